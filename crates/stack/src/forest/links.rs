//! From names to files: collects images, and finds what their headers name.
//!
//! A relative name starts where the image was named, not where its file is: an image with names in
//! two folders may stand on different files, and both count.

use super::folders::FileName;
use super::record::{Content, FileStat, Opened, Record, luks_disk_bytes};
use super::{Below, Forest, ForestImage, IMAGES_MAX, ImageId, Lost, Outcome, Problem, ScanOptions};
use crate::policy::likely_place;
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{BackingName, parse_image_name};
use serde_json::Value;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A sidecar is no image, and there is one for each.
const SIDECAR_ENDING: &[u8] = b".mica-index";

/// Names of one image that are looked at.
const NAMES_MAX: usize = 64;

/// Images that were found so far.
pub(super) struct Linker {
    images: Vec<ForestImage>,
    by_file: HashMap<(u64, u64), ImageId>,
    /// Files whose headers cannot be used, and why.
    bad: HashMap<(u64, u64), String>,
    /// Directories without symbolic links, in which files may be named (I4).
    allowed: Vec<PathBuf>,
    pub(super) problems: Vec<Problem>,
    by_other_names: Vec<(ImageId, ImageId)>,
    /// Room for a header.
    room: Vec<u8>,
}

/// A name in a header, as far as it is understood.
struct Named {
    path: PathBuf,
    /// The format that the image states.
    format: Option<String>,
    /// Why mica would not open it.
    refusal: Option<String>,
}

impl Linker {
    pub(super) fn new(places: &[PathBuf], options: &ScanOptions) -> Result<Self> {
        let mut allowed = Vec::new();
        for place in places.iter().chain(&options.allow_paths) {
            let real = place
                .canonicalize()
                .map_err(|error| Error::from_io(format!("finding {}", place.display()), error))?;
            allowed.push(match (real.is_dir(), real.parent()) {
                (false, Some(folder)) => folder.to_owned(),
                _ => real,
            });
        }
        Ok(Self {
            images: Vec::new(),
            by_file: HashMap::new(),
            bad: HashMap::new(),
            allowed,
            problems: Vec::new(),
            by_other_names: Vec::new(),
            room: Vec::new(),
        })
    }

    /// Takes a file that the user named, whatever it is.
    pub(super) fn take_named(&mut self, path: &Path) -> Result<()> {
        let failed = |error| Error::from_io(format!("reading {}", path.display()), error);
        let record = self.record(path).map_err(failed)?;
        // A device has no header that stays what it was.
        let Some(record) = record else { return Ok(()) };
        self.add(path, record, |_| true).map(drop)
    }

