//! The demonstration.
use anyhow::Result;
/// Options.
#[derive(clap::Args)]
pub(crate) struct Options {}
pub(crate) fn run(_options: &Options) -> Result<()> {
    Ok(())
}
