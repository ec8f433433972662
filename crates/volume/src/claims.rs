//! The numbers of writers: claims, and the boundaries below which they are void.
//!
//! Invariants
//! - I1 No number is used twice: a claim counts if its put was done, and no boundary above it was
//!   there then. Claims are deleted only below a boundary.
//! - I2 A number is greater than all that were claimed before its claimer began to look. Of those
//!   who look at the same time, one may claim a greater number before another claims a smaller one.
//! - I3 Nobody can foresee the number of a writer with a log. Otherwise a store that is put back
//!   from a copy would give that number again to another writer, and the log would be taken for
//!   that one's.

use crate::format::Id;
use crate::format::head::Life;
use crate::heads::{Heads, Named, ROUNDS_MAX};
use crate::names;
use crate::place::Writer;
use crate::put::{Patience, last_after, last_in, put};
use crate::state::State;
use mica_block::{Error, ErrorKind, ObjectName, Objects, Put, Result};
use mica_rt::Buf;

/// The highest boundary that somebody saw: where the look at claims begins. It may be old, as the
/// look after a claim decides (I1).
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenBoundary(Option<Writer>);

impl Heads {
    /// The highest boundary.
    ///
    /// # Errors
    /// `Corrupt` if something else is among the boundaries; otherwise what the store reports.
    pub(crate) async fn seen_boundary(&self) -> Result<SeenBoundary> {
        newest_boundary(&*self.objects).await.map(SeenBoundary)
    }

    /// Claims a number for a writer of `volume`, which a log names or not (I3).
    ///
    /// # Errors
    /// `Limit` if there are no more; otherwise what the store reports.
    pub(crate) async fn claim(&self, volume: Id, named: Named) -> Result<Writer> {
        let seen = self.seen_boundary().await?;
        self.claim_above(seen, volume, named).await
    }

    /// As [`Self::claim`], by who has seen a boundary.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn claim_above(
        &self,
        SeenBoundary(mut boundary): SeenBoundary,
        volume: Id,
        named: Named,
    ) -> Result<Writer> {
        let objects = &*self.objects;
        for _ in 0..ROUNDS_MAX {
            let last = newest_claim(objects, boundary).await?;
            let first = boundary.unwrap_or(Writer::FIRST);
            let next = last.map_or(Some(first), |last| last.next().map(|next| next.max(first)));
            let step = match named {
                Named::Nowhere => 0,
                Named::ByLog => self.random_step(),
            };
            let writer = next.and_then(|next| Writer::new(next.number() + step));
            let writer = writer.ok_or_else(|| {
                let what = format!("{} has no writer numbers left", objects.name());
                Error::new(ErrorKind::Limit, what)
            })?;
            let claim = self.head(0, volume, Life::Open { writer, sequence: 0 }, State::default());
            let claim = Buf::from_slice(&claim.encode());
            if put(objects, &writer.claim(), claim, Patience::VERB).await? == Put::Exists {
                continue;
            }
            // Claims that were not found were deleted behind a boundary: this one is above it, or
            // does not count (I1).
            boundary = newest_boundary(objects).await?;
            if boundary.is_none_or(|boundary| boundary <= writer) {
                return Ok(writer);
            }
            // Collectors look for none where it is. What is left of it is of no harm.
            if let Err(error) = objects.delete(&writer.claim()).await {
                tracing::debug!(%error, "a claim that is void stays");
            }
        }
        let what = format!("other hosts keep claiming numbers in {}: try again", objects.name());
        Err(Error::new(ErrorKind::Io, what))
    }

    /// Numbers that are left out: few enough for 16 million writers with logs at the least.
    fn random_step(&self) -> u64 {
        let [.., low, high] = self.environment.random();
        u16::from_le_bytes([low, high]).into()
    }
}

