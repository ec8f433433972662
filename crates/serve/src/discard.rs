//! What happens to space that is no longer needed: one choice for all servers.

/// What happens to space that clients or guests no longer need.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Discard {
    /// It stays allocated: discards are acknowledged and ignored, zeros are written so that they
    /// keep their space.
    Ignore,
    /// It is passed on to the disk.
    #[default]
    Unmap,
}
