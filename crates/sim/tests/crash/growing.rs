//! Disks that become longer while a guest writes to them and the power goes, or the process dies:
//! what is left has the old length or the new one, and the new part is zeros.

use crate::chain::FOLDER;
use crate::plain::{Plain, read, write};
use mica_block::{Disk as _, ErrorKind, LocalFuture, Manage as _, Result};
use mica_qcow2::Chain;
use mica_qcow2_format::Version;
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::resize::Resizer;
use mica_rt::join_all;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{Loss, World, scenario};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Of the disk, what is written and durable before.
const WRITTEN: u64 = MIB / 2;
/// Number of the guest's writes meanwhile, each so far from the last that it needs a new table.
const WRITES: u64 = 12;
const STRIDE: u64 = 200 << 10;

/// An image, how long its base is, and its old and its new length.
struct Case {
    wish: ImageWish,
    base: u64,
    old: u64,
    new: u64,
}

impl Case {
    fn new(cluster_bytes: u64, base: u64, (old, new): (u64, u64)) -> Self {
        let mut wish = ImageWish { cluster_bytes: Some(cluster_bytes), ..ImageWish::default() };
        if base > 0 {
            wish.backing_name = Some("base.raw".into());
            wish.backing_format = Some("raw".to_owned());
        }
        Self { wish, base, old, new }
    }

    /// The image with its first content, open.
    async fn begin(&self, world: &World) -> (Plain, Chain) {
        let base = vec![5; usize::try_from(self.base).unwrap()];
        world.put(Path::new(FOLDER).join("base.raw"), base);
        let image = Plain::new(world, &self.wish, self.old).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 7, usize::try_from(WRITTEN).unwrap()).await.unwrap();
        chain.flush().await.unwrap();
        (image, chain)
    }

    fn place(&self, number: u64) -> u64 {
        WRITTEN + number * STRIDE % (self.old - WRITTEN - 512)
    }

    /// The disk grows while the guest writes, and then the guest writes to the new part. Counts the
    /// acknowledged writes.
    async fn work(&self, chain: &Chain, acknowledged: &Cell<u64>) -> Result<()> {
        let writes = async {
            for number in 0..WRITES {
                write(chain, self.place(number), 8, 512).await?;
                acknowledged.set(number + 1);
                if number % 5 == 4 {
                    chain.flush().await?;
                }
            }
            Ok(())
        };
        let both: [LocalFuture<'_, Result<()>>; 2] = [chain.resize(self.new), Box::pin(writes)];
        join_all(both).await.into_iter().collect::<Result<()>>()?;
        assert_eq!(chain.geometry().len, self.new);
        write(chain, self.new - 4096, 9, 4096).await?;
        chain.flush().await
    }

    /// Checks that the disk shows what it may; returns its length.
    async fn expect_shown(&self, chain: &Chain, about: &str) -> u64 {
        let len = chain.geometry().len;
        assert!(len == self.old || len == self.new, "{about}: {len} bytes");
        let shown = read(chain, 0, len).await.unwrap();
        for (sector, at) in shown.chunks(512).zip((0..).step_by(512)) {
            let bytes = [sector[0], sector[511]];
            let may_be: &[u8] = match at {
                _ if at < WRITTEN => &[7],
                _ if at >= self.new - 4096 => &[0, 9],
                _ if at >= self.old => &[0],
                _ if at < self.base => &[5, 8],
                _ => &[0, 8],
            };
            assert!(bytes.iter().all(|byte| may_be.contains(byte)), "{about}: {bytes:?} at {at}");
        }
        len
    }

    /// Loses power after each operation in turn.
    async fn cut_after_each(&self, seed: u64) {
        for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
            for operations in 1.. {
                let world = World::new(seed * 1000 + operations);
                let about = format!("{:?}, cut after {operations}, losing {loss:?}", self.wish);
                let (image, chain) = self.begin(&world).await;
                world.cut_power_after(operations, loss);
                let acknowledged = Cell::new(0);
                let ended = until_power_cut(&world, self.work(&chain, &acknowledged)).await;
                world.keep_power();
                if let Some(done) = ended {
                    done.unwrap();
                    assert_eq!(self.expect_shown(&chain, &about).await, self.new);
                    chain.close().await.unwrap();
                    drop(chain);
                    image.expect_sound().await;
                    break;
                }
                drop(chain);
                image.expect_uncorrupted(&about).await;
                let chain = image.open(Mode::Write).await;
                let len = self.expect_shown(&chain, &about).await;
                write(&chain, len - 4096, 9, 4096).await.unwrap();
                chain.close().await.unwrap();
                drop(chain);
                image.expect_uncorrupted(&about).await;
            }
        }
    }

    /// Kills the process at each step in turn.
    async fn kill_at_each(&self, seed: u64) {
        for step in 0.. {
            let world = World::new(seed * 1000 + step);
            let about = format!("{:?}, killed at step {step}", self.wish);
            let (image, chain) = self.begin(&world).await;
            let (dying, armed) = (world.clone(), std::rc::Rc::new(Cell::new(true)));
            let still = std::rc::Rc::clone(&armed);
            mica_rt::spawn(async move {
                mica_rt::sleep(Duration::from_micros(step * 83)).await;
                if still.get() {
                    dying.kill();
                }
            });
            let acknowledged = Cell::new(0);
            let ended = until_power_cut(&world, self.work(&chain, &acknowledged)).await;
            armed.set(false);
            drop(chain);
            if let Some(done) = ended {
                return done.unwrap();
            }
            let chain = image.open(Mode::Write).await;
            self.expect_shown(&chain, &about).await;
            for number in 0..acknowledged.get() {
                let shown = read(&chain, self.place(number), 512).await.unwrap();
                assert_eq!(shown, [8; 512], "{about}: write {number} was acknowledged");
            }
            chain.close().await.unwrap();
            drop(chain);
            image.expect_uncorrupted(&about).await;
        }
    }
}

