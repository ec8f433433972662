use super::*;
use crate::above::active_layer;
use crate::{ImageOptions, MayWrite, Names};
use mica_qcow2_tools::create::{ImagePlan, create};
use mica_rt::{Backend, Executor};
use mica_store::Handles;
use tempfile::TempDir;

const LEN: u64 = 1 << 20;

fn executor() -> Executor {
    Executor::new(Backend::Pool).expect("an executor")
}

fn options() -> ImageOptions {
    ImageOptions::new(Handles::new(16))
}

fn images(named: &Path) -> FileImages {
    FileImages::to_write(named, options(), MayWrite::new_file()).expect("images")
}

fn create_at(path: &Path, wish: &ImageWish) {
    File::create(path).expect("a file");
    let plan: ImagePlan = wish.plan(LEN).expect("a plan");
    let store = images(path).open_writable(path).expect("it opens").store;
    executor().block_on(create(plan, Stores { image: &*store, data: None })).expect("created");
}

/// A folder with an image in it.
fn world() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().canonicalize().expect("a folder").join("vm.qcow2");
    create_at(&path, &ImageWish { cluster_bytes: Some(1 << 15), ..ImageWish::default() });
    (folder, path)
}

fn wish(path: PathBuf) -> NewLayerWish {
    NewLayerWish { path, image: ImageWish::default(), reuse: false }
}

fn beneath(active: &Path) -> Beneath<'_> {
    Beneath { active, len: LEN, is_raw: false }
}

fn make(active: &Path, wish: NewLayerWish) -> Result<NewLayer> {
    executor().block_on(NewLayer::make(&images(active), beneath(active), wish))
}

/// Makes one that the chain gets.
fn put(images: &FileImages, active: &Path, wish: NewLayerWish) -> Result<PathBuf> {
    executor().block_on(async {
        let new = NewLayer::make(images, beneath(active), wish).await?;
        new.rename().await?;
        new.sync().await?;
        new.keep();
        Ok(new.path().to_owned())
    })
}

fn names_in(folder: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path()).expect("a folder");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<_> = entries.map(|entry| name(entry).into_string().expect("text")).collect();
    names.sort();
    names
}

/// The image that is written for `named`.
fn found(named: &Path) -> Result<PathBuf> {
    executor().block_on(active_layer(named, options())).map(|active| active.path)
}

#[test]
fn layer_is_like_the_one_beneath_and_is_found_from_there() {
    let (folder, path) = world();
    let above = put(&images(&path), &path, wish(folder.path().join("vm-2.qcow2"))).expect("made");
    let (_, store) = images(&path).glance(&above).expect("it opens");
    let header = executor().block_on(read_header(&store)).expect("a header");
    assert_eq!((header.cluster_bits.bytes(), header.l2_format().extended), (1 << 15, false));
    assert_eq!(header.disk_bytes(), LEN);
    let backing = header.backing.expect("it names the image");
    assert_eq!(
        (backing.name.to_str(), backing.format.as_deref()),
        (Some("vm.qcow2"), Some("qcow2"))
    );
    assert_eq!(found(&path).expect("found"), path.with_file_name("vm-2.qcow2"));
    // And on, layer by layer.
    for (active, next) in [("vm-2.qcow2", "c:3.qcow2"), ("c:3.qcow2", "vm-4.qcow2")] {
        let active = path.with_file_name(active);
        put(&images(&active), &active, wish(folder.path().join(next))).expect("made");
    }
    assert_eq!(found(&path).expect("found"), path.with_file_name("vm-4.qcow2"));
    let all = [
        "c:3.qcow2",
        "c:3.qcow2.mica-above",
        "vm-2.qcow2",
        "vm-2.qcow2.mica-above",
        "vm-4.qcow2",
        "vm.qcow2",
        "vm.qcow2.mica-above",
    ];
    assert_eq!(names_in(&folder), all);
}

