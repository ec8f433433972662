//! A copy under way: what it says, what a signal does, and copies to standard output.

use mica_tests::command::ending_signals;
use mica_tests::server::Server;
use mica_tests::{clock, command, mica, qemu, tools};
use mica_units::Rng;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// Makes every read and write slow, so that a copy lasts for seconds.
const SLOWLY: [&str; 2] = ["--inject", "delay=30ms"];
const LEN: usize = 96 << 20;

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> command::Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

fn source(dir: &Path) {
    fs::write(dir.join("source.raw"), vec![7; LEN]).expect("there is room");
}

/// Starts mica, and waits until `file`, which it makes under another name, has content.
#[track_caller]
fn start(dir: &Path, args: &[&str], file: &str) -> Child {
    let mut mica = Command::new(mica::binary());
    let mica = mica.current_dir(dir).args(args).stdin(Stdio::null());
    let mut child = mica.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("started");
    let places = [dir.join(file), place(dir, file)];
    let is_written = |file: &PathBuf| file.metadata().is_ok_and(|file| file.len() > 1 << 20);
    let writes = || places.iter().any(is_written).then_some(());
    if clock::poll(LIMIT, Duration::from_millis(2), writes).is_none() {
        let _ = child.kill();
        panic!("it writes nothing: {:?}", child.wait_with_output());
    }
    child
}

/// Where `file` is until it is complete.
fn place(dir: &Path, file: &str) -> PathBuf {
    dir.join(format!(".{file}.mica-unfinished"))
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("it runs");
}

/// How a run of a verb ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Itself,
    /// It was killed, or had ended just before.
    Killed,
}

/// Runs `verb` to its end, then kills it at random instants, and runs it to its end once more:
/// each time after `prepare`, and before `judge`.
#[track_caller]
fn kill_at_random(
    dir: &Path,
    verb: &[&str],
    rng: &mut Rng,
    prepare: impl Fn(),
    judge: impl Fn(Ended),
) {
    let to_its_end = || {
        prepare();
        let began = clock::now();
        mica_in(dir, verb).ok();
        let took = u64::try_from(began.elapsed().as_micros()).expect("seconds");
        judge(Ended::Itself);
        took
    };
    let took = to_its_end();
    for _ in 0..12 {
        prepare();
        let mut mica = Command::new(mica::binary());
        let mica = mica.current_dir(dir).args(verb).stdin(Stdio::null());
        let mut child = mica.stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("runs");
        clock::sleep(Duration::from_micros(rng.below(took)));
        child.kill().expect("killed, unless it has ended");
        child.wait().expect("it ends");
        judge(Ended::Killed);
    }
    to_its_end();
}

#[test]
fn a_signal_ends_a_copy_and_leaves_no_junk() {
    use std::os::unix::process::ExitStatusExt as _;
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    source(dir);
    let to_raw = [&["convert", "-f", "raw", "-O", "raw"], &SLOWLY[..], &["source.raw", "copy"]];
    let to_qcow2 = [&["convert", "-f", "raw"], &SLOWLY[..], &["source.raw", "copy"]];
    let full = ["-o", "preallocation=full", "copy", "4G"];
    let create = [&["create", "-f", "raw"], &SLOWLY[..], &full];
    for verb in [to_raw.concat(), to_qcow2.concat(), create.concat()] {
        for number in ending_signals() {
            let child = start(dir, &verb, "copy");
            signal(&child, number);
            let ended = child.wait_with_output().expect("it ends");
            assert_eq!(ended.status.signal(), Some(number.as_raw()), "{verb:?}: {ended:?}");
            assert_eq!(String::from_utf8_lossy(&ended.stderr), "", "{verb:?}");
            assert!(!dir.join("copy").exists(), "{verb:?}: junk was left");
            assert!(!place(dir, "copy").exists(), "{verb:?}: junk was left");
        }
    }
    // An existing file stays, and one that cannot be replaced is emptied.
    let forced = [to_raw.concat(), vec!["--force"]].concat();
    let left = || {
        fs::write(dir.join("copy"), vec![1; 4096]).expect("there is room");
        let child = start(dir, &forced, "copy");
        signal(&child, ending_signals()[0]);
        child.wait_with_output().expect("it ends");
        assert!(!place(dir, "copy").exists(), "junk was left");
        fs::read(dir.join("copy")).expect("it was there before")
    };
    assert!(left() == vec![1; 4096]);
    fs::hard_link(dir.join("copy"), dir.join("again")).expect("a second name");
    assert!(left().is_empty());
    assert_eq!(fs::metadata(dir.join("again")).expect("the same file").len(), 0);
}

