//! Dirty bitmaps that are changed while the power goes: what is left are the old bitmaps or the new
//! ones, and those of the length that the disk has. The image is intact in any case.

use crate::plain::{Plain, read, write};
use mica_block::{Disk as _, Images as _, Manage as _};
use mica_qcow2::find_bitmap;
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::inspect;
use mica_qcow2_tools::resize::Resizer;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{Loss, World, scenario};
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;

/// It ends within a large cluster, whose rest has to be zeroed when it becomes longer.
const DISK: u64 = (4 << 20) - 2048;
const WRITTEN: usize = 64 << 10;

/// The names of the bitmaps that are true, each with how many bytes are dirty in it.
async fn bitmaps(world: &World) -> Vec<(String, u64)> {
    let info = inspect(world, &Plain::top()).await.unwrap();
    let mut all = Vec::new();
    for entry in info.bitmaps {
        if entry.in_use || !info.header.autoclear.bitmaps_consistent {
            continue;
        }
        let bitmap = find_bitmap(world, &[Plain::top()], &entry.name).await.unwrap();
        let disk = info.header.disk_bytes();
        let range = GuestRange::new(GuestOffset::ZERO, disk).unwrap();
        let runs = bitmap.runs(range).await.unwrap();
        assert_eq!(runs.iter().map(|(len, _)| len).sum::<u64>(), disk);
        let dirty = runs.iter().filter(|(_, is_dirty)| *is_dirty).map(|(len, _)| len).sum();
        all.push((entry.name, dirty));
    }
    all
}

/// What is done with which bitmap, and what there is then.
type Step = (&'static str, fn() -> Vec<BitmapAction>, Vec<(&'static str, u64)>);

fn steps() -> Vec<Step> {
    vec![
        ("a", || vec![BitmapAction::Add(Some(512))], vec![("a", 0)]),
        ("b", || vec![BitmapAction::Add(None), BitmapAction::Disable], vec![("a", 0), ("b", 0)]),
        ("a", || vec![BitmapAction::Merge("b".to_owned())], vec![("a", 0), ("b", 0)]),
        ("a", || vec![BitmapAction::Clear], vec![("a", 0), ("b", 0)]),
        ("a", || vec![BitmapAction::Remove], vec![("b", 0)]),
        ("b", || vec![BitmapAction::Remove], vec![]),
    ]
}

async fn cut_after_each(world: &World, wish: &ImageWish, loss: Loss) {
    let steps = steps();
    for step in 0..steps.len() {
        for operations in 1.. {
            let world = World::new(world.seed() * 1000 + operations);
            let about = format!("{wish:?}, step {step}, cut after {operations}, losing {loss:?}");
            let image = Plain::new(&world, wish, DISK).await;
            let chain = image.open(Mode::Write).await;
            write(&chain, 0, 7, WRITTEN).await.unwrap();
            chain.close().await.unwrap();
            drop(chain);
            for (name, actions, _) in &steps[..step] {
                edit_bitmap(&world, &Plain::top(), name, actions()).await.unwrap();
            }
            let named = |all: &[(&str, u64)]| -> Vec<(String, u64)> {
                all.iter().map(|(name, dirty)| ((*name).to_owned(), *dirty)).collect()
            };
            let before = step.checked_sub(1).map_or(Vec::new(), |last| named(&steps[last].2));
            assert_eq!(bitmaps(&world).await, before, "{about}");
            let (name, actions, after) = &steps[step];
            world.cut_power_after(operations, loss);
            let path = Plain::top();
            let ended = until_power_cut(&world, edit_bitmap(&world, &path, name, actions())).await;
            world.keep_power();
            image.expect_uncorrupted(&about).await;
            let now = bitmaps(&world).await;
            let after = named(after);
            assert!([&before, &after].contains(&&now), "{about}: {now:?}");
            let chain = image.open(Mode::Read).await;
            assert_eq!(read(&chain, 0, WRITTEN as u64).await.unwrap(), [7; WRITTEN], "{about}");
            drop(chain);
            if let Some(done) = ended {
                done.unwrap();
                assert_eq!(now, after, "{about}");
                image.expect_sound().await;
                break;
            }
            // Later changes still succeed.
            let again = vec![BitmapAction::Add(None)];
            edit_bitmap(&world, &path, "again", again).await.unwrap();
            image.expect_uncorrupted(&about).await;
            assert!(bitmaps(&world).await.contains(&("again".to_owned(), 0)), "{about}");
            assert!(world.identify(&path).is_ok());
        }
    }
}

