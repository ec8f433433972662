use super::*;
use crate::plan;
use crate::spec::ChainSpec;
use mica_units::{GuestOffset, LayerNumber};

fn bits(bits: u32) -> ClusterBits {
    ClusterBits::new(bits).expect("valid")
}

/// Expands every layer of a chain with all features; returns it with the owners.
fn expand_all(layers: u32, seed: u64) -> (Vec<(LayerShape, Vec<Entry>)>, OwnerMap) {
    let spec = ChainSpec {
        layers,
        disk_bytes: (64 << 20) + 512,
        features: Features::all(),
        seed,
        ..ChainSpec::new("unused")
    };
    let chain = plan::plan(&spec, bits(16));
    let mut owners = OwnerMap::new(spec.disk_bytes, chain.unit_bytes);
    let mut expanded = Vec::new();
    for (shape, held) in chain.shapes.iter().zip(&chain.held) {
        let mut rng = Rng::for_part(seed, shape.number.index() as u64);
        let entries = expand(shape, held, bits(16), spec.features, &mut rng, &mut owners);
        expanded.push((shape.clone(), entries));
    }
    (expanded, owners)
}

#[test]
fn entries_ascend_within_the_layer_and_suit_its_version() {
    for seed in 0..20 {
        let (layers, _) = expand_all(12, seed);
        for (shape, entries) in &layers {
            assert!(entries.is_sorted_by(|a, b| a.cluster < b.cluster));
            let LayerKind::Qcow2(qcow2) = &shape.kind else { continue };
            for entry in entries {
                assert!(entry.cluster << qcow2.l2.cluster_bits.bits() < shape.len);
                let zeros = matches!(entry.content, Content::Zero | Content::ZeroAllocated);
                assert!(!zeros || qcow2.l2.version == Version::V3);
                let compressed = entry.content == Content::Compressed;
                assert!(!compressed || qcow2.data_file == DataFile::Internal);
                if let Content::Subclusters { allocated, zero, placed } = entry.content {
                    assert!(qcow2.l2.extended && allocated & zero == 0);
                    assert!(placed || allocated == 0);
                }
            }
        }
    }
}

#[test]
fn owners_are_what_a_walk_of_the_chain_finds() {
    for seed in 0..20 {
        let (layers, owners) = expand_all(12, seed);
        for offset in (0..owners.disk_bytes()).step_by(512) {
            assert_eq!(owners.at(offset), walk(&layers, offset), "seed {seed}, byte {offset}");
        }
    }
}

/// The owner of byte `offset` by asking every layer from the active one down.
fn walk(layers: &[(LayerShape, Vec<Entry>)], offset: u64) -> Owner {
    for (shape, entries) in layers.iter().rev() {
        if offset >= shape.len {
            return Owner::Hole;
        }
        let cluster_bits = match &shape.kind {
            LayerKind::Raw => bits(16),
            LayerKind::Qcow2(qcow2) => qcow2.l2.cluster_bits,
        };
        let cluster = cluster_bits.guest_cluster(GuestOffset::new(offset)).number();
        let Ok(index) = entries.binary_search_by_key(&cluster, |entry| entry.cluster) else {
            continue;
        };
        let subcluster = cluster_bits.offset_within(offset) / (cluster_bits.bytes() / 32);
        let bit = |set: u32| set >> subcluster & 1 == 1;
        match entries[index].content {
            Content::Data | Content::Compressed => return Owner::Data(shape.number),
            Content::Zero | Content::ZeroAllocated => return Owner::Zero(shape.number),
            Content::Subclusters { allocated, .. } if bit(allocated) => {
                return Owner::Data(shape.number);
            }
            Content::Subclusters { zero, .. } if bit(zero) => return Owner::Zero(shape.number),
            Content::Subclusters { .. } => {}
        }
    }
    Owner::Hole
}

#[test]
fn a_plain_layer_holds_just_what_it_is_asked_to() {
    let spec = ChainSpec { disk_bytes: 1 << 30, ..ChainSpec::new("unused") };
    let chain = plan::plan(&spec, bits(16));
    let mut owners = OwnerMap::new(spec.disk_bytes, chain.unit_bytes);
    let entries =
        expand(&chain.shapes[0], &[3, 70], bits(16), spec.features, &mut Rng::new(1), &mut owners);
    let data = |cluster| Entry { cluster, content: Content::Data };
    assert_eq!(entries, [data(3), data(70)]);
    assert_eq!(owners.at(3 << 16), Owner::Data(LayerNumber::BASE));
    assert_eq!(owners.data_units().collect::<Vec<_>>(), [3 << 16, 70 << 16]);
}
