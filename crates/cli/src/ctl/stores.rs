//! Verbs about a volume that is served, and about its store: the server puts there what was
//! written, and says where that is; the verb of `mica volume` reads it, in this process.

use crate::client::{Client, nothing, of_disk};
use crate::failure::{Failure, tell};
use crate::output::OutputFormat;
use crate::plain::plain;
use crate::sections;
use crate::volume::{DrawnArgs, LiveVerb, run_live};
use clap::{Args, Subcommand};
use std::process::ExitCode;

#[derive(Subcommand)]
pub(super) enum StoreVerb {
    /// Show the properties of a served volume.
    ///
    /// Like mica volume info.
    #[command(after_long_help = sections::CTL_INFO)]
    Info {
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Show a served volume with its snapshots.
    ///
    /// Like mica volume tree.
    #[command(after_long_help = sections::CTL_TREE)]
    Tree {
        #[command(flatten)]
        drawn: DrawnArgs,
        #[command(flatten)]
        scope: ScopeArgs,
    },
    /// Check a served volume, and report what is damaged.
    ///
    /// Like mica volume check. Every write acknowledged so far is put into the store first. The
    /// store is then read by this process, with the rights and credentials of the user who runs it.
    #[command(after_long_help = sections::CTL_CHECK)]
    Check(ScopeArgs),
    /// Read all of a served volume, or its store.
    ///
    /// Like mica volume scrub. Every write acknowledged so far is put into the store first. The
    /// store is then read by this process, with the rights and credentials of the user who runs it.
    #[command(after_long_help = sections::CTL_SCRUB)]
    Scrub(ScopeArgs),
    /// Free space that nothing in the store of a volume needs.
    ///
    /// Like mica volume gc, by this process, with the rights and credentials of the user who runs
    /// it. The server does so in the background, unless it has --gc off.
    #[command(after_long_help = sections::CTL_GC)]
    Gc {
        /// Only show what would be freed.
        #[arg(short = 'n', long)]
        dry_run: bool,
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
    },
}

// What is looked at. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct ScopeArgs {
    /// All volumes of its store.
    #[arg(long)]
    store: bool,
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
}

impl StoreVerb {
    pub(super) fn run(&self, client: &Client, output: OutputFormat) -> Result<ExitCode, Failure> {
        let (disk, of_store, verb) = match self {
            Self::Info { disk } => (disk, false, LiveVerb::Info),
            Self::Tree { drawn, scope: ScopeArgs { store, disk } } => {
                (disk, *store, LiveVerb::Tree(*drawn))
            }
            Self::Check(ScopeArgs { store, disk }) => (disk, *store, LiveVerb::Check),
            Self::Scrub(ScopeArgs { store, disk }) => (disk, *store, LiveVerb::Scrub),
            Self::Gc { dry_run, disk } => (disk, true, LiveVerb::Gc { dry_run: *dry_run }),
        };
        run_live(verb, url(client, disk, of_store)?, output)
    }
}

/// What a volume holds, shares and has alone.
pub(super) fn space(
    client: &Client,
    disk: &str,
    output: OutputFormat,
) -> Result<ExitCode, Failure> {
    run_live(LiveVerb::Stats, url(client, disk, false)?, output)
}

/// Where the volume of a disk is, or its store. What was answered before is there, or it is said
/// why it is not.
fn url(client: &Client, disk: &str, of_store: bool) -> Result<String, Failure> {
    let answer = client.post(&of_disk(disk, "store"), &nothing())?;
    if let Some(why) = answer["missing"].as_str() {
        let why = plain(why);
        tell(&format!("mica: the last writes to {disk} may not be in its store: {why}"));
    }
    let url = |key: &str| answer[key].as_str().map(plain);
    let (volume, store) = (url("url"), url("store"));
    let unexpected = || Failure::new(format!("{disk}: the server does not say where it is"));
    let (volume, store) = volume.zip(store).ok_or_else(unexpected)?;
    Ok(if of_store { store } else { volume })
}
