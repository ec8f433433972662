//! Opening an indexed chain.

use crate::chains::Chain;
use crate::load::ratio;
use crate::peers::Peer;
use crate::samples::Sample;
use anyhow::{Context as _, Result};
use mica_gen::Rng;
use mica_tests::{clock, nbd};

const BLOCK_BYTES: u64 = 4 << 10;

/// From the start of the process until a client has the first 4 KiB, and the memory needed so far.
///
/// # Errors
/// If the server dies, breaks the protocol, or answers wrongly.
pub(super) fn measure(chain: &Chain, sample: &mut Sample) -> Result<()> {
    let units: Vec<_> = chain.owners.data_units().collect();
    let mut rng = Rng::new(u64::from(sample.repeat) + 1);
    let unit = usize::try_from(rng.below(units.len() as u64))?;
    let at = *units.get(unit).context("a chain without data")?;
    let running = Peer::mica(&[]).start(&chain.image, "qcow2", &[])?;
    let start = clock::now();
    let mut client = running.server.connect(&nbd::Wish::default())?;
    let block = client.read(at, BLOCK_BYTES)?;
    let taken = running.server.open + start.elapsed();
    let (_, peak) = running.server.memory();
    chain.verify(&block, at)?;
    client.disconnect()?;
    running.stop()?;
    sample.put("open_ms", taken.as_secs_f64() * 1e3);
    sample.put("rss_peak_mib", ratio(peak, 1 << 20));
    Ok(())
}
