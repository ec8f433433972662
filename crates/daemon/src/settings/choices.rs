//! Options whose value is one of a few words.

use clap::ValueEnum;
use mica_serve::Discard;
use mica_serve::fuse::AllowOther;
use mica_stack::{Durability, SnapshotPer};
use serde::{Deserialize, Serialize};

/// What happens to space that clients no longer need.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Discards {
    /// It stays allocated.
    #[value(alias = "off")]
    #[serde(alias = "off")]
    Ignore,
    /// It is freed.
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

/// Whether what clients write is searched for zeros.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ZeroDetection {
    /// It is not.
    #[default]
    Off,
    /// Zeros become zeros of the image, and keep their space.
    On,
    /// Zeros become zeros of the image, and their space is freed.
    Unmap,
}

/// Whether other users may use the file that the disk is served as.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OtherUsers {
    /// They may, as far as the file's mode permits.
    On,
    /// They may not.
    Off,
    /// They may where the system permits it.
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
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum IndexMode {
    /// Use valid sidecars, and write missing ones in the background.
    #[default]
    Auto,
    /// Use valid sidecars; write nothing.
    Read,
    /// Neither use nor write sidecars.
    Off,
}

/// How images are read: through the page cache, or bypassing it (O_DIRECT).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Through the page cache.
    #[default]
    Writeback,
    /// Bypassing it.
    None,
}

/// How I/O is done.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    /// By io_uring where the system permits it, otherwise by threads.
    #[default]
    Auto,
    /// By io_uring.
    #[value(name = "io_uring")]
    IoUring,
    /// By threads.
    Threads,
}

/// Whether NBD clients use TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TlsMode {
    /// No TLS.
    Off,
    /// Clients may use it.
    On,
    /// Over TCP clients must use it.
    Require,
}

/// Whether clients must present a certificate.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum VerifyPeer {
    /// They must, as with QEMU.
    #[default]
    On,
    /// They need not.
    Off,
}

/// Whether the process gives up what serving does not need.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SandboxMode {
    /// As much of it as the kernel supports.
    #[default]
    On,
    /// All of it, or nothing is served.
    Require,
    /// Not at all.
    Off,
}

/// After what of its guest a volume takes a snapshot by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotAfter {
    /// Each request that changes it.
    Write,
    /// Each flush.
    Flush,
}

impl From<SnapshotAfter> for SnapshotPer {
    fn from(choice: SnapshotAfter) -> Self {
        match choice {
            SnapshotAfter::Write => Self::Write,
            SnapshotAfter::Flush => Self::Flush,
        }
    }
}

/// Whether what volumes no longer need is freed while they are served.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GcMode {
    /// In the background, when there is enough of it.
    #[default]
    Auto,
    /// Only by `mica volume gc`.
    Off,
}

/// What the answer to a flush of a volume promises.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlushDurability {
    /// The log of this machine has it.
    Host,
    /// The store has it.
    Store,
}

impl From<FlushDurability> for Durability {
    fn from(choice: FlushDurability) -> Self {
        match choice {
            FlushDurability::Host => Self::Host,
            FlushDurability::Store => Self::Store,
        }
    }
}
