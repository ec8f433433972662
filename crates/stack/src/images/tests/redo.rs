//! What a writer that died left, and who may have it.

use super::{folder_with_image, images, names_in, options};
use crate::{
    Format, ImageOptions, RedoPlace, open, open_writable, redo_folder, redo_folder_of_owner,
};
use mica_block::{Disk, ErrorKind, Images as _, Manage, Result};
use mica_qcow2::ChainOptions;
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_rt::{Backend, Buf, Executor};
use mica_store::Locking;
use mica_units::{GuestOffset, GuestRange};
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

const CLUSTER: u64 = 65536;

/// An empty image, and a place for the logs of its writers.
struct Place {
    _folder: TempDir,
    image: PathBuf,
    memory: PathBuf,
    executor: Executor,
}

impl Place {
    fn new() -> Self {
        let (folder, image) = folder_with_image();
        let memory = folder.path().join("memory");
        std::fs::create_dir(&memory).unwrap();
        let executor = Executor::new(Backend::Auto).unwrap();
        let new = images(&image).open_writable(&image).unwrap().store;
        let plan = ImageWish::default().plan(1 << 20).unwrap();
        executor.block_on(create(plan, Stores { image: &*new, data: None })).unwrap();
        Self { _folder: folder, image, memory, executor }
    }

    fn options(&self, locking: Locking) -> ImageOptions {
        let redo = RedoPlace::Directory(self.memory.clone());
        ImageOptions { redo, locking, ..options() }
    }

    fn open_writable(&self, locking: Locking) -> Result<Arc<dyn Manage>> {
        let chain = ChainOptions::default();
        let options = self.options(locking);
        self.executor.block_on(open_writable(&self.image, Format::Qcow2, options, &chain))
    }

    /// What is written is not flushed.
    fn write(&self, disk: &dyn Disk, byte: u8) {
        self.executor.block_on(async {
            let buf = Buf::from_slice(&[byte; 512]);
            disk.write(GuestOffset::new(CLUSTER), buf).await.0.unwrap();
        });
    }

    fn shown(&self, disk: &dyn Disk) -> u8 {
        let range = GuestRange::new(GuestOffset::new(CLUSTER), 512).unwrap();
        self.executor.block_on(async {
            let extents = disk.plan(range, Vec::new()).finish().await.unwrap();
            let (read, buf) = disk.read(&extents[0], Buf::new(512)).await;
            read.unwrap();
            buf[0]
        })
    }

    /// What a read-only opener sees.
    fn read(&self, locking: Locking) -> u8 {
        let chain = ChainOptions::default();
        let opened = open(&self.image, Format::Qcow2, self.options(locking), &chain);
        self.shown(&*self.executor.block_on(opened).unwrap())
    }

    fn logs(&self) -> usize {
        names_in(&redo_folder(&self.memory).unwrap()).len()
    }
}

/// The log of a writer that died does not disturb readers, unless a writer may live.
#[test]
fn image_of_a_dead_writer_is_read_with_what_it_left() {
    let place = Place::new();
    let written = place.open_writable(Locking::On).unwrap();
    place.write(&*written, 7);
    assert_eq!(place.read(Locking::ForceShare), 0, "somebody may be writing");
    // Without a close, as if it were killed.
    drop(written);
    assert_eq!(place.logs(), 1);
    assert_eq!((place.read(Locking::On), place.read(Locking::ForceShare)), (7, 0));
    assert_eq!(place.logs(), 1, "a reader leaves it as it is");
    let again = place.open_writable(Locking::On).unwrap();
    assert_eq!((place.shown(&*again), place.logs()), (7, 0));
    place.executor.block_on(again.close()).unwrap();
    drop(again);
    assert_eq!(place.read(Locking::ForceShare), 7);
}

/// The story: a writer that took no lock of the image, or whose file system has none, was alive; a
/// reader that opened the image got its lock, and applied that writer's log to what it read.
#[test]
fn log_of_a_living_writer_is_its_own_though_it_locks_no_image() {
    let place = Place::new();
    let written = place.open_writable(Locking::Off).unwrap();
    place.write(&*written, 7);
    assert_eq!(place.read(Locking::On), 0, "its writer lives");
    let refused = place.open_writable(Locking::Off).err().expect("its writer lives");
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    assert_eq!((place.shown(&*written), place.logs()), (7, 1));
    drop(written);
    assert_eq!(place.read(Locking::On), 7, "now it is dead");
}

/// The story: root read an image whose writer, another user's, had died; it saw what had been
/// flushed, and was told that the rest is lost.
#[test]
fn root_reads_what_the_owner_of_an_image_left() {
    const OWNER: u32 = 12_345;
    if rustix::process::geteuid().as_raw() != 0 {
        eprintln!("SKIPPED: this is not root");
        return;
    }
    let place = Place::new();
    let written = place.open_writable(Locking::On).unwrap();
    place.write(&*written, 7);
    drop(written);
    let folder = redo_folder(&place.memory).unwrap();
    let theirs = place.memory.join(format!("mica-{OWNER}"));
    std::fs::rename(&folder, &theirs).unwrap();
    let log = theirs.join(names_in(&theirs).first().unwrap());
    for path in [&log, &theirs, &place.image] {
        chown(path, Some(OWNER), None).unwrap();
    }
    assert_eq!(redo_folder_of_owner(&place.memory, &place.image), Some(theirs.clone()));
    assert_eq!((place.read(Locking::On), place.read(Locking::ForceShare)), (7, 0));
    let refused = place.open_writable(Locking::On).err().expect("it is another user's");
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    // A user who is not the owner is not believed.
    chown(&log, Some(OWNER + 1), None).unwrap();
    assert_eq!(place.read(Locking::On), 0);
    assert!(log.exists());
}
