//! `mica info`: what an image says about itself, with qemu-img's wording and fields. Without
//! `--backing-chain` it opens that one file only.

mod encryption;

use crate::calendar::utc;
use crate::failure::Failure;
use crate::images::SubjectArgs;
use crate::output::{OutputFormat, human_size, print, print_json};
use crate::plain::plain;
use clap::Args;
use mica_block::{Disk, Images, wait_for_dead};
use mica_crypt::luks::{LuksHeader, read_header as read_luks_header};
use mica_qcow2::loop_error;
use mica_qcow2_format::{BitmapEntry, Compression, Encryption, Header, SnapshotEntry, Version};
use mica_qcow2_tools::{ImageInfo, inspect};
use mica_stack::{ExportDisk, FileImages, Format, RawDisk, warn_of_luks};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

#[derive(Args)]
pub(crate) struct InfoArgs {
    /// Show the whole chain of backing files.
    #[arg(short = 'b', long)]
    backing_chain: bool,
    #[command(flatten)]
    subject: SubjectArgs,
}

pub(crate) fn run(args: &InfoArgs) -> Result<ExitCode, Failure> {
    let format = args.subject.images.format();
    if format == Format::Null {
        return Err(Failure::new("the null format is not an image: there is nothing to show"));
    }
    if let Some(export) = args.subject.images.open_export(&args.subject.image)? {
        show(args, vec![describe_export(&args.subject.image, &export)])?;
        return Ok(ExitCode::SUCCESS);
    }
    let executor = args.subject.images.executor()?;
    executor.block_on(async {
        let images = FileImages::new(&args.subject.image, args.subject.images.image_options()?)?;
        let mut described = Vec::new();
        let mut seen = HashSet::new();
        let mut next = Some((args.subject.image.clone(), format));
        while let Some((path, format)) = next.take() {
            let (one, below) = describe(&images, &path, format, args.backing_chain).await?;
            if !seen.insert(one.file) {
                return Err(loop_error(&path).into());
            }
            described.push(one);
            next = below.filter(|_| args.backing_chain);
        }
        show(args, described)?;
        Ok(ExitCode::SUCCESS)
    })
}

/// The description of one image.
struct Described {
    file: (u64, u64),
    json: Value,
    text: String,
}

async fn describe(
    images: &FileImages,
    path: &Path,
    format: Format,
    follow: bool,
) -> Result<(Described, Option<(PathBuf, Format)>), Failure> {
    let disk_bytes = std::fs::metadata(path).map_or(0, |data| data.blocks() * 512);
    if format == Format::Raw {
        let image = wait_for_dead(async || images.open(path)).await?;
        let len = image.store.len()?;
        warn_of_luks(path, format, &RawDisk::new(Arc::clone(&image.store))?).await;
        let mut description = Description::new(path, len, Some(disk_bytes));
        description.raw(len.next_multiple_of(512));
        let file = (image.identity.device, image.identity.inode);
        return Ok((description.finish(file), None));
    }
    if format == Format::Luks {
        let image = wait_for_dead(async || images.open(path)).await?;
        let (len, luks) = (image.store.len()?, read_luks_header(&*image.store).await);
        let luks = luks.map_err(|error| error.wrap(path.display().to_string()))?;
        let mut description = Description::new(path, len, Some(disk_bytes));
        description.luks(len, &luks);
        let file = (image.identity.device, image.identity.inode);
        return Ok((description.finish(file), None));
    }
    let info = wait_for_dead(async || inspect(images, path).await).await?;
    // A backing file that may not be opened is not an error if only its name is shown.
    let backing = match info.backing(images, path) {
        Ok(backing) => backing,
        Err(_) if !follow => None,
        Err(error) => return Err(error.into()),
    };
    let mut description = Description::new(path, info.image.store.len()?, Some(disk_bytes));
    description.qcow2(&info, backing.as_ref().map(|(path, _)| path.as_path()));
    let file = (info.image.identity.device, info.image.identity.inode);
    let below = match backing {
        Some((path, format)) if follow => {
            let format = format.as_deref().unwrap_or("raw").parse()?;
            Some((path, format))
        }
        _ => None,
    };
    Ok((description.finish(file), below))
}

