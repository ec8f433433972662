//! QEMU's tools on images that nobody serves. They wait for the locks of a server that was killed a
//! moment ago, and their errors are not panics here.

use super::keys;
use super::stamp::SECTOR;
use super::story::{Fault, Outcome, Wrong, trouble};
use crate::clock;
use crate::command::{self, Finished};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// How long an image may stay locked after its writer was killed.
const LOCK_LIMIT: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(120);
/// How programs say that another one holds an image or a socket.
const HELD: [&str; 4] =
    ["Failed to get", "Is another process using", "holds the image", "another server listens"];

/// Runs `program` in `dir` to its end, again while a killed server still holds the image.
pub(super) fn run<S: AsRef<OsStr>>(program: &str, dir: &Path, args: &[S]) -> Outcome<Finished> {
    let mut last = None;
    clock::poll(LOCK_LIMIT, Duration::from_millis(4), || {
        let mut command = Command::new(program);
        let said = command::finish_within(command.current_dir(dir).args(args), LIMIT);
        let is_held = !said.status.success() && is_held(&said.stderr);
        last = Some(said);
        (!is_held).then_some(())
    });
    last.ok_or_else(|| trouble("nothing was run"))
}

/// Whether a program reports that it cannot begin since another one, which may be dying, holds what
/// it needs.
pub(super) fn is_held(said: &str) -> bool {
    HELD.iter().any(|text| said.contains(text))
}

/// Runs `qemu-img`, which has to succeed.
pub(super) fn img<S: AsRef<OsStr>>(dir: &Path, args: &[S]) -> Outcome<String> {
    succeeded(run("qemu-img", dir, args)?)
}

/// The output of a program, which must have succeeded.
pub(super) fn succeeded(said: Finished) -> Outcome<String> {
    match said.status.success() {
        true => Ok(said.stdout),
        false => Err(Fault::new(Wrong::Unusable, said.to_string())),
    }
}

/// The options with which QEMU opens `image`, and what it calls it then.
pub(super) fn opened(dir: &Path, format: &str, image: &str) -> Outcome<(Vec<String>, String)> {
    if keys::secret(dir).is_none() {
        return Ok((["-f", format].map(str::to_owned).to_vec(), image.to_owned()));
    }
    let args = ["info", "-U", "-f", format, "--backing-chain", "--output", "json", image];
    let told: serde_json::Value = serde_json::from_str(&img(dir, &args)?).map_err(trouble)?;
    let (mut prefix, mut name) = (String::new(), Vec::new());
    for layer in told.as_array().into_iter().flatten() {
        let [format, file] = ["format", "filename"].map(|key| layer[key].as_str().unwrap_or(""));
        name.push(format!("{prefix}driver={format},{prefix}file.filename={file}"));
        if layer["encrypted"] == true {
            let option = if format == "luks" { "key-secret" } else { "encrypt.key-secret" };
            name.push(format!("{prefix}{option}=key"));
        }
        prefix.push_str("backing.");
    }
    let options = keys::OBJECT.iter().chain(&["--image-opts"]).map(|option| (*option).to_owned());
    Ok((options.collect(), name.join(",")))
}

/// Runs `qemu-io` commands on an image of this `format`, which must all succeed.
pub(super) fn io(dir: &Path, format: &str, image: &str, commands: &[String]) -> Outcome {
    let (options, image) = opened(dir, format, image)?;
    let mut args: Vec<_> = options.iter().map(String::as_str).collect();
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(&image);
    let said = run("qemu-io", dir, &args)?;
    let failed = ["error", "failed", "rror:"];
    let is_wrong = failed.iter().any(|word| said.stdout.contains(word));
    if is_wrong || !said.status.success() {
        return Err(Fault::new(Wrong::Unusable, said.to_string()));
    }
    Ok(())
}

/// The disk of `image` as QEMU reads it.
pub(super) fn flatten(dir: &Path, image: &str, more: &[&str], raw: &Path) -> Outcome<Vec<u8>> {
    flatten_as(dir, ("qcow2", image), more, raw)
}

/// As [`flatten`], of an image of this `format`.
pub(super) fn flatten_as(
    dir: &Path,
    (format, image): (&str, &str),
    more: &[&str],
    raw: &Path,
) -> Outcome<Vec<u8>> {
    let raw_name = raw.display().to_string();
    let (options, image) = opened(dir, format, image)?;
    let mut args = vec!["convert", "-O", "raw"];
    args.extend(options.iter().map(String::as_str));
    args.extend_from_slice(more);
    args.extend([&*image, &raw_name]);
    img(dir, &args)?;
    let bytes = fs::read(raw)?;
    fs::remove_file(raw)?;
    if !bytes.len().is_multiple_of(SECTOR) {
        return Err(trouble(format!("a disk of {} bytes", bytes.len())));
    }
    Ok(bytes)
}

/// The length of a disk.
pub(super) fn len(dir: &Path, image: &str) -> Outcome<u64> {
    let told = img(dir, &["info", "-f", "qcow2", "--output", "json", image])?;
    let told: serde_json::Value = serde_json::from_str(&told).map_err(trouble)?;
    told["virtual-size"].as_u64().ok_or_else(|| trouble("no length"))
}

/// Which sectors of the disk of `image` are dirty in its `bitmap`, as qemu-nbd tells it.
pub(super) fn dirty(dir: &Path, image: &str, bitmap: &str, sectors: usize) -> Outcome<Vec<bool>> {
    let (options, image) = opened(dir, "qcow2", image)?;
    let map = format!("--map=qemu:dirty-bitmap:{bitmap}");
    let mut args = vec!["--json", &map, "--", "[", "qemu-nbd", "-r", "-B", bitmap];
    args.extend(options.iter().map(String::as_str));
    args.extend([&*image, "]"]);
    dirty_in(&succeeded(run("nbdinfo", dir, &args)?)?, sectors)
}

/// Which sectors of a disk of so many are dirty by what nbdinfo `said`.
pub(super) fn dirty_in(said: &str, sectors: usize) -> Outcome<Vec<bool>> {
    let told: serde_json::Value = serde_json::from_str(said)
        .map_err(|error| Fault::new(Wrong::Failed, format!("{error}: {said}")))?;
    let mut is_dirty = vec![false; sectors];
    for part in told.as_array().into_iter().flatten().filter(|part| part["type"] != 0) {
        let bytes = |key: &str| part[key].as_u64().and_then(|bytes| usize::try_from(bytes).ok());
        let known = bytes("offset").zip(bytes("length"));
        let (at, len) = known.ok_or_else(|| Fault::new(Wrong::Failed, said))?;
        let range = at / SECTOR..(at + len).div_ceil(SECTOR);
        let told = is_dirty.get_mut(range).ok_or_else(|| Fault::new(Wrong::Length, said))?;
        told.fill(true);
    }
    Ok(is_dirty)
}

/// What `qemu-img check` finds: corruptions and leaks.
pub(super) fn check(dir: &Path, image: &str) -> Outcome<(u64, u64)> {
    let (options, image) = opened(dir, "qcow2", image)?;
    let mut args = vec!["check", "--output", "json"];
    args.extend(options.iter().map(String::as_str));
    args.push(&image);
    let said = run("qemu-img", dir, &args)?;
    let told: serde_json::Value = serde_json::from_str(&said.stdout)
        .map_err(|_| Fault::new(Wrong::Unusable, said.to_string()))?;
    let count = |name: &str| told[name].as_u64().unwrap_or(0);
    if count("check-errors") > 0 {
        return Err(Fault::new(Wrong::Corrupt, said.to_string()));
    }
    Ok((count("corruptions"), count("leaks")))
}
