//! What a collector asks of a volume that is open: a head that has all that was put, and that what
//! is in sparse extents is written again.
//!
//! Invariants
//! - I1 Neither is a request: the end of the volume waits for none of it, and ends it.
//! - I2 Guests go first: nothing is written again while changes wait for the log or the store.

use super::Volume;
use super::rewrite::Progress;
use crate::place::ExtentId;
use crate::shared::Shared;
use crate::tenure::HeadTurn;
use crate::writing::is_throttled;
use mica_block::Result;
use mica_rt::sleep;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How often it is looked whether guests still wait.
const LOOK_EVERY: Duration = Duration::from_millis(100);

impl Volume {
    /// Puts a head with every extent that is in the store when this is called, unless the newest
    /// has them all: then a collector knows what of them is needed. What is put meanwhile is not
    /// waited for.
    ///
    /// # Errors
    /// Why the volume is latched.
    pub async fn checkpoint(&self) -> Result<()> {
        if self.shared.writer.is_none() {
            return Ok(());
        }
        let done = self.shared.over.unless_raised(self.shared.checkpoint_if_newer()).await;
        done.unwrap_or(Ok(()))
    }

    /// Writes again what the volume has in `extents`, no faster than this, and yielding to guests,
    /// if it is to; returns how many blocks that were. A flush makes it durable. What is written
    /// meanwhile is not touched, and what is not done when the volume is closed, or this is
    /// dropped, stays as it is.
    ///
    /// # Errors
    /// As a write; `Corrupt` if something of it is damaged.
    pub async fn tidy(
        &self,
        extents: &BTreeSet<ExtentId>,
        bytes_per_second: Option<u64>,
    ) -> Result<u64> {
        self.shared.putter()?;
        let mut progress = bytes_per_second.map_or_else(Progress::default, Progress::paced);
        let rewritten = self.shared.rewrite(extents, &mut progress);
        match self.shared.over.unless_raised(rewritten).await {
            Some(Err(error)) if !self.shared.now().stage.is_ending() => Err(error),
            _ => Ok(progress.count),
        }
    }
}

impl Shared {
    async fn checkpoint_if_newer(self: &Arc<Self>) -> Result<()> {
        // A guest that goes on writing has put more whenever a head is answered.
        let wanted = self.now().sequence;
        loop {
            let turn = || {
                let mut now = self.now();
                let refusal = now.stage.refusal().map(Err);
                let is_done = wanted <= now.heads.sequence;
                refusal.or_else(|| match is_done {
                    true => Some(Ok(None)),
                    false => self.head_turn(&mut now).map(|turn| Ok(Some(turn))),
                })
            };
            let taken: Result<Option<HeadTurn>> = self.progress.until(turn).await;
            let Some(turn) = taken? else { return Ok(()) };
            self.put_checkpoint(turn);
        }
    }

