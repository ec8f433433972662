//! The clusters that were decompressed last, so that consecutive small reads decompress once.

use mica_rt::Buf;
use mica_units::{GuestOffset, LayerNumber};
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Maximum number of bytes that are kept; one cluster is kept whatever its size.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// A few decompressed clusters, the latest first.
#[derive(Default)]
pub(crate) struct DecodedClusters {
    kept: Mutex<VecDeque<Kept>>,
}

struct Kept {
    layer: LayerNumber,
    cluster: GuestOffset,
    bytes: Buf,
}

impl DecodedClusters {
    /// Copies the bytes from `within` on into `part`; false if the cluster is not kept.
    pub(crate) fn copy(
        &self,
        layer: LayerNumber,
        cluster: GuestOffset,
        within: usize,
        part: &mut Buf,
    ) -> bool {
        let kept = self.kept.lock();
        let is_it = |kept: &&Kept| kept.layer == layer && kept.cluster == cluster;
        match kept.iter().find(is_it) {
            Some(kept) => {
                part.copy_from_slice(&kept.bytes[within..within + part.len()]);
                true
            }
            None => false,
        }
    }

    /// Forgets all of them: another layer may get the number of one that is gone.
    pub(crate) fn clear(&self) {
        self.kept.lock().clear();
    }

    /// Keeps a cluster and drops the oldest beyond the bound.
    pub(crate) fn keep(&self, layer: LayerNumber, cluster: GuestOffset, bytes: Buf) {
        let mut kept = self.kept.lock();
        kept.push_front(Kept { layer, cluster, bytes });
        let mut total = 0;
        let fits = |kept: &&Kept| {
            total += kept.bytes.len();
            total <= KEPT_BYTES_MAX
        };
        let count = kept.iter().take_while(fits).count();
        kept.truncate(count.max(1));
    }
}