#[test]
fn power_may_go_while_bitmaps_are_changed() {
    for cluster_bytes in [512, 65536] {
        for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
            scenario(1, |world| async move {
                let wish = ImageWish { cluster_bytes: Some(cluster_bytes), ..ImageWish::default() };
                cut_after_each(&world, &wish, loss).await;
            });
        }
    }
}

/// An image with the bitmap "a", in which as much is dirty as the first cluster of its bits says,
/// and "b", in which nothing is.
async fn image_with_bitmaps(world: &World, wish: &ImageWish) -> Plain {
    /// An entry of a bitmap's table: all bits are 1.
    const ONES: u64 = 1;
    let image = Plain::new(world, wish, DISK).await;
    let chain = image.open(Mode::Write).await;
    write(&chain, 0, 7, WRITTEN).await.unwrap();
    write(&chain, DISK - 512, 7, 512).await.unwrap();
    chain.close().await.unwrap();
    drop(chain);
    for (name, granularity) in [("a", Some(512)), ("b", None)] {
        let add = vec![BitmapAction::Add(granularity)];
        edit_bitmap(world, &Plain::top(), name, add).await.unwrap();
    }
    let info = inspect(world, &Plain::top()).await.unwrap();
    let first = info.bitmaps.iter().find(|entry| entry.name == "a").unwrap();
    image.put(first.table_offset.bytes(), ONES);
    image
}

/// Makes a disk with bitmaps `new` bytes long, losing power after each operation in turn.
async fn resize_cut_after_each(world: &World, wish: &ImageWish, loss: Loss, new: u64) {
    for operations in 1.. {
        let world = World::new(world.seed() * 1000 + operations);
        let about = format!("{wish:?} to {new}, cut after {operations}, losing {loss:?}");
        let image = image_with_bitmaps(&world, wish).await;
        let before = bitmaps(&world).await;
        let dirty = before[0].1;
        assert!(dirty > 0 && before[1].1 == 0, "{about}: {before:?}");
        world.cut_power_after(operations, loss);
        let resize = async {
            let mut resizer = Resizer::open(Arc::new(world.clone()), &Plain::top()).await?;
            resizer.resize(new).await
        };
        let ended = until_power_cut(&world, resize).await;
        world.keep_power();
        image.expect_uncorrupted(&about).await;
        let chain = image.open(Mode::Read).await;
        let len = chain.geometry().len;
        let shown = read(&chain, 0, WRITTEN as u64).await.unwrap();
        drop(chain);
        assert!(shown.iter().all(|byte| *byte == 7), "{about}");
        assert!(len == DISK || len == new, "{about}: {len} bytes");
        // What the disk gains is not dirty, and what it loses is forgotten.
        let after = vec![("a".to_owned(), dirty.min(new)), ("b".to_owned(), 0)];
        let (now, of_len) = (bitmaps(&world).await, if len == new { &after } else { &before });
        assert_eq!(now, *of_len, "{about}");
        if let Some(done) = ended {
            done.unwrap();
            assert_eq!((len, now), (new, after), "{about}");
            image.expect_sound().await;
            break;
        }
        // Later changes still succeed.
        let again = vec![BitmapAction::Add(None)];
        edit_bitmap(&world, &Plain::top(), "again", again).await.unwrap();
        image.expect_uncorrupted(&about).await;
        assert!(bitmaps(&world).await.contains(&("again".to_owned(), 0)), "{about}");
    }
}

#[test]
fn power_may_go_while_a_disk_with_bitmaps_gets_another_length() {
    for (cluster_bytes, new) in
        [(512, DISK / 4), (512, 2 * DISK), (65536, DISK / 4), (65536, 2 * DISK)]
    {
        for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
            scenario(1, |world| async move {
                let wish = ImageWish { cluster_bytes: Some(cluster_bytes), ..ImageWish::default() };
                resize_cut_after_each(&world, &wish, loss, new).await;
            });
        }
    }
}
