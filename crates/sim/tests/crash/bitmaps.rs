//! Dirty bitmaps that are changed while the power goes: what is left are the old bitmaps or the new
//! ones, or they are marked as not to be used. The image is intact in any case.

use crate::plain::{Plain, read, write};
use mica_block::{Images as _, Manage as _};
use mica_qcow2::find_bitmap;
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::inspect;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{Loss, World, scenario};
use mica_units::{GuestOffset, GuestRange};

const DISK: u64 = 4 << 20;
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
        let range = GuestRange::new(GuestOffset::ZERO, DISK).unwrap();
        let runs = bitmap.runs(range).await.unwrap();
        assert_eq!(runs.iter().map(|(len, _)| len).sum::<u64>(), DISK);
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
            assert!([&before, &after, &Vec::new()].contains(&&now), "{about}: {now:?}");
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
