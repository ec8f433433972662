//! Which functions servers run, for the linker to place side by side.
//!
//! The pages of a program that it touches count as its memory, and the system maps 64 KiB around
//! each. What serving runs is a tenth of mica, and would lie everywhere in it. So servers run a
//! load of the benches under qemu-x86_64, which logs every block of code the first time it meets
//! it, and a script for the linker names the functions with these blocks, in the order in which
//! they began.
//!
//! The script matches names as compilers make them, with what differs from one build to the next
//! replaced. A function whose name it does not match is placed with all others, which costs memory
//! and nothing else: so it need not be made again with each change.

mod program;

use anyhow::{Result, ensure};
use mica_tests::shell;
use program::Program;
use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SCRIPT: &str = "crates/cli/text-order.ld";
/// What runs a program and logs its code, and Debian's package of it.
const EMULATOR: &str = "qemu-x86_64";
const PACKAGE: &str = "qemu-user";
/// Loads of servers, small: the emulator is slow.
const LOADS: [&[&str]; 2] = [
    &["nbd", "--quick", "--layers", "5", "--repeats", "1"],
    &["chain", "--quick", "--layers", "5", "--parts", "warm,cold", "--repeats", "1"],
];
/// What servers do not run in the emulator: it has no io_uring, answers no machine, and is of a
/// processor without the newest instructions; and it is so slow that files are never read ahead.
const UNSEEN: [&str; 12] = [
    "_R*7mica_rt8restrict*",
    "_R*8crc_fast*avx512*",
    "_R*7mica_rt4join*",
    "_R*10mica_store4file*",
    "_R*10mica_serve3nbd5reply*",
    "_R*11mica_qcow26survey*",
    "_R*11mica_qcow25write7overlay*",
    "_R*7mica_rt7backend5uring*",
    "_R*8io_uring*",
    "_R*10mica_serve10vhost_user*",
    "_R*12virtio_queue*",
    "_R*9vm_memory*",
];
/// Part of the name of what only servers run.
const SERVER: &str = "10mica_serve";

/// Writes the script.
pub(crate) fn run() -> Result<()> {
    let emulator = Command::new(EMULATOR).arg("-version").output();
    ensure!(emulator.is_ok(), "{EMULATOR} is missing (apt install {PACKAGE})");
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    let program = shell::target()?.join("release/mica");
    let work = tempfile::tempdir()?;
    let logs = work.path().join("logs");
    fs::create_dir(&logs)?;
    let emulated = emulated(work.path(), &logs, &program)?;
    for load in LOADS {
        let mut bench = shell::cargo(["xtask", "bench"]);
        bench.args(load).arg("--out").arg(work.path()).env("MICA_BIN", &emulated);
        shell::run(&mut bench)?;
    }
    let program = Program::read(&program)?;
    let names = served(&program, &logs)?;
    fs::write(shell::root().join(SCRIPT), script(&names))?;
    println!("{SCRIPT}: {} functions", names.len());
    Ok(())
}

/// A program in `folder` that runs `program` in the emulator, which logs into `logs`.
fn emulated(folder: &Path, logs: &Path, program: &Path) -> Result<PathBuf> {
    let path = folder.join("mica");
    let (logs, program) = (logs.display(), program.display());
    let run = format!("exec {EMULATOR} -d in_asm,page -D '{logs}'/$$ '{program}' \"$@\"");
    fs::write(&path, format!("#!/bin/sh\n{run}\n"))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// The names of all functions that servers ran, in the order in which they began.
fn served<'a>(program: &'a Program, logs: &Path) -> Result<Vec<&'a str>> {
    let mut paths: Vec<_> = fs::read_dir(logs)?.collect::<Result<_, _>>()?;
    paths.sort_by_cached_key(|log| log.metadata().and_then(|about| about.modified()).ok());
    let (mut names, mut known) = (Vec::new(), HashSet::new());
    for log in paths {
        let log = BufReader::new(fs::File::open(log.path())?);
        let ran = ran(program, log.lines().map_while(Result::ok));
        if ran.iter().any(|name| name.contains(SERVER)) {
            names.extend(ran.into_iter().filter(|name| known.insert(*name)));
        }
    }
    ensure!(!names.is_empty(), "no server ran");
    Ok(names)
}

