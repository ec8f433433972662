//! Copies to standard output: the bytes of the disk in order, zeros included.

use super::ConvertArgs;
use super::progress::Progress;
use crate::failure::Failure;
use crate::output::OutputFormat;
use crate::pipe::copy_out;
use mica_block::Disk;
use mica_rt::Executor;
use mica_stack::Format;
use std::path::Path;

/// Whether `path` stands for standard input or output.
pub(super) fn is_stream(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// # Errors
/// If the options ask for something that a stream does not have.
pub(super) fn check(args: &ConvertArgs, format: Format) -> Result<(), Failure> {
    if !is_stream(&args.names.target) {
        return Ok(());
    }
    if format != Format::Raw {
        let what = "-: only a raw image can be written to standard output: add -O raw";
        return Err(Failure::new(what));
    }
    let has_base = args.backing.is_some() || args.backing_format.is_some();
    let has_options = !args.new.options.is_empty() || args.new.compress || has_base;
    let has_file = args.no_create || args.new.force || args.target_cache.is_some();
    if args.rate.is_some() {
        let what = "-: standard output is as slow as its reader: leave out -r, and use pv -L";
        return Err(Failure::new(what));
    }
    if has_options || has_file || args.new.report.format() == Some(OutputFormat::Json) {
        let what = "-: standard output carries the bytes of the disk: leave out -o, -c, -B, -F, \
                    -n, -t, --force and --output json";
        return Err(Failure::new(what));
    }
    Ok(())
}

pub(super) fn convert(
    executor: &Executor,
    source: &dyn Disk,
    progress: &Progress,
) -> Result<(), Failure> {
    let len = source.geometry().len;
    executor.block_on(copy_out(source, 0..len, |position, bytes| {
        progress.at(position);
        progress.wrote(bytes);
    }))
}