/// The story: an image was restored over an older one, which was the only other copy, and the
/// machine went down.
#[test]
fn whatever_is_killed_over_an_existing_file_leaves_the_old_or_the_new_one() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("source.raw"), vec![7; 8 << 20]).expect("there is room");
    mica_in(dir, &["convert", "-f", "raw", "source.raw", "source.qcow2"]).ok();
    qemu::img(dir, ["bitmap", "--add", "source.qcow2", "mon"]).ok();
    mica_in(dir, &["backup", "-q", "source.qcow2", "folder", "--as", "one"]).ok();
    let old: Vec<u8> = (0..3 << 20).map(|at: u32| u8::try_from(at % 251).expect("small")).collect();
    let verbs: [&[&str]; 6] = [
        &["convert", "--force", "-f", "raw", "-O", "raw", "source.raw", "disk"],
        &["convert", "--force", "-U", "-f", "raw", "-O", "raw", "source.raw", "disk"],
        &["convert", "--force", "-f", "raw", "source.raw", "disk"],
        &["convert", "--force", "--bitmaps", "source.qcow2", "disk"],
        &["restore", "--force", "-q", "folder@one", "disk"],
        &["create", "--force", "-q", "-b", "source.qcow2", "-F", "qcow2", "disk"],
    ];
    let mut rng = Rng::new(15);
    for verb in verbs {
        let is_raw = verb.contains(&"-O");
        let is_old = || {
            let now = fs::read(dir.join("disk")).expect("it is there");
            if now == old {
                return true;
            }
            let format = if is_raw { "raw" } else { "qcow2" };
            let whole = ["compare", "-q", "-f", format, "-F", "raw", "disk", "source.raw"];
            qemu::img(dir, whole).ok();
            if !is_raw {
                qemu::img(dir, ["check", "-q", "disk"]).ok();
                let told = qemu::img(dir, ["info", "--output", "json", "disk"]).json();
                let bitmaps = &told["format-specific"]["data"]["bitmaps"];
                assert_eq!(bitmaps.is_array(), verb.contains(&"--bitmaps"), "{told}");
            }
            false
        };
        let put_old = || fs::write(dir.join("disk"), &old).expect("there is room");
        kill_at_random(dir, verb, &mut rng, put_old, |how| {
            let is_old = is_old();
            if how == Ended::Itself {
                assert!(!is_old && !place(dir, "disk").exists(), "{verb:?}");
            }
        });
        fs::remove_file(dir.join("disk")).expect("there");
    }
}

/// The story: between the two files of an image the machine went down, and the old image showed
/// parts of the new data at the old places.
#[test]
fn old_image_is_none_while_its_data_file_is_another_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    source(dir);
    fs::write(dir.join("small.raw"), vec![9; 512 << 10]).expect("there is room");
    let convert = |source| {
        ["convert", "--force", "-f", "raw", "-o", "data_file=data", source, "disk"].to_vec()
    };
    mica_in(dir, &convert("small.raw")).ok();
    mica_in(dir, &["compare", "-s", "-F", "raw", "disk", "small.raw"]).ok();
    // Then it is overwritten in place.
    fs::hard_link(dir.join("data"), dir.join("again")).expect("a second name");
    let slowly = [&convert("source.raw")[..], &SLOWLY].concat();
    let mut child = start(dir, &slowly, "data");
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let said = mica_in(dir, &["info", "disk"]).refusal();
    assert!(said.contains("version"), "{said}");
    for alone in [false, true] {
        if alone {
            fs::remove_file(dir.join("again")).expect("there");
        }
        for source in ["source.raw", "small.raw"] {
            mica_in(dir, &convert(source)).ok();
            mica_in(dir, &["compare", "-s", "-F", "raw", "disk", source]).ok();
        }
    }
    // The image's own name is no place for its data.
    let said = mica_in(dir, &["create", "--force", "-o", "data_file=disk", "disk", "1M"]);
    let said = said.refusal();
    assert!(!said.contains("another process"), "{said}");
    mica_in(dir, &["compare", "-s", "-F", "raw", "disk", "small.raw"]).ok();
}

