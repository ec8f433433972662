//! Which machine this is. Names are no proof: containers share them, and machines are renamed.

use std::path::Path;

/// A file in which systems have an identity that stays, and one with that of the running kernel.
pub const MACHINE_ID: &str = "/etc/machine-id";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A machine, as far as it says which one it is.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Machine {
    /// Its name: what heads have.
    pub(super) host: String,
    /// What its system was given when it was installed.
    pub(super) id: Option<String>,
    /// What its kernel was given when it started.
    pub(super) boot: Option<String>,
}

impl Machine {
    pub(super) fn here() -> Self {
        Self { host: host(), id: id_in(Path::new(MACHINE_ID)), boot: id_in(Path::new(BOOT_ID)) }
    }

    /// Whether the lock of a file that both see, if it is free, proves that a process of `other` is
    /// dead: it ran on this kernel, or on this machine before it started again.
    pub(super) fn proves_end_on(&self, other: &Self) -> bool {
        let is_same = |own: &Option<String>, other: &Option<String>| own.is_some() && own == other;
        if is_same(&self.boot, &other.boot) {
            return true;
        }
        match (&self.id, &other.id) {
            (Some(own), Some(other)) => own == other,
            // Nothing better is known.
            _ => self.host == other.host,
        }
    }
}

/// The name by which heads know this machine.
pub(super) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// What is in a file that has an identity in hexadecimal digits.
fn id_in(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let text = text.trim();
    let is_id =
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    is_id.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(host: &str, id: &str, boot: &str) -> Machine {
        let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Machine { host: host.to_owned(), id: known(id), boot: known(boot) }
    }

    /// The story: two machines had one name, and each took the other's writers for its own dead
    /// ones.
    #[test]
    fn name_of_a_machine_proves_nothing_if_it_says_more() {
        let here = machine("box", "a", "1");
        for (other, is_proof) in [
            (machine("box", "a", "1"), true),
            (machine("renamed", "a", "2"), true),
            (machine("container", "b", "1"), true),
            (machine("box", "b", "2"), false),
            (machine("box", "", "2"), true),
            (machine("other", "", "2"), false),
            (machine("box", "", ""), true),
        ] {
            assert_eq!(here.proves_end_on(&other), is_proof, "{other:?}");
            assert_eq!(other.proves_end_on(&here), is_proof, "{other:?}");
        }
    }

    #[test]
    fn machine_knows_itself() {
        assert!(Machine::here().proves_end_on(&Machine::here()));
    }
}