/// The names of the functions that the `lines` of a log are about, each once.
fn ran(program: &Program, lines: impl Iterator<Item = String>) -> Vec<&str> {
    let (mut names, mut known) = (Vec::new(), HashSet::new());
    let mut loaded_at = None;
    for line in lines {
        if let Some(start) = line.strip_prefix("start_code") {
            loaded_at = address(start).and_then(|start| start.checked_sub(program.code));
        }
        let at = line.split_once(':').and_then(|(at, _)| address(at));
        let at = at.zip(loaded_at).and_then(|(at, loaded)| at.checked_sub(loaded));
        let here = at.into_iter().flat_map(|at| program.functions_at(at));
        names.extend(here.filter(|name| known.insert(*name)));
    }
    names
}

/// A number of a log: `0x` and hexadecimal digits.
fn address(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

fn script(names: &[&str]) -> String {
    let mut script = String::from(
        "/* Functions that servers run, in the order in which they begin: side by side, they take\n   \
         less memory. Made by `cargo xtask text-order`. */\nSECTIONS\n{\n  .text.served :\n  {\n",
    );
    let mut known = HashSet::new();
    let patterns = names.iter().map(|name| pattern(name));
    for pattern in patterns.chain(UNSEEN.map(str::to_owned)) {
        if known.insert(pattern.clone()) {
            // Functions that are marked as cold are in sections of their own.
            script += &format!("    *(.text.{pattern} .text.unlikely.{pattern})\n");
        }
    }
    script + "  }\n}\nINSERT BEFORE .text;\n"
}

/// What matches `name` in another build, too: without the hash of each crate that it names (`Cs`,
/// base 62, `_`; RFC 2603), and of what was made of the function across units of code.
fn pattern(name: &str) -> String {
    let name = name.split(".llvm.").next().unwrap_or(name);
    if !name.starts_with("_R") {
        return name.to_owned();
    }
    let mut parts = name.split("Cs");
    let mut pattern = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let is_hash = |hash: &str| hash.bytes().all(|byte| byte.is_ascii_alphanumeric());
        match part.split_once('_').filter(|(hash, _)| is_hash(hash)) {
            Some((_, rest)) => pattern += &format!("Cs*_{rest}"),
            None => pattern += &format!("Cs{part}"),
        }
    }
    pattern + "*"
}

#[cfg(test)]
mod tests {
    use super::{Program, pattern, ran, script};

    #[test]
    fn patterns_have_no_hashes() {
        let name = "_RNvMs_NtCs1Gkdk2_7mica_rt3bufNtB4_3Buf3newCs9x_4mica";
        let wanted = "_RNvMs_NtCs*_7mica_rt3bufNtB4_3Buf3newCs*_4mica*";
        assert_eq!(pattern(name), wanted);
        assert_eq!(pattern(&format!("{name}.llvm.123")), wanted);
        assert_eq!(pattern("ZSTD_decompress"), "ZSTD_decompress");
    }

    #[test]
    fn functions_are_named_once_and_in_order() {
        let functions =
            [(0x100, 0x10, "one"), (0x110, 0x20, "too"), (0x110, 0x20, "two"), (0x140, 8, "three")];
        let functions = functions.map(|(at, len, name)| (at, len, name.to_owned()));
        let program = Program { code: 0x100, functions: functions.to_vec() };
        let log = "start_code  0x4100\nIN:\n0x4138:  nop\n0x4111:  nop\n0x4104:  nop\n0x412f: nop";
        assert_eq!(ran(&program, log.lines().map(str::to_owned)), ["two", "too", "one"]);
        let script = script(&["two", "one", "two"]);
        let (two, one) = (script.find("(.text.two "), script.find("(.text.one "));
        assert!(two.is_some() && two < one, "{script}");
        assert_eq!(script.matches(".text.two ").count(), 1);
    }
}
