//! Exports of other programs' NBD servers as what mica reads: copied, compared and mapped as QEMU
//! does it.

use mica_tests::command::{self, Finished};
use mica_tests::server::Server;
use mica_tests::{clock, mica, qemu, tools};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// `qemu-nbd` of a qcow2 image, which takes one client only.
fn qemu_nbd(image: &Path, export: &str, more: &[&str]) -> Server {
    let server = Server::start(export, |socket| {
        let mut nbd = Command::new("qemu-nbd");
        nbd.args(["-r", "-t", "-f", "qcow2", "-x", export]).args(more);
        nbd.arg("-k").arg(socket).arg(image);
        nbd
    });
    server.expect("served")
}

/// `nbdkit`, with filters and a plugin.
fn nbdkit(words: &[&str]) -> Server {
    let server = Server::start("", |socket| {
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(["-f", "-U"]).arg(socket).args(words);
        nbdkit
    });
    server.expect("served")
}

/// A disk with data, zeros that were written, and nothing.
fn image(dir: &Path) {
    qemu::create(dir, "image.qcow2", &[], "40M");
    let writes =
        ["write -P 3 0 3M", "write -z 1M 64k", "write -P 4 20M 100k", "write -P 5 40957k 3k"];
    qemu::io(dir, &[], "image.qcow2", &writes);
}

#[test]
fn an_export_is_read_as_qemu_img_reads_it() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(dir);
    let server = qemu_nbd(&dir.join("image.qcow2"), "a b", &["-D", "for tests", "-e", "2"]);
    let uri = format!("nbd+unix:///a%20b?socket={}", server.socket().display());
    for (format, more) in [("qcow2", &["-c"][..]), ("raw", &[])] {
        let copy = format!("copy.{format}");
        mica_in(dir, &[&["convert", "-O", format, &uri, &copy], more].concat()).ok();
        qemu::same(dir, ("qcow2", "image.qcow2"), (format, &copy));
    }
    qemu::img(dir, ["check", "copy.qcow2"]).ok();
    // Holes are not read, nor written.
    let [ours, theirs] = ["map", "qemu-img map"].map(|verb| match verb {
        "map" => mica_in(dir, &["map", "--output", "json", &uri]).json(),
        _ => qemu::img(dir, ["map", "--output", "json", "-f", "raw", &uri]).json(),
    });
    assert_eq!(ours, theirs);
    let [ours, theirs] = ["mica", "qemu-img"].map(|program| match program {
        "mica" => mica_in(dir, &["info", "--output", "json", &uri]).json(),
        _ => qemu::img(dir, ["info", "--output", "json", "-f", "raw", &uri]).json(),
    });
    for field in ["virtual-size", "format"] {
        assert_eq!(ours[field], theirs[field], "{field}");
    }
    assert_eq!(ours["description"], "for tests");
    let said = mica_in(dir, &["info", &uri]).ok();
    assert!(said.contains("disk size: unavailable"), "{said}");

    mica_in(dir, &["dd", &format!("if={uri}"), "of=part.raw", "bs=1M", "skip=1", "count=21"]).ok();
    qemu::img(dir, ["convert", "-O", "raw", "image.qcow2", "image.raw"]).ok();
    let (part, all) = (fs::read(dir.join("part.raw")), fs::read(dir.join("image.raw")));
    assert!(part.expect("made") == all.expect("made")[1 << 20..21 << 20]);
    let said = mica_in(dir, &["compare", "-F", "qcow2", &uri, "image.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
    let [ours, theirs] =
        [["measure", &uri], ["measure", "image.qcow2"]].map(|words| mica_in(dir, &words).ok());
    let first = |text: &str| text.lines().next().map(str::to_owned);
    assert_eq!(first(&ours), first(&theirs));
}

/// Servers that know less, or want their requests in another way.
#[test]
fn any_server_that_serves_is_copied() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDKIT]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(dir);
    qemu::img(dir, ["convert", "-O", "raw", "image.qcow2", "image.raw"]).ok();
    // Not a whole number of sectors.
    let odd = fs::read(dir.join("image.raw")).expect("made")[..5_000_001].to_vec();
    fs::write(dir.join("odd.raw"), odd).expect("written");
    for (file, words) in [
        ("image.raw", &["file"][..]),
        ("image.raw", &["--no-sr", "file"]),
        ("image.raw", &["--filter=noextents", "file"]),
        (
            "image.raw",
            &[
                "--filter=blocksize-policy",
                "file",
                "blocksize-minimum=4096",
                "blocksize-maximum=64k",
                "blocksize-error-policy=error",
            ],
        ),
        ("odd.raw", &["file"]),
    ] {
        let path = dir.join(file);
        let server = nbdkit(&[words, &[path.to_str().expect("text")]].concat());
        let said = mica_in(dir, &["convert", "--force", "-O", "raw", &server.uri(), "copy.raw"]);
        assert!(said.stderr.contains("reading all of it") == words.contains(&"--no-sr"), "{said}");
        said.ok();
        let copied = fs::read(dir.join("copy.raw")).expect("made");
        let mut whole = fs::read(&path).expect("there");
        whole.resize(whole.len().next_multiple_of(512), 0);
        assert!(copied == whole, "{words:?}");
    }
}

