//! What benches of the life of a chain share: a server that is asked for changes, and a guest that
//! notices them.

pub(crate) mod asking;
pub(crate) mod guest;
