//! Power cuts while the index of a chain is built, beneath the real kernel: whatever is in the
//! places of sidecars afterwards, readers get the right bytes.
//!
//! Before the part that is cut, the same folder had a chain of the same shape with other content
//! and its index. So the blocks of a new sidecar had nodes of an older one of the same layer, whose
//! sums are right at their places: what a file system would show if a sidecar were put in its place
//! before it is durable.

use anyhow::{Context, Result, ensure};
use mica_tests::mounts::Mount;
use mica_tests::power::{self, Disk, Recorder, Recording};
use mica_tests::server::Server;
use mica_tests::{clock, mica, qemu, tools};
use mica_units::Rng;
use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

const LAYERS: &str = "34";
const SEED: u64 = 12;
/// States that are judged, and memory for them.
const CUTS: usize = 14;
const STATES_MIB: u64 = 256;
/// A seal proves nothing about a layer that changed less than a second before.
const SETTLE: Duration = Duration::from_millis(1500);

#[test]
fn whatever_a_power_cut_leaves_of_an_index_readers_get_the_right_bytes() {
    let needed = [tools::QEMU_IMG, tools::QEMU_STORAGE_DAEMON, tools::NBDFUSE, tools::MKE2FS];
    if !tools::present(&needed) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    if let Some(lack) = power::lacks(folder.path()) {
        return tools::skip(&lack);
    }
    if let Err(error) = record_and_cut(folder.path()) {
        panic!("{error:#}; seed {SEED}, in {}", folder.keep().display());
    }
}

fn record_and_cut(dir: &Path) -> Result<()> {
    let mut rng = Rng::new(SEED);
    let recorder = Recorder::start(dir, 1024)?;
    let chain = recorder.folder().join("chain");
    make_chain(&chain, "1")?;
    index(&chain, "build")?;
    index(&chain, "drop")?;
    make_chain(&chain, "2")?;
    let wanted = flat(&chain, dir)?;
    let from = recorder.sync()?;
    // Built twice: the second time over what the first one left free.
    index(&chain, "build")?;
    index(&chain, "drop")?;
    index(&chain, "build")?;
    recorder.sync()?;
    let Recording { before, log } = recorder.stop()?;

    let places = power::places(&log, from, CUTS, &mut rng)?;
    let states = Mount::memory(&dir.join("states"), STATES_MIB)?;
    let mut disk = Disk::new(before, &log);
    let mut seals = Vec::new();
    for (number, (end, cut)) in places.into_iter().enumerate() {
        disk.advance(end)?;
        let file = states.folder().join(format!("{number}.img"));
        disk.lay_down(&disk.cut(cut, &mut rng), &file)?;
        let judged = judge(&file, &wanted);
        fs::remove_file(&file)?;
        seals.push(judged.with_context(|| format!("state {number}: {cut:?} at entry {end}"))?);
    }
    println!("sidecars in the {CUTS} states: {seals:?}");
    let in_between = seals.iter().filter(|count| (1..33).contains(*count)).count();
    ensure!(in_between > 0, "no cut met a build at work: {seals:?}");
    Ok(())
}

/// Makes a chain whose content depends on `seed`, durable.
fn make_chain(chain: &Path, seed: &str) -> Result<()> {
    let args = ["gen", "chain", "--force", "--layers", LAYERS, "--size", "16M", "--seed", seed];
    mica::run(args.map(AsRef::as_ref).into_iter().chain([chain.as_os_str()])).ok();
    rustix::fs::syncfs(File::open(chain)?)?;
    clock::sleep(SETTLE);
    Ok(())
}

fn index(chain: &Path, verb: &str) -> Result<()> {
    let top = chain.join("top.qcow2");
    let done = mica::run(["index".as_ref(), verb.as_ref(), top.as_os_str()]);
    ensure!(done.status.success(), "{done}");
    Ok(())
}

/// The content of the chain, as QEMU reads it.
fn flat(chain: &Path, dir: &Path) -> Result<Vec<u8>> {
    let raw = dir.join("flat.raw");
    let top = chain.join("top.qcow2");
    let args = ["convert", "-f", "qcow2", "-O", "raw"].map(AsRef::as_ref);
    qemu::img(dir, args.into_iter().chain([top.as_os_str(), raw.as_os_str()])).ok();
    Ok(fs::read(raw)?)
}

/// Reads the chain on the disk in `file` with the sidecars that are there; returns how many there
/// were.
fn judge(file: &Path, wanted: &[u8]) -> Result<usize> {
    let ext4 = Mount::ext4(file, &file.with_extension("mounted")).context("the file system")?;
    let judge = || -> Result<usize> {
        let chain = ext4.folder().join("chain");
        let names = fs::read_dir(&chain)?.map(|entry| Ok(entry?.file_name()));
        let names = names.collect::<Result<Vec<_>>>()?;
        let sidecars =
            names.iter().filter(|name| name.to_string_lossy().ends_with(".mica-index")).count();
        // Once with what is there, and once while the index is brought up to date.
        for index in ["read", "auto"] {
            let server = Server::mica(&chain.join("top.qcow2"), "qcow2", &["--index", index])?;
            let bytes = server.connect(&Default::default())?.read_all()?;
            let stopped = server.stop()?;
            ensure!(stopped.status.success(), "mica ends with {stopped:?}");
            let differs = bytes.iter().zip(wanted).position(|(read, wanted)| read != wanted);
            ensure!(
                bytes.len() == wanted.len() && differs.is_none(),
                "--index {index}: other bytes from {differs:?}, with {sidecars} sidecars"
            );
        }
        Ok(sidecars)
    };
    let judged = judge();
    ext4.unmount();
    judged
}
