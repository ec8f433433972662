//! Storage that fails, fills up or is taken away.

use super::image::{self, Image, make, serve, sound, sound_but_for_leaks, stop_alive};
use mica_tests::guest::{Answer, EIO, ENOSPC, Guest, Request};
use mica_tests::mounts::{Mount, make_ext4};
use mica_tests::server::Server;
use mica_tests::{command, judge, mica, qemu, tools};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

const BLOCK: usize = 64 << 10;

/// Writes blocks of `byte` over the whole disk; the resulting errors, block by block.
fn fill(guest: &mut Guest, byte: u8) -> Vec<u32> {
    let starts = (0..guest.len()).step_by(BLOCK);
    let write = |start| guest.write(start, &[byte; BLOCK]).expect("answered");
    starts.map(write).collect()
}

/// Each block holds the bytes of the last write that was acknowledged, or of one that was not.
#[track_caller]
fn blocks_hold(dir: &Path, errors: &[u32], old: impl Fn(usize) -> u8, new: u8) {
    qemu::flatten(dir, "disk.qcow2", "flat.raw");
    let flat = fs::read(dir.join("flat.raw")).expect("flat");
    for (number, (block, errno)) in flat.chunks(BLOCK).zip(errors).enumerate() {
        match errno {
            0 => judge::same_bytes(&format!("block {number}"), block, &[new; BLOCK]),
            _ => {
                let known = block.iter().all(|byte| *byte == new || *byte == old(number));
                assert!(known, "block {number} holds what nobody wrote");
            }
        }
    }
}

fn first_content(number: usize) -> u8 {
    if number < 32 { 17 } else { 0 }
}

/// A full disk: guests get ENOSPC if space is needed, and can still write if it is not.
#[track_caller]
fn continues_without_space(dir: &Path, server: Server) {
    let mut guest = Guest::connect(&server).expect("served");
    let errors = fill(&mut guest, 0x22);
    assert!(errors.iter().all(|errno| [0, ENOSPC].contains(errno)), "{errors:?}");
    assert!(errors[..32].iter().all(|errno| *errno == 0), "these had their space: {errors:?}");
    assert!(errors.contains(&ENOSPC), "there was space for all");
    assert_eq!(guest.flush().expect("answered"), 0, "what was acknowledged is durable");
    // The disk still works for what needs no space.
    assert_eq!(guest.write(0, &[0x22; BLOCK]).expect("answered"), 0);
    let Answer::Done(read) = guest.read(0, 65_536).expect("answered") else { panic!("no read") };
    judge::same_bytes("the first block", &read, &[0x22; BLOCK]);
    let stopped = stop_alive(server);
    assert_eq!(stopped.status.code(), Some(0), "{stopped:?}");
    sound_but_for_leaks(dir);
    blocks_hold(dir, &errors, first_content, 0x22);
}

#[test]
fn a_guest_gets_enospc_and_the_disk_continues() {
    if !image::tools_present() {
        return;
    }
    for options in ["cluster_size=64k", "extended_l2=on", "cluster_size=4k"] {
        let dir = tempfile::tempdir().expect("a folder");
        make(dir.path(), options);
        println!("{options}");
        let full = "error=range:6M-1T,op=write+zero+allocate,errno=ENOSPC";
        continues_without_space(dir.path(), serve(dir.path(), &["--inject", full]));
    }
}

#[test]
fn a_file_that_may_not_grow_does_not_end_the_server() {
    if !image::tools_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    make(dir, "cluster_size=64k");
    let server = Server::start("", |socket| {
        let mut serve = Command::new("prlimit");
        serve.arg("--fsize=6291456:6291456").arg(mica::binary());
        serve.args(["serve", "--nbd"]).arg(socket).arg(dir.join("disk.qcow2"));
        serve
    });
    continues_without_space(dir, server.expect("served"));
}

