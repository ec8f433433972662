//! What this process may still do once it knows what it serves.
//!
//! Images are written by strangers, and clients may be enemies. `stack::policy` decides which files
//! an image may name; here the kernel is told as much, so that a mistake there, or in any parser,
//! opens nothing else.
//!
//! Invariants
//! - I1 It is entered after the configuration is read, and before an image is.
//! - I2 Every thread that serves is started after that by one that is inside, and so is inside: the
//!   kernel passes landlock's rules and seccomp's filters on to new threads.
//! - I3 A system call that is refused returns an error and never ends the process: a library that
//!   tries something that is not needed must not cost a guest its disk.
//! - I4 What io_uring does is not seen by seccomp. Landlock sees it.

mod calls;
mod needs;

pub(crate) use needs::Needs;

use clap::ValueEnum;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use mica_block::{Error, ErrorKind, Result};
use serde::Deserialize;

/// Whether the process gives up what serving does not need.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SandboxMode {
    /// As much of it as the kernel knows how to take.
    #[default]
    On,
    /// All of it, or nothing is served.
    Require,
    /// Nothing.
    Off,
}

/// The newest rules of landlock that are asked for; an older kernel takes those that it knows.
const RULES: ABI = ABI::V6;

/// Puts this thread, and all that it starts from now on, into the sandbox.
///
/// # Errors
/// `Unsupported` if all of it is required and the kernel lacks some; else what the system says.
pub(crate) fn enter(mode: SandboxMode, needs: &Needs) -> Result<()> {
    if mode == SandboxMode::Off {
        return Ok(());
    }
    // Others would be trusted with what we gave up.
    rustix::thread::set_no_new_privs(true)
        .map_err(|error| Error::from_io("giving up new privileges", error.into()))?;
    let mut lacking = Vec::new();
    match restrict_files(needs) {
        Ok(RulesetStatus::FullyEnforced) => {}
        Ok(RulesetStatus::PartiallyEnforced) => lacking.push("some rules of landlock".to_owned()),
        Ok(RulesetStatus::NotEnforced) => lacking.push("landlock".to_owned()),
        Err(error) => lacking.push(format!("landlock ({error})")),
    }
    if let Err(error) = calls::restrict() {
        lacking.push(format!("seccomp ({error})"));
    }
    if lacking.is_empty() {
        return Ok(());
    }
    let lacking = lacking.join(", ");
    if mode == SandboxMode::Require {
        let context = format!("--sandbox require: this system lacks {lacking}");
        return Err(Error::new(ErrorKind::Unsupported, context));
    }
    tracing::warn!("the sandbox is not complete: this system lacks {lacking}");
    Ok(())
}

/// Only the files, ports and processes of `needs` from now on.
fn restrict_files(needs: &Needs) -> std::result::Result<RulesetStatus, landlock::RulesetError> {
    let scopes = match needs.abstract_sockets {
        true => BitFlags::from(Scope::Signal),
        false => Scope::from_all(RULES),
    };
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(RULES))?
        .handle_access(AccessNet::from_all(RULES))?
        .scope(scopes)?
        .create()?;
    for (path, access) in &needs.files {
        // What is not there cannot be opened; who needs it will say so.
        let Ok(found) = PathFd::new(path) else { continue };
        let access = match path.is_dir() {
            true => *access,
            false => *access & AccessFs::from_file(RULES),
        };
        rules = rules.add_rule(PathBeneath::new(found, access))?;
    }
    for port in &needs.ports {
        rules = rules.add_rule(NetPort::new(*port, AccessNet::BindTcp))?;
    }
    Ok(rules.restrict_self()?.ruleset)
}

#[cfg(test)]
mod tests;
