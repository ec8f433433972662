//! Whether other images stand on the layers of a chain: asked before a layer is changed or leaves.
//!
//! They are looked for in the folders of the layers, where the marks of these lead, and where the
//! notes beside them say (`noted.rs`). An image that another program made elsewhere is not found.

mod noted;

pub(crate) use noted::note_beside;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use noted::read_note;
pub(crate) use noted::settle_notes;
pub use noted::{
    ExpectedOverlays, Noting, announce_noted_overlay, announce_overlays, expect_overlays,
    forget_overlays, note_overlay,
};

use crate::above::owner_of;
use crate::files::{folder_of, node_of};
use crate::forest::{ScanDepth, images_on};
use crate::mark::{Mark, cure};
use crate::merged::was_merged;
use mica_block::{Error, ErrorKind, Result};
use mica_crypt::luks::MAGIC as LUKS_MAGIC;
use mica_qcow2_format::MAGIC;
use mica_store::Node;
use noted::{Found, noted_on};
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Images that are named at most.
const NAMED_MAX: usize = 5;

/// An image, and the layer that it names as its backing file.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Overlay {
    /// The image.
    path: PathBuf,
    /// The layer.
    stands_on: PathBuf,
    evidence: Evidence,
}

/// What says that an image stands on a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Evidence {
    /// Its header.
    Header,
    /// Only the note of the layer, because the image may not be read.
    Hidden,
    /// The same, because it is not where it was: it may have been moved, or removed.
    Gone,
}

/// What the user says of noted images that are not where they were.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GoneImages {
    /// Nothing: they may have been moved, and need their layers.
    MayBeMoved,
    /// They were removed: their lines leave the notes.
    Removed,
}

impl GoneImages {
    /// As the option `--ignore-gone` says.
    #[must_use]
    pub fn new(ignore: bool) -> Self {
        if ignore { Self::Removed } else { Self::MayBeMoved }
    }
}

/// The images in the folders of `layers`, in the folder of `above`, in those to which the marks
/// of `layers` lead, and where their notes say, that name one of `layers` as their backing file,
/// other than `layers` themselves, and `above`. An image that was merged into another one and is
/// not used any more is none of them, but those that stand on it are. An image elsewhere is not
/// found, nor one that cannot be read, unless it is noted; nor does anybody know of one that is
/// noted and gone where it is now.
///
/// # Errors
/// If a folder cannot be listed; `Denied` if a mark leads to nothing, or a note to a folder that
/// may only not be mounted.
fn overlays_on(layers: &[PathBuf], above: &Path) -> Result<Vec<Overlay>> {
    let mut layers: Vec<_> = layers.iter().filter(|layer| layer.exists()).cloned().collect();
    let marked = marked_above(&layers)?;
    let places = layers.iter().chain(&marked).map(PathBuf::as_path);
    let folders = places.chain([above]).map(folder_of);
    let mut folders: Vec<_> = folders.map(Path::to_owned).collect();
    folders.sort();
    folders.dedup();
    let own = layers.iter().map(PathBuf::as_path).chain([above]).map(node_of);
    let mut own: HashSet<_> = own.collect();
    loop {
        let Noticed { places, mut unread, noted } = noted_places(&layers, &folders, &own)?;
        let mut on = images_on(&layers, &places, ScanDepth::OneLevel)?.found;
        on.retain(|(path, _)| !own.contains(&node_of(path)));
        leave_out_renamed(&mut unread, on.iter().filter(|(path, _)| !noted.contains(path)));
        let merged: Vec<_> = on.iter().map(|(path, _)| path).filter(|it| was_merged(it)).collect();
        if merged.is_empty() {
            let evidence = Evidence::Header;
            let overlay = |(path, stands_on)| Overlay { path, stands_on, evidence };
            unread.extend(on.into_iter().map(overlay));
            unread.sort_by(|one, other| one.path.cmp(&other.path));
            return Ok(unread);
        }
        // What stands on them stands on what is beneath them.
        own.extend(merged.iter().map(|path| node_of(path)));
        layers.extend(merged.into_iter().cloned());
    }
}

