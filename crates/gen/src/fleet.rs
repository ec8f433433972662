//! Fleets of chains as a cloud has them: tiny images whose headers, names and times follow what was
//! published of one region in 2020 ("Virtual Disk Snapshot Management at Scale", section 3).
//!
//! - More than 80 % of the chains, and about half of the files, have a length of 10 or less
//!   ([`SHORT`]); 10 % of the chains and a quarter of the files have 30 to 35 ([`STREAMED`]);
//!   few have 100 and more, and the longest has a thousand ([`CHAINS_FOR_LONGEST`]).
//! - Chains share base images of about five layers ([`OS_LAYERS`]), and what copies of disks
//!   have in common ([`COPY_PERCENT`]).
//! - 30 % of the provider's disks have 10 GB (folder `first`), 40 % of the customers' 50 GB
//!   (`third`), and some up to 10 TB.
//! - Many snapshots are taken by the day or more often; long chains come from those by the day or
//!   week ([`gap_seconds`]).
//!
//! What is not published, as what lies between, is chosen so that these figures come out.

use mica_block::{Error, Result};
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::layout::ImageWriter;
use mica_units::Rng;
use serde::Serialize;
use std::fs::{self, File, FileTimes};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Weights of the lengths 1 to 10: three files in four of these chains are in the longest of them.
const SHORT: [u64; 10] = [1, 1, 2, 2, 4, 8, 10, 14, 18, 24];
/// Lengths about which merging is triggered.
const STREAMED: (u64, u64) = (30, 35);
/// Chains from which on one of a thousand layers is among them, without being most of the files.
const CHAINS_FOR_LONGEST: u64 = 2000;
/// Layers of a base image of an operating system: at least, and at most.
const OS_LAYERS: (u64, u64) = (4, 6);
/// One base image for so many chains.
const CHAINS_PER_OS: u64 = 50;
/// How many of the chains that are longer stand on a base image.
const OS_PERCENT: u64 = 30;
/// How many chains are copies of others: they share some of their layers.
const COPY_PERCENT: u64 = 22;
/// How many disks are the provider's own.
const FIRST_PERCENT: u64 = 35;
/// When the last one was taken: the end of 2020, in seconds since the epoch.
const END_SECONDS: u64 = 1_609_372_800;
const GIB: u64 = 1 << 30;
const DAY: u64 = 86_400;

/// The description of a fleet. The same makes the same files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FleetSpec {
    /// Folder for it; created if missing.
    pub dir: PathBuf,
    /// Number of chains.
    pub chains: u64,
    /// Seed of everything random.
    pub seed: u64,
}

/// A fleet that was made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Fleet {
    /// Number of chains.
    pub chains: u64,
    /// Number of images.
    pub images: u64,
    /// Layers of the longest chain.
    pub longest: u64,
}

/// A layer that was made.
#[derive(Clone)]
struct Layer {
    path: PathBuf,
    size: u64,
    /// When it was last written, in seconds since the epoch.
    written: u64,
}

/// Makes the fleet that `spec` describes. After each chain `progress` is called with the number of
/// chains made so far.
///
/// # Errors
/// What the system reports.
pub fn generate_fleet(spec: &FleetSpec, mut progress: impl FnMut(u64)) -> Result<Fleet> {
    let mut rng = Rng::for_part(spec.seed, 0);
    let mut fleet = Fleet { chains: 0, images: 0, longest: 0 };
    let mut systems = Vec::new();
    for number in 0..(spec.chains / CHAINS_PER_OS).max(2) {
        let folder = spec.dir.join(format!("images/os-{number:03}"));
        let count = OS_LAYERS.0 + rng.below(OS_LAYERS.1 - OS_LAYERS.0 + 1);
        let layers = extend(&folder, (Vec::new(), 10 * GIB), count, &mut rng)?;
        fleet.images += layers.len() as u64;
        systems.push(layers);
    }
    for lengths in classes(spec.chains, &mut rng) {
        let mut made: Vec<Vec<Layer>> = Vec::new();
        for length in lengths {
            let below = match pick(&made, &mut rng).filter(|_| rng.percent(COPY_PERCENT)) {
                Some(other) => copied(other, length, &mut rng),
                None if length > OS_LAYERS.1 && rng.percent(OS_PERCENT) => {
                    pick(&systems, &mut rng).cloned().unwrap_or_default()
                }
                None => Vec::new(),
            };
            let party = if rng.percent(FIRST_PERCENT) { "first" } else { "third" };
            let size = below.last().map_or(0, |layer| layer.size).max(size_of(party, &mut rng));
            let folder = spec.dir.join(format!("{party}/disk-{:06}", fleet.chains));
            let shared = below.len() as u64;
            let chain = extend(&folder, (below, size), length - shared, &mut rng)?;
            fleet.chains += 1;
            fleet.images += length - shared;
            fleet.longest = fleet.longest.max(length);
            progress(fleet.chains);
            made.push(chain);
        }
    }
    Ok(fleet)
}

