//! Runs in turns: every server once, then again the other way round.

use super::peers::Peer;
use super::samples::{Sample, Samples};
use anyhow::Result;

/// Runs each of `peers` once, in reverse order if `repeat` is odd.
pub(super) fn each_once(
    part: &str,
    peers: &[Peer],
    layers: u32,
    repeat: u32,
    samples: &mut Samples,
    measure: impl Fn(&Peer, &mut Sample) -> Result<()>,
) {
    for peer in in_order(peers, repeat) {
        let mut sample = Sample::new(part, &peer.name, layers, repeat);
        note(&mut sample, |sample| measure(peer, sample));
        samples.push(sample);
    }
}

/// All of `things`, in reverse order if `repeat` is odd.
pub(super) fn in_order<T>(things: &[T], repeat: u32) -> Vec<&T> {
    let mut order: Vec<_> = things.iter().collect();
    if repeat % 2 == 1 {
        order.reverse();
    }
    order
}

/// Measures; a failure becomes the sample's error.
pub(super) fn note(sample: &mut Sample, measure: impl FnOnce(&mut Sample) -> Result<()>) {
    if let Err(error) = measure(sample) {
        let text = format!("{error:#}");
        let end = text.char_indices().nth(600).map_or(text.len(), |(at, _)| at);
        sample.error = Some(text[..end].replace('\n', " "));
    }
}
