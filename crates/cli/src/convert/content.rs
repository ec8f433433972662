//! What each cluster of a piece should hold: data, zeros, or nothing beyond the backing file's
//! content.

use mica_block::Result;
use mica_qcow2_format::Compression;
use mica_qcow2_tools::layout::{Compressor, Content};
use mica_stack::is_zero;

/// The rules by which clusters are classified.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContentRules {
    /// Bytes of a cluster of the target; for a raw one, the length of a run of zeros to leave out.
    pub(super) cluster_bytes: usize,
    /// Bytes of a subcluster; those of a cluster if there are none.
    pub(super) subcluster_bytes: usize,
    /// Whether clusters of zeros are written as data.
    pub(super) keep_zeros: bool,
    /// Whether clusters of zeros are allocated.
    pub(super) reserve_zeros: bool,
    /// How clusters are compressed, if they are.
    pub(super) compress: Option<Compression>,
}

impl ContentRules {
    /// Whether parts known to be zeros have to be visited too.
    pub(super) fn with_zeros(&self) -> bool {
        self.keep_zeros || self.reserve_zeros
    }
}

/// What each cluster of `bytes` should hold, over a backing file with the bytes `beneath`.
pub(super) fn contents(
    rules: &ContentRules,
    bytes: &[u8],
    beneath: Option<&[u8]>,
    mut compressor: Option<&mut Compressor>,
) -> Result<Vec<Content>> {
    let mut contents = Vec::with_capacity(bytes.len() / rules.cluster_bytes);
    for (number, cluster) in bytes.chunks_exact(rules.cluster_bytes).enumerate() {
        let within = number * rules.cluster_bytes..(number + 1) * rules.cluster_bytes;
        let content = match beneath {
            _ if rules.keep_zeros => Content::Data,
            None => match on_nothing(rules, cluster) {
                Content::Unallocated if rules.reserve_zeros => Content::Reserved,
                content => content,
            },
            Some(beneath) => over(rules, cluster, &beneath[within]),
        };
        let has_data = match content {
            Content::Data => true,
            Content::Parts { allocated, .. } => allocated != 0,
            Content::Unallocated | Content::Reserved | Content::Packed(_) => false,
        };
        // A compressed cluster is a whole one, whatever the backing file has.
        let packed = match &mut compressor {
            Some(compressor) if has_data => compressor.compress(cluster)?,
            _ => None,
        };
        contents.push(packed.map_or(content, Content::Packed));
    }
    Ok(contents)
}

/// A cluster of an image without a backing file: unallocated parts read as zeros.
fn on_nothing(rules: &ContentRules, cluster: &[u8]) -> Content {
    if rules.subcluster_bytes == rules.cluster_bytes {
        return if is_zero(cluster) { Content::Unallocated } else { Content::Data };
    }
    let parts = cluster.chunks_exact(rules.subcluster_bytes);
    let allocated = mask(parts.map(|part| !is_zero(part)));
    match allocated {
        0 => Content::Unallocated,
        u32::MAX => Content::Data,
        allocated => Content::Parts { allocated, zero: 0 },
    }
}

/// A cluster over a backing file: parts that are equal are left out.
fn over(rules: &ContentRules, cluster: &[u8], beneath: &[u8]) -> Content {
    let parts = || cluster.chunks_exact(rules.subcluster_bytes);
    let theirs = beneath.chunks_exact(rules.subcluster_bytes);
    let differs = mask(parts().zip(theirs).map(|(ours, theirs)| ours != theirs));
    let zero = mask(parts().map(is_zero)) & differs;
    let allocated = differs & !zero;
    let all = match rules.subcluster_bytes == rules.cluster_bytes {
        true => 1,
        false => u32::MAX,
    };
    match (allocated, zero) {
        (0, 0) => Content::Unallocated,
        (allocated, 0) if allocated == all => Content::Data,
        (allocated, zero) => Content::Parts { allocated, zero },
    }
}

/// Packs the n-th answer into bit n.
fn mask(answers: impl Iterator<Item = bool>) -> u32 {
    answers.enumerate().fold(0, |mask, (bit, answer)| mask | u32::from(answer) << bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(subcluster_bytes: usize) -> ContentRules {
        ContentRules {
            cluster_bytes: 128,
            subcluster_bytes,
            keep_zeros: false,
            reserve_zeros: false,
            compress: None,
        }
    }

    #[test]
    fn zeros_are_left_out_where_nothing_is_beneath() {
        let mut bytes = vec![0; 256];
        bytes[200] = 1;
        let plain = contents(&rules(128), &bytes, None, None).expect("no compressor");
        assert_eq!(plain, [Content::Unallocated, Content::Data]);
        let parts = contents(&rules(4), &bytes, None, None).expect("no compressor");
        assert_eq!(parts, [Content::Unallocated, Content::Parts { allocated: 1 << 18, zero: 0 }]);
    }

    #[test]
    fn over_a_backing_file_only_what_differs_is_held() {
        let (mut ours, mut beneath) = (vec![7; 128], vec![7; 128]);
        let held = |ours: &[u8], beneath: &[u8], unit| {
            contents(&rules(unit), ours, Some(beneath), None).expect("no compressor").remove(0)
        };
        assert_eq!(held(&ours, &beneath, 128), Content::Unallocated);
        ours[..4].fill(0);
        beneath[4..8].fill(1);
        assert_eq!(held(&ours, &beneath, 4), Content::Parts { allocated: 2, zero: 1 });
        assert_eq!(held(&ours, &beneath, 128), Content::Data);
        assert_eq!(held(&[0; 128], &beneath, 128), Content::Parts { allocated: 0, zero: 1 });
    }
}
