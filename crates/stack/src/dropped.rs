//! Files of kept states that were dropped, which a server that was killed did not remove any more.
//!
//! ```text
//! drop  the state's layer is marked as dropped into the one above ─▶ it goes there, durably
//!       ─▶ the chain goes on without it ─▶ its file is removed ─▶ its mark is (`merged.rs`)
//! ```
//!
//! What is left of a drop that did not get to its end is removed with the next state that is
//! dropped or kept.
//!
//! Invariants
//! - I1 A file is removed only if its mark counts, so that it is the file that was dropped, and
//!   nobody has written to it since, and leads to a layer of the disk's chain, which the file is no
//!   layer of.
//! - I2 Nobody has it open, be it only to read, and no image that can be found stands on it. Who
//!   has it open when its drop ends keeps it for good: an image may stand on it that was not found.
//! - I3 What the disk has is durable without it.
//! - I4 The mark goes last.
//! - I5 A mark is of a drop that took its layer out of the chain, or is at work: a layer that is
//!   there when the disk is opened, or leaves by another merge, is the user's ([`forget_drops`]).

use crate::files::{folder_of, position_of, sync_folder_of};
use crate::keep::{is_called, may_keep_state, remove_state};
use crate::merged;
use crate::overlays::check_no_overlays;
use crate::{FileImages, ImageOptions, MayWrite};
use crate::{GoneFiles, GoneImages, forget_overlays, settle_marks};
use mica_block::{Error, Images, OpenImage, Result};
use mica_store::Locking;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for the readers of this process to let go of a layer that has left its chain, and how often
/// they are asked.
const LET_GO_LIMIT: Duration = Duration::from_secs(2);
const LET_GO_LOOK: Duration = Duration::from_millis(20);

