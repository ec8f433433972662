//! What this process may still do once it knows what it serves.
//!
//! Images are written by strangers, and clients may be enemies. `stack::policy` decides which files
//! an image may name; here the kernel is told as much, so that a mistake there, or in any parser,
//! opens nothing else.
//!
//! ```text
//! enter    landlock: this thread, and all that it starts          no file, port or process but ...
//!   workers start, and make their rings
//! close    seccomp: all threads of the process                    no system call but ...
//!   images are opened
//! ```
//!
//! Invariants
//! - I1 It is entered after the configuration is read, and closed before an image is.
//! - I2 No thread of the process is outside: those that serve are started by one that is inside,
//!   and the filters of system calls come to all that there are. What has to be done outside is
//!   done by another process ([`crate::helper`]).
//! - I3 A system call that is refused returns an error and does not end a server that people use: a
//!   library that tries something that is not needed must not cost a guest its disk.
//! - I4 What io_uring does is not seen by seccomp. So there are only rings that were made before,
//!   each restricted to the operations that it is for, and none is made any more.
//! - I5 What landlock does not cover (modes, owners, times and attributes of files, sockets of
//!   others) is refused by its system calls, whatever it is done to.

mod calls;
mod needs;

pub(crate) use needs::Needs;

use crate::settings::SandboxMode;
use calls::{Surprise, Threads};
use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, NetPort, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use mica_block::{Error, ErrorKind, Result};

/// The newest rules of landlock that are asked for; an older kernel takes those that it knows.
const RULES: ABI = ABI::V9;
/// What a kernel without is said to lack: what newer rules cover, system calls are refused for.
const RULES_NEEDED: ABI = ABI::V6;

/// A sandbox that is being entered: to be closed before anything is read that strangers wrote.
#[must_use]
pub(crate) struct Sandbox {
    mode: SandboxMode,
    has_tcp: bool,
    lacking: Vec<String>,
}

impl Sandbox {
    /// Leaves to this thread, and all that it starts from now on, the files, ports and processes of
    /// `needs`.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn enter(mode: SandboxMode, needs: &Needs) -> Result<Self> {
        let mut sandbox = Self { mode, has_tcp: !needs.ports.is_empty(), lacking: Vec::new() };
        if mode == SandboxMode::Off {
            return Ok(sandbox);
        }
        // Others would be trusted with what we gave up.
        rustix::thread::set_no_new_privs(true)
            .map_err(|error| Error::from_io("giving up new privileges", error.into()))?;
        sandbox.lacking.extend(match restrict_files(needs) {
            Ok(status) => match (status.ruleset, status.landlock) {
                (RulesetStatus::FullyEnforced, _) => None,
                (RulesetStatus::NotEnforced, _) => Some("landlock".to_owned()),
                (_, LandlockStatus::Available { effective_abi, .. })
                    if effective_abi >= RULES_NEEDED =>
                {
                    None
                }
                _ => Some("some rules of landlock".to_owned()),
            },
            Err(error) => Some(format!("landlock ({error})")),
        });
        Ok(sandbox)
    }

    /// Leaves to all threads of this process the system calls that serving needs, and no ring but
    /// those that there are.
    ///
    /// # Errors
    /// `Unsupported` if all of it is required and the kernel lacks some.
    pub(crate) fn close(self) -> Result<()> {
        self.close_for(Threads::All, Surprise::OF_THIS_BUILD)
    }

    fn close_for(mut self, threads: Threads, surprise: Surprise) -> Result<()> {
        if self.mode == SandboxMode::Off {
            return Ok(());
        }
        if let Err(error) = calls::restrict_server(self.has_tcp, threads, surprise) {
            self.lacking.push(format!("seccomp ({error})"));
        }
        if self.lacking.is_empty() {
            return Ok(());
        }
        let lacking = self.lacking.join(", ");
        if self.mode == SandboxMode::Require {
            let context = format!("--sandbox require: this system lacks {lacking}");
            return Err(Error::new(ErrorKind::Unsupported, context));
        }
        tracing::warn!("the sandbox is not complete: this system lacks {lacking}");
        Ok(())
    }
}

/// Leaves to this process, which is the helper of a server, what a helper needs. Landlock would
/// keep it from seeing other processes, which is what it is for.
///
/// # Errors
/// What the system says.
pub(crate) fn restrict_helper(mounts: bool) -> Result<()> {
    let failed = |error| Error::from_io("the helper of the sandbox", error);
    // A program that mounts for users has privileges of its own, which it would not get then.
    if mounts && !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    rustix::thread::set_no_new_privs(true).map_err(|error| failed(error.into()))?;
    calls::restrict_helper(mounts, Surprise::OF_THIS_BUILD).map_err(failed)
}

/// Only the files, ports and processes of `needs` from now on.
fn restrict_files(needs: &Needs) -> std::result::Result<RestrictionStatus, landlock::RulesetError> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(RULES))?
        .handle_access(AccessNet::from_all(RULES))?
        .scope(Scope::from_all(RULES))?
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
    rules.restrict_self()
}

#[cfg(test)]
mod tests;