fn cases() -> Vec<Case> {
    let mut old_format = Case::new(4096, 4 * MIB, (2 * MIB, 3 * MIB));
    old_format.wish.version = Some(Version::V2);
    vec![
        // Its L1 table moves; and the old end is within a cluster.
        Case::new(512, 0, (2 * MIB, 6 * MIB)),
        Case::new(512, 3 * MIB, (2 * MIB, 4 * MIB)),
        Case::new(4096, 5 * MIB, (2 * MIB - 512, 4 * MIB)),
        Case::new(64 << 10, 3 * MIB, (2 * MIB - 1536, 20 * MIB)),
        old_format,
    ]
}

#[test]
fn disks_that_grow_while_they_are_written_survive_a_cut_after_every_operation() {
    for case in &cases() {
        scenario(1, |world| async move { case.cut_after_each(world.seed()).await });
    }
}

#[test]
fn disks_that_grow_while_their_server_is_killed_lose_nothing() {
    for case in &cases() {
        // Version 2 has no log: there, what was not flushed is lost.
        if case.wish.version.is_none() {
            scenario(1, |world| async move { case.kill_at_each(world.seed()).await });
        }
    }
}

/// What an image kept from when it was longer does not reappear.
#[test]
fn disk_that_was_longer_once_grows_with_zeros() {
    scenario(2, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 4 * MIB).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 7, usize::try_from(4 * MIB).unwrap()).await.unwrap();
        chain.close().await.unwrap();
        drop(chain);
        let mut resizer = Resizer::open(Arc::new(world.clone()), &Plain::top()).await.unwrap();
        resizer.resize(MIB + 512).await.unwrap();
        drop(resizer);
        let chain = image.open(Mode::Write).await;
        // Its last slice is in the cache.
        assert_eq!(read(&chain, MIB, 512).await.unwrap(), [7; 512]);
        chain.resize(4 * MIB).await.unwrap();
        let shown = read(&chain, 0, 4 * MIB).await.unwrap();
        let kept = usize::try_from(MIB + 512).unwrap();
        assert!(shown[..kept].iter().all(|byte| *byte == 7));
        assert!(shown[kept..].iter().all(|byte| *byte == 0));
        chain.close().await.unwrap();
        drop(chain);
        image.expect_sound().await;
    });
}

#[test]
fn impossible_lengths_of_a_served_disk_are_refused() {
    scenario(1, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 4 * MIB).await;
        let chain = image.open(Mode::Write).await;
        for len in [0, 4 * MIB - 512, 4 * MIB + 1, 1 << 62] {
            let refused = chain.resize(len).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{len}: {refused}");
        }
        assert_eq!(chain.geometry().len, 4 * MIB);
        chain.close().await.unwrap();
        drop(chain);
        let chain = image.open(Mode::Read).await;
        assert_eq!(chain.resize(8 * MIB).await.unwrap_err().kind(), ErrorKind::Denied);
    });
}

/// A thousand terabytes are added at once.
#[test]
fn disk_becomes_very_long_at_once() {
    scenario(1, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 4 * MIB).await;
        let chain = image.open(Mode::Write).await;
        chain.resize(1 << 50).await.unwrap();
        write(&chain, (1 << 50) - 512, 3, 512).await.unwrap();
        assert_eq!(read(&chain, (1 << 50) - 512, 512).await.unwrap(), [3; 512]);
        chain.close().await.unwrap();
        drop(chain);
        image.expect_sound().await;
    });
}