/// The story: a map that was to end within a sector ended with a panic, and one that began there
/// failed.
#[test]
fn any_range_of_an_export_is_mapped() {
    if !tools::present(&[tools::NBDKIT]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    // Data, zeros, and a last sector that is not whole.
    let server = nbdkit(&["data", "data=(1 * 32768) @65536 (2 * 100)", "size=65736"]);
    let uri = server.uri();
    for (words, bytes) in [
        (&["--max-length", "1000"][..], 1000),
        // The end is that of the last sector.
        (&["-s", "100"], 66_048 - 100),
        (&["-s", "32700", "--max-length", "100"], 100),
        (&["-s", "65700"], 348),
    ] {
        let words = [&["map", "--output", "json"], words, &[&uri]].concat();
        let said = mica_in(dir.path(), &words).ok();
        let extents: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        let extents = extents.as_array().expect("a list");
        let lens = extents.iter().map(|extent| extent["length"].as_u64().expect("a length"));
        assert_eq!(lens.sum::<u64>(), bytes, "{words:?}: {extents:?}");
    }
}

#[test]
fn what_is_not_there_is_not_read() {
    if !tools::present(&[tools::NBDKIT]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let stats = dir.join("stats");
    let file = format!("statsfile={}", stats.display());
    // 1 TiB, of which 100 KiB are there.
    let words = ["--filter=stats", "data", "data=(1 * 102400) @0x3000000000 1", "size=1T", &file];
    let server = nbdkit(&words);
    mica_in(dir, &["convert", &server.uri(), "copy.qcow2"]).ok();
    let said = mica_in(dir, &["compare", "-F", "qcow2", &server.uri(), "copy.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
    server.stop().expect("stopped");
    let said = fs::read_to_string(&stats).expect("written at its end");
    let read = said.lines().find(|line| line.starts_with("read:")).expect("it was read");
    assert!(read.contains(" KiB, "), "{said}");
}

#[test]
fn what_is_wrong_is_said() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD, tools::NBDKIT]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(dir);
    let server = qemu_nbd(&dir.join("image.qcow2"), "web", &[]);
    let socket = server.socket().display().to_string();
    let other = format!("nbd+unix:///other?socket={socket}");
    let uri = server.uri();
    let copies = format!("`mica convert '{uri}' ");
    for (words, why) in [
        (&["convert", &other, "no.qcow2"][..], "has no export \"other\", only \"web\""),
        (&["convert", "nbd+unix:///web?socket=/missing", "no.qcow2"], "connecting to the server"),
        (&["convert", "nbd+unix:///web", "no.qcow2"], "socket=PATH"),
        (&["convert", "nbds://localhost", "no.qcow2"], "tls-certificates="),
        (&["convert", "nbd:localhost:10809", "no.qcow2"], "nbd://HOST:PORT"),
        (&["info", "nbd:localhost:10809"], "nbd://HOST:PORT"),
        (&["map", "nbd:unix:/missing"], "nbd://HOST:PORT"),
        (&["convert", "image.qcow2", &uri], "nbdcopy"),
        (&["convert", "-l", "x", &uri, "no.qcow2"], "no snapshots"),
        (&["convert", "--bitmaps", &uri, "no.qcow2"], "cannot be copied"),
        (&["convert", "-f", "luks", &uri, "no.qcow2"], "an NBD export is raw"),
        (&["convert", "-f", "qcow2", &uri, "no.qcow2"], "an NBD export is raw, not qcow2"),
        (&["map", "-f", "qcow2", &uri], "an NBD export is raw, not qcow2"),
        // What an image names is never taken for a URI.
        (&["convert", "-B", &uri, "-F", "raw", "image.qcow2", "no.qcow2"], &copies),
        (&["create", "-b", &uri, "-F", "raw", "no.qcow2"], &copies),
        (&["create", "-b", "nbd:localhost:1", "-F", "raw", "no.qcow2"], "mica convert nbd://HOST"),
        (&["create", "-b", "https://host/x", "-F", "raw", "no.qcow2"], "mica does not open"),
        (&["rebase", "-b", &uri, "-F", "raw", "image.qcow2"], &copies),
        (&["clone", &uri, "no.qcow2"], &copies),
        (&["check", &uri], &copies),
        (&["serve", "--nbd", "no.qcow2", &uri], &copies),
    ] {
        let said = mica_in(dir, words).refusal();
        assert!(said.contains(why), "{said}");
        assert!(!dir.join("no.qcow2").exists(), "{words:?}");
    }

    // It cannot be read.
    let words = ["--filter=error", "pattern", "16M", "error-pread=EIO", "error-pread-rate=100%"];
    let server = nbdkit(&words);
    let said = mica_in(dir, &["convert", &server.uri(), "no.qcow2"]).refusal();
    assert!(said.contains("the server reports an error"), "{said}");
    // The server goes away in the middle.
    let server = nbdkit(&["--filter=delay", "pattern", "64M", "rdelay=100ms"]);
    let words = ["convert", "-m", "1", &server.uri(), "no.qcow2"];
    let copying =
        Command::new(mica::binary()).current_dir(dir).args(words).stderr(Stdio::piped()).spawn();
    let copying = copying.expect("it runs");
    clock::sleep(Duration::from_millis(400));
    drop(server);
    let said = copying.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(1), "{text}");
    assert!(text.contains("nbd+unix://") && text.contains("the connection"), "{text}");
    assert!(!dir.join("no.qcow2").exists());
}
