//! Another key for a volume: its secret stays, and so does every block; its next head has the
//! secret wrapped by the new key.
//!
//! Invariants
//! - I1 One put changes the key. Before it the old key opens the volume, after it the new one,
//!   whatever happens in between, and at no instant none.
//! - I2 Nothing is put before both keys were tried: the old one unwraps the secret, and what the
//!   new one wrapped is unwrapped again.

use super::Volumes;
use crate::crypt::VolumeKey;
use crate::names::VolumeName;
use crate::properties::Properties;
use mica_block::{Error, ErrorKind, Result};

impl Volumes {
    /// Lets `new` open a volume that nobody has open, and the key at hand no more. Returns false if
    /// `new` is its key already. Clones keep the key that they have.
    ///
    /// Heads that have the secret wrapped by the old key are deleted. Whoever has copied one, and
    /// has that key, has the secret: only a copy of the volume that is encrypted from scratch has
    /// another.
    ///
    /// # Errors
    /// `Denied` if it is open, or the key at hand is another or none; `Invalid` if it is not
    /// encrypted; otherwise what the store reports.
    pub async fn rekey(&self, name: &VolumeName, new: &VolumeKey) -> Result<bool> {
        let heads = self.heads(name);
        heads.rekey(|properties| self.rewrapped(name, properties, new)).await
    }