/// Removes files of states that were dropped from the disk whose chain has these `layers`, the last
/// of which is the active one. Returns their paths. Images that are gone and stood on the file of
/// the state `freed` were removed, as the user says; others may have been moved. The caller keeps
/// layers from coming and going meanwhile.
///
/// # Errors
/// The first failure, after all others were tried.
pub fn remove_dropped(
    layers: &[PathBuf],
    options: &ImageOptions,
    freed: Option<&str>,
) -> Result<Vec<PathBuf>> {
    let (mut removed, mut failed) = (Vec::new(), None);
    // States are kept beside the active layer.
    let Some(folder) = layers.last().map(|active| folder_of(active)) else { return Ok(removed) };
    for (file, at) in marks_in(folder)? {
        let is_freed = freed.is_some_and(|freed| is_called(&file, layers, freed));
        let gone = GoneImages::new(is_freed);
        match remove_if_dropped((&file, &at), layers, options, gone) {
            Ok(true) => removed.push(file),
            Ok(false) => {}
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed.map_or(Ok(removed), Err)
}

/// Takes back what is said of `layers` by drops that did not get to their end. Only those that may
/// keep a state, by their names, are looked at: a chain has thousands of others.
///
/// # Errors
/// As for reading a mark; what the system reports.
pub fn forget_drops(layers: &[PathBuf]) -> Result<()> {
    layers
        .iter()
        .filter(|layer| may_keep_state(layer))
        .try_for_each(|layer| merged::forget_drop(layer))
}

/// Where a state went.
#[derive(Clone, Copy)]
pub(crate) struct Went<'a> {
    /// The layer that has what it had, durably.
    pub(crate) into: &'a Path,
    /// Those that the chain has now.
    pub(crate) layers: &'a [PathBuf],
}

/// Removes the `file` of a state that was dropped a moment ago. Images on it that are `gone` are
/// taken as when the drop began.
///
/// # Errors
/// As [`check_no_overlays`]; `Denied` if somebody has the file open: then it stays. Else what the
/// system reports.
pub(crate) fn remove_dropped_file(
    file: &Path,
    went: Went<'_>,
    options: &ImageOptions,
    gone: GoneImages,
) -> Result<()> {
    // Without locks nobody knows who has it open.
    let _alone = match options.locking {
        Locking::On => Some(let_go_of(file, options)?),
        Locking::ForceShare | Locking::Off => None,
    };
    // Whoever makes an image on it has it open until that is noted.
    check_no_overlays(&[file.to_owned()], went.into, gone)?;
    remove_state(file, &options.sidecars)?;
    forget_in_note_beneath(file, went);
    Ok(())
}

/// The `file` is removed: it may be noted of what was beneath it, and is beneath another now.
fn forget_in_note_beneath(file: &Path, went: Went<'_>) {
    if let Some(at @ 1..) = position_of(went.layers, went.into) {
        forget_overlays(&went.layers[at - 1], &[file.to_owned()]);
    }
}

/// The `file`, which nobody else has open.
fn alone_with(file: &Path, options: &ImageOptions) -> Result<OpenImage> {
    let images = FileImages::to_write(file, options.clone(), MayWrite::to_remove())?;
    images.open_alone(file)
}

/// As [`alone_with`], once this process has completed the reads of the file that it had begun.
fn let_go_of(file: &Path, options: &ImageOptions) -> Result<OpenImage> {
    let mut waited = Duration::ZERO;
    loop {
        match alone_with(file, options) {
            Err(error) if waited == LET_GO_LIMIT => return Err(error),
            Err(_) => sleep(LET_GO_LOOK),
            Ok(alone) => return Ok(alone),
        }
        waited = (waited + LET_GO_LOOK).min(LET_GO_LIMIT);
    }
}

#[expect(clippy::disallowed_methods, reason = "a thread that has nothing else to do")]
fn sleep(time: Duration) {
    std::thread::sleep(time);
}

/// The same for the `file`, whose mark would be `at`. Returns whether there was something.
fn remove_if_dropped(
    (file, at): (&Path, &Path),
    layers: &[PathBuf],
    options: &ImageOptions,
    gone: GoneImages,
) -> Result<bool> {
    match file.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return merged::remove_lone_mark(at);
        }
        Err(error) => return Err(Error::from_io(format!("looking at {}", file.display()), error)),
        Ok(_) => {}
    }
    if position_of(layers, file).is_some() {
        return Ok(false);
    }
    let Some(into) = merged::dropped_into(file)? else { return Ok(false) };
    let Some(into) = position_of(layers, &into).map(|into| &layers[into]) else { return Ok(false) };
    let _alone = alone_with(file, options)?;
    check_no_overlays(&[file.to_owned()], into, gone)?;
    let synced = File::open(into).and_then(|layer| layer.sync_all());
    synced.map_err(|error| Error::from_io(format!("syncing {}", into.display()), error))?;
    sync_folder_of(into)?;
    settle_marks(layers, &[file.to_owned()], GoneFiles::Go)?;
    remove_state(file, &options.sidecars)?;
    forget_in_note_beneath(file, Went { into, layers });
    Ok(true)
}

