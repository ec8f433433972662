//! `mica map`: which layer owns which bytes of the disk, with qemu-img's wording.

use crate::failure::Failure;
use crate::images::{SubjectArgs, size_of};
use crate::output::{OutputFormat, print};
use crate::plain::plain;
use clap::Args;
use mica_block::{Extent, ExtentKind, Manage, Survey};
use mica_qcow2::IndexUse;
use mica_units::{GuestOffset, GuestRange};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Text that is buffered before it is printed.
const PRINT_BYTES: usize = 64 << 10;

#[derive(Args)]
pub(crate) struct MapArgs {
    /// Offset on the disk to start at, in bytes (suffixes k, M, G, T).
    #[arg(short = 's', long, default_value = "0", value_name = "OFFSET")]
    start_offset: String,
    /// Number of bytes; up to the end of the disk by default.
    #[arg(long, value_name = "LENGTH")]
    max_length: Option<String>,
    #[command(flatten)]
    subject: SubjectArgs,
}

pub(crate) fn run(args: &MapArgs) -> Result<ExitCode, Failure> {
    let start = size_of("--start-offset", &args.start_offset)?;
    let limit = args.max_length.as_deref().map(|text| size_of("--max-length", text)).transpose()?;
    let executor = args.subject.images.executor()?;
    executor.block_on(async {
        let disk = args.subject.images.open_source(&args.subject.image, IndexUse::Read).await?;
        let len = disk.geometry().len;
        let end = limit.map_or(len, |limit| len.min(start.saturating_add(limit)));
        let mut printer = Printer::new(args, &*disk);
        printer.begin()?;
        let range = GuestRange::between(GuestOffset::new(start), GuestOffset::new(end.max(start)));
        let range = range.ok_or_else(|| Failure::new("the disk ends beyond 64 bits"))?;
        let mut survey = Survey::new(&*disk, range);
        while let Some(extents) = survey.next().await? {
            for extent in extents {
                printer.add(extent)?;
            }
        }
        printer.end()?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Joins extents across pieces and prints them.
struct Printer<'a> {
    disk: &'a dyn Manage,
    format: OutputFormat,
    /// Names of the layers, and of the external data files that some have.
    names: Vec<String>,
    data_names: Vec<Option<String>>,
    pending: Option<Extent>,
    count: usize,
    text: String,
}

impl<'a> Printer<'a> {
    fn new(args: &MapArgs, disk: &'a dyn Manage) -> Self {
        let mut paths = disk.layer_paths();
        if paths.is_empty() {
            paths.push(args.subject.image.clone());
        }
        let format = args.subject.output.output;
        let shown = |path: &PathBuf| match format {
            // An image that a stranger wrote names others as it likes.
            OutputFormat::Human => plain(&path.to_string_lossy()),
            OutputFormat::Json => path.display().to_string(),
        };
        let data_name = |at| disk.data_path(at).as_ref().map(shown);
        let data_names = (0..paths.len()).map(data_name).collect();
        let names = paths.iter().map(shown).collect();
        Self { disk, format, names, data_names, pending: None, count: 0, text: String::new() }
    }

    fn begin(&mut self) -> Result<(), Failure> {
        match self.format {
            OutputFormat::Human => {
                self.text.push_str("Offset          Length          Mapped to       File\n");
            }
            OutputFormat::Json => self.text.push('['),
        }
        Ok(())
    }

    fn add(&mut self, extent: Extent) -> Result<(), Failure> {
        match &mut self.pending {
            Some(pending) if pending.continues_into(&extent) => pending.len += extent.len,
            pending => {
                if let Some(done) = pending.replace(extent) {
                    self.print(done)?;
                }
            }
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), Failure> {
        if let Some(done) = self.pending.take() {
            self.print(done)?;
        }
        if self.format == OutputFormat::Json {
            self.text.push_str("]\n");
        }
        print(&self.text)
    }

    fn print(&mut self, extent: Extent) -> Result<(), Failure> {
        let at = self.disk.layer_position(extent.layer);
        let name = self.data_names[at].as_ref().unwrap_or(&self.names[at]);
        // Writing to a string does not fail.
        let _ = match self.format {
            OutputFormat::Human if extent.kind == ExtentKind::Data => {
                let Extent { start, len, host, .. } = extent;
                let start = format!("{:#x}", start.bytes());
                let len = format!("{len:#x}");
                let host = format!("{:#x}", host.bytes());
                writeln!(self.text, "{start:<16}{len:<16}{host:<16}{name}")
            }
            OutputFormat::Human => Ok(()),
            OutputFormat::Json => self.write_json(extent),
        };
        self.count += 1;
        if self.text.len() > PRINT_BYTES {
            print(&std::mem::take(&mut self.text))?;
        }
        Ok(())
    }

    fn write_json(&mut self, extent: Extent) -> std::fmt::Result {
        let depth = self.names.len() - 1 - self.disk.layer_position(extent.layer);
        if self.count > 0 {
            self.text.push_str(",\n");
        }
        let (start, len) = (extent.start.bytes(), extent.len);
        let present = extent.kind.is_present();
        let zero = extent.kind.reads_as_zero();
        let data = !zero || extent.kind == ExtentKind::DataInHole;
        let compressed = extent.kind == ExtentKind::Encoded;
        write!(
            self.text,
            "{{ \"start\": {start}, \"length\": {len}, \"depth\": {depth}, \"present\": {present}, \
             \"zero\": {zero}, \"data\": {data}, \"compressed\": {compressed}"
        )?;
        let position = self.disk.layer_position(extent.layer);
        // Its bytes there are others, as in QEMU.
        if extent.kind.has_host() && !self.disk.is_encrypted(position) {
            write!(self.text, ", \"offset\": {}", extent.host.bytes())?;
        }
        self.text.push('}');
        Ok(())
    }
}