    /// Returns when no change waits for the log or the store.
    pub(super) async fn unthrottled(&self) {
        while is_throttled(self, &self.now()) {
            sleep(LOOK_EVERY).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::CollectOptions;
    use crate::heads::Claimed;
    use crate::place::BLOCK_BYTES;
    use crate::testing::{memory, name, read, run, volumes, write};
    use mica_block::{Disk as _, Manage as _, ManageVolume as _, Objects};
    use mica_rt::{now, spawn, timeout};
    use mica_store::object::{FaultyObjects, FaultyOptions, ObjectOperation};
    use mica_units::Rng;
    use std::sync::atomic::{AtomicBool, Ordering};

    const BLOCK: u64 = BLOCK_BYTES as u64;
    /// Blocks of the disk, and of a round of writing.
    const DISK: u64 = 12_000;
    const ROUND: u64 = 3_000;

    /// The story: a volume that was open for months, and overwritten at random, grew without bound:
    /// what its writer had put since it opened was left alone, and only closed volumes were
    /// compacted.
    #[test]
    fn open_volume_that_is_overwritten_for_long_takes_a_quarter_more_than_it_has() {
        run(7, async {
            let store = memory();
            let objects: Arc<dyn Objects> = Arc::new(store.clone());
            let volumes = volumes(&objects, "host-1").await;
            volumes.create(&name("web"), DISK * BLOCK).await.expect("made");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            let mut rng = Rng::new(9);
            let mut model = vec![1; usize::try_from(DISK).expect("small")];
            for block in 0..DISK {
                write(&volume, block * BLOCK, &[1; BLOCK_BYTES]).await;
            }
            for round in 2..12_u8 {
                for _ in 0..ROUND {
                    let block = rng.below(DISK);
                    write(&volume, block * BLOCK, &[round; BLOCK_BYTES]).await;
                    model[usize::try_from(block).expect("small")] = round;
                }
                volume.flush().await.expect("flushed");
                volume.checkpoint().await.expect("put");
                let options = CollectOptions::default();
                let found = volumes.collect(options, &mut |_| ()).await.expect("collected");
                assert_eq!(found.recent_bytes, 0, "its head has everything");
                for sparse in &found.sparse {
                    let extents = sparse.extents.iter().copied().collect();
                    volume.tidy(&extents, Some(1 << 30)).await.expect("written again");
                }
                volume.flush().await.expect("flushed");
                volume.checkpoint().await.expect("put");
                volumes.collect(options, &mut |_| ()).await.expect("collected");
                let (stored, live) = (store.stored_bytes(), DISK * BLOCK);
                println!("round {round}: {:.3} of the guest's", stored as f64 / live as f64);
                assert!(stored * 100 <= live * 128, "{stored} of {live}");
            }
            for (block, byte) in (0..).zip(&model) {
                assert_eq!(read(&volume, block * BLOCK, BLOCK).await, [*byte; BLOCK_BYTES]);
            }
            volume.close().await.expect("closed");
        });
    }

    #[test]
    fn checkpoint_without_anything_new_puts_no_head() {
        run(8, async {
            let store = memory();
            let objects: Arc<dyn Objects> = Arc::new(store.clone());
            let volumes = volumes(&objects, "host-1").await;
            volumes.create(&name("web"), DISK * BLOCK).await.expect("made");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            write(&volume, 0, &[1; BLOCK_BYTES]).await;
            volume.flush().await.expect("flushed");
            let before = store.contents().len();
            volume.checkpoint().await.expect("put");
            assert_eq!(store.contents().len(), before + 1);
            volume.checkpoint().await.expect("nothing to put");
            assert_eq!(store.contents().len(), before + 1);
            volume.close().await.expect("closed");
            volume.checkpoint().await.expect("nothing to put");
        });
    }

    /// The story: while its guest wrote, somebody who asked for a head waited without end, and the
    /// volume put one after the other.
    #[test]
    fn checkpoint_of_a_volume_whose_guest_goes_on_writing_puts_two_heads_at_most() {
        run(10, async {
            let (only, latency) = (Some(ObjectOperation::Put), Duration::from_secs(1));
            let options = FaultyOptions { seed: 10, only, latency, ..FaultyOptions::default() };
            let objects: Arc<dyn Objects> =
                Arc::new(FaultyObjects::new(Arc::new(memory()), options));
            let volumes = volumes(&objects, "host-1").await;
            volumes.create(&name("web"), DISK * BLOCK).await.expect("made");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            let (volume, is_over) = (Arc::new(volume), Arc::new(AtomicBool::new(false)));
            let guest = {
                let (volume, is_over) = (Arc::clone(&volume), Arc::clone(&is_over));
                spawn(async move {
                    for block in 0.. {
                        write(&volume, block % DISK * BLOCK, &[1; BLOCK_BYTES]).await;
                        volume.flush().await.expect("flushed");
                        if is_over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                })
            };
            for _ in 0..5 {
                sleep(Duration::from_millis(3700)).await;
                let put = || volume.figures().heads;
                let (start, before) = (now(), put());
                let done = timeout(Duration::from_secs(30), volume.checkpoint()).await;
                done.expect("it ends").expect("put");
                assert!(now().saturating_since(start) < 3 * latency, "two heads");
                assert!(put() - before <= 2, "{} heads", put() - before);
            }
            is_over.store(true, Ordering::Relaxed);
            guest.await;
            volume.close().await.expect("closed");
        });
    }

    /// Rewriting is slow on purpose: whoever closes or hands over the volume does not wait for it.
    #[test]
    fn end_of_a_volume_does_not_wait_for_what_is_written_again() {
        run(9, async {
            let objects: Arc<dyn Objects> = Arc::new(memory());
            let volumes = volumes(&objects, "host-1").await;
            volumes.create(&name("web"), DISK * BLOCK).await.expect("made");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            for block in 0..2048 {
                write(&volume, block * BLOCK, &[1; BLOCK_BYTES]).await;
            }
            volume.flush().await.expect("flushed");
            let volume = Arc::new(volume);
            let id = volume.shared().now().state.map.node.expect("a map").extent();
            let tidying = {
                let volume = Arc::clone(&volume);
                // A block a second.
                spawn(async move { volume.tidy(&[id].into(), Some(BLOCK)).await })
            };
            sleep(Duration::from_secs(3)).await;
            let start = now();
            volume.close().await.expect("closed");
            assert!(now().saturating_since(start) < Duration::from_secs(1));
            tidying.await.expect("it ended");
        });
    }
}
