//! `mica volume import`: a volume of an image, with a snapshot of each layer of its chain.

mod copy;
mod layers;

use super::keys::NewArgs;
use super::session::{Session, SessionArgs, volume};
use crate::convert::Progress;
use crate::ending::Ending;
use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::output::{ReportArgs, human_size};
use clap::Args;
use copy::copy_layer;
use layers::{Layer, layers};
use mica_block::Manage;
use mica_rt::sync::Signal;
use mica_rt::{spawn, timeout};
use mica_stack::{VolumeAccess, VolumeOptions, VolumeUrl};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// How long a volume may take to be closed that is deleted then.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// Make a volume of an image.
///
/// Each layer of a chain becomes a snapshot, labelled with the name of its file; what layers share
/// is kept once. The volume has what the uppermost has. If it fails, or a signal ends it, there is
/// no volume.
#[derive(Args)]
pub(super) struct ImportArgs {
    /// Show progress on stderr.
    ///
    /// As `mica convert` does.
    #[arg(short = 'p', long)]
    progress: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    new: NewArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// The image: for a chain, its active layer; or the URI of an export of an NBD server.
    ///
    /// As with `mica convert`: nbd://HOST:PORT/EXPORT, nbd+unix:///EXPORT?socket=PATH, or with TLS
    /// nbds://HOST:PORT/EXPORT?tls-certificates=DIR.
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// The new volume.
    #[arg(value_name = "URL")]
    url: String,
}

pub(super) fn run(args: &ImportArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume import")?;
    let key = args.new.read_key()?;
    let session = SessionArgs { io: args.images.io.clone() }.start()?;
    session.executor.block_on(async {
        let layers = layers(&args.images, &args.image).await?;
        let last = layers.last().map_or(0, |layer| layer.len);
        let store = session.stores.open_or_make(&url.store).await?;
        let len = layers.first().map_or(last, |layer| layer.len);
        let ending = Ending::watch()?;
        ending.finish(store.begin_import(&url.name, len, key, args.new.new_volume())).await?;
        if let Err(failure) = fill(args, &session, url, (&layers, &ending)).await {
            // Half an image must not be taken for all of it.
            let deleted = store.delete(&url.name, true).await;
            if deleted.is_ok() {
                ending.end_if_raised();
            }
            return Err(match deleted {
                Ok(()) => {
                    failure.within(format!("{url} is not imported, and nothing of it is left"))
                }
                Err(error) => {
                    let (message, error) = (failure.message(), error.in_one_line());
                    let what = format!("{message}; {url} has a part of it, delete it: {error}");
                    Failure::new(what)
                }
            });
        }
        let labels: Vec<_> = layers.iter().map(|layer| &*layer.label).collect();
        let (size, count) = (human_size(last), labels.len());
        let snapshots = if count == 1 { "a snapshot" } else { "snapshots" };
        let text = format!("{url}: {size}, with {snapshots}: {}\n", labels.join(", "));
        let json = json!({
            "url": url.to_string(),
            "virtual-size": last,
            "snapshots": labels,
        });
        args.report.print(&text, &json)?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Copies all layers, one after the other, each with a snapshot.
async fn fill(
    args: &ImportArgs,
    session: &Session,
    url: &VolumeUrl,
    (layers, ending): (&[Layer], &Ending),
) -> Result<(), Failure> {
    let access = VolumeAccess::Import;
    let key = args.new.key.volume_key.clone().filter(|_| args.new.encrypts());
    let options = VolumeOptions { access, key, ..VolumeOptions::default() };
    let volume = session.stores.open_volume(url, &options).await?;
    let (tended, ended) = (Arc::clone(&volume), Arc::new(Signal::default()));
    let ends = Arc::clone(&ended);
    let tending = spawn(async move {
        ends.unless_raised(tended.tend()).await;
    });
    let copied = ending.unless_raised(copy_layers(args, &*volume, layers)).await;
    let closed = match copied {
        Ok(()) => volume.close().await.map_err(Failure::from),
        Err(failure) => {
            // Its store may be what fails. Whatever comes of this, the volume is deleted.
            let _ = timeout(CLOSE_LIMIT, volume.close()).await;
            Err(failure)
        }
    };
    // Nothing holds the volume and its lock any longer than this.
    ended.raise();
    tending.await;
    closed
}

async fn copy_layers(
    args: &ImportArgs,
    volume: &dyn Manage,
    layers: &[Layer],
) -> Result<(), Failure> {
    let snapshots = volume.snapshots().expect("a volume has snapshots");
    let total = layers.iter().map(|layer| layer.len).sum();
    let progress = Progress::start(total, args.report.progress(args.progress));
    let mut done = 0;
    for layer in layers {
        let source = layer.open(&args.images).await?;
        if layer.len > volume.geometry().len {
            volume.resize(layer.len).await?;
        }
        let at = |position| progress.at(done + position);
        copy_layer(&*source, volume, done > 0, at, |bytes| progress.wrote(bytes)).await?;
        snapshots.take(&layer.label).await?;
        source.close().await?;
        done += layer.len;
    }
    progress.finish();
    Ok(())
}
