//! Which state of which image a name means.

use super::WriteArgs;
use crate::failure::Failure;
use crate::images::ImageArgs;
use mica_backup::Content;
use mica_block::Manage;
use mica_qcow2::snapshots::SnapshotSelector;
use mica_qcow2::{DiffFormat, DiffState, IndexUse};
use mica_stack::{FileImages, Format, kept_path, state_of};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many states an error names.
const NAMED_MAX: usize = 16;

/// A state of an image.
pub(super) struct Subject {
    /// The image of the disk, which may be in use.
    image: PathBuf,
    /// The file that has the state.
    path: PathBuf,
    /// Its internal snapshot that the state is.
    snapshot: Option<SnapshotSelector>,
    /// What the state is called.
    state: Option<String>,
    args: ImageArgs,
    format: Format,
}

impl Subject {
    /// What `named` means: a file of that name, or else a state that is kept of one, or an internal
    /// snapshot.
    pub(super) fn new(named: &str, args: ImageArgs) -> Result<Self, Failure> {
        let format = args.format();
        if format == Format::Null {
            return Err(Failure::new("the null format is not an image"));
        }
        let path = PathBuf::from(named);
        let at = named
            .rsplit_once('@')
            .filter(|(image, state)| !path.exists() && !image.is_empty() && !state.is_empty());
        if let Some((image, state)) = at {
            return Self::of(Path::new(image), state, args, format);
        }
        let (image, state) = match of_kept_file(&path) {
            Some((image, state)) => (image, Some(state)),
            None => (path.clone(), None),
        };
        Ok(Self { image, path, snapshot: None, state, args, format })
    }

    /// The state called `state` of `image`.
    fn of(image: &Path, state: &str, args: ImageArgs, format: Format) -> Result<Self, Failure> {
        let real = image.canonicalize().unwrap_or_else(|_| image.to_owned());
        let snapshot: SnapshotSelector = state.parse()?;
        let state = snapshot.word();
        let kept = kept_path(&real, state)?;
        let may_be_kept = matches!(snapshot, SnapshotSelector::Any(_));
        let (path, state, snapshot) = match may_be_kept && kept.exists() {
            true => (kept, state.to_owned(), None),
            false if format != Format::Qcow2 => {
                let what =
                    format!("only qcow2 images have states, and {} has none", image.display());
                return Err(Failure::new(what));
            }
            false if !image.exists() => {
                let what = format!("there is neither {} nor {}", image.display(), kept.display());
                return Err(Failure::new(what));
            }
            false => (image.to_owned(), state.to_owned(), Some(snapshot)),
        };
        let (image, state) = (image.to_owned(), Some(state));
        Ok(Self { image, path, snapshot, state, args, format })
    }

    /// The state called `state` of the same disk.
    pub(super) fn other(&self, state: &str) -> Result<Self, Failure> {
        Self::of(&self.image, state, self.args.clone(), self.format)
    }

    /// What the disk is called: as by a server, after its file.
    pub(super) fn disk(&self) -> String {
        self.image.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    pub(super) fn state_name(&self, args: &WriteArgs) -> String {
        args.state(self.state.clone())
    }

    pub(super) fn files(&self) -> Result<FileImages, Failure> {
        Ok(FileImages::new(&self.path, self.args.image_options()?)?)
    }

    pub(super) fn as_diffed<'a>(&'a self, images: &'a FileImages) -> DiffState<'a> {
        let format = match self.format {
            Format::Raw => DiffFormat::Raw,
            _ => DiffFormat::Qcow2,
        };
        DiffState { images, path: &self.path, format, snapshot: self.snapshot.as_ref() }
    }

    pub(super) async fn open(&self) -> Result<Arc<dyn Manage>, Failure> {
        let mut chain = self.args.chain_options(IndexUse::Read)?;
        chain.snapshot.clone_from(&self.snapshot);
        let images = self.args.image_options()?;
        Ok(mica_stack::open(&self.path, self.format, images, &chain).await?)
    }

    /// Which content the state of `disk`, which is open, has: that of these files, as they are.
    pub(super) fn content(&self, disk: &dyn Manage) -> Result<Content, Failure> {
        let mut content =
            self.snapshot.as_ref().map_or("", SnapshotSelector::word).as_bytes().to_vec();
        let mut paths = disk.layer_paths();
        paths.extend(disk.data_paths());
        if paths.is_empty() {
            paths.push(self.path.clone());
        }
        for path in paths {
            let found = path.metadata();
            let found = found.map_err(|error| Failure::from(error).within(path.display()))?;
            let (changed, part) = (found.mtime(), found.mtime_nsec());
            let fields = [found.dev(), found.ino(), found.len()];
            content.extend(fields.iter().flat_map(|field| field.to_le_bytes()));
            content.extend([changed, part].iter().flat_map(|field| field.to_le_bytes()));
        }
        Ok(Content::lasting(content))
    }

    /// When the state's file was changed last, in nanoseconds since 1970.
    pub(super) fn time_ns(&self) -> u64 {
        let changed = self.path.metadata().and_then(|found| found.modified()).ok();
        let since = changed.and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    }

    /// The states that are kept of the disk, for an error that misses one.
    pub(super) fn kept(&self) -> String {
        let image = self.image.canonicalize().unwrap_or_else(|_| self.image.clone());
        let folder = image.parent().map(std::fs::read_dir);
        let names = folder.into_iter().flatten().flatten().flatten();
        let mut names: Vec<_> = names.filter_map(|entry| state_of(&image, &entry.path())).collect();
        names.sort();
        match names.len() {
            0 => "none is kept".to_owned(),
            count @ ..=NAMED_MAX => format!("{} are kept ({count})", names.join(", ")),
            count => {
                format!("{} and {} more are kept", names[..NAMED_MAX].join(", "), count - NAMED_MAX)
            }
        }
    }
}

/// The image and the state that a file named `IMAGE@STATE.ENDING` is of.
fn of_kept_file(path: &Path) -> Option<(PathBuf, String)> {
    let stem = path.file_stem()?.to_str()?;
    let (image, _) =
        stem.split_once('@').filter(|(image, state)| !image.is_empty() && !state.is_empty())?;
    let mut name = std::ffi::OsString::from(image);
    if let Some(ending) = path.extension() {
        name.push(".");
        name.push(ending);
    }
    let image = path.with_file_name(name);
    let state = state_of(&image, path)?;
    Some((image, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_states_are_known_by_their_names() {
        let of = |path: &str| {
            let found = of_kept_file(Path::new(path));
            found.map(|(image, state)| (image.to_string_lossy().into_owned(), state))
        };
        let found = of("/vm/web@mon.qcow2");
        assert_eq!(found, Some(("/vm/web.qcow2".to_owned(), "mon".to_owned())));
        assert_eq!(of("web@a@b"), Some(("web".to_owned(), "a@b".to_owned())));
        for other in ["/vm/web.qcow2", "/vm@x/web.qcow2", "@mon.qcow2", "web@.qcow2"] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
