//! What a store says and does when something fails.

use crate::ceph::{Ceph, TIMEOUT};
use crate::cluster;
use crate::takeover::taken_over_by_force;
use mica_block::{Entry, Error, ErrorKind, ObjectName, Objects, Put, Result};
use mica_rados::{Pool, PoolOptions};
use mica_rt::{Backend, Buf, Executor, sleep};
use mica_store::object::{RetryObjects, RetryOptions};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

fn name(text: &str) -> ObjectName {
    ObjectName::new(text).expect("a name")
}

fn executor() -> Executor {
    Executor::new(Backend::Auto).expect("a backend")
}

async fn put(objects: &dyn Objects, name: &ObjectName, content: &[u8]) -> Result<Put> {
    objects.put_if_absent(name, Buf::from_slice(content)).await.0
}

/// Waits until `check` says so.
async fn eventually(check: impl AsyncFn() -> bool) {
    const CHECKS_MAX: usize = 600;
    for _ in 0..CHECKS_MAX {
        if check().await {
            return;
        }
        sleep(Duration::from_millis(100)).await;
    }
    panic!("it does not come to pass");
}

/// All of a short object.
async fn read(objects: &dyn Objects, name: &ObjectName) -> Result<Vec<u8>> {
    let (len, buf) = objects.open(name).read_end(Buf::new(100)).await;
    len.map(|len| buf[..usize::try_from(len).expect("short")].to_vec())
}

fn is_kind<T: std::fmt::Debug>(result: Result<T>, kind: ErrorKind) -> Error {
    let error = result.expect_err("it fails");
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(!error.in_one_line().contains('\n'));
    error
}

fn says(error: &Error, words: &[&str]) {
    let line = error.in_one_line();
    assert!(words.iter().all(|word| line.contains(word)), "{line}");
}

#[test]
fn connection_that_cannot_be_made_says_what_to_do() {
    let Some(ceph) = cluster() else { return };
    let refused = |options: PoolOptions, kind, words: &[&str]| {
        let error = is_kind(Pool::open(options).map(|pool| pool.name()), kind);
        says(&error, words);
        says(&error, &["rados://vol/"]);
    };
    let options = || ceph.options("vol", None);
    refused(options(), ErrorKind::NotFound, &["no pools", "ceph osd pool create"]);
    ceph.make_pool("images");
    ceph.make_pool("scratch");
    refused(options(), ErrorKind::NotFound, &["no such pool", "images, scratch"]);
    let missing = PathBuf::from("/nowhere/ceph.conf");
    let options_of = |config| PoolOptions { config: Some(config), ..options() };
    refused(options_of(missing), ErrorKind::Invalid, &["reading /nowhere/ceph.conf"]);
    let stranger = PoolOptions { user: Some("nobody".to_owned()), ..options() };
    refused(stranger, ErrorKind::Denied, &["client.nobody", "keyring"]);
    // Nobody listens there.
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("bound");
    drop(free);
    let own = tempfile::tempdir().expect("a folder");
    let config = own.path().join("ceph.conf");
    let given = std::fs::read_to_string(ceph.configuration()).expect("read");
    let elsewhere = given.lines().map(|line| match line.starts_with("mon host") {
        true => format!("mon host = [v2:{address}]\n"),
        false => format!("{line}\n"),
    });
    std::fs::write(&config, elsewhere.collect::<String>()).expect("written");
    let dead = PoolOptions { timeout: Duration::from_secs(2), ..options_of(config) };
    refused(dead, ErrorKind::Io, &["monitors", "ceph.conf"]);
}

#[test]
fn store_in_one_daemon_says_what_is_wrong_and_goes_on_afterwards() {
    let Some(mut ceph) = cluster() else { return };
    ceph.add_daemons(1);
    ceph.make_pool("vol");
    let executor = executor();
    executor.block_on(async {
        refused_for_lack_of_rights(&ceph).await;
        refused_for_lack_of_room(&ceph).await;
        unanswered(&ceph).await;
        blocklisted(&ceph).await;
        taken_over_by_force(&ceph);
        in_a_pool_that_is_deleted(&ceph).await;
        laid_out_otherwise(&ceph).await;
    });
}

async fn refused_for_lack_of_rights(ceph: &Ceph) {
    let reader = PoolOptions { user: Some("reader".to_owned()), ..ceph.options("vol", None) };
    let pool = Pool::open(reader).expect("it may connect");
    let error = is_kind(put(&pool, &name("a/b"), b"bytes").await, ErrorKind::Denied);
    says(&error, &["key", "ceph auth get"]);
    is_kind(read(&pool, &name("a/b")).await, ErrorKind::Denied);
    is_kind(pool.list(None, None).await, ErrorKind::Denied);
    let other = ceph.open("vol", None).address().expect("known");
    let error = is_kind(pool.blocklist(&other, TIMEOUT).await, ErrorKind::Denied);
    says(&error, &["blocklist"]);
}