fn pick<'a, T>(items: &'a [T], rng: &mut Rng) -> Option<&'a T> {
    let count = items.len() as u64;
    let at = if count == 0 { 0 } else { rng.below(count) };
    items.get(usize::try_from(at).ok()?)
}

/// Lower layers of `other`, for a chain of this length on top of them.
fn copied(other: &[Layer], length: u64, rng: &mut Rng) -> Vec<Layer> {
    let most = (other.len() as u64).min(length).saturating_sub(1);
    let count = if most == 0 { 0 } else { 1 + rng.below(most) };
    other[..usize::try_from(count).unwrap_or(0)].to_vec()
}

/// The lengths of all chains: short ones, longer ones, those that are merged, long ones, and those
/// of a hundred and more. Shares are kept exactly, so that a small fleet has them, too.
fn classes(chains: u64, rng: &mut Rng) -> [Vec<u64>; 5] {
    let share = |per_mille: u64| (chains * per_mille + 500) / 1000;
    let mut huge = Vec::new();
    let mut budget = chains * 9 / 10;
    if chains >= CHAINS_FOR_LONGEST {
        huge.push(1040);
        budget -= 1040;
    }
    while budget >= 100 && (huge.len() as u64) < share(6) + 1 {
        // Few of many: the longer, the rarer.
        let length = (100 * 100 / (1 + rng.below(100))).clamp(100, 900).min(budget);
        huge.push(length);
        budget -= length;
    }
    let among = |count: u64, (from, to): (u64, u64), rng: &mut Rng| -> Vec<u64> {
        (0..count).map(|_| from + rng.below(to - from + 1)).collect()
    };
    let middle = among(share(60), (11, 29), rng);
    let streamed = among(share(100), STREAMED, rng);
    let long = (0..share(18)).map(|_| 36 + rng.below(32).min(rng.below(64))).collect();
    let others = huge.len() as u64 + share(60) + share(100) + share(18);
    [short_lengths(chains.saturating_sub(others)), middle, streamed, long, huge]
}

fn short_lengths(count: u64) -> Vec<u64> {
    let all: u64 = SHORT.iter().sum();
    let mut lengths = Vec::new();
    let mut weight = 0;
    for (length, own) in (1..).zip(SHORT) {
        weight += own;
        let until = count * weight / all;
        lengths.resize(usize::try_from(until).unwrap_or(usize::MAX), length);
    }
    lengths
}

fn size_of(party: &str, rng: &mut Rng) -> u64 {
    const COMMON: [u64; 9] = [5, 20, 30, 40, 60, 80, 100, 120, 200];
    const RARE: [u64; 6] = [250, 500, 1000, 2000, 5000, 10_240];
    let (usual, percent) = if party == "first" { (10, 30) } else { (50, 40) };
    let gib = match rng.percent(percent) {
        true => usual,
        false if rng.percent(85) => rng.choose(&COMMON),
        false => rng.choose(&RARE),
    };
    gib * GIB
}

/// How long after the previous layer the next one is made. Long chains come from those who take
/// snapshots by the day or week.
fn gap_seconds(length: u64, rng: &mut Rng) -> u64 {
    let shares = if length > STREAMED.1 { [5, 70, 23, 2] } else { [12, 45, 28, 10] };
    let mut roll = rng.below(100);
    let ends = [3600, DAY, 7 * DAY, 30 * DAY];
    let mut start = 60;
    for (share, end) in shares.into_iter().zip(ends) {
        if roll < share {
            // Those who do so by the clock do it at its end.
            let by_clock = rng.percent(50);
            return if by_clock { end - 1 - rng.below(60) } else { start + rng.below(end - start) };
        }
        roll -= share;
        start = end;
    }
    start + rng.below(200 * DAY)
}

