//! What killed servers of older versions left: a folder `mica-ephemeral-…` with an overlay in it,
//! for each of their disks.
//!
//! Invariants
//! - I1 An overlay that a server has open is locked, as images are, and stays.
//! - I2 That of a disk that is drained is not locked. So only what nobody has written for a week
//!   goes.
//! - I3 Only what this user owns goes, and only by these names: anybody may make files where
//!   temporary files are.

use mica_stack::remove_unfinished;
use rustix::process::geteuid;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// Begins the name of a folder, of which so many letters and digits are left; and the name of the
/// overlay in it.
const FOLDER: &[u8] = b"mica-ephemeral-";
const REST_LEN: usize = 6;
const OVERLAY: &str = "overlay.qcow2";
const OLD: Duration = Duration::from_hours(7 * 24);

/// Removes what nobody has in `place`. What cannot be removed stays.
pub(super) fn remove(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.as_encoded_bytes().strip_prefix(FOLDER);
        if rest.is_some_and(|rest| {
            rest.len() == REST_LEN && rest.iter().all(u8::is_ascii_alphanumeric)
        }) {
            remove_folder(&entry.path());
        }
    }
}

fn remove_folder(folder: &Path) {
    let is_left = |path: &Path, is_kind: fn(&Metadata) -> bool| {
        path.symlink_metadata().is_ok_and(|found| is_kind(&found) && is_old(&found))
    };
    if !is_left(folder, Metadata::is_dir) {
        return;
    }
    let overlay = folder.join(OVERLAY);
    if is_left(&overlay, Metadata::is_file) && remove_unfinished(&overlay) {
        tracing::info!(folder = ?folder, "removed what a killed server left");
    }
    // Unless something is in it.
    let _ = fs::remove_dir(folder);
}

/// Whether it is this user's, and nobody has written it for long.
fn is_old(found: &Metadata) -> bool {
    let age = found.modified().ok().and_then(|then| then.elapsed().ok());
    found.uid() == geteuid().as_raw() && age.is_some_and(|age| age > OLD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, FileTimes};
    use std::path::PathBuf;
    use std::time::SystemTime;

    fn make_old(path: &Path) {
        let then = SystemTime::now() - 2 * OLD;
        let times = FileTimes::new().set_modified(then);
        File::open(path).unwrap().set_times(times).unwrap();
    }

    /// A folder in `place` as one was, which nobody has written for long.
    fn folder(place: &Path, name: &str, overlay: Option<&str>) -> PathBuf {
        let folder = place.join(name);
        fs::create_dir(&folder).unwrap();
        if let Some(overlay) = overlay {
            fs::write(folder.join(overlay), "an image").unwrap();
            make_old(&folder.join(overlay));
        }
        make_old(&folder);
        folder
    }

    #[test]
    fn what_nobody_has_goes_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path();
        let gone = [
            folder(place, "mica-ephemeral-aB3dEf", Some(OVERLAY)),
            folder(place, "mica-ephemeral-empty0", None),
        ];
        let elsewhere = folder(place, "elsewhere", Some(OVERLAY));
        let young = folder(place, "mica-ephemeral-young0", Some(OVERLAY));
        fs::write(young.join(OVERLAY), "just now").unwrap();
        let link = place.join("mica-ephemeral-link00");
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        let named = folder(place, "mica-ephemeral-notes-of-mine", Some(OVERLAY));
        let other = folder(place, "mica-ephemeral-other0", Some("another.qcow2"));
        let file = place.join("mica-ephemeral-file00");
        fs::write(&file, "a file").unwrap();
        make_old(&file);
        remove(place);
        for path in gone {
            assert!(!path.exists(), "{}", path.display());
        }
        let of_others = other.join("another.qcow2");
        let stay = [&elsewhere, &young, &named].map(|folder| folder.join(OVERLAY));
        let stay = stay.iter().chain([&of_others]);
        for path in stay.chain([&link, &file]) {
            assert!(path.exists(), "{}", path.display());
        }
    }
}