async fn refused_for_lack_of_room(ceph: &Ceph) {
    let pool = ceph.open("vol", Some("full"));
    let (kept, refused) = (name("kept"), name("refused"));
    assert_eq!(put(&pool, &kept, b"bytes").await.expect("put"), Put::Done);
    set_full_ratios(ceph, ["0.00001", "0.00002", "0.00003"]);
    // When the daemon knows it.
    eventually(async || {
        let put = put(&pool, &refused, b"bytes").await;
        pool.delete(&refused).await.expect("deleted");
        put.is_err()
    })
    .await;
    let error = is_kind(put(&pool, &refused, b"bytes").await, ErrorKind::NoSpace);
    says(&error, &["refused", "full"]);
    assert_eq!(read(&pool, &kept).await.expect("read"), b"bytes");
    pool.delete(&kept).await.expect("what makes room is allowed");
    set_full_ratios(ceph, ["0.85", "0.9", "0.95"]);
    eventually(async || put(&pool, &refused, b"bytes").await.is_ok()).await;
    is_kind(read(&pool, &kept).await, ErrorKind::NotFound);
    let too_long = vec![0; (90 << 20) + 1];
    is_kind(put(&pool, &name("long"), &too_long).await, ErrorKind::Limit);
}

/// Sets how much of a daemon's device may be used until it is nearly full, too full for more
/// copies, and full.
fn set_full_ratios(ceph: &Ceph, ratios: [&str; 3]) {
    let mut settings = ["set-nearfull-ratio", "set-backfillfull-ratio", "set-full-ratio"]
        .into_iter()
        .zip(ratios)
        .collect::<Vec<_>>();
    // They have to be in order all the time.
    if ratios[2] > "0.5" {
        settings.reverse();
    }
    for (setting, ratio) in settings {
        ceph.ceph(&["osd", setting, ratio]);
    }
}

/// A daemon that stopped answers nobody, and a request ends nevertheless.
async fn unanswered(ceph: &Ceph) {
    let timeout = Duration::from_secs(1);
    let options = PoolOptions { timeout, ..ceph.options("vol", Some("unanswered")) };
    let pool: Arc<dyn Objects> = Arc::new(Pool::open(options).expect("opened"));
    let before = name("a/before");
    assert_eq!(put(&*pool, &before, b"bytes").await.expect("put"), Put::Done);
    ceph.signal_daemon(0, "STOP");
    // All at once: a daemon that stood still for long has to be helped by others.
    let putting = pool.put_if_absent(&name("a/unclear"), Buf::from_slice(b"bytes"));
    let (reading, listing) = (pool.open(&before).read_end(Buf::new(9)), pool.list(None, None));
    is_kind(putting.await.0, ErrorKind::Io);
    is_kind(reading.await.0, ErrorKind::Io);
    is_kind(listing.await, ErrorKind::Io);
    // One that is repeated arrives when it goes on; those that were dropped may, or may not.
    drop(pool.put_if_absent(&name("a/dropped"), Buf::from_slice(b"bytes")));
    drop(pool.put_if_absent(&name("new/dropped"), Buf::from_slice(b"bytes")));
    let retry = RetryObjects::new(Arc::clone(&pool), RetryOptions::new(1));
    let repeated = retry.put_if_absent(&name("a/repeated"), Buf::from_slice(b"its own"));
    sleep(Duration::from_millis(100)).await;
    ceph.signal_daemon(0, "CONT");
    assert_eq!(repeated.await.0.expect("put"), Put::Done);
    for name in ["a/dropped", "new/dropped"].map(name) {
        match read(&retry, &name).await {
            Ok(there) => assert_eq!(there, b"bytes", "whole, if it is there"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error:?}"),
        }
    }
    assert_eq!(read(&retry, &before).await.expect("read"), b"bytes");
    let listed = retry.list(Some(&name("a")), None).await.expect("listed");
    assert!(listed.iter().any(|entry| *entry.name() == name("a/repeated")));
}

/// The old writer's client is blocklisted while it writes.
async fn blocklisted(ceph: &Ceph) {
    let old = ceph.open("vol", Some("fenced"));
    let new = ceph.open("vol", Some("fenced"));
    let (old_address, new_address) = (old.address().expect("known"), new.address().expect("known"));
    assert_ne!(old_address, new_address);
    for wrong in ["", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:0/", "x"] {
        is_kind(new.blocklist(wrong, TIMEOUT).await, ErrorKind::Invalid);
    }
    // Repeated for as long as it may pass.
    let retry = RetryObjects::new(Arc::new(old), RetryOptions::new(1));
    let writer = std::thread::spawn(move || {
        executor().block_on(async {
            for number in 0_u64.. {
                let put = put(&retry, &name(&format!("w/{number:08}")), b"bytes").await;
                if let Err(error) = put {
                    assert!(number > 0, "it wrote before");
                    return (retry, error);
                }
            }
            unreachable!("it is stopped");
        })
    });
    let folder = name("w");
    eventually(async || all(&new, &folder).await.len() > 20).await;
    new.blocklist(&old_address, Duration::from_secs(3600)).await.expect("blocklisted");
    let when_fenced = all(&new, &folder).await;
    let (old, error) = writer.join().expect("no panic");
    assert_eq!(error.kind(), ErrorKind::Denied);
    says(&error, &["blocklisted", "another host"]);
    assert!(all(&new, &folder).await == when_fenced, "it put something afterwards");
    is_kind(put(&old, &name("w/late"), b"bytes").await, ErrorKind::Denied);
    is_kind(read(&old, &name("w/00000000")).await, ErrorKind::Denied);
    is_kind(old.list(Some(&folder), None).await, ErrorKind::Denied);
    is_kind(old.delete(&name("w/00000000")).await, ErrorKind::Denied);
    assert_eq!(put(&new, &name("w/new"), b"bytes").await.expect("put"), Put::Done);
    // Only that client was meant, not its host.
    let another = ceph.open("vol", Some("fenced"));
    assert_eq!(read(&another, &name("w/new")).await.expect("read"), b"bytes");
}

