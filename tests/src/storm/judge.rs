//! The verdict on what was read, in words that lead to the fault.

use super::model::{Bad, View};
use super::stamp::SECTOR;
use super::stamp::{self, Seen, Seq, Writer};
use super::state::State;
use super::story::{Fault, Outcome, Wrong};

/// Runs of wrong sectors that are listed.
const RUNS_MAX: usize = 8;

/// Compares the bytes of a whole disk with what it may be. Returns what it is.
pub(super) fn disk(state: &State, bytes: &[u8], view: View, what: &str) -> Outcome<Vec<Seq>> {
    let (len, wanted) = ((bytes.len() / SECTOR) as u64, state.model.len());
    if len == wanted {
        return state.model.judge(0, bytes, view).map_err(|bad| fault(&bad, what));
    }
    if state.other_len != Some(len) {
        let or = state.other_len.map_or(String::new(), |other| format!(" or {other}"));
        let what = format!("{what}: the disk has {len} sectors, not {wanted}{or}");
        return Err(Fault::new(Wrong::Length, what));
    }
    let mut model = state.model.clone();
    model.resize(len);
    model.judge(0, bytes, view).map_err(|bad| fault(&bad, what))
}

/// What is wrong, for sectors that are.
pub(super) fn fault(bad: &[Bad], what: &str) -> Fault {
    let wrong = bad.iter().map(wrong).min_by_key(|wrong| gravity(*wrong));
    let count: u64 = bad.iter().map(|bad| bad.count).sum();
    let mut told = format!("{what}: {count} sectors");
    for bad in bad.iter().take(RUNS_MAX) {
        let allowed: Vec<_> = bad.allowed.iter().map(|seq| name(*seq)).collect();
        told += &format!(
            "\n  sector {} and {} more: {}; may be {}",
            bad.sector,
            bad.count - 1,
            describe(bad.seen),
            allowed.join(", ")
        );
    }
    if bad.len() > RUNS_MAX {
        told += &format!("\n  and {} more runs", bad.len() - RUNS_MAX);
    }
    Fault::new(wrong.unwrap_or(Wrong::Foreign), told)
}

fn wrong(bad: &Bad) -> Wrong {
    let Seen::Write(seq) = bad.seen else { return Wrong::Foreign };
    if bad.lossy.contains(&seq) {
        return Wrong::LostAcknowledged;
    }
    match bad.writer {
        Writer::Foreign => Wrong::Undone,
        // Its place in time shows whether it is too old, or was gone already.
        Writer::Guest => {
            let base = bad.lossy.first().copied().unwrap_or(0);
            let is_older = seq == 0 || stamp::order(seq) < stamp::order(base);
            if is_older { Wrong::LostFlushed } else { Wrong::CameBack }
        }
    }
}

fn gravity(wrong: Wrong) -> u32 {
    match wrong {
        Wrong::Foreign => 0,
        Wrong::Undone => 1,
        Wrong::LostFlushed => 2,
        Wrong::CameBack => 3,
        _ => 4,
    }
}

fn describe(seen: Seen) -> String {
    match seen {
        Seen::Write(seq) => format!("is {}", name(seq)),
        Seen::Misplaced { sector, seq } => format!("is {} of sector {sector}", name(seq)),
        Seen::Foreign => "is what nobody wrote".to_owned(),
    }
}

fn name(seq: Seq) -> String {
    match (seq, stamp::writer(seq)) {
        (0, _) => "zeros".to_owned(),
        (_, Writer::Guest) => format!("write {}", stamp::order(seq)),
        (_, Writer::Foreign) => format!("QEMU's write {}", stamp::order(seq)),
    }
}