/// The story: the machine went down between the old image, which was none any more, and its new
/// data file: all of it was there, and nothing could be opened.
#[test]
fn whatever_is_killed_over_an_image_with_a_data_file_leaves_the_old_or_the_new_one() {
    if !tools::present(&[tools::QEMU_IMG, tools::STRACE]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for (name, byte) in [("one.raw", 1), ("two.raw", 2)] {
        let byte_at = |at: u32| byte + u8::try_from(at >> 15).expect("small");
        let bytes: Vec<u8> = (0..512 << 10).map(byte_at).collect();
        fs::write(dir.join(name), bytes).expect("there is room");
    }
    let convert =
        |source| ["convert", "--force", "-f", "raw", "-o", "data_file=data", source, "disk"];
    let is = |source| {
        let whole = ["compare", "-q", "-f", "qcow2", "-F", "raw", "disk", source];
        qemu::img(dir, whole).code() == Some(0)
    };
    mica_in(dir, &convert("one.raw")).ok();
    let mut seen = [0; 2];
    for call in ["linkat", "renameat2", "unlink", "unlinkat", "fsync", "fdatasync"] {
        for number in 1..=8 {
            let (old, new) =
                if is("one.raw") { ("one.raw", "two.raw") } else { ("two.raw", "one.raw") };
            let mut strace = Command::new("strace");
            strace.args(["-f", "-qq", "-o", "/dev/null", "-e"]);
            strace.arg(format!("inject={call}:signal=KILL:when={number}"));
            strace.arg(mica::binary()).args(convert(new)).current_dir(dir);
            let ended = command::finish(&mut strace);
            let (is_old, is_new) = (is(old), is(new));
            assert!(is_old || is_new, "{call} {number}: {ended}");
            qemu::img(dir, ["check", "-q", "disk"]).ok();
            if ended.code() == Some(0) {
                assert!(is_new, "{call} {number}");
                break;
            }
            seen[usize::from(is_new)] += 1;
            // The next one takes away what was left.
            mica_in(dir, &convert(old)).ok();
            assert!(is(old), "{call} {number}");
            let mut names: Vec<_> = fs::read_dir(dir).expect("listed").collect();
            names.retain(|name| name.as_ref().is_ok_and(|name| name.file_name() != "data"));
            assert_eq!(names.len(), 3, "{call} {number}: {names:?}");
        }
    }
    assert!(seen.iter().all(|count| *count > 1), "{seen:?}");
}

/// The story: as the last one, but the new image had a data file of another name, and the old image
/// could have been read.
#[test]
fn old_image_stays_one_whose_data_file_is_not_the_one_that_is_replaced() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    source(dir);
    fs::write(dir.join("small.raw"), vec![9; 512 << 10]).expect("there is room");
    let convert =
        |data, source| ["convert", "--force", "-f", "raw", "-o", data, source, "disk"].to_vec();
    mica_in(dir, &convert("data_file=data", "small.raw")).ok();
    // Overwritten in place, as it has two names.
    fs::write(dir.join("other"), vec![1; 4096]).expect("there is room");
    fs::hard_link(dir.join("other"), dir.join("again")).expect("a second name");
    let slowly = [&convert("data_file=other", "source.raw")[..], &SLOWLY].concat();
    let mut child = start(dir, &slowly, "other");
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    mica_in(dir, &["compare", "-s", "-F", "raw", "disk", "small.raw"]).ok();
    mica_in(dir, &convert("data_file=other", "source.raw")).ok();
    mica_in(dir, &["compare", "-s", "-F", "raw", "disk", "source.raw"]).ok();
}

#[test]
fn file_that_is_replaced_gives_its_mode_owner_and_attributes_to_the_new_one() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let (disk, link) = (dir.join("disk"), dir.join("link"));
    fs::write(dir.join("source.raw"), vec![7; 1 << 20]).expect("there is room");
    fs::write(&disk, "old").expect("there is room");
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o640)).expect("set");
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        chown(&disk, Some(1234), Some(4321)).expect("set");
    }
    let flags = rustix::fs::XattrFlags::empty();
    let has_attributes = rustix::fs::setxattr(&disk, "user.whose", b"ours", flags).is_ok();
    symlink("disk", &link).expect("a link");
    let before = fs::metadata(&disk).expect("there");
    let convert = || mica_in(dir, &["convert", "--force", "-f", "raw", "source.raw", "link"]);
    convert().ok();
    let after = fs::metadata(&disk).expect("there");
    let what = |found: &fs::Metadata| (found.mode(), found.uid(), found.gid());
    assert_eq!(what(&after), what(&before));
    assert_ne!(after.ino(), before.ino(), "it is another file");
    assert!(after.len() > 1 << 20 && link.is_symlink());
    if has_attributes {
        let mut value = [0; 8];
        let len = rustix::fs::getxattr(&disk, "user.whose", &mut value[..]).expect("it has it");
        assert_eq!(&value[..len], b"ours");
    }
    // Nobody replaces it while it is in use.
    mica_in(dir, &["clone", "-q", "disk", "over"]).ok();
    let server = Server::mica_writable(&dir.join("over"), "qcow2", &[]).expect("served");
    convert().refusal();
    assert_eq!(fs::metadata(&disk).expect("there").ino(), after.ino());
    drop(server);
}

