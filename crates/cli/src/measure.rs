//! `mica measure`: how long a new image of a disk will be, with qemu-img's wording.

use crate::create::{no_new_luks, parse_options, raw_len};
use crate::failure::Failure;
use crate::images::{ImageArgs, export_uri, no_snapshots, size_of};
use crate::output::{OutputArgs, OutputFormat, print, print_json};
use clap::Args;
use mica_block::wait_for_dead;
use mica_qcow2::IndexUse;
use mica_qcow2::snapshots::SnapshotSelector;
use mica_qcow2_format::Version;
use mica_qcow2_tools::inspect;
use mica_qcow2_tools::measure::{Measure, bitmaps_bytes, data_bytes, measure};
use mica_stack::{FileImages, Format};
use mica_units::ClusterBits;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::process::ExitCode;

/// Show how long a new image will be.
#[derive(Args)]
pub(crate) struct MeasureArgs {
    /// Format of the new image: qcow2 or raw.
    #[arg(
        short = 'O',
        long,
        alias = "target-format",
        default_value = "qcow2",
        value_name = "FMT",
        hide_default_value = true
    )]
    output_format: String,
    /// Options of the new image, see -o help.
    ///
    /// Can be repeated.
    #[arg(short = 'o', long, value_name = "KEY=VALUE,...")]
    options: Vec<String>,
    /// Measure for a full disk of this length instead.
    #[arg(short = 's', long, value_name = "SIZE", conflicts_with = "image")]
    size: Option<String>,
    /// Measure this internal snapshot.
    ///
    /// By ID or name, or as snapshot.id=ID or snapshot.name=NAME (or both).
    #[arg(short = 'l', long, alias = "snapshot", value_name = "NAME", conflicts_with = "size")]
    load_snapshot: Option<SnapshotSelector>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The image to measure for.
    #[arg(value_name = "IMAGE", required_unless_present = "size")]
    image: Option<PathBuf>,
}

pub(crate) fn run(args: &MeasureArgs) -> Result<ExitCode, Failure> {
    let executor = args.images.executor()?;
    let (measured, bitmaps) = executor.block_on(measure_for(args))?;
    let Measure { required, fully_allocated } = measured;
    match args.output.output {
        OutputFormat::Json => {
            let mut fields: Map<String, Value> = Map::new();
            if let Some(bitmaps) = bitmaps {
                fields.insert("bitmaps".into(), bitmaps.into());
            }
            fields.insert("required".into(), required.into());
            fields.insert("fully-allocated".into(), fully_allocated.into());
            print_json(&fields)?;
        }
        OutputFormat::Human => {
            let mut text =
                format!("required size: {required}\nfully allocated size: {fully_allocated}\n");
            if let Some(bitmaps) = bitmaps {
                text.push_str(&format!("bitmaps size: {bitmaps}\n"));
            }
            print(&text)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn measure_for(args: &MeasureArgs) -> Result<(Measure, Option<u64>), Failure> {
    let format = args.output_format.parse::<Format>()?;
    let options = parse_options(&args.options, format)?;
    let source = match &args.image {
        None => None,
        Some(image) => {
            let mut chain = args.images.chain_options(IndexUse::Read)?;
            chain.snapshot.clone_from(&args.load_snapshot);
            let (images, format) = (args.images.image_options()?, args.images.format());
            match args.images.open_export(image)? {
                Some(_) if args.load_snapshot.is_some() => return Err(no_snapshots()),
                Some(export) => Some(export as _),
                None => Some(mica_stack::open(image, format, images, &chain).await?),
            }
        }
    };
    let size = match (&args.size, &source) {
        (Some(size), _) => size_of("--size", size)?,
        (None, Some(source)) => source.geometry().len,
        (None, None) => options.size.unwrap_or(0),
    };
    if options.size.is_some_and(|other| other != size) {
        let what = "-o size: IMAGE, or --size, says how long the disk is: leave it out";
        return Err(Failure::new(what));
    }
    match format {
        Format::Luks => Err(no_new_luks()),
        Format::Null => Err(Failure::new("images of the null format cannot be measured")),
        Format::Raw => {
            let len = raw_len(size)?;
            Ok((Measure { required: len, fully_allocated: len }, None))
        }
        Format::Qcow2 => {
            let plan = options.wish.plan(size)?;
            // Its base is not opened here: with a passphrase at hand it may be encrypted, and then
            // so is the image.
            let has_secret = !args.images.image_options()?.secrets.is_empty();
            let may_be_encrypted = plan.backing.is_some() && has_secret;
            let plan = options.encrypt.apply_to_measure(plan, may_be_encrypted)?;
            let bits = plan.l2.cluster_bits;
            let data = match &source {
                None => 0,
                // How much of it the backing file has is unknown: all of it may be needed.
                Some(_) if plan.backing.is_some() => plan.clusters() * bits.bytes(),
                Some(source) => data_bytes(&**source, bits).await?,
            };
            let bitmaps = match plan.l2.version {
                Version::V2 => None,
                Version::V3 => source_bitmaps(args, bits).await?,
            };
            Ok((measure(&plan, data), bitmaps))
        }
    }
}

/// Bytes that a copy of the source's bitmaps takes, if it can have any.
async fn source_bitmaps(args: &MeasureArgs, bits: ClusterBits) -> Result<Option<u64>, Failure> {
    let (Some(image), Format::Qcow2) = (&args.image, args.images.format()) else {
        return Ok(None);
    };
    if export_uri(image).is_some() {
        return Ok(None);
    }
    let images = FileImages::new(image, args.images.image_options()?)?;
    let info = wait_for_dead(async || inspect(&images, image).await).await?;
    if info.header.version == Version::V2 {
        return Ok(None);
    }
    Ok(Some(bitmaps_bytes(&info.bitmaps, info.header.disk_bytes(), bits)))
}
