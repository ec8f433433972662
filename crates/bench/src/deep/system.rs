//! The system alone on the same places: one thread, one `pread` after the other. What a read costs
//! more when its page belongs to one of many files is not the server's doing, nor can it avoid it.

use super::verbs::Mapped;
use crate::chains::Chain;
use crate::load::ratio;
use crate::measure::RANDOM_BYTES;
use crate::samples::Sample;
use anyhow::{Context as _, Result, ensure};
use mica_gen::Rng;
use mica_tests::clock;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Its name among the servers.
pub(super) const NAME: &str = "pread";
/// Reads that are timed together and verified afterwards.
const BATCH: usize = 256;

/// Where the data of a chain is, as mica maps it.
pub(super) struct Places {
    files: Vec<File>,
    /// The unit's place on the disk, its file, and its place there.
    units: Vec<(u64, usize, u64)>,
    unit_bytes: u64,
}

impl Places {
    /// All data of `chain`.
    ///
    /// # Errors
    /// If a layer cannot be opened, or the chain cannot be mapped.
    pub(super) fn of(chain: &Chain) -> Result<Self> {
        raise_files_limit()?;
        let files = chain.layer_paths()?.into_iter().map(File::open);
        let files = files.collect::<std::io::Result<Vec<_>>>()?;
        let map = Mapped::query(&chain.image)?;
        map.verify(&chain.owners, chain.layers)?;
        let unit_bytes = chain.owners.unit_bytes();
        let units = map.data_units(chain.layers, unit_bytes);
        ensure!(!units.is_empty(), "a chain without data");
        Ok(Self { files, units, unit_bytes })
    }

    /// Reads at random for as long as `limit`.
    ///
    /// # Errors
    /// If a read fails, or yields other bytes than the generator's.
    pub(super) fn measure(
        &self,
        chain: &Chain,
        limit: Duration,
        sample: &mut Sample,
    ) -> Result<()> {
        let mut rng = Rng::new(u64::from(sample.repeat) + 1);
        let block_bytes = RANDOM_BYTES as usize;
        let blocks = self.unit_bytes / u64::from(RANDOM_BYTES);
        let mut room = vec![0; BATCH * block_bytes];
        let (mut taken, mut reads) = (Duration::ZERO, 0);
        while taken < limit {
            let places: Vec<_> = (0..BATCH)
                .map(|_| {
                    let unit = usize::try_from(rng.below(self.units.len() as u64)).unwrap_or(0);
                    (unit, rng.below(blocks) * u64::from(RANDOM_BYTES))
                })
                .collect();
            let start = clock::now();
            for ((unit, within), block) in places.iter().zip(room.chunks_exact_mut(block_bytes)) {
                let (_, file, offset) = self.units[*unit];
                self.files[file].read_exact_at(block, offset + within)?;
            }
            taken += start.elapsed();
            reads += BATCH as u64;
            for ((unit, within), block) in places.iter().zip(room.chunks_exact(block_bytes)) {
                chain.verify(block, self.units[*unit].0 + within)?;
            }
        }
        let seconds = taken.as_secs_f64();
        sample.put("random_1_per_s", ratio(reads, 1) / seconds);
        sample.put("random_1_cpu_us", seconds * 1e6 / ratio(reads, 1));
        Ok(())
    }
}

/// So many files may be open as the system allows.
fn raise_files_limit() -> Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .context("raising the limit of open files")
}
