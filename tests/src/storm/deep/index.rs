//! What happens to the index of a chain while nobody serves it: whatever is left of it, or in its
//! place, may only cost time.

use super::build::name_of;
use crate::storm::story::Outcome;
use mica_units::Rng;
use std::fs;
use std::path::{Path, PathBuf};

/// How the name of a sidecar ends.
const SIDECAR: &str = "mica-index";
/// Sidecars that something happens to at once.
const SOME_MAX: u64 = 8;

/// Does something to the index of the chain in `dir`; says what, in words.
pub(super) fn damage(dir: &Path, rng: &mut Rng) -> Outcome<String> {
    let mut all = Vec::new();
    for file in fs::read_dir(dir)? {
        let path = file?.path();
        if path.extension().is_some_and(|end| end == SIDECAR) {
            all.push(path);
        }
    }
    all.sort();
    if all.is_empty() {
        return Ok("there is no index".to_owned());
    }
    let count = all.len();
    let some: Vec<PathBuf> =
        (0..1 + rng.below(SOME_MAX)).map(|_| all[index(rng, count)].clone()).collect();
    let what = rng.choose(&["removed", "removed in part", "bits", "cut", "swapped", "torn"]);
    match what {
        "removed" => all.iter().try_for_each(fs::remove_file)?,
        "swapped" => {
            let other = all[index(rng, count)].clone();
            let bytes = fs::read(&other)?;
            fs::write(&some[0], bytes)?;
        }
        _ => {
            for path in &some {
                // One may be among them twice.
                let Ok(mut bytes) = fs::read(path) else { continue };
                let at = index(rng, bytes.len().max(1));
                match what {
                    "removed in part" => {
                        fs::remove_file(path)?;
                        continue;
                    }
                    "bits" => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 4),
                    "cut" => bytes.truncate(at),
                    _ => bytes.iter_mut().skip(at).take(4096).for_each(|byte| *byte = 0),
                }
                fs::write(path, bytes)?;
            }
        }
    }
    Ok(format!("of {count} sidecars some are {what}, as {}", some[0].display()))
}

fn index(rng: &mut Rng, count: usize) -> usize {
    usize::try_from(rng.below(count as u64)).unwrap_or(0)
}

/// The kernel forgets what it has of the layers, so that they are read from their storage.
pub(super) fn forget(dir: &Path, layers: usize) -> Outcome {
    for layer in 0..layers {
        let file = fs::File::open(dir.join(name_of(layer)))?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(std::io::Error::from)?;
    }
    Ok(())
}
