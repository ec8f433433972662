//! Internal snapshots that are made, applied and deleted while the power goes: what is left is the
//! image of before or of after, and every snapshot that it lists shows what it always did.

use crate::chain::FOLDER;
use crate::plain::{Plain, range, read, write};
use mica_block::{Disk as _, ErrorKind, Manage as _, ManageBitmaps as _, Result};
use mica_qcow2::snapshots::SnapshotSelector;
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache};
use mica_qcow2_format::Version;
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::inspect;
use mica_qcow2_tools::recover::{RepairMode, open_for_repair, repair, repair_for_opening};
use mica_qcow2_tools::snapshots::SnapshotEditor;
use mica_sim::crash::until_power_cut;
use mica_sim::{Loss, World, scenario};
use std::path::Path;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
/// The part of the disk that is written.
const WRITTEN: u64 = MIB;

/// What is done to an image that has the snapshots "a" and "b".
#[derive(Clone, Copy, Debug)]
enum Deed {
    Create,
    Apply(&'static str),
    Delete(&'static str),
}

impl Deed {
    async fn run(self, world: &World) -> Result<()> {
        let mut editor = SnapshotEditor::open(world, &Plain::top()).await?;
        match self {
            Self::Create => editor.create("c", 1_700_000_000_000_000_000).await,
            Self::Apply(name) => editor.apply(&SnapshotSelector::Name(name.to_string())).await,
            Self::Delete(name) => editor.delete(&SnapshotSelector::Name(name.to_string())).await,
        }
    }
}

/// The byte of each part of the disk: parts that change between snapshots, and one that is shared
/// by all.
type Parts = [u8; 4];
const STATE_A: Parts = [1, 1, 1, 0];
const STATE_B: Parts = [2, 1, 0, 0];
const NOW: Parts = [3, 1, 3, 3];

async fn open(world: &World, snapshot: Option<&str>) -> Chain {
    let options = ChainOptions {
        cache: MapCache::new(CACHE_BYTES_MIN),
        writable: snapshot.is_none(),
        snapshot: snapshot.map(|name| SnapshotSelector::Name(name.to_owned())),
        repair: Some(repair_for_opening),
        ..ChainOptions::default()
    };
    Chain::open(Arc::new(world.clone()), &Path::new(FOLDER).join("plain.qcow2"), &options)
        .await
        .unwrap()
}

async fn put(world: &World, parts: Parts) {
    let chain = open(world, None).await;
    for (at, byte) in (0..).zip(parts) {
        let len = WRITTEN / 4;
        write(&chain, at * len, byte, usize::try_from(len).unwrap()).await.unwrap();
    }
    chain.close().await.unwrap();
}

async fn parts(chain: &Chain) -> Parts {
    let len = chain.geometry().len;
    let shown = read(chain, 0, len).await.unwrap();
    let part = usize::try_from(WRITTEN / 4).unwrap();
    let found: Vec<u8> = shown
        .chunks(part)
        .map(|bytes| {
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a part is torn");
            bytes[0]
        })
        .collect();
    assert!(found[4..].iter().all(|byte| *byte == 0), "beyond what was written");
    *found.first_chunk().unwrap()
}

async fn image(world: &World, wish: &ImageWish) -> Plain {
    let image = Plain::new(world, wish, 2 * MIB).await;
    for (name, state) in [("a", STATE_A), ("b", STATE_B)] {
        put(world, state).await;
        let mut editor = SnapshotEditor::open(world, &Plain::top()).await.unwrap();
        editor.create(name, 7).await.unwrap();
    }
    put(world, NOW).await;
    image
}

/// Does the deed, losing power after each operation in turn.
async fn cut_after_each(world: &World, wish: &ImageWish, deed: Deed) {
    for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
        for operations in 1.. {
            let world = World::new(world.seed() * 1000 + operations);
            let about = format!("{wish:?} {deed:?}, cut after {operations}, losing {loss:?}");
            let image = image(&world, wish).await;
            image.expect_sound().await;
            world.cut_power_after(operations, loss);
            let ended = until_power_cut(&world, deed.run(&world)).await;
            world.keep_power();
            if wish.version == Some(Version::V2) {
                // It has no dirty bit: somebody has to check it.
                let (opened, header) = open_for_repair(&world, &Plain::top()).await.unwrap();
                let report =
                    repair(opened.store, &header, RepairMode::All, &mut |_| {}).await.unwrap();
                assert_eq!(report.after.corruptions, 0, "{about}");
            }
            let now = open(&world, None).await;
            let content = parts(&now).await;
            now.close().await.unwrap();
            drop(now);
            image.expect_uncorrupted(&about).await;
            let listed = inspect(&world, &Plain::top()).await.unwrap().snapshots;
            let names: Vec<&str> = listed.iter().map(|entry| &*entry.name).collect();
            let (before, after): (&[&str], &[&str]) = match deed {
                Deed::Create => (&["a", "b"], &["a", "b", "c"]),
                Deed::Apply(_) => (&["a", "b"], &["a", "b"]),
                Deed::Delete("a") => (&["a", "b"], &["b"]),
                Deed::Delete(_) => (&["a", "b"], &["a"]),
            };
            let applied = match deed {
                Deed::Apply("a") => STATE_A,
                Deed::Apply(_) => STATE_B,
                _ => NOW,
            };
            let is_new = names == after && content == applied;
            let is_old = names == before && content == NOW;
            assert!(is_new || ended.is_none() && is_old, "{about}: {names:?} {content:?}");
            // A guest goes on, and no snapshot notices.
            put(&world, [9, 8, 7, 6]).await;
            image.expect_uncorrupted(&about).await;
            for (name, state) in [("a", STATE_A), ("b", STATE_B), ("c", NOW)] {
                if names.contains(&name) {
                    let shown = open(&world, Some(name)).await;
                    assert_eq!(parts(&shown).await, state, "{about}: snapshot {name}");
                }
            }
            if let Some(done) = ended {
                done.unwrap();
                image.expect_sound().await;
                break;
            }
        }
    }
}

fn every_shape(deed: Deed) {
    let shapes = [
        (Version::V3, 4096, false, 16),
        (Version::V3, 64 << 10, true, 8),
        (Version::V2, 16 << 10, false, 16),
    ];
    for (version, cluster_bytes, extended, refcount_bits) in shapes {
        let wish = ImageWish {
            version: Some(version),
            cluster_bytes: Some(cluster_bytes),
            extended_l2: Some(extended),
            refcount_bits: Some(refcount_bits),
            ..ImageWish::default()
        };
        scenario(1, |world| {
            let wish = &wish;
            async move { cut_after_each(&world, wish, deed).await }
        });
    }
}

#[test]
fn snapshot_is_made_or_not_whenever_the_power_goes() {
    every_shape(Deed::Create);
}

#[test]
fn snapshot_is_applied_or_not_whenever_the_power_goes() {
    every_shape(Deed::Apply("a"));
    every_shape(Deed::Apply("b"));
}

#[test]
fn snapshot_is_deleted_or_not_whenever_the_power_goes() {
    every_shape(Deed::Delete("a"));
    every_shape(Deed::Delete("b"));
}

/// One-bit refcounts count to one, and a snapshot shares everything.
#[test]
fn image_whose_refcounts_have_no_room_stays_as_it_is() {
    scenario(1, |world| async move {
        let wish = ImageWish { refcount_bits: Some(1), ..ImageWish::default() };
        let image = Plain::new(&world, &wish, 2 * MIB).await;
        put(&world, NOW).await;
        let mut editor = SnapshotEditor::open(&world, &Plain::top()).await.unwrap();
        let refused = editor.create("a", 7).await.unwrap_err();
        assert!(refused.to_string().contains("no room"), "{refused}");
        drop(editor);
        image.expect_sound().await;
        let now = open(&world, None).await;
        assert_eq!(parts(&now).await, NOW);
        now.close().await.unwrap();
    });
}

/// While a snapshot is applied its bitmaps are in use, and afterwards all is dirty in them.
#[test]
fn bitmaps_never_lack_what_changes_when_a_snapshot_is_applied() {
    scenario(1, |world| async move {
        for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
            for operations in 1.. {
                let world = World::new(world.seed() * 1000 + operations);
                let about = format!("cut after {operations}, losing {loss:?}");
                let wish = ImageWish { cluster_bytes: Some(4096), ..ImageWish::default() };
                let image = image(&world, &wish).await;
                let add = vec![BitmapAction::Add(Some(4096))];
                edit_bitmap(&world, &Plain::top(), "b", add).await.unwrap();
                let chain = open(&world, None).await;
                write(&chain, 0, NOW[0], 4096).await.unwrap();
                chain.close().await.unwrap();
                drop(chain);
                world.cut_power_after(operations, loss);
                let ended = until_power_cut(&world, Deed::Apply("a").run(&world)).await;
                world.keep_power();
                drop(open(&world, None).await);
                let chain = open(&world, None).await;
                let dirty = chain.dirty("b", range(0, 2 * MIB)).await;
                let content = parts(&chain).await;
                match dirty {
                    Ok(runs) if content == NOW => assert!(runs[0] == (4096, true), "{about}"),
                    Ok(runs) => assert_eq!(runs, [(2 * MIB, true)], "{about}"),
                    Err(error) => {
                        assert!(ended.is_none(), "{about}: {error}");
                        assert_eq!(error.kind(), ErrorKind::Corrupt, "{about}: {error}");
                    }
                }
                chain.close().await.unwrap();
                drop(chain);
                image.expect_uncorrupted(&about).await;
                if let Some(done) = ended {
                    done.unwrap();
                    image.expect_sound().await;
                    break;
                }
            }
        }
    });
}
