//! Options that are one of a few words.

use clap::ValueEnum;
use mica_serve::Discard;
use mica_serve::fuse::AllowOther;
use serde::Deserialize;

/// What becomes of space that clients do not need any more.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Discards {
    /// It is kept.
    #[value(alias = "off")]
    #[serde(alias = "off")]
    Ignore,
    /// It is given back.
    #[default]
    #[value(alias = "on")]
    #[serde(alias = "on")]
    Unmap,
}

impl From<Discards> for Discard {
    fn from(choice: Discards) -> Self {
        match choice {
            Discards::Ignore => Self::Ignore,
            Discards::Unmap => Self::Unmap,
        }
    }
}

/// Whether other users may use the file that the disk is served as.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OtherUsers {
    /// They may, as far as the file's mode lets them.
    On,
    /// They may not.
    Off,
    /// They may where the system allows to allow it.
    #[default]
    Auto,
}

impl From<OtherUsers> for AllowOther {
    fn from(choice: OtherUsers) -> Self {
        match choice {
            OtherUsers::On => Self::On,
            OtherUsers::Off => Self::Off,
            OtherUsers::Auto => Self::Auto,
        }
    }
}

/// Whether sidecars of the chain's index are used.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IndexMode {
    /// Use sidecars where they fit, and write them in the background where not.
    #[default]
    Auto,
    /// Use sidecars where they fit; write nothing.
    Read,
    /// Neither use nor write sidecars.
    Off,
}

/// How images are read: through the page cache, or past it (O_DIRECT).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Through the page cache.
    #[default]
    Writeback,
    /// Past it.
    None,
}

/// How I/O is done.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    /// By io_uring where the system lets us, else by threads.
    #[default]
    Auto,
    /// By io_uring.
    #[value(name = "io_uring")]
    IoUring,
    /// By threads.
    Threads,
}

/// Whether NBD clients use TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TlsMode {
    /// There is none.
    Off,
    /// Clients may use it.
    On,
    /// Over TCP clients have to use it.
    Require,
}

/// Whether clients have to show a certificate.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VerifyPeer {
    /// They have to, as with QEMU.
    #[default]
    On,
    /// They do not.
    Off,
}

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
