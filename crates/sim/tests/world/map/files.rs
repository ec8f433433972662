//! Chains in real files, whose descriptors are given up and opened again.

use mica_block::{Disk, ErrorKind, Images, Result};
use mica_qcow2::{Chain, ChainOptions};
use mica_qcow2_format::{L2Entry, Version};
use mica_rt::{Backend, Buf, Executor};
use mica_sim::{TinyImage, TinySpec};
use mica_stack::{FileImages, ImageOptions};
use mica_store::Handles;
use mica_units::{GuestOffset, GuestRange};
use std::fs::{self, File, FileTimes};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

const CLUSTER: u64 = 65536;
const LAYERS: u64 = 10;

/// A chain in which layer n has cluster n, filled with n + 1; the base has cluster 20, too. A few
/// descriptors have to suffice for it.
struct Layers {
    folder: TempDir,
    chain: Chain,
    /// Where the base's L2 entry of cluster 0 is.
    entry_at: u64,
}

impl Layers {
    async fn indexed() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut entry_at = 0;
        for number in 0..LAYERS {
            let mut image = TinyImage::new(&TinySpec {
                cluster_bits: 16,
                version: Version::V3,
                extended: false,
                disk_bytes: 32 * CLUSTER,
                backing: number.checked_sub(1).map(|below| (format!("{below}.qcow2"), "qcow2")),
            });
            let at = fill(&mut image, number, number as u8 + 1);
            if number == 0 {
                entry_at = at as u64;
                fill(&mut image, 20, 21);
            }
            let path = folder.path().join(format!("{number}.qcow2"));
            fs::write(path, image.bytes()).unwrap();
        }
        let top = folder.path().join(format!("{}.qcow2", LAYERS - 1));
        let options = ImageOptions::new(Handles::new(4));
        let images: Arc<dyn Images> = Arc::new(FileImages::new(&top, options).unwrap());
        let chain = Chain::open(images, &top, &ChainOptions::default()).await.unwrap();
        chain.build_index(&mut |_| ControlFlow::Continue(())).await.unwrap();
        assert_eq!(chain.indexed_layers() as u64, LAYERS - 1);
        Self { folder, chain, entry_at }
    }

    fn base(&self) -> PathBuf {
        self.folder.path().join("0.qcow2")
    }

    async fn read(&self, cluster: u64) -> Result<u8> {
        let range = GuestRange::new(GuestOffset::new(cluster * CLUSTER), 512).unwrap();
        let extents = self.chain.plan(range, Vec::new()).finish().await?;
        let (result, buf) = self.chain.read(&extents[0], Buf::new(512)).await;
        result.map(|()| buf[0])
    }

    /// Reads all clusters except the base's, so that its descriptor is given up.
    async fn pass_by(&self) {
        for _ in 0..2 {
            for cluster in 1..LAYERS {
                assert_eq!(u64::from(self.read(cluster).await.unwrap()), cluster + 1);
            }
        }
    }
}

/// Gives `cluster` a cluster of the file, full of `byte`; returns where its entry is.
fn fill(image: &mut TinyImage, cluster: u64, byte: u8) -> usize {
    let host = image.allocate();
    image.put(host.bytes() as usize, &[byte; CLUSTER as usize]);
    image.set(cluster, L2Entry::Data(host))
}

fn on_real_files(test: impl AsyncFn()) {
    Executor::new(Backend::Auto).unwrap().block_on(test());
}

/// An entry of the base was made to name another cluster, and the time of the last write set back.
/// The index silently kept naming the old one.
#[test]
fn base_whose_tables_changed_under_the_same_time_is_refused() {
    on_real_files(async || {
        let layers = Layers::indexed().await;
        assert_eq!(layers.read(0).await.unwrap(), 1);
        layers.pass_by().await;
        let base = layers.base();
        let modified = fs::metadata(&base).unwrap().modified().unwrap();
        let file = File::options().read(true).write(true).open(&base).unwrap();
        let mut entries = [0; 21 * 8];
        file.read_exact_at(&mut entries, layers.entry_at).unwrap();
        file.write_all_at(&entries[20 * 8..], layers.entry_at).unwrap();
        file.set_times(FileTimes::new().set_modified(modified)).unwrap();
        let error = layers.read(0).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("its tables differ"), "{error}");
        // With its old content it is served again.
        file.write_all_at(&entries[..8], layers.entry_at).unwrap();
        file.set_times(FileTimes::new().set_modified(modified)).unwrap();
        assert_eq!(layers.read(0).await.unwrap(), 1);
    });
}

#[test]
fn base_that_is_linked_and_gets_another_mode_is_still_served() {
    on_real_files(async || {
        let layers = Layers::indexed().await;
        let link = layers.folder.path().join("backup");
        layers.pass_by().await;
        fs::hard_link(layers.base(), &link).unwrap();
        assert_eq!(layers.read(0).await.unwrap(), 1);
        layers.pass_by().await;
        fs::set_permissions(layers.base(), fs::Permissions::from_mode(0o400)).unwrap();
        fs::remove_file(&link).unwrap();
        assert_eq!(layers.read(0).await.unwrap(), 1);
        assert_eq!(layers.read(20).await.unwrap(), 21);
    });
}