/// The greatest writer that was claimed, as far as claims were not deleted; some of those below
/// `boundary` are left out. In a pool a folder of claims stays when it is empty, and looking into
/// each that there ever was would make every opening slower than the one before.
///
/// # Errors
/// `Corrupt` if something else is among the claims; otherwise what the store reports.
async fn newest_claim(objects: &dyn Objects, boundary: Option<Writer>) -> Result<Option<Writer>> {
    let all = names::claims();
    let folder = match boundary.and_then(Writer::folder_before) {
        Some(before) => last_after(objects, &all, &before).await?,
        None => last_in(objects, &all).await?,
    };
    let Some(folder) = folder else { return Ok(None) };
    let Some(claim) = last_in(objects, &folder).await? else { return Ok(None) };
    let writer = Writer::from_claim(&claim);
    writer.map(Some).ok_or_else(|| stranger(&claim, objects, "claim of a writer"))
}

/// The highest boundary.
///
/// # Errors
/// As [`newest_claim`].
async fn newest_boundary(objects: &dyn Objects) -> Result<Option<Writer>> {
    let Some(boundary) = last_in(objects, &names::boundaries()).await? else { return Ok(None) };
    let writer = Writer::from_boundary(&boundary);
    writer.map(Some).ok_or_else(|| stranger(&boundary, objects, "boundary of claims"))
}

