//! The seal of a sidecar, for a caller that has no chain open.

use super::sidecar::{HEADER_BYTES, Header, SidecarId};
use mica_block::{Identity, SealState};

/// What the beginning of a sidecar says.
pub struct Seal(Header);

/// The name of a sidecar, which follows from its contents and from what it was built on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SealName(SidecarId);

impl Seal {
    /// Bytes of it, from the start of the sidecar.
    pub const BYTES: usize = HEADER_BYTES;

    /// The seal in `bytes`; `None` if it is none of this version.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Header::decode(bytes).map(Self)
    }

    /// Length of its sidecar in bytes.
    pub fn sidecar_len(&self) -> u64 {
        self.0.len
    }

    /// The name of its sidecar.
    pub fn name(&self) -> SealName {
        SealName(self.0.id)
    }

    /// Whether it fits, without reading the layer's tables: for the layer with `depth` layers
    /// beneath it and `layer_len` bytes of the disk, in the file `now`, over one whose sidecar is
    /// `below`.
    pub fn state(
        &self,
        depth: usize,
        layer_len: u64,
        now: &Identity,
        below: Option<SealName>,
    ) -> SealState {
        self.0.state((depth, layer_len), now, below.map(|name| name.0))
    }

    /// What stands for the sidecar of a raw base of `len` bytes, which needs none.
    pub fn of_raw_base(len: u64) -> SealName {
        SealName(Header::id_of_raw_base(len))
    }
}