    /// Takes a file that was found in a folder, if it is an image.
    pub(super) fn take(&mut self, name: &FileName) -> Result<()> {
        let FileName { path, is_link } = name;
        if path.as_os_str().as_bytes().ends_with(SIDECAR_ENDING) {
            return Ok(());
        }
        if *is_link && !path.canonicalize().is_ok_and(|real| self.is_allowed(&real)) {
            return Ok(());
        }
        match self.record(path) {
            Ok(Some(record)) => self.add(path, record, |record| record.is_image()).map(drop),
            Ok(None) => Ok(()),
            // It is gone, or has become a link into a loop.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => {
                self.leave_out(path, error.to_string());
                Ok(())
            }
        }
    }

    fn record(&mut self, path: &Path) -> io::Result<Option<Record>> {
        match Opened::open(path)? {
            Some(opened) => opened.read(&mut self.room).map(Some),
            None => Ok(None),
        }
    }

    fn leave_out(&mut self, path: &Path, what: impl Into<String>) {
        let (path, what) = (path.to_owned(), what.into());
        self.problems.push(Problem { path, what, outcome: Outcome::LeftOut });
    }

    fn find_odd(&mut self, path: &Path, what: impl Into<String>) {
        let (path, what) = (path.to_owned(), what.into());
        self.problems.push(Problem { path, what, outcome: Outcome::Odd });
    }

    /// The image in this file, if it is one, and `is_wanted`.
    fn add(
        &mut self,
        path: &Path,
        record: Record,
        is_wanted: impl FnOnce(&Record) -> bool,
    ) -> Result<Option<ImageId>> {
        let file = record.stat.file;
        if let Some(id) = self.by_file.get(&file) {
            let id = *id;
            let names = &mut self.images[id.index()].names;
            if names.iter().any(|name| name == path) {
                return Ok(Some(id));
            }
            match names.len() {
                NAMES_MAX.. => self.leave_out(path, "one name too many of an image"),
                _ => names.push(path.to_owned()),
            }
            return Ok(Some(id));
        }
        if self.bad.contains_key(&file) || !is_wanted(&record) {
            return Ok(None);
        }
        let FileStat { len, disk_bytes, .. } = record.stat;
        let (qcow2, virtual_bytes) = match record.content {
            Content::Bad(why) => {
                self.leave_out(path, why.clone());
                self.bad.insert(file, why);
                return Ok(None);
            }
            Content::Qcow2(facts, virtual_bytes) => (Some(facts), virtual_bytes),
            Content::Other => (None, len.next_multiple_of(512)),
        };
        if self.images.len() == IMAGES_MAX {
            let context = format!("there are more than {IMAGES_MAX} images");
            return Err(Error::new(ErrorKind::Limit, context));
        }
        let id = ImageId::new(self.images.len());
        self.by_file.insert(file, id);
        self.images.push(ForestImage {
            names: vec![path.to_owned()],
            file,
            qcow2,
            is_luks: false,
            virtual_bytes,
            file_bytes: len,
            disk_bytes,
            changed_ns: (record.stat.mtime_ns, record.stat.ctime_ns),
            created_ns: record.stat.created_ns,
            below: Below::Nothing,
            depth: 0,
            overlays: Vec::new(),
            chains: 0,
            chain_bytes: 0,
            is_indexed: false,
        });
        Ok(Some(id))
    }

    /// Finds what all images stand on. Files that are only named join them, and theirs, too.
    pub(super) fn finish(mut self) -> Result<Forest> {
        let mut next = 0;
        while next < self.images.len() {
            self.link(ImageId::new(next))?;
            next += 1;
        }
        Ok(Forest {
            images: self.images,
            problems: self.problems,
            by_other_names: self.by_other_names,
            ..Forest::default()
        })
    }

    fn link(&mut self, id: ImageId) -> Result<()> {
        let image = &self.images[id.index()];
        let Some(facts) = &image.qcow2 else { return Ok(()) };
        let (names, data_file) = (image.names.clone(), facts.data_file.clone());
        if let Some(data) = data_file.and_then(|name| self.data_file(&names[0], &name)) {
            self.images[id.index()].disk_bytes += data.disk_bytes;
        }
        let Some(backing) =
            self.images[id.index()].qcow2.as_ref().and_then(|it| it.backing.clone())
        else {
            return Ok(());
        };
        let named = match understand(&backing) {
            Ok(named) => named,
            Err(why) => {
                let below = Below::Lost { name: backing.name, why: Lost::Other(why) };
                self.images[id.index()].below = below;
                return Ok(());
            }
        };
        let below = self.below(&names[0], &backing.name, &named)?;
        if let Below::Image(lower) = below {
            self.take_format((id, lower), &named);
        }
        for name in &names[1..] {
            let other = self.below(name, &backing.name, &named)?;
            if let Below::Image(lower) = other
                && other != below
            {
                let on = self.images[lower.index()].path().display().to_string();
                self.find_odd(name, format!("under this name it stands on {on}"));
                self.by_other_names.push((id, lower));
            }
        }
        self.images[id.index()].below = below;
        Ok(())
    }

    /// What the image that is called `referrer` stands on.
    fn below(&mut self, referrer: &Path, name: &OsStr, named: &Named) -> Result<Below> {
        let lost = |why| Ok(Below::Lost { name: name.to_owned(), why });
        let path = referrer.parent().unwrap_or(Path::new("")).join(&named.path);
        let stat = match FileStat::of(&path) {
            Ok(stat) => stat,
            Err(error) => {
                let absolute = std::path::absolute(&path).unwrap_or_default();
                return lost(match self.is_allowed(&likely_place(&absolute)) {
                    false => Lost::Outside,
                    true if error.kind() == io::ErrorKind::NotFound => Lost::Missing,
                    true => Lost::Other(error.to_string()),
                });
            }
        };
        if let Some(id) = self.by_file.get(&stat.file) {
            return Ok(Below::Image(*id));
        }
        if let Some(why) = self.bad.get(&stat.file) {
            return lost(Lost::Other(why.clone()));
        }
        if !path.canonicalize().is_ok_and(|real| self.is_allowed(&real)) {
            return lost(Lost::Outside);
        }
        match self.record(&path) {
            Ok(Some(record)) => match self.add(&path, record, |_| true)? {
                Some(id) => Ok(Below::Image(id)),
                None => lost(Lost::Other("its header cannot be used".to_owned())),
            },
            Ok(None) => lost(Lost::Other("not a regular file, not looked at".to_owned())),
            Err(error) => lost(Lost::Other(error.to_string())),
        }
    }

    fn data_file(&self, referrer: &Path, name: &OsStr) -> Option<FileStat> {
        let path = referrer.parent().unwrap_or(Path::new("")).join(name);
        let real = path.canonicalize().ok()?;
        let stat = self.is_allowed(&real).then(|| FileStat::of(&real).ok())??;
        stat.is_regular.then_some(stat)
    }

    /// What `upper` says of the format of the image that it stands on; and why a chain that is
    /// drawn cannot be opened.
    fn take_format(&mut self, (upper, lower): (ImageId, ImageId), named: &Named) {
        let path = self.images[upper.index()].path().to_owned();
        if let Some(refusal) = &named.refusal {
            self.find_odd(&path, refusal.clone());
        }
        let below = &self.images[lower.index()];
        let what = match (named.format.as_deref(), &below.qcow2) {
            (None, Some(_)) => "does not state the format of what it stands on, which is qcow2",
            (Some("raw"), Some(_)) => {
                "says that what it stands on is raw, and that begins as qcow2"
            }
            (Some("luks"), Some(_)) => {
                "says that what it stands on is a LUKS image, and that begins as qcow2"
            }
            (Some("qcow2"), None) => "says that what it stands on is qcow2, which it is not",
            (Some("luks"), None) if below.is_luks => return,
            (Some("luks"), None) => match luks_disk_bytes(below.path()) {
                Some(bytes) => {
                    let below = &mut self.images[lower.index()];
                    (below.is_luks, below.virtual_bytes) = (true, bytes);
                    return;
                }
                None => "says that what it stands on is a LUKS image, whose header cannot be used",
            },
            _ => return,
        };
        self.find_odd(&path, what);
    }

    fn is_allowed(&self, real: &Path) -> bool {
        self.allowed.iter().any(|allowed| real.starts_with(allowed))
    }
}

