use super::*;
use mica_block::{Error, ErrorKind, Manage, Result};
use mica_rt::{Backend, Buf, Executor};
use mica_store::Handles;
use mica_units::GuestOffset;
use std::path::Path;
use std::sync::Arc;

const LEN: u64 = 1 << 30;

fn run<T>(test: impl Future<Output = T>) -> T {
    Executor::new(Backend::Pool).expect("threads").block_on(test)
}

fn stores() -> Stores {
    Stores::new(Handles::new(64), 1 << 20, Patience::Verb)
}

fn volume(folder: &Path, name: &str) -> VolumeUrl {
    format!("file://{}/{name}", folder.display()).parse().expect("a URL")
}

async fn make(stores: &Stores, url: &VolumeUrl) -> Result<()> {
    stores.open_or_make(&url.store).await?.volumes().create(&url.name, LEN).await
}

const WRITE: VolumeOptions = VolumeOptions { writable: true, force: false };

async fn write(disk: &dyn Manage, byte: u8) -> Result<()> {
    disk.write(GuestOffset::ZERO, Buf::from_slice(&[byte; 4096])).await.0?;
    disk.flush().await
}

async fn first(disk: &dyn Manage) -> u8 {
    let range = mica_units::GuestRange::new(GuestOffset::ZERO, 4096).expect("on the disk");
    let plan = disk.plan(range, Vec::new()).finish().await.expect("planned");
    mica_block::read_whole(disk, &plan).await.expect("read")[0]
}

fn kind<T>(result: Result<T>) -> ErrorKind {
    result.map(drop).map_err(|error: Error| error.kind()).expect_err("refused")
}

#[test]
fn store_is_made_in_a_directory_that_may_be_made_but_not_in_one_that_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let stores = stores();
        let url = volume(&folder.path().join("store"), "web");
        assert_eq!(kind(stores.open(&url.store).await), ErrorKind::NotFound);
        make(&stores, &url).await.expect("made");
        assert_eq!(kind(make(&stores, &url).await), ErrorKind::Invalid, "it is there");
        let deep = volume(&folder.path().join("mnt/store"), "web");
        let error = make(&stores, &deep).await.expect_err("no such directory").in_one_line();
        assert!(error.ends_with("/mnt"), "{error}");
        std::fs::write(folder.path().join("note"), "mine").expect("written");
        let taken = volume(folder.path(), "web");
        assert_eq!(kind(make(&stores, &taken).await), ErrorKind::Invalid, "not empty");
    });
}

#[test]
fn store_is_opened_once_and_what_is_in_it_is_found_again() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let stores = stores();
        let url = volume(folder.path(), "web");
        make(&stores, &url).await.expect("made");
        let [a, b] = [stores.open(&url.store).await, stores.open(&url.store).await];
        assert!(Arc::ptr_eq(&a.expect("open"), &b.expect("open")));
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        assert_eq!(disk.geometry().len, LEN);
        write(&*disk, 7).await.expect("written");
        disk.close().await.expect("closed");
        let read = stores.open_volume(&url, &VolumeOptions::default()).await.expect("open");
        assert_eq!((first(&*read).await, read.is_writable()), (7, false));
        let other = VolumeUrl { snapshot: Some("none".to_owned()), ..url };
        assert_eq!(kind(stores.open_volume(&other, &WRITE).await), ErrorKind::NotFound);
    });
}

#[test]
fn volume_is_open_once_on_this_machine_and_its_dead_writer_is_no_obstacle() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        // Another process has other stores.
        let (stores, others) = (stores(), self::stores());
        let url = volume(folder.path(), "web");
        make(&stores, &url).await.expect("made");
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        write(&*disk, 1).await.expect("written");
        let again = others.open_volume(&url, &WRITE).await.map(drop).expect_err("it is open");
        let own = format!("process {} of this machine", std::process::id());
        assert!(again.in_one_line().contains(&own), "{again}");
        let forced = VolumeOptions { force: true, ..WRITE };
        assert_eq!(kind(others.open_volume(&url, &forced).await), ErrorKind::Denied);
        let store = others.open(&url.store).await.expect("open");
        assert_eq!(kind(store.delete(&url.name, true).await), ErrorKind::Denied);
        // It ends without closing the volume, as one that is killed does.
        drop(disk);
        let disk = others.open_volume(&url, &WRITE).await.expect("its writer is dead");
        assert_eq!(first(&*disk).await, 1);
        disk.close().await.expect("closed");
        drop(disk);
        store.delete(&url.name, false).await.expect("deleted");
        assert_eq!(kind(stores.open_volume(&url, &WRITE).await), ErrorKind::NotFound);
        let locks = std::fs::read_dir(folder.path().join(".locks")).expect("a folder");
        assert!(locks.count() <= 1, "at most the one that was looked for just now");
    });
}

#[test]
fn stores_in_memory_are_for_tests_of_one_process() {
    run(async {
        let stores = stores();
        let url: VolumeUrl = "memory:x/web".parse().expect("a URL");
        make(&stores, &url).await.expect("made");
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        write(&*disk, 3).await.expect("written");
        disk.close().await.expect("closed");
        assert_eq!(kind(self::stores().open(&url.store).await), ErrorKind::NotFound);
    });
}