/// The layers in `folder` that have marks, by the names of these, and where the marks are.
fn marks_in(folder: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
    let failed_here = |error| Error::from_io(format!("listing {}", folder.display()), error);
    let mut marks = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed_here)? {
        let at = entry.map_err(failed_here)?.path();
        marks.extend(merged::layer_marked_by(&at).map(|layer| (layer, at)));
    }
    Ok(marks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mark::Mark;
    use crate::merged::{MergeMarks, Until};
    use mica_store::Handles;
    use std::fs::{self, OpenOptions};
    use std::io::Write;
    use tempfile::TempDir;

    /// What a server leaves that is killed when the chain of `disk` went on without `disk@a`, and
    /// `base` is beneath both.
    struct World {
        folder: TempDir,
        layers: [PathBuf; 2],
        file: PathBuf,
    }

    const FILE: &str = "disk@a.qcow2";

    impl World {
        fn new(put: impl FnOnce(&Path, &Path) -> Result<MergeMarks>) -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let at = |name: &str| folder.path().canonicalize().expect("there").join(name);
            let [base, disk, file] = ["base.qcow2", "disk.qcow2", FILE].map(at);
            for path in [&base, &disk, &file] {
                fs::write(path, "image").expect("written");
            }
            fs::write(at("disk@a.qcow2.mica-index"), "sidecar").expect("written");
            Mark::put(&base, &file).expect("marked");
            Mark::put(&file, &disk).expect("marked");
            // They stay, as they do if the process dies.
            std::mem::forget(put(&disk, &file).expect("marked"));
            Self { folder, layers: [base, disk], file }
        }

        fn remove(&self) -> Result<Vec<PathBuf>> {
            self.remove_with(None)
        }

        fn remove_with(&self, freed: Option<&str>) -> Result<Vec<PathBuf>> {
            remove_dropped(&self.layers, &ImageOptions::new(Handles::new(8)), freed)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.folder.path()).expect("listed");
            let name = |entry: fs::DirEntry| entry.file_name().into_string().expect("text");
            let mut names: Vec<_> = entries.map(|entry| name(entry.expect("listed"))).collect();
            names.sort();
            names
        }
    }

    #[test]
    fn file_that_a_killed_drop_left_goes_with_all_that_is_about_it() {
        let world = World::new(MergeMarks::put_dropped);
        assert_eq!(world.remove().expect("removed"), std::slice::from_ref(&world.file));
        assert_eq!(world.names(), ["base.qcow2", "base.qcow2.mica-above", "disk.qcow2"]);
        let mark = fs::read_to_string(world.folder.path().join("base.qcow2.mica-above"));
        assert_eq!(mark.expect("there"), "above: disk.qcow2\n");
        assert!(world.remove().expect("nothing to do").is_empty());
    }

    /// The story: indexes were kept in a folder of their own, and stayed there.
    #[test]
    fn sidecar_that_is_kept_elsewhere_goes_too() {
        let world = World::new(MergeMarks::put_dropped);
        let elsewhere = tempfile::tempdir().expect("a folder");
        let place = crate::SidecarPlace::Directory(elsewhere.path().to_owned());
        let sidecars = crate::sidecars::paths_of_sidecar(&place, &world.file).expect("a file");
        fs::write(&sidecars[0], "sidecar").expect("written");
        let mut options = ImageOptions::new(Handles::new(8));
        options.sidecars = place;
        assert_eq!(remove_dropped(&world.layers, &options, None).expect("removed").len(), 1);
        assert!(sidecars.iter().all(|sidecar| !sidecar.exists()));
    }

    #[test]
    fn mark_that_is_left_of_a_file_that_is_gone_goes() {
        let world = World::new(MergeMarks::put_dropped);
        fs::remove_file(&world.file).expect("removed");
        world.remove().expect("removed");
        assert!(!world.names().contains(&format!("{FILE}.mica-merged")));
    }

    #[test]
    fn file_that_is_not_known_to_be_left_of_a_drop_stays() {
        // That of a layer that was committed is the user's.
        let committed =
            World::new(|disk, file| MergeMarks::put(disk, &[file.to_owned()], Until::Unsaid));
        // The merge did not get to its end.
        let mut under_way = World::new(MergeMarks::put_dropped);
        under_way.layers[0].clone_from(&under_way.file);
        let mut elsewhere = World::new(MergeMarks::put_dropped);
        elsewhere.layers[1] = elsewhere.layers[0].clone();
        let written = World::new(MergeMarks::put_dropped);
        let mut file = OpenOptions::new().append(true).open(&written.file).expect("opened");
        file.write_all(b"more").expect("written");
        let replaced = World::new(MergeMarks::put_dropped);
        fs::rename(&replaced.file, replaced.folder.path().join("moved")).expect("moved");
        fs::write(&replaced.file, "image").expect("written");
        for (what, world) in [
            ("committed", &committed),
            ("under way", &under_way),
            ("of another disk", &elsewhere),
            ("written", &written),
            ("replaced", &replaced),
        ] {
            assert!(world.remove().expect("nothing to do").is_empty(), "{what}");
            assert!(world.file.exists(), "{what}");
        }
    }

    /// The story: what a killed drop had left was removed, and the base's mark, which led there and
    /// not on, led to nothing: the disk was not found any more by the base's name.
    #[test]
    fn file_that_a_mark_leads_to_from_which_none_leads_on_stays() {
        let world = World::new(MergeMarks::put_dropped);
        Mark::forget(&world.file).expect("unmarked");
        let said = world.remove().expect_err("a disk may go on there").to_string();
        assert!(said.contains("base.qcow2.mica-above"), "{said}");
        assert!(world.file.exists());
        Mark::forget(&world.layers[0]).expect("unmarked");
        assert_eq!(world.remove().expect("removed"), std::slice::from_ref(&world.file));
    }

    /// The story: a drop was killed before its end, and the user took the layer out of the chain by
    /// another merge, which leaves the file.
    #[test]
    fn file_of_a_layer_that_left_by_another_merge_stays() {
        let world = World::new(MergeMarks::put_dropped);
        forget_drops(&[world.layers[0].clone(), world.file.clone()]).expect("forgotten");
        assert!(!world.names().contains(&format!("{FILE}.mica-merged")));
        assert!(world.remove().expect("nothing to do").is_empty());
        assert!(world.file.exists());
    }

    /// The story: a drop is killed, and the layer above is cloned, which shows what it did.
    #[test]
    fn layer_that_a_state_goes_into_may_be_cloned_and_keeps_the_mark_of_another_merge() {
        let world = World::new(MergeMarks::put_dropped);
        crate::refuse_merged(&world.layers[1]).expect("it shows what it did");
        crate::refuse_merged(&world.file).expect_err("it goes");
        std::mem::forget(MergeMarks::put(&world.layers[1], &[], Until::Unsaid).expect("marked"));
        assert_eq!(world.remove().expect("removed").len(), 1);
        crate::refuse_merged(&world.layers[1]).expect_err("others go into it");
    }

    #[test]
    fn file_that_somebody_has_open_stays() {
        let world = World::new(MergeMarks::put_dropped);
        let images = FileImages::new(&world.file, ImageOptions::new(Handles::new(8)));
        let images = images.expect("allowed");
        let open = images.open(&world.file).expect("opened");
        world.remove().expect_err("it is in use");
        assert!(world.file.exists());
        drop(open);
        assert_eq!(world.remove().expect("removed").len(), 1);
    }

    #[test]
    fn file_that_only_an_image_that_is_gone_stood_on_goes_if_the_user_says_that_it_was_removed() {
        let world = World::new(MergeMarks::put_dropped);
        let elsewhere = tempfile::tempdir().expect("a folder");
        let clone = elsewhere.path().join("clone.qcow2");
        crate::overlays::put_image(&clone, world.file.to_str());
        crate::note_overlay(&world.file, &clone);
        world.remove_with(Some("a")).expect_err("it is there");
        fs::remove_file(&clone).expect("removed");
        // What is said of other states does not count.
        for freed in [None, Some("b"), Some("disk@a")] {
            world.remove_with(freed).expect_err("it may have been moved");
        }
        assert!(world.file.exists());
        assert_eq!(world.remove_with(Some("a")).expect("removed").len(), 1);
        assert_eq!(world.names(), ["base.qcow2", "base.qcow2.mica-above", "disk.qcow2"]);
    }

    /// The story: who removed the file of a state looked for images on it, and then waited until
    /// nobody had it open. Whoever had was just making such an image, in another folder.
    #[test]
    fn file_that_an_image_is_made_on_while_it_is_waited_for_stays() {
        let world = World::new(MergeMarks::put_dropped);
        let elsewhere = tempfile::tempdir().expect("a folder");
        let clone = elsewhere.path().join("clone.qcow2");
        let options = ImageOptions::new(Handles::new(8));
        let images = FileImages::new(&world.file, options.clone()).expect("allowed");
        let open = images.open(&world.file).expect("opened");
        let went = Went { into: &world.layers[1], layers: &world.layers };
        let remove = |gone| remove_dropped_file(&world.file, went, &options, gone);
        std::thread::scope(|scope| {
            let removal = scope.spawn(|| remove(GoneImages::Removed));
            sleep(LET_GO_LIMIT / 4);
            crate::overlays::put_image(&clone, world.file.to_str());
            crate::note_overlay(&world.file, &clone);
            drop(open);
            removal.join().expect("it ends").expect_err("an image stands on it");
        });
        assert!(world.file.exists());
        fs::remove_file(&clone).expect("removed");
        remove(GoneImages::MayBeMoved).expect_err("it may have been moved");
        remove(GoneImages::Removed).expect("removed");
    }
}
