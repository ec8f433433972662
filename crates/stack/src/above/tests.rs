use super::*;
use crate::mark::{CONTENT_BYTES_MAX, KEY, SUFFIX};
use crate::temporary::NEW_ABOVE;
use crate::{Beneath, Format, MayWrite, NewLayer, NewLayerWish};
use mica_block::Renaming;
use mica_qcow2::ChainOptions;
use mica_qcow2_format::field;
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_rt::{Backend, Executor};
use mica_store::Handles;
use std::fs::File;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use tempfile::TempDir;

const LEN: u64 = 1 << 20;

fn executor() -> Executor {
    Executor::new(Backend::Pool).expect("an executor")
}

fn options() -> ImageOptions {
    ImageOptions::new(Handles::new(16))
}

/// A folder with `vm.qcow2` and `vm-2.qcow2` on top of it.
fn world() -> (TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().canonicalize().expect("a folder").join("vm.qcow2");
    File::create(&path).expect("a file");
    let images = FileImages::to_write(&path, options(), MayWrite::new_file()).expect("images");
    let plan = ImageWish::default().plan(LEN).expect("a plan");
    let store = images.open_writable(&path).expect("it opens").store;
    executor().block_on(create(plan, Stores { image: &*store, data: None })).expect("created");
    drop(store);
    let above = path.with_file_name("vm-2.qcow2");
    let wish = NewLayerWish { path: above.clone(), image: ImageWish::default(), reuse: false };
    let made = async {
        let beneath = Beneath { active: &path, len: LEN, is_raw: false };
        let new = NewLayer::make(&images, beneath, wish).await?;
        new.rename().await?;
        new.sync().await.map(|()| new.keep())
    };
    executor().block_on(made).expect("made");
    (folder, path, above)
}

fn active(named: &Path) -> Result<Active> {
    executor().block_on(active_layer(named, options()))
}

fn may_write(path: &Path) -> Result<MayWrite> {
    executor().block_on(MayWrite::check(path, &options()))
}

fn refusal(named: &Path) -> String {
    let error = active(named).err().expect("refused");
    assert!(error.to_string().contains("remove"), "it says what to do: {error}");
    error.to_string()
}

#[test]
fn image_without_a_mark_is_written_itself() {
    let (_folder, _, above) = world();
    assert_eq!(active(&above).expect("found").path, above);
    may_write(&above).expect("it may be written");
}

#[test]
fn frozen_image_is_followed_by_any_name_and_refused_to_who_would_write_it() {
    let (folder, path, above) = world();
    let link = folder.path().join("link.qcow2");
    symlink(&path, &link).expect("a link");
    for name in [&path, &link] {
        assert_eq!(active(name).expect("found").path, above);
        let refused = may_write(name).expect_err("frozen");
        assert!(refused.to_string().contains("vm-2.qcow2"), "{refused}");
    }
}

#[test]
fn image_is_written_only_with_leave_and_not_if_it_was_frozen_since_that_was_given() {
    let (_folder, path, above) = world();
    let mark = Mark::of(&path, std::fs::metadata(&path).expect("there").uid());
    let mark = mark.expect("read").expect("it is frozen");
    let open = |may_write: MayWrite| {
        let images = FileImages::to_write(&path, options(), may_write).expect("images");
        images.open_writable(&path).map(drop)
    };
    let reader = FileImages::new(&path, options()).expect("images");
    assert_eq!(reader.open_writable(&path).err().expect("refused").kind(), ErrorKind::Denied);
    assert_eq!(reader.open_upgradable(&path).err().expect("refused").kind(), ErrorKind::Denied);
    mark.remove().expect("removed");
    let early = may_write(&path).expect("it is no longer frozen");
    open(early.clone()).expect("it may be written");
    Mark::put(&path, &above).expect("marked");
    for may_write in [early, MayWrite::new_file()] {
        let refused = open(may_write).expect_err("frozen meanwhile");
        assert!(refused.to_string().contains("vm-2.qcow2"), "{refused}");
    }
    open(MayWrite::to_repair()).expect("a repair is asked for");
}

