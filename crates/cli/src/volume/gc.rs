//! `mica volume gc`.

use super::keys::KeyArgs;
use super::session::{Session, SessionArgs, volume};
use crate::ending::Ending;
use crate::failure::{Failure, tell};
use crate::output::{ReportArgs, human_size, progress_bar};
use clap::Args;
use mica_block::ErrorKind;
use mica_stack::{Store, StoreUrl, VolumeUrl};
use mica_volume::{CollectOptions, Collected, Step, VolumeKey};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

/// Delete what no volume, snapshot or clone in a store needs.
///
/// In a directory, sparse extents of volumes that no host has open are also rewritten, including
/// those whose server or verb was killed on this host and had no log. Other work on the store can
/// continue meanwhile, and this may be stopped at any time. Needs no key, except to rewrite extents
/// of an encrypted volume.
#[derive(Args)]
pub(super) struct GcArgs {
    /// Only show what would be freed.
    #[arg(short = 'n', long)]
    pub(super) dry_run: bool,
    /// Also rewrite sparse extents in a bucket or a pool.
    ///
    /// During that time the volume is open on this host, and no other host can open it, except by
    /// force. If this verb is killed, the next use of the volume on this host ends that.
    #[arg(long, conflicts_with = "dry_run")]
    pub(super) compact: bool,
    #[command(flatten)]
    pub(super) report: ReportArgs,
    #[command(flatten)]
    pub(super) session: SessionArgs,
    #[command(flatten)]
    pub(super) key: KeyArgs,
    /// The store: file:///DIR, s3://BUCKET/PREFIX or rados://POOL/PREFIX.
    #[arg(value_name = "STORE")]
    pub(super) store: String,
}

pub(super) fn run(args: &GcArgs) -> Result<ExitCode, Failure> {
    let key = args.key.read()?;
    let session = args.session.start()?;
    let bar = progress_bar(0, "extents");
    let collected = session.executor.block_on(async {
        let store = store_at(&session, &args.store).await?;
        let options = CollectOptions { dry_run: args.dry_run, ..CollectOptions::default() };
        let mut show = |at: mica_volume::Progress| {
            bar.set_length(at.of_extents.max(at.extents));
            bar.set_position(if at.step == Step::Free { at.of_extents } else { at.extents });
        };
        let mut collected = store.volumes().collect(options, &mut show).await?;
        // A server that starts has precedence only where a lock proves who is dead.
        let compacts = args.compact || !store.is_remote();
        if args.dry_run {
            let sparse_bytes = if compacts { sparse_bytes(&store, &collected).await? } else { 0 };
            return Ok::<_, Failure>((collected, sparse_bytes, None));
        }
        let ending = Ending::watch()?;
        let is_compacted = compacts && compact(&store, &collected, (key.as_ref(), &ending)).await?;
        // Volumes are closed again; what is left of a collection is done by the next one.
        ending.end_if_raised();
        if is_compacted {
            let again = async { Ok(store.volumes().collect(options, &mut show).await?) };
            let again = ending.unless_raised(again).await;
            ending.end_if_raised();
            collected += again?;
        }
        Ok((collected, 0, Some(ending)))
    });
    bar.finish_and_clear();
    let (collected, sparse_bytes, ending) = collected?;
    if let Some(error) = &collected.failure {
        tell(&format!("mica: {} objects stay: {}", collected.failed, error.in_one_line()));
    }
    let mut described = described(args, &collected);
    if args.dry_run {
        described["sparse-bytes"] = sparse_bytes.into();
    }
    args.report.print(&human(args, &collected, sparse_bytes), &described)?;
    ending.iter().for_each(Ending::end_if_raised);
    Ok(if collected.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The store at `url`. Who names a volume learns what its store is.
async fn store_at(session: &Session, url: &str) -> Result<Arc<Store>, Failure> {
    let whole = StoreUrl::from_str(url);
    if let Ok(whole) = &whole {
        whole.check_lasting()?;
        if let Some(store) = session.stores.find(whole).await? {
            return Ok(store);
        }
    }
    if let Ok(VolumeUrl { store, name, snapshot }) = volume(url)
        && let Some(store) = session.stores.find(&store).await?
    {
        let (name, there) = (name.as_str(), store.volumes().info(&name).await);
        let found = match (there, snapshot) {
            (Err(error), _) if error.kind() == ErrorKind::NotFound => {
                format!("there is no store {url}, and no volume {name} in {}", store.url())
            }
            (Err(error), _) => return Err(error.into()),
            (Ok(_), Some(_)) => format!("{url} names a snapshot"),
            (Ok(_), None) => format!("{name} is a volume"),
        };
        let store = store.url();
        let what = format!("{found}: collection works on a whole store, such as {store}");
        return Err(Failure::new(what));
    }
    // Why there is none is found out now, as that takes longer.
    Ok(session.stores.open(&whole?).await?)
}

/// What writing sparse extents again would free, about: new ones have headers, too.
async fn sparse_bytes(store: &Store, collected: &Collected) -> Result<u64, Failure> {
    let mut bytes = 0;
    for sparse in &collected.sparse {
        match store.volumes().info(&sparse.name).await {
            Ok(info) => {
                if store.is_left_to_compactors(&info).await {
                    bytes += sparse.bytes - sparse.live_bytes;
                }
            }
            // It went meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

/// Writes again what is in sparse extents of volumes that nobody has open; whether there was any.
async fn compact(
    store: &Store,
    collected: &Collected,
    (key, ending): (Option<&Arc<VolumeKey>>, &Ending),
) -> Result<bool, Failure> {
    if collected.sparse.is_empty() {
        return Ok(false);
    }
    let Some(compactor) = store.compactor().await? else {
        tracing::info!("another collection writes sparse extents again: they are left to it");
        return Ok(false);
    };
    let mut is_any = false;
    for sparse in &collected.sparse {
        if ending.signal().is_raised() {
            break;
        }
        match compactor.compact(sparse, key.cloned(), ending.signal()).await {
            Ok(blocks) => is_any |= blocks > 0,
            // Its server has it, or it is gone, or takes another key.
            Err(error) if matches!(error.kind(), ErrorKind::Denied | ErrorKind::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(is_any)
}

fn described(args: &GcArgs, collected: &Collected) -> Value {
    json!({
        "dry-run": args.dry_run,
        "volumes": collected.volumes,
        "snapshots": collected.snapshots,
        "extents": collected.extents,
        "bytes": collected.bytes,
        "live-bytes": collected.live_bytes,
        "freed-extents": collected.freed_extents,
        "freed-bytes": collected.freed_bytes,
        "punched-bytes": collected.punched_bytes,
        "freed-heads": collected.freed_heads,
        "freed-claims": collected.freed_claims,
        "freed-boot-records": collected.freed_boots,
        "failed": collected.failed,
    })
}

fn human(args: &GcArgs, collected: &Collected, sparse_bytes: u64) -> String {
    let would = if args.dry_run { "would free" } else { "freed" };
    let freed = human_size(collected.freed_bytes + collected.punched_bytes);
    let (all, live) = (human_size(collected.bytes), human_size(collected.live_bytes));
    let counted =
        |count: u64, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let sparse = match sparse_bytes {
        0 => String::new(),
        bytes => format!(", and about {} within sparse ones", human_size(bytes)),
    };
    format!(
        "{would} {freed} in {}{sparse}; {all} were there, {live} of them needed by {} with {}\n",
        counted(collected.freed_extents, "extent"),
        counted(collected.volumes, "volume"),
        counted(collected.snapshots, "snapshot"),
    )
}
