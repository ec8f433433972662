//! The moment for a kill: most faults occur just after something rare that can be seen in the
//! image's file.

use super::load::Stage;
use super::story::Outcome;
use mica_units::Rng;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const HEADER_BYTES: usize = 104;
/// Where the header names the log; anything before it changes when tables move.
const AUTOCLEAR_AT: usize = 88;
/// Looks at the file between two looks at the clients.
const LOOKS: u32 = 32;

/// The event that is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cue {
    /// Nothing.
    Now,
    /// Tables move, or the disk gets another length.
    Tables,
    /// Autoclear bits change.
    Bits,
    /// The file gets another length.
    Length,
}

/// A moment: a cue, and some time after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    cue: Cue,
    pause: Duration,
}

impl Moment {
    pub(super) fn random(rng: &mut Rng) -> Self {
        let cue =
            rng.choose(&[Cue::Now, Cue::Now, Cue::Tables, Cue::Tables, Cue::Bits, Cue::Length]);
        let most = rng.choose(&[1, 200, 1500, 1500]);
        Self { cue, pause: Duration::from_micros(rng.below(most)) }
    }

    /// Waits for it, or until no client is working any more.
    pub(super) fn wait(self, image: &Path, stage: &Stage) -> Outcome {
        self.wait_while(image, || !stage.board().is_idle())
    }

    /// Waits for it, or until nobody `is_busy` any more.
    pub(super) fn wait_while(self, image: &Path, mut is_busy: impl FnMut() -> bool) -> Outcome {
        if self.cue != Cue::Now {
            let file = File::open(image)?;
            let before = self.look(&file)?;
            'changed: while is_busy() {
                for _ in 0..LOOKS {
                    if self.look(&file)? != before {
                        break 'changed;
                    }
                }
            }
        }
        if self.pause >= Duration::from_micros(50) {
            crate::clock::sleep(self.pause);
        }
        Ok(())
    }

    fn look(self, file: &File) -> Outcome<Vec<u8>> {
        if self.cue == Cue::Length {
            return Ok(file.metadata()?.len().to_le_bytes().to_vec());
        }
        let mut header = vec![0; HEADER_BYTES];
        // Images are never shorter than a cluster.
        file.read_exact_at(&mut header, 0)?;
        let (tables, bits) = header.split_at(AUTOCLEAR_AT);
        Ok(if self.cue == Cue::Tables { tables[24..].to_vec() } else { bits[..8].to_vec() })
    }
}
