//! Verbs about a volume that a server has open: those of `mica volume`, beside it.

use super::check::CheckArgs;
use super::gc::GcArgs;
use super::info::InfoArgs;
use super::keys::KeyArgs;
use super::scrub::ScrubArgs;
use super::session::SessionArgs;
use super::stats::StatsArgs;
use super::tree::{DrawnArgs, TreeArgs, TreeFormat};
use super::{check, gc, info, scrub, stats, tree};
use crate::failure::Failure;
use crate::output::{OutputArgs, OutputFormat, ReportArgs};
use std::process::ExitCode;

/// What is done, with a volume or its store.
#[derive(Clone, Copy)]
pub(crate) enum LiveVerb {
    Info,
    Tree(DrawnArgs),
    Check,
    Scrub,
    Gc { dry_run: bool },
    Stats,
}

/// Does it with what is at `url`.
///
/// # Errors
/// As the verb of `mica volume`.
pub(crate) fn run(verb: LiveVerb, url: String, output: OutputFormat) -> Result<ExitCode, Failure> {
    let (report, session) = (ReportArgs::printing(output), SessionArgs::default());
    let printed = OutputArgs { output };
    match verb {
        LiveVerb::Info => info::run(&InfoArgs { output: printed, session, url }),
        LiveVerb::Tree(drawn) => {
            let output = match output {
                OutputFormat::Human => TreeFormat::Human,
                OutputFormat::Json => TreeFormat::Json,
            };
            tree::run(&TreeArgs { output, drawn, session, url })
        }
        LiveVerb::Check => check::run(&CheckArgs { report, session, url }),
        LiveVerb::Scrub => scrub::run(&ScrubArgs { report, session, url }),
        LiveVerb::Gc { dry_run } => {
            let (compact, key) = (false, KeyArgs::default());
            gc::run(&GcArgs { dry_run, compact, report, session, key, store: url })
        }
        LiveVerb::Stats => stats::run(&StatsArgs { output: printed, session, url }),
    }
}