#[test]
fn nothing_is_left_of_a_layer_that_the_chain_did_not_get() {
    let (folder, path) = world();
    let new = make(&path, wish(folder.path().join("vm-2.qcow2"))).expect("made");
    assert_eq!(names_in(&folder), ["vm-2.qcow2", "vm.qcow2", "vm.qcow2.mica-above.tmp"]);
    assert_eq!(found(&path).expect("found"), path, "it is not frozen yet");
    executor().block_on(async { new.rename().await }).expect("renamed");
    assert_eq!(names_in(&folder), ["vm-2.qcow2", "vm.qcow2", "vm.qcow2.mica-above"]);
    assert_eq!(found(&path).expect("found"), new.path());
    executor().block_on(async { new.undo().await }).expect("undone");
    assert_eq!(names_in(&folder), ["vm-2.qcow2", "vm.qcow2"]);
    drop(new);
    assert_eq!(names_in(&folder), ["vm.qcow2"]);
    // Also if it ended before that was undone.
    let new = make(&path, wish(folder.path().join("vm-2.qcow2"))).expect("made");
    executor().block_on(async { new.rename().await }).expect("renamed");
    drop(new);
    assert_eq!(names_in(&folder), ["vm.qcow2"]);
    // Nor of one that could not be made.
    let odd = ImageWish { cluster_bytes: Some(1000), ..ImageWish::default() };
    let odd = NewLayerWish { image: odd, ..wish(folder.path().join("vm-2.qcow2")) };
    assert_eq!(make(&path, odd).expect_err("no power of two").kind(), ErrorKind::Invalid);
    assert_eq!(names_in(&folder), ["vm.qcow2"]);
}

#[test]
fn file_that_is_there_is_taken_only_if_asked_for_and_stays() {
    let (folder, path) = world();
    let there = folder.path().join("vm-2.qcow2");
    std::fs::write(&there, b"something").expect("written");
    let refused = make(&path, wish(there.clone())).expect_err("it is there");
    assert!(refused.to_string().contains("--reuse"), "{refused}");
    assert_eq!(names_in(&folder), ["vm-2.qcow2", "vm.qcow2"]);
    let new = make(&path, NewLayerWish { reuse: true, ..wish(there.clone()) }).expect("taken");
    drop(new);
    assert_eq!(std::fs::read(&there).expect("it stays"), b"something");
}

#[test]
fn layer_is_not_made_where_the_chain_may_open_none() {
    let (_folder, path) = world();
    let elsewhere = tempfile::tempdir().expect("a folder");
    let refused = make(&path, wish(elsewhere.path().join("vm-2.qcow2"))).expect_err("elsewhere");
    assert_eq!(refused.kind(), ErrorKind::Denied);
    assert!(refused.to_string().contains("--allow-path"), "{refused}");
    assert!(names_in(&elsewhere).is_empty());
    let allowed = ImageOptions {
        allow_paths: vec![elsewhere.path().to_owned()],
        names: Names::Beside,
        ..options()
    };
    let files = FileImages::to_write(&path, allowed.clone(), MayWrite::new_file()).expect("images");
    let wanted = wish(elsewhere.path().join("vm-2.qcow2"));
    put(&files, &path, wanted).expect("made");
    let active = executor().block_on(active_layer(&path, allowed)).expect("found");
    // Its base is opened, too, though it is in no folder of the new one.
    let files =
        FileImages::to_write(&active.path, active.options, MayWrite::new_file()).expect("images");
    files.resolve(&active.path, &path).expect("permitted");
}

/// The story: a file that another process was making, as it had locked it, was emptied before that
/// was known.
#[test]
fn file_that_another_process_makes_stays_as_it_is() {
    let (folder, path) = world();
    let place = folder.path().join(".vm.qcow2.mica-new");
    std::fs::write(&place, "another's").expect("written");
    let other = File::options().read(true).write(true).open(&place).expect("it opens");
    let other = mica_rt::File::new(other.into(), mica_rt::Access::Buffered);
    // All that an image can be locked for.
    other.lock_shared(100, 110).expect("locked");
    let new = || wish(folder.path().join("vm-2.qcow2"));
    make(&path, new()).expect_err("it is locked");
    assert_eq!(std::fs::read(&place).expect("there"), b"another's");
    drop(other);
    put(&images(&path), &path, new()).expect("what is left of a killed process is taken");
    assert!(!place.exists());
}

/// The story: a process found the file that another one had just made, and locked it first. That
/// one removed it, and the layer of the other was made in a file without a name.
#[test]
fn new_file_that_another_process_could_lock_first_stays() {
    let (folder, path) = world();
    let unnamed = Unnamed::make(&folder.path().join("vm-2.qcow2"), &path, 0o600).expect("made");
    assert!(unnamed.is_new);
    let place = unnamed.path.clone();
    let other = File::options().read(true).write(true).open(&place).expect("it opens");
    let other = mica_rt::File::new(other.into(), mica_rt::Access::Buffered);
    other.lock_shared(100, 110).expect("locked");
    let refused = images(&path).open_writable(&place).err().expect("it is locked");
    unnamed.leave(&refused);
    assert!(place.exists());
    drop(other);
    // What is the matter with one that nobody has is its own.
    let unnamed = Unnamed { path: place.clone(), is_new: true };
    unnamed.leave(&Error::new(ErrorKind::Io, "the device is gone"));
    assert!(!place.exists());
}
