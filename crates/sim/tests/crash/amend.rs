//! Headers that are amended while the power goes: what is left has the old format or the new one,
//! and shows the same disk.

use crate::plain::{Plain, range, read, write};
use mica_block::{Disk as _, Manage as _, Result, Zeroes};
use mica_qcow2_format::{Header, RefcountWidth, Version};
use mica_qcow2_tools::amend::{Amendment, amend};
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::inspect;
use mica_qcow2_tools::resize::Resizer;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{Loss, World, scenario};
use std::sync::Arc;

const DISK: u64 = 2 << 20;
/// Bytes of what is written, and of the zeros in the middle of that.
const WRITTEN: u64 = 512 << 10;
const ZEROED: (u64, u64) = (128 << 10, 192 << 10);

/// What a header says that is amended here.
fn format(header: &Header) -> Format {
    let lazy = header.compatible.lazy_refcounts;
    ((header.version, header.refcount_width.bits(), lazy), header.disk_bytes())
}

/// The same, and the length of the disk, which changes last.
type Format = ((Version, u32, bool), u64);

/// An image with data, and clusters that are marked as zeros where the format has such marks.
async fn image(world: &World, wish: &ImageWish) -> Plain {
    let image = Plain::new(world, wish, DISK).await;
    let chain = image.open(Mode::Write).await;
    write(&chain, 0, 7, usize::try_from(WRITTEN).unwrap()).await.unwrap();
    for (part, may_unmap) in [(0, true), (1, false)] {
        let (at, len) = (ZEROED.0 + part * ZEROED.1 / 2, ZEROED.1 / 2);
        chain.write_zeroes(range(at, len), Zeroes { may_unmap, fast: false }).await.unwrap();
    }
    chain.close().await.unwrap();
    image
}

async fn expect_the_disk(image: &Plain, about: &str) {
    let chain = image.open(Mode::Read).await;
    let shown = read(&chain, 0, chain.geometry().len).await.unwrap();
    assert!(shown.len() as u64 >= DISK, "{about}");
    for (at, byte) in (0..).zip(shown) {
        let is_zero = at >= WRITTEN || (ZEROED.0..ZEROED.0 + ZEROED.1).contains(&at);
        assert_eq!(byte, if is_zero { 0 } else { 7 }, "{about}: byte {at}");
    }
}

/// What is amended: the format, and the length of the disk.
type Wanted<'a> = (&'a Amendment, Option<u64>);

/// As `mica amend` does it.
async fn amend_all(world: &World, (format, size): Wanted<'_>) -> Result<Header> {
    let top = Plain::top();
    let Some(size) = size else { return amend(world, &top, format).await };
    let mut resizer = Resizer::open_to_amend(Arc::new(world.clone()), &top, format).await?;
    resizer.resize_amended(size, format).await
}

/// Amends an image, losing power after each operation in turn.
async fn cut_after_each(world: &World, wish: &ImageWish, wanted: Wanted<'_>) {
    for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
        let mut seen = Vec::new();
        for operations in 1.. {
            let world = World::new(world.seed() * 1000 + operations);
            let about = format!("{wanted:?}, cut after {operations}, losing {loss:?}");
            let image = image(&world, wish).await;
            let before = format(&inspect(&world, &Plain::top()).await.unwrap().header);
            world.cut_power_after(operations, loss);
            let top = Plain::top();
            let ended = until_power_cut(&world, amend_all(&world, wanted)).await;
            world.keep_power();
            image.expect_uncorrupted(&about).await;
            expect_the_disk(&image, &about).await;
            let now = format(&inspect(&world, &top).await.unwrap().header);
            seen.push(now);
            let Some(done) = ended else {
                // The same can be asked for again.
                let after = format(&amend_all(&world, wanted).await.unwrap());
                // At most the new length is missing.
                let is_short = now == (after.0, before.1);
                assert!(now == before || now == after || is_short, "{about}: {now:?}");
                assert!(wanted.1.is_none_or(|size| after.1 == size), "{about}: {after:?}");
                image.expect_uncorrupted(&about).await;
                expect_the_disk(&image, &about).await;
                continue;
            };
            assert_eq!(now, format(&done.unwrap()), "{about}");
            assert_ne!(now, before, "{about}: nothing was amended");
            let is_old = matches!(loss, Loss::Everything);
            assert!(!is_old || seen.contains(&before), "the power never went before the end");
            image.expect_sound().await;
            // A guest goes on.
            let chain = image.open(Mode::Write).await;
            write(&chain, DISK - 4096, 9, 4096).await.unwrap();
            chain.close().await.unwrap();
            drop(chain);
            image.expect_sound().await;
            break;
        }
    }
}

fn every_cluster_size(wish: &ImageWish, wanted: &Amendment) {
    every_cluster_size_of((wanted, None), wish);
}

fn every_cluster_size_of(wanted: Wanted<'_>, wish: &ImageWish) {
    for cluster_bytes in [4096, 64 << 10] {
        let wish = ImageWish { cluster_bytes: Some(cluster_bytes), ..wish.clone() };
        scenario(1, |world| {
            let (wish, wanted) = (&wish, wanted);
            async move { cut_after_each(&world, wish, wanted).await }
        });
    }
}

#[test]
fn image_becomes_older_or_stays_as_it_is_whenever_the_power_goes() {
    let wanted = Amendment { version: Some(Version::V2), ..Amendment::default() };
    every_cluster_size(&ImageWish::default(), &wanted);
}

#[test]
fn image_becomes_newer_or_stays_as_it_is_whenever_the_power_goes() {
    let old = ImageWish { version: Some(Version::V2), ..ImageWish::default() };
    let lazy_refcounts = Some(true);
    let wanted = Amendment { version: Some(Version::V3), lazy_refcounts, ..Amendment::default() };
    every_cluster_size(&old, &wanted);
}

#[test]
fn refcounts_have_one_width_or_the_other_whenever_the_power_goes() {
    for order in [0, 6] {
        let refcount_width = RefcountWidth::from_order(order);
        let wanted = Amendment { refcount_width, ..Amendment::default() };
        every_cluster_size(&ImageWish::default(), &wanted);
    }
}

#[test]
fn disk_has_one_length_or_the_other_and_zeros_at_its_end_whenever_the_power_goes() {
    for more in [512, 1 << 20, 3 << 20] {
        every_cluster_size_of((&Amendment::default(), Some(DISK + more)), &ImageWish::default());
    }
}

#[test]
fn of_all_that_is_amended_at_most_the_length_is_missing_whenever_the_power_goes() {
    let (size, lazy_refcounts) = (Some(DISK + (1 << 20)), Some(true));
    let refcount_width = RefcountWidth::from_order(5);
    let wanted = Amendment { lazy_refcounts, refcount_width, ..Amendment::default() };
    every_cluster_size_of((&wanted, size), &ImageWish::default());
    let old = ImageWish { version: Some(Version::V2), ..ImageWish::default() };
    let wanted = Amendment { version: Some(Version::V3), ..Amendment::default() };
    every_cluster_size_of((&wanted, size), &old);
}
