//! The operations of a store that a fault applies to.

use mica_block::Space;

/// A kind of operation of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Making durable.
    Sync,
    /// Freeing space.
    Punch,
    /// Making a range read as zeros.
    Zero,
    /// Allocating space for a range.
    Allocate,
    /// Changing the length.
    SetLen,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::Sync,
        Self::Punch,
        Self::Zero,
        Self::Allocate,
        Self::SetLen,
    ];

    /// Its name in logs and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Sync => "sync",
            Self::Punch => "punch",
            Self::Zero => "zero",
            Self::Allocate => "allocate",
            Self::SetLen => "set-len",
        }
    }

    pub(crate) fn of_space(change: Space) -> Self {
        match change {
            Space::Punch => Self::Punch,
            Space::Zero => Self::Zero,
            Space::Allocate => Self::Allocate,
        }
    }
}

/// A set of operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operations(u8);

impl Operations {
    /// Reads only.
    pub const READS: Self = Self(1 << Operation::Read as u8);
    /// Every operation.
    pub const ALL: Self = Self(0x7f);
    /// None.
    pub const NONE: Self = Self(0);

    /// This set and `operation`.
    #[must_use]
    pub fn with(self, operation: Operation) -> Self {
        Self(self.0 | 1 << operation as u8)
    }

    /// Whether `operation` is in it.
    pub fn contains(self, operation: Operation) -> bool {
        self.0 & 1 << operation as u8 != 0
    }
}

impl From<Operation> for Operations {
    fn from(operation: Operation) -> Self {
        Self::NONE.with(operation)
    }
}