/// The story: a verb that was killed left the first part of an image under the name that was wished
/// for, and nothing told it from a whole one.
#[test]
fn whatever_is_killed_leaves_a_whole_image_or_none_and_the_next_run_cleans_up() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("source.raw"), vec![7; 8 << 20]).expect("there is room");
    mica_in(dir, &["convert", "-f", "raw", "source.raw", "base.qcow2"]).ok();
    let state = ["backup", "-q", "base.qcow2", "folder", "--as", "one"];
    mica_in(dir, &state).ok();
    let names = || {
        let all = fs::read_dir(dir).expect("listed");
        let all = all.map(|entry| entry.expect("listed").file_name().into_string().expect("text"));
        all.collect::<BTreeSet<_>>()
    };
    let before = names();
    let verbs: [&[&str]; 7] = [
        &["convert", "-f", "raw", "-O", "raw", "source.raw", "new"],
        &["convert", "-U", "-f", "raw", "source.raw", "new"],
        &["convert", "-f", "raw", "source.raw", "new"],
        &["convert", "-B", "base.qcow2", "-F", "qcow2", "base.qcow2", "new"],
        &["create", "-q", "-b", "base.qcow2", "-F", "qcow2", "new"],
        &["clone", "-q", "base.qcow2", "new"],
        &["restore", "-q", "folder@one", "new"],
    ];
    let mut rng = Rng::new(14);
    for verb in verbs {
        let format = if verb.contains(&"raw") && verb.contains(&"-O") { "raw" } else { "qcow2" };
        let judge = || {
            if format == "qcow2" {
                qemu::img(dir, ["check", "-q", "new"]).ok();
            }
            let whole = ["compare", "-q", "-f", format, "-F", "raw", "new", "source.raw"];
            qemu::img(dir, whole).ok();
            fs::remove_file(dir.join("new")).expect("there");
        };
        kill_at_random(
            dir,
            verb,
            &mut rng,
            || {},
            |how| {
                if how == Ended::Itself || dir.join("new").exists() {
                    judge();
                }
                let left: Vec<_> = names().difference(&before).cloned().collect();
                let may_be_left =
                    |name: &String| how == Ended::Killed && name == ".new.mica-unfinished";
                assert!(left.iter().all(may_be_left), "{verb:?}: {left:?}");
            },
        );
    }
}

#[test]
fn image_that_another_process_makes_is_not_made_twice_and_stays() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    source(dir);
    // Slower than anybody waits for the lock of a process that may be dead.
    let slow = ["convert", "-f", "raw", "--inject", "delay=500ms", "source.raw", "copy"];
    let child = start(dir, &slow, "copy");
    let said = mica_in(dir, &["create", "copy", "1M"]).refusal();
    assert!(said.contains("another process is making"), "{said}");
    // One that comes by its name meanwhile stays, too.
    fs::write(dir.join("copy"), "other").expect("written");
    let ended = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        !ended.status.success() && said.contains("copy: another file was created under this name"),
        "{said}"
    );
    assert_eq!(fs::read(dir.join("copy")).expect("there"), b"other");
    assert!(!place(dir, "copy").exists());
}

/// As `nohup mica convert … &` in a shell.
#[test]
fn an_ignored_signal_stays_ignored() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    source(dir);
    let script = "trap '' HUP INT; \"$0\" convert -f raw --inject delay=5ms source.raw copy & \
                  while ! test -s .copy.mica-unfinished; do sleep 0.01; done; kill -HUP $!; kill -INT $!; wait $!";
    let mut shell = Command::new("bash");
    command::finish(shell.current_dir(dir).arg("-c").arg(script).arg(mica::binary())).ok();
    mica_in(dir, &["compare", "-f", "raw", "source.raw", "copy"]).ok();
}

