//! `mica volume diff`.

use super::session::{SessionArgs, volume};
use crate::failure::Failure;
use crate::output::{OutputArgs, OutputFormat, print, print_json};
use crate::table::table;
use clap::Args;
use mica_units::GuestRange;
use serde_json::{Value, json};
use std::process::ExitCode;

/// Show which parts of two volumes or snapshots may differ.
///
/// Both must be in the same store. Compares their maps, without reading data: parts that were
/// overwritten with the same content are reported too.
#[derive(Args)]
pub(super) struct DiffArgs {
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// A volume, or with @LABEL one of its snapshots.
    #[arg(value_name = "URL[@LABEL]")]
    first: String,
    /// Another one.
    #[arg(value_name = "URL[@LABEL]")]
    second: String,
}

pub(super) fn run(args: &DiffArgs) -> Result<ExitCode, Failure> {
    let [first, second] = [volume(&args.first)?, volume(&args.second)?];
    if first.store != second.store {
        let what = format!(
            "{} and {}: only volumes in one store can be compared by their maps; export them, and \
             use `mica compare`",
            first.store, second.store
        );
        return Err(Failure::new(what));
    }
    let session = args.session.start()?;
    let mut found: Vec<(u64, u64)> = Vec::new();
    session.executor.block_on(async {
        let store = session.stores.open(&first.store).await?;
        for side in [&first, &second] {
            if side.snapshot.is_none() {
                store.check_readable(&side.name).await?;
            }
        }
        let [first_which, second_which] = [first.which(), second.which()];
        let add = |range: GuestRange| match found.last_mut() {
            Some((start, len)) if *start + *len == range.start().bytes() => *len += range.len(),
            _ => found.push((range.start().bytes(), range.len())),
        };
        let sides = ((&first.name, first_which.as_ref()), (&second.name, second_which.as_ref()));
        store.volumes().diff(sides.0, sides.1, add).await
    })?;
    match args.output.output {
        OutputFormat::Json => {
            let json = |(start, len): &(u64, u64)| json!({ "start": start, "length": len });
            print_json(&found.iter().map(json).collect::<Vec<Value>>())?;
        }
        OutputFormat::Human => {
            let row = |(start, len): &(u64, u64)| vec![start.to_string(), len.to_string()];
            print(&table(&["START", "LENGTH"], &[0, 1], found.iter().map(row).collect()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
