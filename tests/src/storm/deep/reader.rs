//! Clients that read a disk from its beginning to its end, as a copy or a boot does.

use crate::nbd::{Connection, Wish};
use crate::storm::judge;
use crate::storm::model::{Model, View};
use crate::storm::stamp::SECTOR;
use crate::storm::story::{Fault, Outcome, Wrong};
use mica_units::Rng;
use std::path::Path;

/// Sectors of a request.
const LENGTHS: [u64; 5] = [8, 16, 128, 512, 2048];

/// Lets some clients read at once, each at its own pace and from its own place.
pub(super) fn read(socket: &Path, model: &Model, rng: &mut Rng) -> Outcome {
    let seeds: Vec<_> = (0..1 + rng.below(3)).map(|_| rng.next_u64()).collect();
    std::thread::scope(|scope| {
        let readers: Vec<_> = seeds
            .into_iter()
            .map(|seed| scope.spawn(move || read_once(socket, model, &mut Rng::new(seed))))
            .collect();
        readers.into_iter().try_for_each(|reader| {
            let went = reader.join();
            went.unwrap_or_else(|_| Err(Fault::new(Wrong::Trouble, "a reader panicked")))
        })
    })
}

fn read_once(socket: &Path, model: &Model, rng: &mut Rng) -> Outcome {
    let failed = |error: anyhow::Error| Fault::new(Wrong::Failed, format!("reading: {error:#}"));
    let mut connection = Connection::open(socket, "", &Wish::default()).map_err(failed)?;
    let len = connection.len / SECTOR as u64;
    if len != model.len() {
        let what = format!("the disk has {len} sectors, not {}", model.len());
        return Err(Fault::new(Wrong::Length, what));
    }
    let step = rng.choose(&LENGTHS);
    let mut at = if rng.percent(70) { 0 } else { rng.below(len) };
    while at < len {
        let count = step.min(len - at);
        let sector = SECTOR as u64;
        let bytes = connection.read(at * sector, count * sector).map_err(failed)?;
        let judged = model.judge(at, &bytes, View::Kept);
        judged.map_err(|bad| judge::fault(&bad, "a reader in sequence"))?;
        at += count;
    }
    Ok(())
}