/// An export has no file here, and takes nobody knows how much there.
fn describe_export(path: &Path, export: &ExportDisk) -> Described {
    let mut description = Description::new(path, export.exported_len(), None);
    description.raw(export.geometry().len);
    if !export.description().is_empty() {
        description.line(&format!("description: {}", export.description().replace('\n', " ")));
        description.set("description", export.description());
    }
    description.finish((0, 0))
}

fn show(args: &InfoArgs, described: Vec<Described>) -> Result<(), Failure> {
    match args.subject.output.output {
        OutputFormat::Human => {
            let texts: Vec<String> = described.into_iter().map(|one| one.text).collect();
            print(&texts.join("\n"))
        }
        OutputFormat::Json => {
            let mut values: Vec<Value> = described.into_iter().map(|one| one.json).collect();
            if args.backing_chain {
                print_json(&values)
            } else {
                print_json(&values.pop().unwrap_or_default())
            }
        }
    }
}

/// Collects the description of one image, as text and as JSON.
struct Description<'a> {
    path: &'a Path,
    file_bytes: u64,
    /// What its file takes; `None` if it has none here.
    disk_bytes: Option<u64>,
    json: Map<String, Value>,
    text: String,
}

impl<'a> Description<'a> {
    fn new(path: &'a Path, file_bytes: u64, disk_bytes: Option<u64>) -> Self {
        let mut json = Map::new();
        let name = path.display().to_string();
        // QEMU counts files in whole sectors.
        let file_bytes = file_bytes.next_multiple_of(512);
        let mut child = json!({
            "children": [],
            "virtual-size": file_bytes,
            "filename": name,
            "format": "nbd",
            "dirty-flag": false,
        });
        if let Some(bytes) = disk_bytes {
            child["format"] = "file".into();
            child["actual-size"] = bytes.into();
            child["format-specific"] = json!({ "type": "file", "data": {} });
        }
        json.insert("children".into(), json!([{ "name": "file", "info": child }]));
        Self { path, file_bytes, disk_bytes, json, text: String::new() }
    }

    /// Adds a line. Names come from images: a terminal must not interpret them, and they must not
    /// look like more lines.
    fn line(&mut self, text: &str) {
        self.text.push_str(&plain(text));
        self.text.push('\n');
    }

    fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.json.insert(name.to_owned(), value.into());
    }

    fn head(&mut self, format: &str, virtual_bytes: u64) {
        let name = self.path.display().to_string();
        self.line(&format!("image: {name}"));
        self.line(&format!("file format: {format}"));
        let size = human_size(virtual_bytes);
        self.line(&format!("virtual size: {size} ({virtual_bytes} bytes)"));
        self.line(&format!("disk size: {}", self.disk_size()));
        self.set("virtual-size", virtual_bytes);
        self.set("filename", name);
        self.set("format", format);
        if let Some(bytes) = self.disk_bytes {
            self.set("actual-size", bytes);
        }
    }

    fn disk_size(&self) -> String {
        self.disk_bytes.map_or_else(|| "unavailable".to_owned(), human_size)
    }

    fn encrypted(&mut self) {
        self.line("encrypted: yes");
        self.set("encrypted", true);
    }

    fn raw(&mut self, virtual_bytes: u64) {
        self.head("raw", virtual_bytes);
        self.set("dirty-flag", false);
    }

    fn luks(&mut self, file_bytes: u64, luks: &LuksHeader) {
        let len = file_bytes.saturating_sub(luks.payload_offset()).next_multiple_of(512);
        self.head("luks", len);
        self.encrypted();
        self.line("Format specific information:");
        let data = encryption::of_luks(luks, None);
        encryption::lines("luks", &data).iter().skip(1).for_each(|line| {
            self.line(line.strip_prefix("    ").unwrap_or(line));
        });
        self.set("format-specific", json!({ "type": "luks", "data": data }));
        self.set("dirty-flag", false);
    }

    fn qcow2(&mut self, info: &ImageInfo, backing: Option<&Path>) {
        let header = &info.header;
        self.head("qcow2", header.disk_bytes());
        if header.encryption != Encryption::None {
            self.encrypted();
        }
        let cluster_bytes = header.cluster_bits.bytes();
        self.line(&format!("cluster_size: {cluster_bytes}"));
        self.set("cluster-size", cluster_bytes);
        self.backing(header, backing);
        self.snapshots(header, &info.snapshots);
        let encrypt = match (&info.luks, header.encryption) {
            (Some(luks), _) => Some(encryption::of_luks(luks, Some("luks"))),
            (None, Encryption::Aes) => Some(json!({ "format": "aes" })),
            (None, _) => None,
        };
        self.specific(header, &info.bitmaps, encrypt);
        self.set("dirty-flag", header.incompatible.dirty);
    }

    fn backing(&mut self, header: &Header, resolved: Option<&Path>) {
        let Some(backing) = &header.backing else { return };
        let name = backing.name.to_string_lossy();
        let resolved = resolved.map(|path| path.display().to_string());
        let actual = match &resolved {
            Some(path) if *path != name => format!(" (actual path: {path})"),
            _ => String::new(),
        };
        self.line(&format!("backing file: {name}{actual}"));
        self.set("backing-filename", name.as_ref());
        if let Some(path) = resolved {
            self.set("full-backing-filename", path);
        }
        if let Some(format) = &backing.format {
            self.line(&format!("backing file format: {format}"));
            self.set("backing-filename-format", format.as_str());
        }
    }

    fn snapshots(&mut self, header: &Header, snapshots: &[SnapshotEntry]) {
        if snapshots.is_empty() {
            return;
        }
        snapshot_lines(snapshots).iter().for_each(|line| self.line(line));
        let listed = snapshots.len();
        let count = header.snapshot_count as usize;
        if listed < count {
            self.line(&format!("({} more snapshots are not shown)", count - listed));
            self.set("snapshots-not-shown", count - listed);
        }
        self.set("snapshots", snapshots.iter().map(snapshot_json).collect::<Vec<_>>());
    }

    fn specific(&mut self, header: &Header, bitmaps: &[BitmapEntry], encrypt: Option<Value>) {
        let mut data = Map::new();
        let compat = match header.version {
            Version::V2 => "0.10",
            Version::V3 => "1.1",
        };
        let compression = match header.compression {
            Compression::Deflate => "zlib",
            Compression::Zstd => "zstd",
        };
        let mut set = |name: &str, value: Value| {
            data.insert(name.to_owned(), value);
        };
        set("compat", compat.into());
        set("compression-type", compression.into());
        if header.version == Version::V3 {
            set("lazy-refcounts", header.compatible.lazy_refcounts.into());
        }
        set("refcount-bits", header.refcount_width.bits().into());
        if let Some(encrypt) = encrypt {
            set("encrypt", encrypt);
        }
        if header.version == Version::V3 {
            set("corrupt", header.incompatible.corrupt.into());
            set("extended-l2", header.incompatible.extended_l2.into());
        }
        if !bitmaps.is_empty() {
            set("bitmaps", bitmaps.iter().map(bitmap_json).collect());
        }
        if header.incompatible.external_data_file {
            let name = header.data_file_name.as_ref().map(|name| name.to_string_lossy());
            if let Some(name) = name {
                set("data-file", name.as_ref().into());
            }
            set("data-file-raw", header.autoclear.raw_external.into());
        }
        self.line("Format specific information:");
        for (name, value) in &data {
            let name = name.replace('-', " ");
            match value {
                Value::Array(bitmaps) => {
                    self.line(&format!("    {name}:"));
                    let lines = bitmaps.iter().flat_map(bitmap_lines);
                    lines.for_each(|line| self.line(&line));
                }
                Value::Object(_) => encryption::lines(&name, value).iter().for_each(|line| {
                    self.line(line);
                }),
                Value::String(text) => self.line(&format!("    {name}: {text}")),
                other => self.line(&format!("    {name}: {other}")),
            }
        }
        self.set("format-specific", json!({ "type": "qcow2", "data": data }));
    }

    fn finish(mut self, file: (u64, u64)) -> Described {
        self.line("Child node '/file':");
        self.line(&format!("    filename: {}", self.path.display()));
        let protocol = if self.disk_bytes.is_some() { "file" } else { "nbd" };
        self.line(&format!("    protocol type: {protocol}"));
        let size = human_size(self.file_bytes);
        self.line(&format!("    file length: {size} ({} bytes)", self.file_bytes));
        self.line(&format!("    disk size: {}", self.disk_size()));
        Described { file, json: Value::Object(self.json), text: self.text }
    }
}