#[test]
fn layer_whose_writer_was_killed_before_it_was_closed_is_frozen_all_the_same() {
    let (_folder, path, above) = world();
    let file = OpenOptions::new().write(true).open(&path).expect("it opens");
    // As if it named a log.
    file.write_all_at(&[7], field::AUTOCLEAR as u64).expect("written");
    assert_eq!(active(&path).expect("found").path, above);
    may_write(&path).expect_err("frozen");
}

#[test]
fn nothing_is_written_while_it_is_unclear_where_the_disk_is() {
    let (folder, path, above) = world();
    let aside = folder.path().join("aside");
    std::fs::rename(&above, &aside).expect("moved");
    assert!(refusal(&path).contains("missing"));
    std::fs::write(&above, b"no image at all").expect("written");
    assert!(refusal(&path).contains("cannot be read"));
    // An image of its own.
    std::fs::copy(&path, &above).expect("copied");
    assert!(refusal(&path).contains("is no longer based on it"));
    std::fs::rename(&aside, &above).expect("moved");
    assert_eq!(active(&path).expect("found").path, above);
    let mark = path.with_file_name("vm.qcow2.mica-above");
    std::fs::write(&mark, b"above: /etc/passwd\n").expect("written");
    assert!(refusal(&path).contains("cannot be opened"));
    for content in [&b""[..], b"above: \n", b"above: vm-2.qcow2", b"below: vm-2.qcow2\n"] {
        std::fs::write(&mark, content).expect("written");
        assert!(refusal(&path).contains("damaged"), "{content:?}");
    }
    std::fs::write(&mark, b"above: vm-2.qcow2\n").expect("written");
    // Others may come in between, as a backup's state does.
    let between = path.with_file_name("between.qcow2");
    std::fs::rename(&above, &between).expect("moved");
    overlay(&above, "between.qcow2");
    assert_eq!(active(&path).expect("found").path, above);
    // Who wants the old state back says so.
    std::fs::remove_file(&mark).expect("removed");
    assert_eq!(active(&path).expect("found").path, path);
}

/// Makes an empty image at `path` that stands on the one called `base`.
fn overlay(path: &Path, base: &str) {
    let wish = ImageWish {
        backing_name: Some(base.into()),
        backing_format: Some("qcow2".to_owned()),
        ..ImageWish::default()
    };
    File::create(path).expect("a file");
    let images = FileImages::to_write(path, options(), MayWrite::to_repair()).expect("images");
    let store = images.open_writable(path).expect("it opens").store;
    let plan = wish.plan(LEN).expect("a plan");
    executor().block_on(create(plan, Stores { image: &*store, data: None })).expect("created");
}

/// The story: a commit was killed when the active layer named the base already, and the marks still
/// led there through the layers in between; a server that was started by the base's name did not
/// find the disk.
#[test]
fn marks_lead_past_layers_that_a_killed_merge_took_out_and_are_put_right() {
    let (_folder, path, above) = world();
    let (third, top) = (path.with_file_name("vm-3.qcow2"), path.with_file_name("vm-4.qcow2"));
    overlay(&third, "vm-2.qcow2");
    overlay(&top, "vm.qcow2");
    Mark::put(&above, &third).expect("marked");
    Mark::put(&third, &top).expect("marked");
    assert_eq!(active(&path).expect("found").path, top);
    // Nobody knows what is in the layers that left.
    assert!(refusal(&above).contains("is no longer based on it"));
    let mark = path.with_file_name("vm.qcow2.mica-above");
    assert_eq!(std::fs::read(&mark).expect("there"), b"above: vm-2.qcow2\n", "nothing is written");
    let opened = async {
        let chain = ChainOptions { writable: true, ..ChainOptions::default() };
        let (disk, opened) =
            crate::open_active(&path, Format::Qcow2, options(), &chain).await.expect("opened");
        disk.close().await.expect("closed");
        opened
    };
    assert_eq!(executor().block_on(opened), top);
    assert_eq!(std::fs::read(&mark).expect("there"), b"above: vm-4.qcow2\n");
    for left in [&above, &third] {
        std::fs::remove_file(left).expect("nobody needs it");
    }
    assert_eq!(active(&path).expect("found").path, top);
}

