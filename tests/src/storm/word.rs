//! Whether mica said what it had to about a loss: the verdict by the rules of `loss.rs`.

use super::chain::Chain;
use super::loss::Trace;
use super::story::{Fault, Wrong};

/// Something that was acknowledged is lost, as it may be, with a program that opened the image with
/// this `trace` and `said` this.
pub(super) fn account(chain: &mut Chain<'_>, trace: Trace, said: &str) {
    let (loss, counts) = (&chain.state.loss, chain.world.counts);
    let (is_told, is_due) = (loss.is_told(said), loss.is_due(trace));
    counts.lost.add();
    chain.tell(format_args!("  unflushed writes are lost; told: {is_told}; {loss:?}, {trace:?}"));
    if is_told {
        counts.told.add();
    } else if is_due {
        let what = format!("{loss:?}, {trace:?}, and all that is said is: {said}");
        chain.note(Fault::new(Wrong::Silent, what));
    } else {
        loss.silent(counts).add();
    }
}
