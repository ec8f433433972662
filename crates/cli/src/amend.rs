//! `mica amend`: changes what an image that is not in use says about its format.

mod keys;

use crate::create::options::{number, switch, version, words, wrong};
use crate::failure::Failure;
use crate::images::{ImageArgs, size_of};
use crate::output::ReportArgs;
use clap::Args;
use keys::KeyOptions;
use mica_block::{Images, wait_for_dead};
use mica_crypt::luks::Slot;
use mica_qcow2_format::{Header, RefcountWidth, Version};
use mica_qcow2_tools::amend::{Amendment, amend};
use mica_qcow2_tools::resize::Resizer;
use mica_rt::Executor;
use mica_stack::{FileImages, Format, KeyChange, MayWrite, amend_keys};
use mica_units::SECTOR_BYTES;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Change the options of an image.
///
/// The image must not be in use. The content of its disk stays the same. Either all changes are
/// made or none; if the power fails, at most the new size is missing, which comes last.
#[derive(Args)]
pub(crate) struct AmendArgs {
    /// Options to change, see -o help.
    ///
    /// Can be repeated.
    #[arg(short = 'o', value_name = "KEY=VALUE,...", required = true)]
    options: Vec<String>,
    /// Allow the last key to be removed: nobody can read the image then.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The image.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
}

/// What can be changed.
const OPTIONS: &[(&str, &str)] = &[
    ("backing_fmt", "the format of the backing file: qcow2 or raw"),
    ("compat", "1.1 (v3), or 0.10 (v2) for old readers"),
    ("data_file", "the name of the file that holds the data, if it was renamed"),
    ("data_file_raw", "off: the data file need not stay a raw image"),
    ("encrypt.iter-time", "milliseconds for which the new passphrase is hashed"),
    ("encrypt.keyslot", "which key: 0 to 7"),
    ("encrypt.new-secret", "the file with the passphrase to be added"),
    ("encrypt.old-secret", "the file with the passphrase to be removed"),
    ("encrypt.state", "active: a key is added; inactive: it is removed"),
    ("lazy_refcounts", "on: refcounts may be repaired after a crash instead of synced"),
    ("refcount_bits", "1, 2, 4, 8, 16, 32 or 64"),
    ("size", "length of the disk, not less than it is"),
];

/// What to use for options that only new images have.
const ELSEWHERE: &[(&str, &str)] = &[
    ("backing_file", "`mica rebase` gives an image another backing file"),
    ("cluster_size", "`mica convert -o cluster_size=...` makes a copy"),
    ("compression_type", "`mica convert -c -o compression_type=...` makes a copy"),
    ("extended_l2", "`mica convert -o extended_l2=...` makes a copy"),
    ("preallocation", "`mica convert -o preallocation=...` makes a copy"),
];

/// The list of options, if `texts` ask for it with -o help.
pub(crate) fn options_help(texts: &[String]) -> Option<String> {
    let asks = |text: &String| words(text).iter().any(|word| word == "help" || word == "?");
    if !texts.iter().any(asks) {
        return None;
    }
    let lines = OPTIONS.iter().map(|(name, what)| format!("  {name:<18} {what}\n"));
    Some(format!(
        "Options of qcow2 images that can be changed (-o):\n{}",
        lines.collect::<String>()
    ))
}

pub(crate) fn run(args: &AmendArgs) -> Result<ExitCode, Failure> {
    let format = args.images.format();
    let mut wanted = Wanted::parse(&args.options)?;
    let executor = args.images.executor()?;
    if let Some(change) = std::mem::take(&mut wanted.keys).change(args.force)? {
        if wanted.format != Amendment::default() || wanted.size.is_some() {
            return Err(Failure::new("-o encrypt.state: keys are changed alone"));
        }
        return change_keys(args, &executor, change);
    }
    if format != Format::Qcow2 {
        return Err(Failure::new("only qcow2 images have options that can be changed"));
    }
    let (header, size) = executor.block_on(async {
        let options = args.images.image_options()?;
        // Layers above may rely on what it says.
        let may_write = MayWrite::check(&args.image, &options).await?;
        let images = FileImages::to_write(&args.image, options, may_write)?;
        let images: Arc<dyn Images> = Arc::new(images);
        let Some(size) = wanted.size else {
            let change = async || amend(&*images, &args.image, &wanted.format).await;
            let header = wait_for_dead(change).await?;
            let size = header.disk_bytes();
            return Ok::<_, Failure>((header, size));
        };
        let open =
            async || Resizer::open_to_amend(Arc::clone(&images), &args.image, &wanted.format).await;
        let mut resizer = wait_for_dead(open).await?;
        if size < resizer.disk_bytes() {
            let what = "size: the disk is longer: `mica resize --shrink` makes it shorter";
            return Err(Failure::new(format!("{}: {what}", args.image.display())));
        }
        let header = resizer.resize_amended(size, &wanted.format).await?;
        Ok((header, size))
    })?;
    args.report.print("Image amended.\n", &described(args, &header, size))?;
    Ok(ExitCode::SUCCESS)
}