/// What notes lead to.
struct Noticed {
    /// Folders, and images in folders that cannot be listed.
    places: Vec<PathBuf>,
    /// What may not be read, or is not there any more, and so counts.
    unread: Vec<Overlay>,
    /// What notes name and can be read.
    noted: HashSet<PathBuf>,
}

/// Leaves out of `unread` what is gone and may be one of the `others`, images that no note names
/// where they are: one that stands on the same layer in the same folder, and each for one. An image
/// of the chain itself says nothing of another one that was beside it.
fn leave_out_renamed<'a>(
    unread: &mut Vec<Overlay>,
    others: impl Iterator<Item = &'a (PathBuf, PathBuf)>,
) {
    let place = |path: &Path, layer: &Path| (node_of(folder_of(path)), node_of(layer));
    let mut renamed = HashMap::new();
    others.for_each(|(path, layer)| *renamed.entry(place(path, layer)).or_insert(0_usize) += 1);
    unread.retain(|overlay| {
        let is_gone = overlay.evidence == Evidence::Gone;
        let may_be = renamed.get_mut(&place(&overlay.path, &overlay.stands_on));
        match may_be.filter(|left| is_gone && **left > 0) {
            Some(left) => *left -= 1,
            None => return true,
        }
        false
    });
}

/// The `folders`, and those of images that the notes of `layers` name, or these images, if only
/// they can be read; and which of those that are none of the `own` files cannot be.
fn noted_places(
    layers: &[PathBuf],
    folders: &[PathBuf],
    own: &HashSet<Option<Node>>,
) -> Result<Noticed> {
    let mut places: HashSet<PathBuf> = folders.iter().cloned().collect();
    let mut can_be_listed = HashMap::new();
    let (mut unread, mut readable) = (Vec::new(), HashSet::new());
    for layer in layers {
        for noted in noted_on(layer)? {
            let folder = folder_of(&noted.path).to_owned();
            let evidence = match noted.find() {
                Found::Readable => {
                    let is_listed = can_be_listed
                        .entry(folder.clone())
                        .or_insert_with(|| std::fs::read_dir(&folder).is_ok());
                    places.insert(if *is_listed { folder } else { noted.path.clone() });
                    readable.insert(noted.path);
                    continue;
                }
                Found::Hidden if own.contains(&node_of(&noted.path)) => continue,
                Found::Hidden => Evidence::Hidden,
                Found::Gone => {
                    // What got another name there is found there.
                    if std::fs::read_dir(&folder).is_ok() {
                        places.insert(folder);
                    }
                    Evidence::Gone
                }
                Found::Unreachable => return Err(unreachable(layer, &noted.path)),
            };
            unread.push(Overlay { path: noted.path, stands_on: layer.clone(), evidence });
        }
    }
    let mut places: Vec<_> = places.into_iter().collect();
    places.sort();
    // The same lines leave the note whenever this is asked.
    unread.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(Noticed { places, unread, noted: readable })
}

fn unreachable(layer: &Path, image: &Path) -> Error {
    let what = format!(
        "{} stood on {}, and its folder is not there, or not mounted: {}",
        image.display(),
        layer.display(),
        noted::cure(layer)
    );
    Error::new(ErrorKind::Denied, what)
}

