//! `mica volume export`: as `mica convert`, from a volume or a snapshot.

use super::keys::KeyArgs;
use super::session::{SessionArgs, stores, volume};
use crate::convert::{Input, TargetArgs, run_from};
use crate::failure::Failure;
use crate::images::ImageArgs;
use clap::Args;
use mica_stack::VolumeOptions;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Copy a volume, or one of its snapshots, into a new image.
///
/// If a host has the volume open, copies the state that it put into the store last: take a snapshot
/// first.
#[derive(Args)]
pub(super) struct ExportArgs {
    #[command(flatten)]
    new: TargetArgs,
    #[command(flatten)]
    session: SessionArgs,
    #[command(flatten)]
    key: KeyArgs,
    /// The volume, or with @LABEL one of its snapshots.
    #[arg(value_name = "URL")]
    url: String,
    /// The image, or - for standard output.
    ///
    /// With -O raw also a device that is not in use.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn run(args: &ExportArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let stores = stores();
    let options = VolumeOptions { key: args.key.volume_key.clone(), ..VolumeOptions::default() };
    let images = ImageArgs::with_io(args.session.io.clone());
    run_from(&args.url, args.file.clone(), (args.new.clone(), images), |executor| {
        let volume = executor.block_on(stores.open_volume(&url, &options))?;
        Ok(Input::of(Path::new(&args.url), volume))
    })
}