#[test]
fn sigusr1_asks_for_a_line_and_kills_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    source(dir);
    let slow = [&["convert", "-f", "raw"], &SLOWLY[..], &["source.raw", "copy"]].concat();
    let mut child = start(dir, &slow, "copy");
    signal(&child, Signal::USR1);
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    stderr.read_line(&mut line).expect("a line");
    assert!(line.contains(" %: ") && line.contains("96 MiB"), "{line}");
    assert!(child.wait().expect("it ends").success());

    let full = ["-o", "preallocation=full", "new", "64M"];
    let create = [&["create", "-f", "raw"], &SLOWLY[..], &full].concat();
    let child = start(dir, &create, "new");
    signal(&child, Signal::USR1);
    let ended = child.wait_with_output().expect("it ends");
    assert!(ended.status.success() && ended.stderr.is_empty(), "{ended:?}");
}

#[test]
fn progress_ends_with_the_totals() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    source(dir);
    let said = mica_in(dir, &["convert", "-p", "-f", "raw", "source.raw", "copy"]);
    let last = said.stderr.lines().last().expect("a line").to_owned();
    assert!(last.starts_with("100 %: 96 MiB in ") && last.contains("B/s"), "{said}");
    assert_eq!(said.ok(), "");

    let slow = ["convert", "-p", "--output", "json", "-f", "raw", "--force", "source.raw", "copy"];
    // Far longer than a second: one piece after the other, each with two delays.
    let said = mica_in(dir, &[&slow[..], &["-m", "1"], &SLOWLY].concat());
    let lines: Vec<Value> =
        said.stderr.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let last = lines.last().expect("a line");
    assert_eq!((&last["done"], &last["total"]), (&LEN.into(), &LEN.into()), "{said}");
    assert!(lines.len() >= 2, "{said}");
    let result = said.json();
    assert_eq!((&result["virtual-size"], &result["format"]), (&LEN.into(), &"qcow2".into()));
    assert_eq!(result["filename"], "copy");

    let quiet = ["convert", "-q", "-p", "-f", "raw", "--force", "source.raw", "copy"];
    assert_eq!(mica_in(dir, &quiet).stderr, "");
}

#[test]
fn a_raw_copy_streams_to_standard_output() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("source.raw"), vec![7; (3 << 20) + 512]).expect("there is room");
    mica_in(dir, &["convert", "-f", "raw", "source.raw", "source.qcow2"]).ok();
    mica_in(dir, &["resize", "source.qcow2", "5M"]).ok();
    let copy = fs::File::create(dir.join("copy.raw")).expect("made");
    let mut mica = Command::new(mica::binary());
    let words = ["convert", "-O", "raw", "source.qcow2", "-"];
    assert!(mica.current_dir(dir).args(words).stdout(copy).status().expect("it runs").success());
    let formats = ["compare", "-s", "-F", "raw", "source.qcow2", "copy.raw"];
    mica_in(dir, &formats).ok();
    for args in [
        &["source.qcow2", "-"][..],
        &["-", "copy.qcow2"],
        &["-O", "raw", "-n", "source.qcow2", "-"],
        &["-O", "raw", "-o", "preallocation=full", "source.qcow2", "-"],
        &["-O", "raw", "-c", "source.qcow2", "-"],
        &["-O", "raw", "-B", "source.qcow2", "source.qcow2", "-"],
        &["-O", "raw", "-F", "qcow2", "source.qcow2", "-"],
    ] {
        let said = mica_in(dir, &[&["convert"], args].concat()).refusal();
        assert!(said.contains("-: "), "{said}");
    }
    assert!(!dir.join("-").exists() && !dir.join("copy.qcow2").exists());
}

/// The story: nothing said that a file with a second hard link is overwritten, and not replaced.
#[test]
fn old_file_that_cannot_be_replaced_is_warned_of() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica_in(dir, &["create", "source.qcow2", "1M"]).ok();
    for (name, content, links, is_warned_of) in
        [("linked", "precious", 2, true), ("alone", "precious", 1, false), ("empty", "", 2, false)]
    {
        for words in
            [&["create", "--force", name, "1M"][..], &["convert", "--force", "source.qcow2", name]]
        {
            let (file, again) = (dir.join(name), dir.join(format!("{name}.again")));
            fs::write(&file, content).expect("written");
            if links == 2 && !again.exists() {
                fs::hard_link(&file, &again).expect("a second name");
            }
            let made = mica_in(dir, words);
            assert_eq!(made.code(), Some(0), "{made}");
            let said = made.stderr.contains("its old content is overwritten");
            assert_eq!(said, is_warned_of, "{made}");
        }
    }
}
