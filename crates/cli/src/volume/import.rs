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
use mica_stack::{Store, VolumeAccess, VolumeOptions, VolumeUrl};
use mica_volume::check_len;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// How long its own writer may take to delete a volume of which there is only a part.
const ABORT_LIMIT: Duration = Duration::from_secs(5);

/// Create a volume from an image.
///
/// Each layer of a chain becomes a snapshot, labelled with the name of its file; data that layers
/// share is stored once. The volume has the content of the uppermost layer. If the import fails or
/// is ended by a signal, there is no volume; data copied until then stays in the store until `mica
/// volume gc`.
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
        let len = layers.first().map_or(last, |layer| layer.len);
        check_len(len)?;
        let store = session.stores.open_or_make(&url.store).await?;
        let ending = Ending::watch()?;
        let begun = store.begin_import(&url.name, len, key, args.new.new_volume());
        let made = ending.finish(begun).await?;
        if let Err(failure) = fill(args, &session, url, (made, &layers, &ending)).await {
            return Err(undo(&store, url, made, (failure, &ending)).await);
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
        // It is whole; but whoever wanted an end here may have more to do after this.
        ending.end_if_raised();
        Ok(ExitCode::SUCCESS)
    })
}

/// Deletes the volume that was made, as half an image must not be taken for all of it. Returns why
/// it is not imported.
async fn undo(
    store: &Store,
    url: &VolumeUrl,
    made: [u8; 16],
    (failure, ending): (Failure, &Ending),
) -> Failure {
    match store.undo_import(&url.name, made).await {
        Ok(false) => {
            ending.end_if_raised();
            if failure.lacks_space() {
                let store = store.url();
                return Failure::new(format!(
                    "{url} was not imported: {store} is full: make room there, and import it \
                     again; `mica volume gc {store}` frees what was copied"
                ));
            }
            failure
                .within(format!("{url} was not imported; `mica volume gc` frees what was copied"))
        }
        Ok(true) => failure.within(format!("{url} has all of the image, but closing it failed")),
        Err(error) => {
            let (message, error) = (failure.message(), error.in_one_line());
            Failure::new(format!("{message}; {url} is incomplete, delete it: {error}"))
        }
    }
}

/// Copies all layers into the volume that was made, one after the other, each with a snapshot.
async fn fill(
    args: &ImportArgs,
    session: &Session,
    url: &VolumeUrl,
    (made, layers, ending): ([u8; 16], &[Layer], &Ending),
) -> Result<(), Failure> {
    let access = VolumeAccess::Import(made);
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
            // Never closed: if this process is killed now, the volume is a part still. Its store
            // may be what fails; then whoever deletes it fences its writer.
            if let Some(volume) = volume.volume() {
                let _ = timeout(ABORT_LIMIT, volume.abort_import()).await;
            }
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
