//! The log of a server that lives is taken away under its clients, and may be put back: by a mount
//! that comes and goes, by whoever cleans up, or by a move between file systems.
//!
//! The server notices with a later group that it has no log, and says so. What is put back may be
//! older than the image.

use super::chain::Chain;
use super::kinds::Kind;
use super::load::Stage;
use super::loss;
use super::served::{Left, LogFate, Served};
use super::story::Outcome;
use crate::clock;
use crate::command;
use mica_units::Rng;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long after its last write a log is overwritten at the earliest.
const OVERWRITTEN_AFTER: Duration = Duration::from_millis(1200);

/// How it is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    /// The same files get another name.
    Moved,
    /// Copies are made first.
    Copied,
    /// Only copies are made, and later written into the files.
    Overwritten,
    /// For good.
    Removed,
}

/// When it is put back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Back {
    WhileServed,
    /// When the server was killed.
    AfterKill,
    Never,
}

/// Takes away the folder with the server's log, for some requests or for longer.
pub(super) fn take_log(
    chain: &mut Chain<'_>,
    rng: &mut Rng,
    stage: &Stage,
    mut served: Served,
    moment: u64,
) -> Outcome<Left> {
    let how = rng.choose(&[How::Moved, How::Copied, How::Copied, How::Overwritten, How::Removed]);
    let is_killed = chain.world.does(rng, Kind::Kill, 60);
    let back = match is_killed {
        true => rng.choose(&[Back::AfterKill, Back::AfterKill, Back::WhileServed, Back::Never]),
        false => rng.choose(&[Back::WhileServed, Back::Never]),
    };
    chain.tell(format_args!("  its log is taken away: {how:?}, put back: {back:?}"));
    chain.world.counts.logs_taken.add();
    let taken = Taken::take(chain, how)?;
    served.log_fate = served.log_fate.max(fate(how, back));
    stage.wait_for(moment + rng.below(60));
    if back == Back::WhileServed {
        taken.put_back()?;
        stage.wait_for(moment + 5 + rng.below(90));
    }
    if !is_killed {
        return Ok(Left::Serving(served));
    }
    let left = served.kill_under_load(chain, rng, stage)?;
    if back == Back::AfterKill {
        taken.put_back()?;
    }
    Ok(left)
}

/// What becomes of the log by that.
fn fate(how: How, back: Back) -> LogFate {
    match how {
        How::Overwritten if back == Back::Never => LogFate::Untouched,
        How::Overwritten => LogFate::Overwritten,
        How::Moved if back != Back::Never => LogFate::Returned,
        How::Copied if back != Back::Never => LogFate::Replaced,
        How::Moved | How::Copied | How::Removed => LogFate::Taken,
    }
}

/// What was taken, and from where.
struct Taken {
    folder: PathBuf,
    away: PathBuf,
    how: How,
}

impl Taken {
    fn take(chain: &mut Chain<'_>, how: How) -> Outcome<Self> {
        let name = chain.new_name("taken");
        let away = chain.world.run.join(name);
        let taken = Self { folder: loss::folder_in(&chain.world.log), away, how };
        match how {
            How::Moved => rename(&taken.folder, &taken.away)?,
            How::Copied => {
                copy(&taken.folder, &taken.away);
                remove(&taken.folder)?;
            }
            How::Overwritten => copy(&taken.folder, &taken.away),
            How::Removed => remove(&taken.folder)?,
        }
        Ok(taken)
    }

    /// Puts it back, if there is anything, in place of what is there by now.
    fn put_back(&self) -> Outcome {
        if self.how == How::Overwritten {
            // Nobody could tell if it were there at once.
            clock::sleep(OVERWRITTEN_AFTER);
            copy(&self.away.join("."), &self.folder);
        } else if self.away.exists() {
            again_while_full(|| {
                remove(&self.folder)?;
                rename(&self.away, &self.folder)
            })?;
        }
        Ok(())
    }
}

/// Files may go while they are copied, and there need not be any.
fn copy(from: &Path, to: &Path) {
    let [from, to] = [from, to].map(|path| path.display().to_string());
    command::run("cp", ["-a", "--", &from, &to]);
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    // A server makes its folder when it needs one.
    or_none(fs::rename(from, to))
}

fn remove(folder: &Path) -> io::Result<()> {
    again_while_full(|| or_none(fs::remove_dir_all(folder)))
}

fn or_none(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// A server may put a file into the folder at any moment.
fn again_while_full(mut act: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match act() {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
            done => return done,
        }
    }
}