#[test]
fn a_full_file_system_does_no_harm() {
    if !image::tools_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let Ok(small) = Mount::memory(&dir.path().join("small"), 8) else {
        tools::skip("mounting a tmpfs is not allowed here");
        return;
    };
    let folder = small.folder();
    make(folder, "cluster_size=64k");
    let server = serve(folder, &[]);
    let mut guest = Guest::connect(&server).expect("served");
    let errors = fill(&mut guest, 0x22);
    assert!(errors.iter().all(|errno| [0, ENOSPC].contains(errno)), "{errors:?}");
    assert!(errors.contains(&ENOSPC), "there was space for all");
    let first_flush = guest.flush().expect("answered");
    assert!([0, ENOSPC].contains(&first_flush), "{first_flush}");
    // With space again, the guest can write.
    let larger = format!("remount,size={}M", 64);
    command::run("mount", ["-o", &larger, &folder.display().to_string()]).ok();
    let again = fill(&mut guest, 0x22);
    assert!(again.iter().all(|errno| *errno == 0), "{again:?}");
    assert_eq!(guest.flush().expect("answered"), 0);
    let stopped = stop_alive(server);
    assert!(stopped.status.success(), "{stopped:?}");
    sound(folder);
    blocks_hold(folder, &vec![0; errors.len()], first_content, 0x22);
}