/// The layers in which the disks of these `layers` went on, as their marks say.
fn marked_above(layers: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for layer in layers {
        let Some(mark) = Mark::of(layer, owner_of(layer)?)? else { continue };
        if !mark.above().exists() {
            let what = format!(
                "{} is frozen: its disk continues in {}, which is missing; {}",
                layer.display(),
                mark.above().display(),
                cure(layer, mark.path())
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        found.push(mark.above().to_owned());
    }
    Ok(found)
}

/// Makes sure that no other image in the folders of `layers` and of `above`, the one on top of
/// them, or where marks and notes of `layers` lead, stands on one of `layers`, apart from images
/// that were merged away, and from those that are `gone`, if these were removed: the notes have
/// them no longer then.
///
/// # Errors
/// `Denied`, with names of images that do, or if a mark leads to nothing, or a note to a folder
/// that may only not be mounted; else if a folder cannot be listed.
pub(crate) fn check_no_overlays(layers: &[PathBuf], above: &Path, gone: GoneImages) -> Result<()> {
    let mut overlays = overlays_on(layers, above)?;
    if gone == GoneImages::Removed {
        // A note that cannot be written does not make them any less gone.
        forget_gone_of(&mut overlays);
    }
    if overlays.is_empty() {
        return Ok(());
    }
    let named = overlays.iter().take(NAMED_MAX).map(|overlay| {
        let (path, layer) = (overlay.path.display(), overlay.stands_on.display());
        match overlay.evidence {
            Evidence::Header => format!("{path} stands on {layer}"),
            Evidence::Hidden => format!(
                "{path}, which may not be read here, stood on {layer}: a server that is started with \
                 --disks-in {} sees what it stands on now, as does a verb of a user who may read it",
                folder_of(&overlay.path).display()
            ),
            Evidence::Gone => format!(
                "{path}, which is not there any more, stood on {layer}: if it was moved, say where \
                 it is with `mica rebase -u -b {} -F {} IMAGE`; then, or if it was removed, add \
                 --ignore-gone",
                std::path::absolute(&overlay.stands_on).unwrap_or_default().display(),
                format_of(&overlay.stands_on),
            ),
        }
    });
    let mut named: Vec<_> = named.collect();
    if let more @ 1.. = overlays.len().saturating_sub(NAMED_MAX) {
        named.push(format!("and {more} more do"));
    }
    let what = format!("other images need these layers: {}", named.join(", "));
    Err(Error::new(ErrorKind::Denied, what))
}

/// Takes the lines of images that are gone out of the note of the layer at `base`: the user says
/// that they were removed.
///
/// # Errors
/// `Denied` if a note leads to a folder that may only not be mounted; `Limit` if the note is longer
/// than may be; else if a folder cannot be listed.
pub fn forget_gone(base: &Path) -> Result<()> {
    forget_gone_of(&mut overlays_on(&[base.to_owned()], base)?);
    Ok(())
}

fn forget_gone_of(overlays: &mut Vec<Overlay>) {
    let gone = overlays.extract_if(.., |overlay| overlay.evidence == Evidence::Gone);
    for (layer, images) in by_layer(gone) {
        forget_overlays(&layer, &images);
    }
}

fn by_layer(overlays: impl Iterator<Item = Overlay>) -> HashMap<PathBuf, Vec<PathBuf>> {
    let mut images: HashMap<_, Vec<_>> = HashMap::new();
    for Overlay { path, stands_on, .. } in overlays {
        images.entry(stands_on).or_default().push(path);
    }
    images
}

/// By which format an image is likely to name the one at `layer`.
fn format_of(layer: &Path) -> &'static str {
    let mut start = [0; LUKS_MAGIC.len()];
    let read = std::fs::File::open(layer).and_then(|file| file.read_exact_at(&mut start, 0));
    match read {
        Ok(()) if start.starts_with(&MAGIC) => "qcow2",
        Ok(()) if start == LUKS_MAGIC => "luks",
        _ => "raw",
    }
}

/// Makes an image that has nothing but what it stands on.
#[cfg(test)]
pub(crate) fn put_image(path: &Path, backing: Option<&str>) {
    use mica_qcow2_format::{BackingName, Compression, Header, L2Format, Version};
    use mica_units::{ClusterBits, HostCluster};
    let cluster_bits = ClusterBits::new(16).expect("64 KiB");
    let l2 = L2Format { cluster_bits, version: Version::V3, extended: false, data_file: false };
    let mut header = Header::new(l2, Compression::Deflate);
    header.refcount_table_offset = cluster_bits.start_of(HostCluster::new(1));
    header.refcount_table_clusters = 1;
    let named = |name: &str| BackingName { name: name.into(), format: None };
    header.backing = backing.map(named);
    std::fs::write(path, header.encode().expect("it fits")).expect("there is room");
}

#[cfg(test)]
mod tests {
    use super::put_image as image;
    use super::*;
    use crate::merged::{MergeMarks, Until};
    use mica_block::Merged;
    use std::fs;

    fn overlay(path: PathBuf, stands_on: PathBuf) -> Overlay {
        Overlay { path, stands_on, evidence: Evidence::Header }
    }

    #[test]
    fn format_is_told_by_how_an_image_begins() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path().join("image");
        let begins = |bytes: &[u8]| {
            fs::write(&at, bytes).expect("written");
            format_of(&at)
        };
        assert_eq!(begins(b"QFI\xfb\0\0\0\x03"), "qcow2");
        assert_eq!(begins(b"LUKS\xba\xbe\0\x01"), "luks");
        assert_eq!(begins(b"LUKS\xba\xbf\0\x01"), "raw");
        assert_eq!(begins(b"QFI"), "raw");
        assert_eq!(begins(b""), "raw");
    }

    #[test]
    fn images_that_stand_on_a_layer_are_found_by_what_they_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        image(&at("base"), None);
        image(&at("middle"), Some("base"));
        image(&at("active"), Some("middle"));
        let found = || overlays_on(&[at("base"), at("middle")], &at("active")).expect("listed");
        assert_eq!(found(), []);
        image(&at("clone"), Some(at("base").to_str().expect("UTF-8")));
        fs::write(at("else"), b"QFI\xfbgarbage").expect("there is room");
        fs::write(at("empty"), b"").expect("there is room");
        std::os::unix::fs::symlink("missing", at("broken")).expect("a link");
        image(&at("lost"), Some("nowhere"));
        assert_eq!(found(), [overlay(at("clone"), at("base"))]);
        // A second name of an own image is no other image.
        fs::remove_file(at("clone")).expect("it is there");
        fs::hard_link(at("active"), at("again")).expect("a link");
        assert_eq!(found(), []);
    }

    /// Two folders: the layer `base` in the first, `clone` on it in the second.
    fn apart() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let real = folder.path().canonicalize().expect("there");
        for name in ["here", "there"] {
            fs::create_dir(real.join(name)).expect("made");
        }
        let (base, clone) = (real.join("here/base"), real.join("there/clone"));
        image(&base, None);
        image(&clone, base.to_str());
        (folder, base, clone)
    }

    #[test]
    fn noted_image_in_another_folder_is_found_whatever_it_is_called_there() {
        let (folder, base, clone) = apart();
        let note = base.with_file_name("base.mica-overlays");
        let found = || overlays_on(std::slice::from_ref(&base), &base).expect("listed");
        assert_eq!(found(), [], "nobody knows of it");
        announce_overlays(&base, &[&clone]).expect("nothing is merged");
        assert_eq!(found(), [overlay(clone.clone(), base.clone())]);
        let line = format!("0 {}\n", clone.display());
        assert_eq!(fs::read_to_string(&note).expect("noted"), line);
        note_overlay(&base, &clone);
        assert_eq!(fs::read_to_string(&note).expect("noted"), line, "it is there already");
        let (renamed, second) = (clone.with_file_name("renamed"), clone.with_file_name("second"));
        fs::rename(&clone, &renamed).expect("renamed");
        assert_eq!(found(), [overlay(renamed.clone(), base.clone())], "the only one");
        assert_eq!(found(), [overlay(renamed.clone(), base.clone())], "once more");
        fs::rename(&renamed, &clone).expect("renamed");
        image(&second, base.to_str());
        note_overlay(&base, &second);
        fs::rename(&clone, &renamed).expect("renamed");
        let there =
            ["renamed", "second"].map(|name| overlay(clone.with_file_name(name), base.clone()));
        assert_eq!(found(), there);
        assert_eq!(fs::read_to_string(&note).expect("noted").lines().count(), 2, "both lead there");
        // One that stands on something else now is asked, and is none. The other may be anywhere.
        image(&renamed, Some("/elsewhere"));
        fs::remove_file(&second).expect("removed");
        let gone = |path| Overlay { path, stands_on: base.clone(), evidence: Evidence::Gone };
        assert_eq!(found(), [gone(clone.clone()), gone(second.clone())]);
        forget_overlays(&base, &[clone, second]);
        assert_eq!(found(), []);
        assert!(!note.exists());
        drop(folder);
    }

    /// What got another name is found only by the line that it has by the old one.
    #[test]
    fn line_of_an_image_that_was_renamed_stays_when_those_that_are_gone_are_ignored() {
        let (_folder, base, clone) = apart();
        let note = base.with_file_name("base.mica-overlays");
        let check = |gone| {
            check_no_overlays(std::slice::from_ref(&base), &base, gone).map_err(|e| e.kind())
        };
        note_overlay(&base, &clone);
        let renamed = clone.with_file_name("renamed");
        fs::rename(&clone, &renamed).expect("renamed");
        for _ in 0..2 {
            assert_eq!(check(GoneImages::Removed), Err(ErrorKind::Denied));
        }
        assert!(note.exists());
        fs::remove_file(&renamed).expect("removed");
        assert_eq!(check(GoneImages::MayBeMoved), Err(ErrorKind::Denied));
        assert_eq!(check(GoneImages::Removed), Ok(()));
        assert!(!note.exists());
        assert_eq!(check(GoneImages::MayBeMoved), Ok(()));
    }

    /// The story: a clone was moved out of the folder in which the disk was that was committed.
    #[test]
    fn image_that_is_gone_is_none_of_those_that_are_known_by_their_own_names() {
        let (_folder, base, clone) = apart();
        let [own, other] = ["own", "other"].map(|name| clone.with_file_name(name));
        for path in [&own, &other] {
            image(path, base.to_str());
        }
        for path in [&clone, &own] {
            note_overlay(&base, path);
        }
        let third = base.with_file_name("third");
        fs::create_dir(&third).expect("made");
        fs::rename(&clone, third.join("clone")).expect("moved");
        let found = || {
            let found = overlays_on(std::slice::from_ref(&base), &own).expect("listed");
            found.into_iter().map(|one| (one.path, one.evidence)).collect::<Vec<_>>()
        };
        // It may be the one that nothing names.
        assert_eq!(found(), [(other.clone(), Evidence::Header)]);
        note_overlay(&base, &other);
        let gone = (clone.clone(), Evidence::Gone);
        assert_eq!(found(), [gone.clone(), (other.clone(), Evidence::Header)]);
        fs::remove_file(&other).expect("removed");
        forget_overlays(&base, &[other]);
        assert_eq!(found(), std::slice::from_ref(&gone), "the own one explains nothing");
        forget_overlays(&base, std::slice::from_ref(&own));
        assert_eq!(found(), [gone], "nor if it is not noted");
    }

    #[test]
    fn image_is_noted_before_it_has_its_name_and_forgotten_if_it_gets_none() {
        let (_folder, base, clone) = apart();
        let note = base.with_file_name("base.mica-overlays");
        fs::remove_file(&clone).expect("removed");
        let found = || overlays_on(std::slice::from_ref(&base), &base).expect("listed");
        let expected = expect_overlays(&base, &[&clone]);
        assert_eq!(found()[0].evidence, Evidence::Gone, "a merge waits for it");
        expected.forget();
        assert!(!note.exists());
        // A line that was there is of an image that may have been moved.
        note_overlay(&base, &clone);
        expect_overlays(&base, &[&clone]).forget();
        assert!(note.exists());
        let below = base.with_file_name("below");
        image(&below, None);
        let marks =
            MergeMarks::put(&below, std::slice::from_ref(&base), Until::Unsaid).expect("marked");
        announce_overlays(&base, &[&clone]).expect_err("it is merged");
        assert!(note.exists(), "what is refused was noted before");
        drop(marks);
    }

    #[test]
    fn images_in_the_own_folder_are_not_noted_and_a_note_that_was_cut_short_goes_on() {
        let (_folder, base, clone) = apart();
        let note = base.with_file_name("base.mica-overlays");
        let beside = base.with_file_name("beside");
        image(&beside, Some("base"));
        note_overlay(&base, &beside);
        assert!(!note.exists());
        fs::write(&note, "0 /cut").expect("written");
        note_overlay(&base, &clone);
        let now = fs::read_to_string(&note).expect("noted");
        assert_eq!(now, format!("0 /cut\0\n0 {}\n", clone.display()));
        let found = overlays_on(std::slice::from_ref(&base), &base).expect("listed");
        assert_eq!(found.len(), 2, "{found:?}");
    }

    #[test]
    fn folder_that_may_not_be_mounted_keeps_the_layer_as_it_is() {
        let (_folder, base, clone) = apart();
        let note = base.with_file_name("base.mica-overlays");
        fs::remove_file(&clone).expect("removed");
        // Another folder is at this place than was there when the image was noted.
        let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(&base).expect("there"));
        fs::write(&note, format!("{inode} {}\n", clone.display())).expect("written");
        let said = check_no_overlays(std::slice::from_ref(&base), &base, GoneImages::Removed)
            .expect_err("not known");
        let said = said.to_string();
        assert!(said.contains("not mounted: mount it") && said.contains("--ignore-gone"), "{said}");
        assert!(said.contains(&note.display().to_string()), "{said}");
        assert!(note.exists());
        // And now it is that one.
        let folder = fs::metadata(folder_of(&clone)).expect("there");
        let inode = std::os::unix::fs::MetadataExt::ino(&folder);
        fs::write(&note, format!("{inode} {}\n", clone.display())).expect("written");
        let said = check_no_overlays(std::slice::from_ref(&base), &base, GoneImages::MayBeMoved)
            .expect_err("or moved");
        assert!(said.to_string().contains("not there any more"), "{said}");
        assert!(note.exists());
    }

    #[test]
    fn note_that_a_stranger_may_have_written_is_not_followed() {
        use std::os::unix::fs::PermissionsExt;
        let (_folder, base, clone) = apart();
        note_overlay(&base, &clone);
        let note = base.with_file_name("base.mica-overlays");
        fs::set_permissions(&note, fs::Permissions::from_mode(0o666)).expect("set");
        let said = check_no_overlays(std::slice::from_ref(&base), &base, GoneImages::MayBeMoved)
            .expect_err("not trusted");
        assert!(said.to_string().contains("stranger"), "{said}");
    }

    #[test]
    fn image_that_was_merged_does_not_count_and_what_stands_on_it_does() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        image(&at("base"), None);
        image(&at("one"), Some("base"));
        image(&at("two"), Some("one"));
        image(&at("active"), Some("base"));
        let found = || overlays_on(&[at("base")], &at("active")).expect("listed");
        let named = |name: &str, below: &str| overlay(at(name), at(below));
        assert_eq!(found(), [named("one", "base")]);
        let marks =
            MergeMarks::put(&at("base"), &[at("one"), at("two")], Until::Unsaid).expect("marked");
        marks.end(Some(&Merged::Done { dropped: Vec::new(), copied: 0 }));
        assert_eq!(found(), []);
        image(&at("clone"), Some("two"));
        assert_eq!(found(), [named("clone", "two")]);
        // One that is used again is no longer what was merged.
        fs::remove_file(at("clone")).expect("it is there");
        let later = fs::metadata(at("one")).expect("there").modified().expect("a time");
        let file = fs::OpenOptions::new().write(true).open(at("one")).expect("it opens");
        file.set_modified(later + std::time::Duration::from_nanos(1_000_000)).expect("set");
        assert_eq!(found(), [named("one", "base")]);
    }
}