/// All of a folder, page by page.
async fn all(objects: &dyn Objects, folder: &ObjectName) -> Vec<Entry> {
    let mut all: Vec<Entry> = Vec::new();
    loop {
        let after = all.last().map(|entry| entry.name().clone());
        let page = objects.list(Some(folder), after.as_ref()).await.expect("listed");
        let is_last = page.len() < mica_block::LIST_MAX;
        all.extend(page);
        if is_last {
            return all;
        }
    }
}

async fn in_a_pool_that_is_deleted(ceph: &Ceph) {
    ceph.make_pool("gone");
    let pool = ceph.open("gone", None);
    let there = name("a");
    assert_eq!(put(&pool, &there, b"bytes").await.expect("put"), Put::Done);
    let sure = "--yes-i-really-really-mean-it";
    ceph.ceph(&["osd", "pool", "delete", "gone", "gone", sure]);
    // What is not in a pool that is gone is not missing.
    eventually(async || read(&pool, &there).await.is_err()).await;
    let error = is_kind(read(&pool, &there).await, ErrorKind::Invalid);
    says(&error, &["rados://gone/", "pool was deleted"]);
    is_kind(put(&pool, &name("b"), b"bytes").await, ErrorKind::Invalid);
    is_kind(put(&pool, &name("new/b"), b"bytes").await, ErrorKind::Invalid);
    is_kind(pool.delete(&there).await, ErrorKind::Invalid);
    assert!(pool.list(None, None).await.is_err());
}

/// A store that a later version has made is neither read as if it were empty, nor changed.
async fn laid_out_otherwise(ceph: &Ceph) {
    let content = ceph.file("layout", b"mica objects 2\n");
    let put_there = ["--object-locator", ":00", "put", "!layout"];
    ceph.rados("vol", "later", &[&put_there[..], &[&*content]].concat());
    let pool = ceph.open("vol", Some("later"));
    let error = is_kind(pool.list(None, None).await, ErrorKind::Unsupported);
    says(&error, &["another version", "mica objects 2"]);
    is_kind(put(&pool, &name("a"), b"bytes").await, ErrorKind::Unsupported);
}

#[test]
fn store_in_three_daemons_survives_the_death_of_one() {
    const WRITERS: usize = 4;
    const BEFORE: usize = 50;
    const PUTS: usize = 200;
    let Some(mut ceph) = cluster() else { return };
    ceph.add_daemons(3);
    ceph.make_pool("vol");
    let pool: Arc<dyn Objects> = Arc::new(ceph.open("vol", Some("three")));
    let object = |writer: usize, number: usize| name(&format!("w{writer}/{number:04}"));
    let content = |writer: usize, number: usize| format!("{writer} {number}").into_bytes();
    let (begun, is_begun) = std::sync::mpsc::channel();
    let write = |writer: usize, begun: std::sync::mpsc::Sender<()>| {
        let retry = RetryObjects::new(Arc::clone(&pool), RetryOptions::new(writer as u64));
        executor().block_on(async {
            for number in 0..PUTS {
                let bytes = content(writer, number);
                let put = put(&retry, &object(writer, number), &bytes).await;
                assert_eq!(put.expect("put"), Put::Done, "{writer} {number}");
                if number == BEFORE {
                    begun.send(()).expect("somebody waits");
                }
            }
        });
    };
    std::thread::scope(|scope| {
        let writers = (0..WRITERS).map(|writer| {
            let (begun, write) = (begun.clone(), &write);
            scope.spawn(move || write(writer, begun))
        });
        let writers: Vec<_> = writers.collect();
        for _ in 0..WRITERS {
            is_begun.recv().expect("they write");
        }
        ceph.kill_daemon(2);
        writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
    });
    executor().block_on(async {
        for writer in 0..WRITERS {
            for number in 0..PUTS {
                let found = read(&*pool, &object(writer, number)).await.expect("read");
                assert_eq!(found, content(writer, number));
            }
            let listed = all(&*pool, &name(&format!("w{writer}"))).await;
            let expected = (0..PUTS).map(|number| object(writer, number));
            assert!(listed.iter().map(Entry::name).cloned().eq(expected));
        }
    });
}
