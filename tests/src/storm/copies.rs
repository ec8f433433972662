//! Copies of all files of a chain, put aside and put back, and timestamps that are moved.

use super::chain::Chain;
use super::layers::files;
use super::loss::Cause;
use super::place::Ground;
use super::story::{Outcome, trouble};
use crate::command;
use mica_units::Rng;
use std::fs::{self, File, FileTimes};
use std::path::Path;
use std::time::{Duration, SystemTime};

const COPIES_MAX: usize = 2;

/// Puts a copy aside, or one back.
pub(super) fn copy(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    let count = chain.copies.len();
    let is_back = count > 0 && (count >= COPIES_MAX || rng.percent(60));
    if is_back { put_back(chain, rng) } else { put_aside(chain) }
}

fn put_aside(chain: &mut Chain<'_>) -> Outcome {
    let name = chain.new_name("copy");
    let folder = chain.world.run.join(name);
    fs::create_dir(&folder)?;
    for file in files(&chain.state.layers) {
        copy_file(&chain.path(&file), &folder.join(&file), true)?;
    }
    chain.tell(format_args!("  aside: {}", folder.display()));
    let mut state = chain.state.clone();
    // A killed server's log need not fit the copy.
    state.endanger(Cause::Copied);
    state.is_contested = state.is_pending;
    chain.copies.push((folder, state));
    Ok(())
}

fn put_back(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    let at = usize::try_from(rng.below(chain.copies.len() as u64)).map_err(trouble)?;
    let (folder, state) = chain.copies[at].clone();
    let is_renamed = rng.percent(50);
    let keeps_times = rng.percent(50);
    chain.tell(format_args!(
        "  back: {}; renamed {is_renamed}, with times {keeps_times}",
        folder.display()
    ));
    chain.world.counts.copies.add();
    for file in files(&state.layers) {
        let target = chain.path(&file);
        let is_small = chain.world.ground != Ground::Folder;
        if is_renamed && !is_small {
            let other = chain.path("renamed");
            copy_file(&folder.join(&file), &other, keeps_times)?;
            fs::rename(&other, &target)?;
        } else {
            copy_file(&folder.join(&file), &target, keeps_times)?;
        }
    }
    chain.state = state;
    if rng.percent(30) {
        chain.copies.remove(at);
    }
    Ok(())
}

/// As `cp` does it: an existing file keeps its inode.
pub(super) fn copy_file(from: &Path, to: &Path, keeps_times: bool) -> Outcome {
    let (from, to) = (from.display().to_string(), to.display().to_string());
    let preserve = if keeps_times { "--preserve=timestamps" } else { "--preserve=mode" };
    let said = command::run("cp", ["--sparse=always", preserve, "--", &from, &to]);
    if said.status.success() { Ok(()) } else { Err(trouble(said)) }
}

/// Moves the timestamps of some file of the chain.
pub(super) fn touch(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    let files = files(&chain.state.layers);
    let at = usize::try_from(rng.below(files.len() as u64)).map_err(trouble)?;
    let path = chain.path(&files[at]);
    let file = File::options().append(true).open(&path)?;
    let modified = file.metadata()?.modified()?;
    let distance = Duration::from_nanos(rng.below(4_000_000_000_000));
    let time = match rng.below(4) {
        0 => modified + distance,
        1 => modified.checked_sub(distance).unwrap_or(modified),
        2 => SystemTime::UNIX_EPOCH + distance,
        _ => modified,
    };
    chain.tell(format_args!("  touch {}: {time:?}", files[at]));
    file.set_times(FileTimes::new().set_modified(time))?;
    // Its file system records that it was changed, but not by whom.
    chain.state.endanger(Cause::Touched);
    chain.state.is_contested |= chain.state.is_pending;
    Ok(())
}