fn change_keys(
    args: &AmendArgs,
    executor: &Executor,
    change: KeyChange,
) -> Result<ExitCode, Failure> {
    let slot = match &change {
        KeyChange::Remove { which: Slot::Number(slot), .. } => Some(*slot),
        KeyChange::Remove { which: Slot::OpenedBy(_), .. } | KeyChange::Add { .. } => None,
    };
    let changed = executor.block_on(async {
        let options = args.images.image_options()?;
        // What the image shows stays the same: layers above do not notice.
        let images = FileImages::to_write(&args.image, options, MayWrite::to_repair())?;
        Ok::<_, Failure>(amend_keys(&images, (&args.image, args.images.format()), change).await?)
    })?;
    // Whoever meant to revoke a passphrase must not believe that it is gone.
    let text = match slot.filter(|_| changed == 0) {
        Some(slot) => format!(
            "Key slot {slot} was not in use: no key was removed. Whatever a removed key had left \
             there is overwritten.\n"
        ),
        None => "Image amended.\n".to_owned(),
    };
    let file = args.image.display().to_string();
    args.report.print(&text, &json!({ "filename": file, "keys": changed }))?;
    Ok(ExitCode::SUCCESS)
}

fn described(args: &AmendArgs, header: &Header, size: u64) -> serde_json::Value {
    json!({
        "filename": args.image.display().to_string(),
        "compat": if header.version == Version::V2 { "0.10" } else { "1.1" },
        "lazy-refcounts": header.compatible.lazy_refcounts,
        "refcount-bits": header.refcount_width.bits(),
        "virtual-size": size,
    })
}

/// What -o asks for.
#[derive(Default)]
struct Wanted {
    format: Amendment,
    size: Option<u64>,
    keys: KeyOptions,
}

impl Wanted {
    fn parse(texts: &[String]) -> Result<Self, Failure> {
        let mut wanted = Self::default();
        for word in texts.iter().flat_map(|text| words(text)) {
            let (key, value) = word.split_once('=').unwrap_or((&word, "on"));
            wanted.set(key, value)?;
        }
        Ok(wanted)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), Failure> {
        let format = &mut self.format;
        match key {
            "backing_fmt" => match value.parse::<Format>() {
                Ok(Format::Qcow2 | Format::Raw) => format.backing_format = Some(value.to_owned()),
                _ => return Err(wrong(key, value, "qcow2 or raw")),
            },
            "compat" => format.version = Some(version(value)?),
            "data_file" => format.data_file = Some(value.into()),
            "data_file_raw" => format.data_file_raw = Some(switch(key, value)?),
            "lazy_refcounts" => format.lazy_refcounts = Some(switch(key, value)?),
            "refcount_bits" => {
                let bits = Some(number(key, value)?).filter(|bits| bits.is_power_of_two());
                let width = bits.and_then(|bits| RefcountWidth::from_order(bits.trailing_zeros()));
                let wanted = "1, 2, 4, 8, 16, 32 or 64";
                format.refcount_width = Some(width.ok_or_else(|| wrong(key, value, wanted))?);
            }
            "size" => {
                let size = size_of("-o size", value)?.checked_next_multiple_of(SECTOR_BYTES);
                let size = size.filter(|size| i64::try_from(*size).is_ok());
                self.size = Some(size.ok_or_else(|| wrong(key, value, "below 8 EiB"))?);
            }
            _ if self.keys.set(key, value)? => {}
            _ => return Err(unknown(key)),
        }
        Ok(())
    }
}

fn unknown(key: &str) -> Failure {
    let elsewhere = ELSEWHERE.iter().find(|(name, _)| *name == key);
    let cure = elsewhere.map_or("-o help lists those that can be changed", |(_, cure)| cure);
    let what = if elsewhere.is_some() { "stays as it is" } else { "is unknown" };
    Failure::new(format!("-o {key} {what}: {cure}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_known_or_its_place_is_said() {
        let said = |text: &str| {
            let refused = Wanted::parse(&[text.to_owned()]).err();
            refused.map(|failure| failure.message().to_owned())
        };
        for (name, _) in OPTIONS {
            let said = said(&format!("{name}=bogus"));
            assert!(said.is_none_or(|said| !said.contains("unknown")), "{name}");
        }
        for (name, cure) in ELSEWHERE {
            assert!(said(&format!("{name}=1")).is_some_and(|said| said.contains(cure)), "{name}");
        }
        assert!(said("cluster_sizes=1").is_some_and(|said| said.contains("unknown")));
        let wanted = Wanted::parse(&["compat=0.10,size=1000".to_owned()]).unwrap_or_default();
        assert_eq!((wanted.format.version, wanted.size), (Some(Version::V2), Some(1024)));
    }
}
