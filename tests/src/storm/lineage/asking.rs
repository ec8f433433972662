//! A client of the control socket that gives a command, and what its end says.

use super::fleet::Fleet;
use super::order::Ending;
use crate::command;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long a command may take, and a merge.
pub(super) const LIMIT: Duration = Duration::from_secs(60);
/// Why a server may refuse a command: what is in its way is there.
const REFUSALS: [&str; 12] = [
    // States.
    "would no longer have the states",
    "keeps its state",
    "keeps the state",
    "has the backup",
    "that was ended",
    // Clones, and what left the chain.
    "stands on",
    "need",
    "is not older than",
    // A merge that was killed, or cancelled.
    "an earlier merge was interrupted",
    // What is beneath an internal snapshot shows through it.
    "has internal snapshots",
    // Only the header of such a layer could be written.
    "in an external file",
    // Nothing is on top of it yet.
    "is a raw image",
];
/// How a client says that a merge did not come to its end.
const CANCELLED: &str = "the merge was cancelled";

/// A client of the control socket.
#[derive(Debug)]
pub(super) struct Asking {
    child: Child,
    said: PathBuf,
}

impl Asking {
    /// Begins the command with these arguments; what it says is in the file `name`.
    pub(super) fn begin(fleet: &Fleet<'_>, name: &str, args: &[String]) -> Outcome<Self> {
        let world = &fleet.world;
        let said = world.run.join(name);
        let file = File::create(&said)?;
        let mut ctl = Command::new(world.binary);
        ctl.current_dir(&world.images).args(["ctl", "--control", text(&fleet.control)?]);
        ctl.args(args).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        Ok(Self { child: ctl.spawn()?, said })
    }

    /// How it ended, and what it said.
    pub(super) fn end(mut self) -> Outcome<(bool, String)> {
        let status = command::wait(&mut self.child, LIMIT);
        let said = std::fs::read_to_string(&self.said)?;
        let Some(status) = status else {
            // It has not ended.
            let _ = self.child.kill();
            let _ = self.child.wait();
            return Err(Fault::new(Wrong::Hang, format!("a command does not end: {said}")));
        };
        if status.code().is_none() || said.contains("panicked") {
            return Err(Fault::new(Wrong::Panicked, said));
        }
        Ok((status.success(), said))
    }
}

/// How a command ended that says this.
pub(super) fn ending_of(is_done: bool, said: &str) -> Outcome<Ending> {
    match is_done {
        true => Ok(Ending::Done),
        false if said.contains(CANCELLED) => Ok(Ending::Open),
        false if REFUSALS.iter().any(|why| said.contains(why)) => Ok(Ending::Refused),
        false => Err(Fault::new(Wrong::Failed, format!("a command: {said}"))),
    }
}
