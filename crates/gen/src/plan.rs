//! Which layers a chain has and which parts of the disk each is asked to hold. No I/O.

use crate::spec::{ChainSpec, Distribution, Feature};
use mica_qcow2_format::{Compression, L1_BYTES_MAX, L1Entry, L2Format, RefcountWidth, Version};
use mica_units::Rng;
use mica_units::{ClusterBits, LayerNumber};

/// Cluster sizes that [`Feature::ClusterSizes`] chooses from, as powers of two.
const CLUSTER_BITS_CHOICES: &[u32] = &[9, 12, 14, 16, 17, 18, 20, 21];
/// Extended L2 entries need at least this.
const EXTENDED_CLUSTER_BITS_MIN: u32 = 14;
/// Verifiable content is judged by blocks of this size, so units are never smaller.
const UNIT_BYTES_MIN: u64 = 4096;

/// What a chain will be.
pub(crate) struct ChainPlan {
    /// From the base up.
    pub(crate) shapes: Vec<LayerShape>,
    /// The unit in which ownership is counted: the smallest that any layer allocates.
    pub(crate) unit_bytes: u64,
    /// Size of a plan cluster: the spec's cluster size, but no smaller than a unit can be.
    pub(crate) cluster_bits: ClusterBits,
    /// Plan clusters that each layer is asked to hold; ascending.
    pub(crate) held: Vec<Vec<u32>>,
}

/// Properties of a layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerShape {
    /// Its number, counted from the base.
    pub(crate) number: LayerNumber,
    /// Its length in bytes.
    pub(crate) len: u64,
    /// Its format.
    pub(crate) kind: LayerKind,
}

/// A layer's format.
#[derive(Clone, Debug)]
pub(crate) enum LayerKind {
    /// The guest's bytes as they are.
    Raw,
    /// A qcow2 image.
    Qcow2(Qcow2Shape),
}

/// Properties of a qcow2 layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Qcow2Shape {
    /// Version and table format.
    pub(crate) l2: L2Format,
    /// Width of its refcounts.
    pub(crate) refcount: RefcountWidth,
    /// How its compressed clusters, if any, are compressed.
    pub(crate) compression: Compression,
    /// How many of a hundred clusters are compressed.
    pub(crate) compressed_percent: u64,
    /// Where the guest's data is.
    pub(crate) data_file: DataFile,
}

/// Where a layer's guest data is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DataFile {
    /// In the image.
    Internal,
    /// In a file beside it.
    External,
    /// In a file beside it, which by itself is a raw disk.
    ExternalRaw,
}

impl LayerShape {
    /// The smallest unit that the layer allocates.
    pub(crate) fn allocation_bytes(&self) -> u64 {
        match &self.kind {
            LayerKind::Raw => UNIT_BYTES_MIN,
            LayerKind::Qcow2(shape) => 1 << shape.l2.subcluster_bits(),
        }
    }
}

/// Plans the chain that `spec`, which is valid, describes.
pub(crate) fn plan(spec: &ChainSpec, cluster_bits: ClusterBits) -> ChainPlan {
    let shapes: Vec<_> = (0..spec.layers as usize)
        .filter_map(LayerNumber::new)
        .map(|number| shape(spec, cluster_bits, number))
        .collect();
    let smallest = shapes
        .iter()
        .filter(|shape| matches!(shape.kind, LayerKind::Qcow2(_)))
        .map(LayerShape::allocation_bytes)
        .min()
        .unwrap_or(UNIT_BYTES_MIN);
    let unit_bits = ClusterBits::new(UNIT_BYTES_MIN.trailing_zeros());
    let cluster_bits = unit_bits.map_or(cluster_bits, |unit_bits| unit_bits.max(cluster_bits));
    let has_raw = shapes.iter().any(|shape| matches!(shape.kind, LayerKind::Raw));
    let unit_bytes = match spec.features.has(Feature::Lengths) {
        true => UNIT_BYTES_MIN,
        // A raw layer holds plan clusters, however large those of the layers above are.
        false if has_raw => smallest.min(cluster_bits.bytes()).max(UNIT_BYTES_MIN),
        false => smallest.max(UNIT_BYTES_MIN),
    };
    ChainPlan { held: assign(spec, cluster_bits), shapes, unit_bytes, cluster_bits }
}

