//! `mica volume clone`.

use super::session::{SessionArgs, volume};
use crate::ending::Ending;
use crate::failure::Failure;
use crate::output::ReportArgs;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;

/// Create a volume that starts as a copy of another, or of a snapshot.
///
/// In the same store: the two share the data that they have in common, and are written
/// independently. Takes a moment, whatever the length. A clone is compressed and encrypted as its
/// source is, with the same key and secret; the key is not needed for this.
#[derive(Args)]
pub(super) struct CloneArgs {
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The volume, or with @LABEL one of its snapshots.
    #[arg(value_name = "URL[@LABEL]")]
    source: String,
    /// The new volume.
    #[arg(value_name = "URL")]
    target: String,
}

pub(super) fn run(args: &CloneArgs) -> Result<ExitCode, Failure> {
    let [source, target] = [volume(&args.source)?, volume(&args.target)?];
    let target = target.without_snapshot("the target of volume clone")?;
    if source.store != target.store {
        let what = format!(
            "{} and {}: a clone must be in the store of its source; `mica volume export` and \
             `import` copy between stores",
            source.store, target.store
        );
        return Err(Failure::new(what));
    }
    let session = args.session.start()?;
    let ending = session.executor.block_on(async {
        let store = session.stores.open(&source.store).await?;
        if source.snapshot.is_none() {
            store.check_readable(&source.name).await?;
        }
        // Half a clone can only be deleted.
        let which = source.which();
        let cloned = store.clone_volume(&source.name, which.as_ref(), &target.name);
        let ending = Ending::watch()?;
        ending.finish(cloned).await?;
        Ok::<_, Failure>(ending)
    })?;
    let json = json!({
        "name": target.name.as_str(),
        "url": target.to_string(),
        "source": source.to_string(),
    });
    args.report.print(&format!("{target}: a clone of {source}\n"), &json)?;
    // It is whole; but whoever wanted an end here may have more to do after this.
    ending.end_if_raised();
    Ok(ExitCode::SUCCESS)
}
