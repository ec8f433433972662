//! Bad days: kills, full disks, two at once, damage.

use crate::restored::restored;
use mica_tests::command::{self, Finished};
use mica_tests::{judge, mica, tools};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const LEN: usize = 24 << 20;

/// A raw disk of noise, all of which is stored.
fn noise() -> Option<(TempDir, Vec<u8>)> {
    if !tools::present(&[tools::QEMU_IMG]) {
        return None;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let (mut number, mut bytes) = (1_u64, vec![0; LEN]);
    for word in bytes.chunks_exact_mut(8) {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        word.copy_from_slice(&number.to_le_bytes());
    }
    fs::write(dir.path().join("disk.raw"), &bytes).expect("written");
    Some((dir, bytes))
}

fn backup(dir: &Path) -> Command {
    let mut backup = Command::new(mica::binary());
    backup
        .args(["backup", "--output", "json", "--format", "raw", "--as", "mon", "disk.raw", "web"]);
    backup.current_dir(dir).stdin(Stdio::null());
    backup
}

fn verify(dir: &Path) -> Finished {
    mica::run(["backup", "verify", "--output", "json", &dir.join("web").display().to_string()])
}

fn data_file(dir: &Path) -> PathBuf {
    let files = fs::read_dir(dir.join("web")).expect("a folder").flatten();
    let mut data = files.filter(|file| file.path().extension().is_some_and(|end| end == "data"));
    data.next().expect("there is data").path()
}

/// Killed again and again, it comes to an end, and what it had done counts.
#[test]
fn backup_that_is_killed_goes_on_where_it_was() {
    let Some((dir, bytes)) = noise() else { return };
    let at = dir.path();
    let mut was_resumed = false;
    let mut done = None;
    for round in 0..100_u64 {
        let mut child = backup(at).stdout(Stdio::piped()).spawn().expect("started");
        let limit = Duration::from_millis(10 + 5 * round);
        if command::wait(&mut child, limit).is_some() {
            done = Some(child);
            break;
        }
        child.kill().expect("killed");
        child.wait().expect("it ends");
        let listed = mica::run([
            "backup",
            "list",
            "--output",
            "json",
            &at.join("web").display().to_string(),
        ]);
        // A kill may come when the state is there already, or before there is a folder.
        let whole = if at.join("web").exists() { listed.json() } else { serde_json::json!([]) };
        was_resumed |= whole.as_array().is_some_and(Vec::is_empty)
            && at.join("web").exists()
            && fs::read_dir(at.join("web")).expect("a folder").count() > 1;
    }
    let said = done.expect("it ends").wait_with_output().expect("read");
    assert!(said.status.success(), "{said:?}");
    let answer: serde_json::Value = serde_json::from_slice(&said.stdout).expect("JSON");
    let resumed = answer["resumed-bytes"].as_u64().expect("a number");
    assert!(!was_resumed || resumed > 0 || answer["was-there"] == true, "{answer}");
    verify(at).ok();
    judge::same_bytes("the disk", &restored(at, "web", "mon", "raw"), &bytes);
    // Nothing is left over.
    assert_eq!(fs::read_dir(at.join("web")).expect("a folder").count(), 3);
}

/// What is no backup is not found whole, and one that was refused leaves nothing.
#[test]
fn nothing_is_no_backup() {
    let dir = tempfile::tempdir().expect("a folder");
    fs::create_dir(dir.path().join("web")).expect("made");
    let said = verify(dir.path()).refusal();
    assert!(said.contains("contains no backup"), "{said}");
    let new = dir.path().join("new");
    let missing = dir.path().join("missing.qcow2").display().to_string();
    mica::run(["backup", &missing, &new.display().to_string()]).refusal();
    assert!(!new.exists());
    // A folder that was there stays.
    let old = dir.path().join("web").display().to_string();
    mica::run(["backup", &missing, &old]).refusal();
    assert!(dir.path().join("web").exists());
}

/// A file that may not grow is what a full disk is.
#[test]
fn full_disk_is_said_in_a_line_and_breaks_nothing() {
    let Some((dir, bytes)) = noise() else { return };
    let at = dir.path();
    let mut shell = Command::new("sh");
    let script = r#"ulimit -f 24576; exec "$mica" backup --format raw --as mon disk.raw web"#;
    shell.args(["-c", script]).env("mica", mica::binary()).current_dir(at);
    let full = command::finish(&mut shell).refusal();
    assert!(full.contains("writing"), "{full}");
    let states =
        mica::run(["backup", "list", "--output", "json", &at.join("web").display().to_string()]);
    assert_eq!(states.json(), serde_json::json!([]));
    let answer = command::finish(&mut backup(at)).json();
    assert!(answer["resumed-bytes"].as_u64() > Some(6 << 20), "{answer}");
    judge::same_bytes("the disk", &restored(at, "web", "mon", "raw"), &bytes);
}

#[test]
fn image_that_changed_meanwhile_is_begun_again() {
    let Some((dir, mut bytes)) = noise() else { return };
    let at = dir.path();
    let mut shell = Command::new("sh");
    let script = r#"ulimit -f 24576; exec "$mica" backup --format raw --as mon disk.raw web"#;
    shell.args(["-c", script]).env("mica", mica::binary()).current_dir(at);
    command::finish(&mut shell).refusal();
    bytes[..512].fill(9);
    let disk = OpenOptions::new().write(true).open(at.join("disk.raw")).expect("it is there");
    disk.write_all_at(&[9; 512], 0).expect("written");
    let answer = command::finish(&mut backup(at)).json();
    assert_eq!(answer["resumed-bytes"], 0, "{answer}");
    judge::same_bytes("the disk", &restored(at, "web", "mon", "raw"), &bytes);
}

#[test]
fn second_backup_into_a_folder_is_refused() {
    let Some((dir, _)) = noise() else { return };
    let at = dir.path();
    fs::create_dir(at.join("web")).expect("made");
    let lock = File::create(at.join("web/.lock")).expect("made");
    flock(&lock, FlockOperation::LockExclusive).expect("locked");
    let refused = command::finish(&mut backup(at)).refusal();
    assert!(refused.contains("another backup") && refused.contains("under way"), "{refused}");
    drop(lock);
    command::finish(&mut backup(at)).ok();
}

#[test]
fn damage_is_named_and_nothing_wrong_is_given_back() {
    let Some((dir, _)) = noise() else { return };
    let at = dir.path();
    command::finish(&mut backup(at)).ok();
    let path = data_file(at);
    let data = OpenOptions::new().read(true).write(true).open(&path).expect("it is there");
    let mut byte = [0];
    data.read_exact_at(&mut byte, 10 << 20).expect("read");
    data.write_all_at(&[byte[0] ^ 1], 10 << 20).expect("written");
    let found = verify(at);
    assert_eq!(found.code(), Some(1), "{found}");
    let answer: serde_json::Value = serde_json::from_str(&found.stdout).expect("JSON");
    let damage = answer["damage"].as_array().expect("a list");
    assert_eq!(damage.len(), 1, "{answer}");
    assert_eq!((&damage[0]["start"], &damage[0]["length"]), (&(9 << 20).into(), &(1 << 20).into()));
    let restore = || {
        let (source, file) = (at.join("web").display().to_string(), at.join("out.raw"));
        let refused = mica::run(["restore", "-O", "raw", &source, &file.display().to_string()]);
        let refused = refused.refusal();
        assert!(!file.exists(), "nothing is left of it");
        refused
    };
    let refused = restore();
    assert!(refused.contains("byte 9437184 of the disk"), "{refused}");
    fs::remove_file(&path).expect("removed");
    let missing = restore();
    assert!(missing.contains("is missing"), "{missing}");
    assert_eq!(verify(at).code(), Some(1));
    // What is no backup at all.
    let other = mica::run(["restore", &at.join("disk.raw").display().to_string(), "x"]).refusal();
    assert!(other.contains("not a folder"), "{other}");
}