impl Record {
    fn is_image(&self) -> bool {
        !matches!(self.content, Content::Other)
    }
}

/// Reads a name more generously than an opening does: who stands on whom counts also where mica
/// would refuse to open the chain.
fn understand(backing: &BackingName) -> std::result::Result<Named, String> {
    let BackingName { name, format } = backing;
    let refusal = match parse_image_name(name) {
        Ok(parsed) => {
            let format = format.clone().or(parsed.format);
            return Ok(Named { path: parsed.path, format, refusal: None });
        }
        Err(error) => error.to_string(),
    };
    let path =
        name.as_bytes().strip_prefix(b"file:").map(|path| OsStr::from_bytes(path).to_owned());
    let json = name.as_bytes().strip_prefix(b"json:");
    let path = path.or_else(|| file_in(&serde_json::from_slice(json?).ok()?));
    match path.map(PathBuf::from).filter(|path| path.is_absolute()) {
        Some(path) => Ok(Named { path, format: format.clone(), refusal: Some(refusal) }),
        None => Err(refusal),
    }
}

/// The file that a description of an image names.
fn file_in(description: &Value) -> Option<OsString> {
    let names = [
        description.get("file").and_then(|file| file.get("filename")),
        description.get("file.filename"),
        description.get("filename"),
    ];
    names.into_iter().flatten().find_map(Value::as_str).map(OsString::from)
}
