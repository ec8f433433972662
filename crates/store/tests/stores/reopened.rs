//! Files that are changed while their descriptor is closed, with image locks.

use crate::{on_each_backend, read};
use mica_block::{ContentProof, ErrorKind, LocalFuture, Result, Store, read_exact};
use mica_store::{CacheMode, FileStore, Handles, Located, Locking};
use mica_units::HostOffset;
use std::fs::{self, File, FileTimes};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

/// The image is unchanged if its first bytes are.
struct FirstBytes {
    were: [u8; 4],
    asked: AtomicUsize,
}

struct Shared(Arc<FirstBytes>);

impl ContentProof for Shared {
    fn holds(&self, store: Arc<dyn Store>) -> LocalFuture<'static, Result<bool>> {
        let proof = Arc::clone(&self.0);
        proof.asked.fetch_add(1, Ordering::Relaxed);
        Box::pin(
            async move { Ok(read_exact(&*store, HostOffset::ZERO, 4).await?[..] == proof.were) },
        )
    }
}

/// An image that was last written an hour ago, and others that take its descriptor.
struct Layers {
    path: PathBuf,
    image: FileStore,
    others: Vec<FileStore>,
}

impl Layers {
    fn open(folder: &Path, cache: CacheMode) -> Self {
        let paths: Vec<_> = (0..9).map(|number| folder.join(format!("layer{number}"))).collect();
        let handles = Handles::new(4);
        let open = |path: &PathBuf| {
            fs::write(path, [1; 8192]).unwrap();
            set_back(path, old());
            let mut located = Located::find(path).unwrap();
            FileStore::new_shared(&mut located, cache, Locking::On, &handles).unwrap()
        };
        let mut stores = paths.iter().map(open);
        let image = stores.next().unwrap();
        Self { path: paths[0].clone(), image, others: stores.collect() }
    }

    fn prove(&self) -> Arc<FirstBytes> {
        let proof = Arc::new(FirstBytes { were: [1; 4], asked: AtomicUsize::new(0) });
        self.image.content().set(Arc::new(Shared(Arc::clone(&proof))));
        proof
    }

    /// Makes the image give up its descriptor.
    async fn pass_by(&self) {
        for _ in 0..2 {
            for other in &self.others {
                read(other, 0, 4).await.unwrap();
            }
        }
    }
}

fn old() -> SystemTime {
    SystemTime::now() - Duration::from_secs(3600)
}

fn set_back(path: &Path, to: SystemTime) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_times(FileTimes::new().set_modified(to)).unwrap();
}

/// Writes in place, and sets the time of the last write to what it was.
fn write_unseen(path: &Path, at: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let before = fs::metadata(path).unwrap().modified().unwrap();
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, at).unwrap();
    set_back(path, before);
}

/// Once, only the time of the last write was compared: changed tables with that time set back were
/// read as if nothing had happened.
#[test]
fn tables_that_changed_under_the_same_time_are_refused_until_they_are_restored() {
    let folder = tempfile::tempdir().unwrap();
    on_each_backend(|| async {
        for cache in [CacheMode::Writeback, CacheMode::None] {
            let layers = Layers::open(folder.path(), cache);
            let proof = layers.prove();
            assert_eq!(read(&layers.image, 4, 4).await.unwrap(), [1; 4]);
            layers.pass_by().await;
            write_unseen(&layers.path, 0, &[9; 4]);
            for _ in 0..2 {
                let error = read(&layers.image, 4, 4).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Io);
                assert!(error.to_string().contains("its tables differ"), "{error}");
            }
            let asked = proof.asked.load(Ordering::Relaxed);
            assert!(asked <= 2, "asked {asked} times: a refusal is remembered");
            write_unseen(&layers.path, 0, &[1; 4]);
            assert_eq!(read(&layers.image, 4, 4).await.unwrap(), [1; 4]);
        }
    });
}

#[test]
fn backup_that_links_and_changes_modes_breaks_no_disk() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("backup");
    on_each_backend(|| async {
        for is_proved in [true, false] {
            let layers = Layers::open(folder.path(), CacheMode::Writeback);
            let proof = is_proved.then(|| layers.prove());
            for step in 0..3 {
                layers.pass_by().await;
                match step {
                    0 => fs::hard_link(&layers.path, &link).unwrap(),
                    1 => fs::set_permissions(&layers.path, fs::Permissions::from_mode(0o600))
                        .unwrap(),
                    _ => fs::remove_file(&link).unwrap(),
                }
                // Many at once: one of them proves it, the others wait.
                let reads = (0..20).map(|_| read(&layers.image, 4, 4));
                for bytes in mica_rt::join_all(reads).await {
                    assert_eq!(bytes.unwrap(), [1; 4]);
                }
                assert_eq!(layers.image.len().unwrap(), 8192);
            }
            // Changed just now, so that timestamps may prove nothing: but it is not proved at each
            // read.
            let asked = proof.map(|proof| proof.asked.load(Ordering::Relaxed));
            assert!(asked.is_none_or(|asked| (3..=6).contains(&asked)), "{asked:?}");
        }
    });
}

#[test]
fn read_that_is_cancelled_while_the_file_is_proved_leaves_that_to_the_next() {
    let folder = tempfile::tempdir().unwrap();
    on_each_backend(|| async {
        let layers = Layers::open(folder.path(), CacheMode::Writeback);
        layers.prove();
        layers.pass_by().await;
        fs::set_permissions(&layers.path, fs::Permissions::from_mode(0o640)).unwrap();
        let given_up = layers.image.read_at(mica_rt::Buf::new(4), HostOffset::ZERO);
        drop(given_up);
        assert_eq!(read(&layers.image, 4, 4).await.unwrap(), [1; 4]);
    });
}