/// A list of snapshots, as QEMU shows it.
pub(crate) fn snapshot_lines(snapshots: &[SnapshotEntry]) -> Vec<String> {
    let mut lines = vec![
        "Snapshot list:".to_owned(),
        "ID      TAG               VM_SIZE                DATE        VM_CLOCK     ICOUNT"
            .to_owned(),
    ];
    for snapshot in snapshots {
        let SnapshotEntry { id, name, date_seconds, .. } = snapshot;
        let state = human_size(snapshot.vm_state_bytes);
        let date = utc(u64::from(*date_seconds));
        let clock = clock(snapshot.vm_clock_nanoseconds);
        let icount = snapshot.icount.filter(|count| *count != u64::MAX);
        let icount = icount.map_or_else(|| "--".to_owned(), |count| count.to_string());
        lines.push(plain(&format!(
            "{id:<7} {name:<16} {state:>8} {date:>20} {clock:>15} {icount:>10}"
        )));
    }
    lines
}

pub(crate) fn snapshot_json(snapshot: &SnapshotEntry) -> Value {
    let nanoseconds = snapshot.vm_clock_nanoseconds;
    let mut value = json!({
        "vm-clock-nsec": nanoseconds % 1_000_000_000,
        "name": snapshot.name,
        "date-sec": snapshot.date_seconds,
        "date-nsec": snapshot.date_nanoseconds,
        "vm-clock-sec": nanoseconds / 1_000_000_000,
        "id": snapshot.id,
        "vm-state-size": snapshot.vm_state_bytes,
    });
    if let (Some(icount), Some(object)) =
        (snapshot.icount.filter(|count| *count != u64::MAX), value.as_object_mut())
    {
        object.insert("icount".to_owned(), icount.into());
    }
    value
}

pub(crate) fn bitmap_json(bitmap: &BitmapEntry) -> Value {
    let flags = [("in-use", bitmap.in_use), ("auto", bitmap.auto)];
    let flags: Vec<&str> = flags.iter().filter(|flag| flag.1).map(|flag| flag.0).collect();
    json!({ "flags": flags, "name": bitmap.name, "granularity": 1_u64 << bitmap.granularity_bits })
}

fn bitmap_lines(bitmap: &Value) -> [String; 3] {
    let flags = bitmap["flags"].as_array().map(Vec::as_slice).unwrap_or_default();
    let flags = flags.iter().fold("        - flags:".to_owned(), |flags, flag| {
        flags + " " + flag.as_str().unwrap_or_default()
    });
    let name = bitmap["name"].as_str().unwrap_or_default();
    let granularity = &bitmap["granularity"];
    [flags, format!("          name: {name}"), format!("          granularity: {granularity}")]
}

/// Hours, minutes, seconds and milliseconds of a guest's clock.
fn clock(nanoseconds: u64) -> String {
    let seconds = nanoseconds / 1_000_000_000;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:04}:{minutes:02}:{:02}.{:03}", seconds % 60, nanoseconds / 1_000_000 % 1000)
}

#[cfg(test)]
mod tests {
    use super::clock;

    #[test]
    fn clocks_are_written_as_by_qemu() {
        assert_eq!(clock(3_723_004_000_000), "0001:02:03.004");
    }
}