/// Puts `count` layers for a disk of this size on top of some.
fn extend(
    folder: &Path,
    (mut layers, size): (Vec<Layer>, u64),
    count: u64,
    rng: &mut Rng,
) -> Result<Vec<Layer>> {
    let failed = |error| Error::from_io(format!("creating {}", folder.display()), error);
    if count > 0 {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let length = layers.len() as u64 + count;
    let gaps: Vec<u64> = (0..count).map(|_| gap_seconds(length, rng)).collect();
    let first = END_SECONDS.saturating_sub(gaps.iter().sum::<u64>() + rng.below(30 * DAY));
    let mut written = layers.last().map_or(first, |layer| layer.written);
    for (number, gap) in (0_u64..).zip(gaps) {
        written += gap;
        let path = folder.join(format!("layer-{number:04}.qcow2"));
        write_layer(&path, size, layers.last(), written)?;
        layers.push(Layer { path, size, written });
    }
    Ok(layers)
}

/// An empty image, which takes two blocks of the file system.
fn write_layer(path: &Path, size: u64, below: Option<&Layer>, written: u64) -> Result<()> {
    let wish = ImageWish {
        backing_name: below.map(|below| relative(path, &below.path).into_os_string()),
        backing_format: below.map(|_| "qcow2".to_owned()),
        extended_l2: Some(false),
        ..ImageWish::default()
    };
    let mut ending = ImageWriter::new(wish.plan(size)?)?.end()?;
    let failed = |error| Error::from_io(format!("writing {}", path.display()), error);
    let file = File::create_new(path).map_err(failed)?;
    while let Some(write) = ending.next_write()? {
        if write.bytes.iter().any(|byte| *byte != 0) {
            // Refcounts are at the start of their blocks, and the rest is a hole.
            let len = write.bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            file.write_all_at(&write.bytes[..len], write.at.bytes()).map_err(failed)?;
        }
    }
    file.write_all_at(&ending.header()?, 0).map_err(failed)?;
    file.set_len(ending.len()).map_err(failed)?;
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(written);
    file.set_times(FileTimes::new().set_modified(time).set_accessed(time)).map_err(failed)
}

/// The name by which an image at `from` names the one at `to`, in the same fleet.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let folder = from.parent().unwrap_or(Path::new(""));
    let shared = folder.components().zip(to.components()).take_while(|(one, other)| one == other);
    let shared = shared.count();
    let up = folder.components().skip(shared).map(|_| Path::new(".."));
    let down = to.components().skip(shared).map(|part| Path::new(part.as_os_str()));
    // The iterators borrow from different paths.
    up.map(Path::to_owned).chain(down.map(Path::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_from_one_folder_to_another() {
        let name = |from: &str, to: &str| relative(Path::new(from), Path::new(to));
        assert_eq!(name("d/a/one", "d/a/two"), Path::new("two"));
        assert_eq!(name("d/a/one", "d/b/c/two"), Path::new("../b/c/two"));
    }

    #[test]
    fn same_spec_makes_the_same_files() {
        let dir = tempfile::tempdir().expect("a folder");
        let made = ["one", "two"].map(|name| {
            let spec = FleetSpec { dir: dir.path().join(name), chains: 30, seed: 5 };
            let fleet = generate_fleet(&spec, |_| {}).expect("made");
            let mut files = Vec::new();
            let mut folders = vec![spec.dir.clone()];
            while let Some(folder) = folders.pop() {
                for entry in fs::read_dir(folder).expect("listed") {
                    let path = entry.expect("listed").path();
                    if path.is_dir() {
                        folders.push(path);
                        continue;
                    }
                    let time = path.metadata().expect("there").modified().expect("a time");
                    let name = path.strip_prefix(&spec.dir).expect("within").to_owned();
                    files.push((name, time, fs::read(&path).expect("read")));
                }
            }
            files.sort();
            assert_eq!(files.len() as u64, fleet.images);
            (fleet, files)
        });
        assert!(made[0] == made[1]);
    }
}