    /// `properties` with the secret wrapped by `new`; `None` if it is.
    fn rewrapped(
        &self,
        name: &VolumeName,
        properties: &Properties,
        new: &VolumeKey,
    ) -> Result<Option<Properties>> {
        let Some(secret) = &properties.secret else {
            let what = format!("volume {} is not encrypted: it has no key", name.as_str());
            return Err(Error::new(ErrorKind::Invalid, what));
        };
        if new.unwrap(secret).is_some() {
            return Ok(None);
        }
        self.access(name, properties)?;
        let old = self.key.as_deref();
        let wrapped = old.and_then(|old| old.rewrap(secret, new, || self.environment.random()));
        // I2: `access` found that the old key is the one.
        let wrapped = wrapped.filter(|wrapped| new.unwrap(wrapped).is_some());
        let wrapped = wrapped.ok_or_else(|| {
            let what = format!("volume {}: its secret cannot be wrapped again", name.as_str());
            Error::new(ErrorKind::Corrupt, what)
        })?;
        Ok(Some(Properties { secret: Some(wrapped), ..*properties }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::head::{Head, Life};
    use crate::heads::Claimed;
    use crate::testing::{environment, kind, memory, name, read, run, volumes, write};
    use mica_block::{Manage, Objects};
    use mica_store::object::{FaultyObjects, FaultyOptions, MemoryObjects, ObjectOperation};
    use std::sync::Arc;

    const ENCRYPTED: u64 = 2;

    fn other() -> Arc<VolumeKey> {
        Arc::new(VolumeKey::of_file("other.key", &[8; 32]).expect("a key"))
    }

    /// A volume with a block of ones.
    async fn made(objects: &MemoryObjects) -> Volumes {
        let objects: Arc<dyn Objects> = Arc::new(objects.clone());
        let volumes = volumes(&objects, "host-1").await;
        volumes.create_as(&name("web"), 1 << 20, kind(ENCRYPTED)).await.expect("made");
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        write(&volume, 0, &[1; 4096]).await;
        volume.close().await.expect("closed");
        volumes
    }

    async fn opens(volumes: &Volumes, key: Option<Arc<VolumeKey>>) -> bool {
        match volumes.with_key(key).open_readable(&name("web")).await {
            Ok(volume) => read(&volume, 0, 4096).await == [1; 4096],
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
                false
            }
        }
    }

    #[test]
    fn new_key_opens_the_volume_and_the_old_one_its_clones_only() {
        run(1, async {
            let objects = memory();
            let volumes = made(&objects).await;
            let (web, copy) = (name("web"), name("copy"));
            volumes.clone_volume(&web, None, &copy).await.expect("cloned");
            assert!(volumes.rekey(&web, &other()).await.expect("changed"));
            assert!(opens(&volumes, Some(other())).await);
            assert!(!opens(&volumes, Some(crate::testing::key())).await);
            volumes.open_readable(&copy).await.expect("it has the old key");
            let heads = objects.contents().into_keys();
            let heads = heads.filter(|head| head.as_str().starts_with("volumes/web/"));
            assert_eq!(heads.count(), 1, "those with the old key are gone");
            // Whoever begins again after a crash finds it done, but for the heads below.
            let old = web.head(0);
            let put = objects.put_if_absent(&old, mica_rt::Buf::from_slice(b"the old key")).await;
            assert_eq!(put.0.expect("put"), mica_block::Put::Done);
            assert!(!volumes.rekey(&web, &other()).await.expect("as it is"));
            assert!(!objects.contents().contains_key(&old));
            let with_new = volumes.with_key(Some(other()));
            let volume = with_new.open_volume(&web, Claimed::Refuse).await.expect("open");
            let refused = with_new.rekey(&web, &crate::testing::key()).await.expect_err("open");
            assert_eq!(refused.kind(), ErrorKind::Denied);
            write(&volume, 4096, &[2; 4096]).await;
            volume.close().await.expect("closed");
            assert!(with_new.rekey(&web, &crate::testing::key()).await.expect("and back"));
            assert!(opens(&volumes, Some(crate::testing::key())).await);
        });
    }

    #[test]
    fn head_that_deletes_a_volume_has_no_secret() {
        run(3, async {
            let objects = memory();
            let volumes = made(&objects).await;
            let before = objects.contents();
            volumes.delete(&name("web"), Claimed::Refuse).await.expect("deleted");
            let new = objects.contents().into_iter().find(|(name, _)| !before.contains_key(name));
            let (_, head) = new.expect("a head");
            let head = Head::decode(&head).expect("a head");
            assert_eq!((head.life, head.properties), (Life::Deleted, Properties::default()));
            volumes.create_as(&name("web"), 1 << 20, kind(ENCRYPTED)).await.expect("made again");
        });
    }

    #[test]
    fn wrong_key_and_volume_without_one_are_refused_before_anything_is_put() {
        run(2, async {
            let objects = memory();
            let volumes = made(&objects).await;
            volumes.create(&name("plain"), 1 << 20).await.expect("made");
            let before = objects.contents();
            for (key, volume, wanted) in [
                (None, "web", ErrorKind::Denied),
                (Some([9; 32]), "web", ErrorKind::Denied),
                (Some([7; 32]), "plain", ErrorKind::Invalid),
                (Some([7; 32]), "none", ErrorKind::NotFound),
            ] {
                let key = key.map(|key| VolumeKey::of_file("some.key", &key).expect("a key"));
                let volumes = volumes.with_key(key.map(Arc::new));
                let refused = volumes.rekey(&name(volume), &other()).await.expect_err("refused");
                assert_eq!(refused.kind(), wanted, "{refused:?}");
            }
            assert_eq!(objects.contents(), before);
        });
    }

    /// A process dies at each of its requests: one of the two keys opens the volume.
    #[test]
    fn crash_at_any_request_leaves_one_of_the_two_keys() {
        let mut outcomes = [0, 0];
        for seed in 0..60 {
            run(seed, async {
                let objects = memory();
                drop(made(&objects).await);
                let options = FaultyOptions {
                    only: Some(if seed % 3 == 0 {
                        ObjectOperation::Delete
                    } else {
                        ObjectOperation::Put
                    }),
                    hung: 0.5,
                    lost: 0.3,
                    seed,
                    ..FaultyOptions::default()
                };
                let dying: Arc<dyn Objects> =
                    Arc::new(FaultyObjects::new(Arc::new(objects.clone()), options));
                let opened = Volumes::open(dying, environment("host-1"), 1 << 20).await;
                let dying = opened.expect("a store").with_key(Some(crate::testing::key()));
                let limit = std::time::Duration::from_secs(30);
                let _ = mica_rt::timeout(limit, dying.rekey(&name("web"), &other())).await;
                let objects: Arc<dyn Objects> = Arc::new(objects);
                let after = volumes(&objects, "host-2").await;
                let (old, new) = (
                    opens(&after, Some(crate::testing::key())).await,
                    opens(&after, Some(other())).await,
                );
                assert!(old != new, "seed {seed}: {old} {new}");
                outcomes[usize::from(new)] += 1;
            });
        }
        assert!(outcomes.iter().all(|count| *count > 5), "{outcomes:?}");
    }
}