/// The story: a clone of a frozen layer was served, and merged with that layer. The mark of the
/// base, which led on to the disk that was cloned, led to the clone then.
#[test]
fn mark_that_leads_to_another_disk_than_the_one_that_was_merged_stays() {
    let (_folder, path, above) = world();
    let beside = |name: &str| path.with_file_name(name);
    let (top, clone) = (beside("vm-3.qcow2"), beside("clone.qcow2"));
    overlay(&top, "vm-2.qcow2");
    overlay(&clone, "vm.qcow2");
    let mark = || std::fs::read_to_string(beside("vm.qcow2.mica-above")).expect("there");
    let gone = std::slice::from_ref(&above);
    // The layer that is gone is where the disk itself is, as far as anybody knows.
    settle_marks(&[path.clone(), clone.clone()], gone, GoneFiles::Stay).expect("settled");
    assert_eq!(mark(), "above: vm-2.qcow2\n");
    Mark::put(&above, &top).expect("marked");
    settle_marks(&[path.clone(), clone], gone, GoneFiles::Stay).expect("settled");
    assert_eq!(mark(), "above: vm-2.qcow2\n");
    settle_marks(&[path.clone(), top], gone, GoneFiles::Stay).expect("settled");
    assert_eq!(mark(), "above: vm-3.qcow2\n");
    Mark::put(&path, &above).expect("marked");
    Mark::forget(&above).expect("unmarked");
    let refused = settle_marks(&[path.clone(), beside("clone.qcow2")], gone, GoneFiles::Go);
    assert_eq!(refused.expect_err("it would lead to nothing").kind(), ErrorKind::Denied);
    // Marks in a circle lead nowhere, nor do those of a file that is not there.
    Mark::put(&path, &above).expect("marked");
    Mark::put(&above, &above).expect("marked");
    settle_marks(&[path.clone(), beside("clone.qcow2")], gone, GoneFiles::Stay).expect("settled");
    std::fs::remove_file(&above).expect("removed");
    settle_marks(&[path.clone(), beside("clone.qcow2")], gone, GoneFiles::Stay).expect("settled");
    assert_eq!(mark(), "above: vm-2.qcow2\n");
}

#[test]
fn mark_that_anybody_may_write_is_not_followed() {
    let (_folder, path, _) = world();
    let mark = path.with_file_name("vm.qcow2.mica-above");
    std::fs::set_permissions(&mark, std::fs::Permissions::from_mode(0o666)).expect("set");
    assert!(refusal(&path).contains("stranger"));
}

#[test]
fn marks_in_a_circle_are_refused() {
    let (_folder, path, above) = world();
    std::fs::copy(&path, path.with_file_name("aside")).expect("copied");
    // The layer beneath names the one above as its own base.
    let wish = ImageWish {
        backing_name: Some("vm-2.qcow2".into()),
        backing_format: Some("qcow2".to_owned()),
        ..ImageWish::default()
    };
    let images = FileImages::to_write(&path, options(), MayWrite::to_repair()).expect("images");
    let store = images.open_writable(&path).expect("it opens").store;
    let plan = wish.plan(LEN).expect("a plan");
    executor().block_on(create(plan, Stores { image: &*store, data: None })).expect("created");
    drop(store);
    Mark::put(&above, &path).expect("marked");
    assert_eq!(active(&path).err().expect("refused").kind(), ErrorKind::Limit);
}

#[test]
fn page_says_what_the_code_does() {
    const PAGE: &str = include_str!("../../../../docs/formats/above.md");
    let rows = [
        ("SUFFIX", SUFFIX.to_owned()),
        ("NEW_ABOVE", NEW_ABOVE.to_owned()),
        ("KEY", String::from_utf8(KEY.to_vec()).expect("text")),
    ];
    for (name, value) in rows {
        assert!(PAGE.contains(&format!("| `{name}` | `{value}` |")), "{name}");
    }
    assert!(PAGE.contains(&format!("| `CONTENT_BYTES_MAX` | {CONTENT_BYTES_MAX} |")));
    let (_folder, path, _) = world();
    let mark = std::fs::read(path.with_file_name("vm.qcow2.mica-above")).expect("a mark");
    assert_eq!(mark, b"above: vm-2.qcow2\n");
}
