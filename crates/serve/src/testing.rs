//! What the tests of several servers use.

pub(crate) mod clock;
pub(crate) mod gauge;
pub(crate) mod memory;
pub(crate) mod random;