fn stranger(name: &ObjectName, objects: &dyn Objects, wanted: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{name} of {} is not a valid {wanted}", objects.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::CollectOptions;
    use crate::environment::Environment;
    use crate::testing::{memory, name, run};
    use crate::volumes::Volumes;
    use mica_block::{Entry, LocalFuture, Object, PutFuture};
    use mica_rt::{join_all, sleep};
    use mica_store::object::{FaultyObjects, FaultyOptions, MemoryObjects, ObjectOperation};
    use parking_lot::Mutex;
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    /// A store whose folders stay, empty or not: who lists them looks into each.
    #[derive(Clone)]
    struct Pool {
        inner: MemoryObjects,
        /// The folders of claims that there ever were, and how many were looked into.
        claims: Arc<Mutex<(BTreeSet<String>, usize)>>,
    }

    impl Objects for Pool {
        fn name(&self) -> String {
            self.inner.name()
        }

        fn is_far(&self) -> bool {
            self.inner.is_far()
        }

        fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
            self.inner.open(name)
        }

        fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
            if Writer::from_claim(name).is_some() {
                let (folder, _) = name.as_str().rsplit_once('/').expect("it has one");
                self.claims.lock().0.insert(folder.to_owned());
            }
            self.inner.put_if_absent(name, content)
        }

        fn list(
            &self,
            folder: Option<&ObjectName>,
            after: Option<&ObjectName>,
        ) -> LocalFuture<'static, Result<Vec<Entry>>> {
            if folder == Some(&names::claims()) {
                let (folders, looked_into) = &mut *self.claims.lock();
                let is_after =
                    |at: &&String| after.is_none_or(|after| at.as_str() > after.as_str());
                *looked_into += folders.iter().filter(is_after).count();
            }
            self.inner.list(folder, after)
        }

        fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
            self.inner.delete(name)
        }
    }

    /// The story: in a pool each opening with a log was slower than the one before, for ever: it
    /// looked into a folder for each writer that there had ever been. So did each collection.
    #[test]
    fn what_a_claim_costs_does_not_grow_with_those_that_were_deleted() {
        run(1, async {
            let pool = Pool { inner: memory(), claims: Arc::default() };
            let next = AtomicU64::new(1);
            let random = move || {
                let next = next.fetch_add(1, Ordering::Relaxed);
                let mut id = [0; 16];
                id[..8].copy_from_slice(&next.to_le_bytes());
                // The steps are longer than a folder.
                id[14..].copy_from_slice(
                    &(8192 + u16::try_from(next % 1000).expect("small")).to_le_bytes(),
                );
                id
            };
            let environment = Environment::new("host", || 1, random);
            let objects: Arc<dyn Objects> = Arc::new(pool.clone());
            let volumes = Volumes::open_or_make(objects, environment, 1 << 20).await;
            let volumes = volumes.expect("a store");
            let heads = volumes.heads(&name("web"));
            let mut last = None;
            for round in 0..20 {
                pool.claims.lock().1 = 0;
                let claimed = heads.claim([1; 16], Named::ByLog).await.expect("claimed");
                assert!(Some(claimed) > last, "numbers are never used again");
                last = Some(claimed);
                let looked_into = pool.claims.lock().1;
                assert!(looked_into <= 1, "round {round}: {looked_into}");
                pool.claims.lock().1 = 0;
                let options = CollectOptions::default();
                volumes.collect(options, &mut |_| ()).await.expect("collected");
                let looked_into = pool.claims.lock().1;
                assert!(looked_into <= 2, "collection {round}: {looked_into}");
            }
            assert!(pool.claims.lock().0.len() > 10);
        });
    }

    fn names_in(objects: &MemoryObjects, folder: &str) -> Vec<String> {
        let names = objects.contents().into_keys().map(|name| name.as_str().to_owned());
        names.filter(|name| name.starts_with(folder)).collect()
    }

    /// What a collector leaves that cannot delete, or dies, the next one finds, though it looks
    /// only from the lowest boundary on.
    #[test]
    fn claims_that_a_collector_left_are_found_by_the_next() {
        for refused in [1.0, 0.5, 0.1] {
            run(1, async {
                let memory = memory();
                let objects: Arc<dyn Objects> = Arc::new(memory.clone());
                let volumes = crate::testing::volumes(&objects, "host").await;
                let options = FaultyOptions {
                    only: Some(ObjectOperation::Delete),
                    refused,
                    ..FaultyOptions::default()
                };
                let failing: Arc<dyn Objects> =
                    Arc::new(FaultyObjects::new(Arc::clone(&objects), options));
                let failing = crate::testing::volumes(&failing, "collector").await;
                let heads = volumes.heads(&name("web"));
                for _ in 0..4 {
                    for _ in 0..5 {
                        heads.claim([1; 16], Named::ByLog).await.expect("claimed");
                    }
                    let options = CollectOptions::default();
                    failing.collect(options, &mut |_| ()).await.expect("collected");
                }
                let options = CollectOptions::default();
                volumes.collect(options, &mut |_| ()).await.expect("collected");
                assert_eq!(names_in(&memory, "writers/"), [""; 0], "{refused}");
                assert_eq!(names_in(&memory, "boundaries/").len(), 1, "{refused}");
            });
        }
    }

    /// A put of a claim is under way for long, and meanwhile a boundary is put above it.
    #[test]
    fn claim_that_is_void_when_it_is_put_is_taken_back() {
        run(1, async {
            let memory = memory();
            let objects: Arc<dyn Objects> = Arc::new(memory.clone());
            let quick = crate::testing::volumes(&objects, "quick").await;
            let options = FaultyOptions {
                only: Some(ObjectOperation::Put),
                slow: 1.0,
                slow_by: Duration::from_secs(5),
                ..FaultyOptions::default()
            };
            let slow: Arc<dyn Objects> =
                Arc::new(FaultyObjects::new(Arc::clone(&objects), options));
            let slow = crate::testing::volumes(&slow, "slow").await;
            let (slow, quick_heads) = (slow.heads(&name("web")), quick.heads(&name("web")));
            let mut claimed = None;
            let both: [LocalFuture<'_, ()>; 2] = [
                Box::pin(async {
                    claimed = Some(slow.claim([1; 16], Named::Nowhere).await.expect("claimed"));
                }),
                Box::pin(async {
                    sleep(Duration::from_secs(1)).await;
                    // It is another number than the one that is under way.
                    let above = Writer::new(9).expect("a number");
                    objects
                        .put_if_absent(&above.claim(), Buf::from_slice(&[0]))
                        .await
                        .0
                        .expect("put");
                    let options = CollectOptions::default();
                    quick.collect(options, &mut |_| ()).await.expect("collected");
                }),
            ];
            join_all(both).await;
            let claimed = claimed.expect("done");
            assert_eq!(claimed.number(), 10);
            assert_eq!(names_in(&memory, "writers/"), [claimed.claim().as_str()]);
            let next = quick_heads.claim([1; 16], Named::Nowhere).await.expect("claimed");
            assert!(next > claimed);
        });
    }
}
