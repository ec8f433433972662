//! What this process may still do once its configuration is known.
//!
//! Images are untrusted and clients may be hostile. `stack::policy` decides which files an image
//! may name; here the kernel enforces as much, so that a mistake there or in any parser opens
//! nothing else.
//!
//! ```text
//! enter    landlock: this thread and all that it starts           no file, port or process but ...
//!   workers start and create their rings
//! close    seccomp: all threads of the process                    no system call but ...
//!   images are opened
//! ```
//!
//! Invariants
//! - I1 It is entered after the configuration is read, and closed before any image is.
//! - I2 No thread of the process is outside: worker threads are started from inside, and the
//!   system call filters apply to all threads. What must be done outside is done by another process
//!   ([`crate::helper`]).
//! - I3 A refused system call returns an error and does not kill a production server: a library
//!   that tries something optional must not cost a guest its disk.
//! - I4 seccomp does not see what io_uring does. So the only rings are those created before,
//!   each restricted to its operations, and no new one can be created.
//! - I5 What landlock does not cover (modes, owners, times and attributes of files, sockets of
//!   others) is refused by system call, whatever the object; what a new layer needs of it the
//!   helper does ([`mica_stack::make_alike`]). Except that a process with a bucket may connect: to
//!   TCP ports that landlock allows, and, for names of hosts, to others by UDP.

mod calls;
mod needs;

pub(crate) use needs::{Granted, Needs};

use crate::settings::SandboxMode;
use calls::{Allowed, Threads, Unlisted};
use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, NetPort, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use mica_block::{Error, ErrorKind, Result};

/// The newest landlock rules that are requested; an older kernel applies those that it knows.
const RULES: ABI = ABI::V9;
/// A kernel with less is reported to lack rules. What newer rules cover is also refused by system
/// call.
const RULES_NEEDED: ABI = ABI::V6;

/// A sandbox that is entered but not closed: it must be closed before any untrusted input is read.
#[must_use]
pub(crate) struct Sandbox {
    mode: SandboxMode,
    allowed: Allowed,
    lacking: Vec<String>,
}

impl Sandbox {
    /// Restricts this thread, and all that it starts from now on, to the files, ports and processes
    /// of `needs`.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn enter(mode: SandboxMode, needs: &Needs) -> Result<Self> {
        let allowed = Allowed {
            has_tcp: !needs.ports.is_empty(),
            has_links: needs.has_links,
            has_network: !needs.connects.is_empty(),
        };
        let mut sandbox = Self { mode, allowed, lacking: Vec::new() };
        if mode == SandboxMode::Off {
            return Ok(sandbox);
        }
        // Otherwise a setuid program could get back what we gave up.
        rustix::thread::set_no_new_privs(true)
            .map_err(|error| Error::from_io("setting no_new_privs", error.into()))?;
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

    /// Restricts all threads of this process to the system calls that serving needs, and to the
    /// existing rings.
    ///
    /// # Errors
    /// `Unsupported` if the whole sandbox is required and the kernel lacks a part of it.
    pub(crate) fn close(self) -> Result<()> {
        self.close_for(Threads::All, Unlisted::OF_THIS_BUILD)
    }

    fn close_for(mut self, threads: Threads, unlisted: Unlisted) -> Result<()> {
        if self.mode == SandboxMode::Off {
            return Ok(());
        }
        if let Err(error) = calls::restrict_server(self.allowed, threads, unlisted) {
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
        tracing::warn!("the sandbox is incomplete: this system lacks {lacking}");
        Ok(())
    }
}

/// What a helper does besides what every one does.
#[derive(Clone, Copy)]
pub(crate) struct HelperDoes {
    /// Mount files.
    pub(crate) mounts: bool,
    /// Remove files that were made at the start.
    pub(crate) removes: bool,
}

/// Restricts this process, the helper of a server, to what a helper needs. Landlock would hide
/// other processes, which a helper must see.
///
/// # Errors
/// Those of the system calls.
pub(crate) fn restrict_helper(does: HelperDoes) -> Result<()> {
    let failed = |error| Error::from_io("sandbox helper failed", error);
    // A program that mounts for users is setuid, which would have no effect then.
    if does.mounts && !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    rustix::thread::set_no_new_privs(true).map_err(|error| failed(error.into()))?;
    calls::restrict_helper(does, Threads::All, Unlisted::OF_THIS_BUILD).map_err(failed)
}

/// Restricts this thread to the files, ports and processes of `needs`.
fn restrict_files(needs: &Needs) -> std::result::Result<RestrictionStatus, landlock::RulesetError> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(RULES))?
        .handle_access(AccessNet::from_all(RULES))?
        .scope(Scope::from_all(RULES))?
        .create()?;
    for (path, access) in &needs.files {
        // What does not exist cannot be opened; the code that needs it will report it.
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
    for port in &needs.connects {
        rules = rules.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
    }
    rules.restrict_self()
}

#[cfg(test)]
mod tests;