fn shape(spec: &ChainSpec, default_bits: ClusterBits, number: LayerNumber) -> LayerShape {
    let has = |feature| spec.features.has(feature);
    let mut rng = Rng::for_part(spec.seed, 1 << 32 | number.index() as u64);
    let base = number == LayerNumber::BASE;
    let active = number.index() + 1 == spec.layers as usize;

    let mut len = spec.disk_bytes;
    if has(Feature::Lengths) && !active && rng.percent(40) {
        let units = (len / UNIT_BYTES_MIN).max(2);
        len = (units / 2 + rng.below(units)) * UNIT_BYTES_MIN;
    }
    if has(Feature::RawBase) && base && !active {
        return LayerShape { number, len, kind: LayerKind::Raw };
    }

    let version = if has(Feature::Version2) && rng.percent(25) { Version::V2 } else { Version::V3 };
    let mut cluster_bits = default_bits;
    if has(Feature::ClusterSizes) && rng.percent(60) {
        let fits = |bits: &ClusterBits| l1_bytes(len, *bits) <= L1_BYTES_MAX;
        let choice = ClusterBits::new(rng.choose(CLUSTER_BITS_CHOICES)).filter(fits);
        cluster_bits = choice.unwrap_or(default_bits);
    }
    let extended = has(Feature::ExtendedL2)
        && version == Version::V3
        && cluster_bits.bits() >= EXTENDED_CLUSTER_BITS_MIN
        && rng.percent(40);
    let refcount = match has(Feature::RefcountBits) && version == Version::V3 {
        true => RefcountWidth::from_order(u32::try_from(rng.below(7)).unwrap_or(4)),
        false => None,
    };
    let data_file = match has(Feature::DataFiles) && version == Version::V3 && rng.percent(25) {
        true if base => DataFile::ExternalRaw,
        true => DataFile::External,
        false => DataFile::Internal,
    };
    let compression = match has(Feature::Zstd) && version == Version::V3 {
        true if !has(Feature::Deflate) || rng.percent(50) => Compression::Zstd,
        _ => Compression::Deflate,
    };
    let compressed_percent = match compression {
        _ if data_file != DataFile::Internal => 0,
        Compression::Zstd => 30,
        Compression::Deflate if has(Feature::Deflate) => 30,
        Compression::Deflate => 0,
    };
    let data_elsewhere = data_file != DataFile::Internal;
    let l2 = L2Format { cluster_bits, version, extended, data_file: data_elsewhere };
    let refcount = refcount.unwrap_or(RefcountWidth::DEFAULT);
    let shape = Qcow2Shape { l2, refcount, compression, compressed_percent, data_file };
    LayerShape { number, len, kind: LayerKind::Qcow2(shape) }
}

/// Bytes of the L1 table of a disk of `len` bytes with plain L2 entries; half of what extended ones
/// need, which are only used with clusters that keep it small.
fn l1_bytes(len: u64, bits: ClusterBits) -> u64 {
    len.div_ceil(1 << (2 * bits.bits() - 3)).saturating_mul(L1Entry::BYTES as u64)
}

/// Chooses the plan clusters that are owned, exactly as many as the spec says, and their layers.
fn assign(spec: &ChainSpec, cluster_bits: ClusterBits) -> Vec<Vec<u32>> {
    let mut held = vec![Vec::new(); spec.layers as usize];
    let mut rng = Rng::new(spec.seed);
    let clusters = cluster_bits.clusters_for(spec.disk_bytes);
    let mut wanted = fraction_of(clusters, spec.fill);
    let stale = spec.features.has(Feature::Stale);
    for cluster in 0..u32::try_from(clusters).unwrap_or(u32::MAX) {
        // Each of the clusters that are left is equally likely to be one of those wanted.
        if rng.below(clusters - u64::from(cluster)) >= wanted {
            continue;
        }
        wanted -= 1;
        let owner = owner(&mut rng, spec);
        held[owner].push(cluster);
        if stale && owner > 0 && rng.percent(25) {
            let older = usize::try_from(rng.below(owner as u64)).unwrap_or(0);
            held[older].push(cluster);
        }
    }
    held
}

fn owner(rng: &mut Rng, spec: &ChainSpec) -> usize {
    let layers = u64::from(spec.layers);
    let from_base = match spec.distribution {
        Distribution::Uniform => rng.below(layers),
        Distribution::NewestHeavy => {
            let below_active = rng.fraction().powi(3);
            layers - 1 - fraction_of(layers, below_active).min(layers - 1)
        }
    };
    usize::try_from(from_base).unwrap_or(0)
}

/// `fraction` of `count`, rounded down.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts of clusters are far below 2^53 and the fraction is in 0.0..=1.0"
)]
fn fraction_of(count: u64, fraction: f64) -> u64 {
    (count as f64 * fraction) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(layers: u32) -> ChainSpec {
        ChainSpec { layers, disk_bytes: 1 << 30, ..ChainSpec::new("unused") }
    }

    fn bits() -> ClusterBits {
        ClusterBits::new(16).expect("valid")
    }

    #[test]
    fn exactly_the_fill_is_owned_and_by_every_layer() {
        let held = plan(&spec(10), bits()).held;
        assert_eq!(held.iter().map(Vec::len).sum::<usize>(), 4915);
        assert!(held.iter().all(|clusters| (350..650).contains(&clusters.len())));
        assert!(held.iter().all(|clusters| clusters.is_sorted()));
    }

    #[test]
    fn newest_layers_own_most_when_asked() {
        let wish = ChainSpec { distribution: Distribution::NewestHeavy, ..spec(100) };
        let held = plan(&wish, bits()).held;
        let newest: usize = held[90..].iter().map(Vec::len).sum();
        assert!((1900..2700).contains(&newest), "{newest} of 4915 in the newest tenth");
    }

    #[test]
    fn every_feature_shows_in_some_layer_and_the_active_one_has_the_disks_length() {
        let wish = ChainSpec { features: crate::Features::all(), ..spec(100) };
        let shapes = plan(&wish, bits()).shapes;
        let any = |test: &dyn Fn(&Qcow2Shape) -> bool| {
            shapes.iter().any(|shape| matches!(&shape.kind, LayerKind::Qcow2(qcow2) if test(qcow2)))
        };
        assert!(matches!(shapes[0].kind, LayerKind::Raw));
        assert!(any(&|shape| shape.l2.version == Version::V2));
        assert!(any(&|shape| shape.l2.extended));
        assert!(any(&|shape| shape.compression == Compression::Zstd));
        assert!(any(&|shape| shape.data_file == DataFile::External));
        assert!(any(&|shape| shape.refcount.order() == 0));
        assert!(any(&|shape| shape.l2.cluster_bits.bits() == 9));
        assert!(shapes.iter().any(|shape| shape.len < 1 << 30));
        assert!(shapes.iter().any(|shape| shape.len > 1 << 30));
        assert_eq!(shapes[99].len, 1 << 30);
    }
}