/// The story: ext4 forgets what the page cache has of a range before it looks for the space that
/// zeros need there. So writes that had been acknowledged were undone by zeros that failed.
#[test]
fn zeros_for_which_there_is_no_space_undo_no_write() {
    if !tools::present(&[tools::MKE2FS]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let file_system = dir.path().join("ext4.img");
    make_ext4(&file_system, 64 << 20, &["-m", "0"]).expect("made");
    let Ok(small) = Mount::ext4(&file_system, &dir.path().join("small")) else {
        tools::skip("mounting an ext4 is not allowed here");
        return;
    };
    let image = small.folder().join("disk.raw");
    fs::File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("made");
    let server = Server::mica_writable(&image, "raw", &[]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    // Behind a hole.
    let places = || (4 << 20..8 << 20).step_by(BLOCK);
    let write_all = |guest: &mut Guest, byte| {
        for at in places() {
            assert_eq!(guest.write(at, &[byte; BLOCK]).expect("answered"), 0);
        }
    };
    write_all(&mut guest, 1);
    assert_eq!(guest.flush().expect("answered"), 0);
    let mut filler = fs::File::create(small.folder().join("filler")).expect("made");
    while filler.write(&[1; 4096]).is_ok_and(|count| count > 0) {}
    filler.sync_all().expect("durable");
    write_all(&mut guest, 2);
    let zeros = Request::Zero { offset: 0, len: 16 << 20, no_hole: true, fua: false };
    assert_eq!(guest.ask(&zeros).expect("answered"), Answer::Error(ENOSPC));
    for at in places() {
        let Answer::Done(read) = guest.read(at, 65_536).expect("answered") else {
            panic!("no read at {at}")
        };
        let is_known = read.iter().all(|byte| [0, 2].contains(byte));
        assert!(is_known, "the write at {at} is undone");
    }
    drop((guest, filler));
    stop_alive(server);
    small.unmount();
}

#[test]
fn bad_blocks_fail_alone() {
    if !image::tools_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    // All tables are in front, and every cluster has its place.
    make(dir, "preallocation=metadata");
    let server = serve(dir, &["--inject", "error=range:5M-6M,op=write,errno=EIO"]);
    let mut guest = Guest::connect(&server).expect("served");
    let errors = fill(&mut guest, 0x33);
    let sick = errors.iter().filter(|errno| **errno == EIO).count();
    assert!((16..=17).contains(&sick), "{errors:?}");
    assert!(errors.iter().all(|errno| [0, EIO].contains(errno)), "{errors:?}");
    assert_eq!(guest.flush().expect("answered"), 0, "a failed write was reported already");
    let stopped = stop_alive(server);
    assert_eq!(stopped.status.code(), Some(0), "{stopped:?}");
    sound(dir);
    blocks_hold(dir, &errors, first_content, 0x33);
}

#[test]
fn after_a_sync_that_failed_nothing_is_acknowledged() {
    if !image::tools_present() {
        return;
    }
    for options in ["cluster_size=64k", "extended_l2=on", "lazy_refcounts=on", "compat=0.10"] {
        for failing in ["from:1", "nth:1", "nth:2", "nth:3"] {
            let dir = tempfile::tempdir().expect("a folder");
            let dir = dir.path();
            make(dir, options);
            let what = format!("{options}, {failing}");
            let server = serve(dir, &["--inject", &format!("error={failing},op=sync,errno=EIO")]);
            let mut guest = Guest::connect(&server).expect("served");
            let mut last = 0;
            for number in 0..6 {
                let wrote = guest.write((4 << 20) + number * 65_536, &[9; BLOCK]).expect("alive");
                assert!(last == 0 || wrote == EIO, "{what}: a write goes on after that");
                last = if wrote == 0 { guest.flush().expect("alive") } else { wrote };
                assert!([0, EIO].contains(&last), "{what}: {last}");
            }
            assert_eq!(last, EIO, "{what}: no sync failed");
            assert_eq!(guest.flush().expect("alive"), EIO, "{what}");
            assert_eq!(guest.write(0, &[9; 512]).expect("alive"), EIO, "{what}");
            let stopped = stop_alive(server);
            assert_eq!(stopped.status.code(), Some(1), "{what}: {stopped:?}");
            assert!(stopped.log.contains("disk.qcow2"), "{what}: it names the image: {stopped:?}");
            opens_again(dir, &what);
        }
    }
}

/// Its metadata would be in no group, and in no log: the failed sync ended it.
#[test]
fn a_write_under_way_when_a_sync_fails_is_not_acknowledged() {
    if !image::tools_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    make(dir, "cluster_size=64k");
    let (slow, fails) = ("delay=500ms,op=write", "error=from:6,op=sync");
    let server = serve(dir, &["--inject", slow, "--inject", fails]);
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(40 << 16, &[0x66; BLOCK]).expect("answered"), 0);
    assert_eq!(guest.flush().expect("answered"), 0);

    // Where nothing is allocated yet.
    let (offset, bytes) = (50 << 16, vec![0x77; BLOCK]);
    let write = guest.send(&Request::Write { offset, bytes, fua: false }).expect("sent");
    let mut flush = guest.send(&Request::Flush).expect("sent");
    let mut has_failed = false;
    loop {
        let (cookie, answer) = guest.receive().expect("answered");
        if cookie == write {
            assert!(has_failed, "it took longer than some flushes");
            assert_eq!(answer, Answer::Error(EIO));
            break;
        }
        assert_eq!(cookie, flush);
        has_failed |= answer == Answer::Error(EIO);
        if !has_failed {
            flush = guest.send(&Request::Flush).expect("sent");
        }
    }
    let stopped = stop_alive(server);
    assert_eq!(stopped.status.code(), Some(1), "{stopped:?}");
}

/// The image is opened, written and closed as if nothing had happened.
#[track_caller]
fn opens_again(dir: &Path, what: &str) {
    let server = serve(dir, &[]);
    let mut guest = Guest::connect(&server).expect("served");
    let Answer::Done(read) = guest.read(0, 2 << 20).expect("alive") else { panic!("{what}") };
    assert!(read[512..].iter().all(|byte| *byte == 17), "{what}: the first content is there");
    assert_eq!(guest.write(8 << 20, &[7; BLOCK]).expect("alive"), 0, "{what}");
    assert_eq!(guest.flush().expect("alive"), 0, "{what}");
    let stopped = stop_alive(server);
    assert_eq!(stopped.status.code(), Some(0), "{what}: {stopped:?}");
    sound_but_for_leaks(dir);
}

#[test]
fn a_file_truncated_under_the_server_affects_nothing_else() {
    if !image::tools_present() {
        return;
    }
    for keep in [0, 200, 70_000, 300_000, 1 << 20] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        make(dir, "cluster_size=64k");
        let server = serve(dir, &[]);
        let mut guest = Guest::connect(&server).expect("served");
        assert_eq!(guest.write(4 << 20, &[5; BLOCK]).expect("alive"), 0);
        Image::open(dir).set_len(keep);
        for round in 0..3_u64 {
            let answers = [
                guest.read(round << 19, 65_536).expect("alive").errno(),
                guest.write(round << 19, &[6; BLOCK]).expect("alive"),
                guest.write((6 + round) << 20, &[6; BLOCK]).expect("alive"),
                guest.flush().expect("alive"),
            ];
            let known = answers.iter().all(|errno| [0, EIO].contains(errno));
            assert!(known, "{keep} bytes are left: {answers:?}");
        }
        stop_alive(server);
    }
}
