//! What becomes of space that nobody needs any more: one choice for all servers.

/// What becomes of space that clients or guests do not need any more.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Discard {
    /// It stays as it is: discards are answered and dropped, zeros are written so that they keep
    /// their space.
    Ignore,
    /// The disk is told.
    #[default]
    Unmap,
}
