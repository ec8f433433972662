//! The loads that are put on images.

use crate::load::Durable;
use mica_gen::Rng;
use std::collections::HashSet;

/// Writes in flight by default.
const DEPTH: usize = 16;
/// Writes that wait for a flush each, on a connection of their own.
pub(crate) const WRITERS: usize = 16;
/// Writes between two flushes, as in the paper.
const SOMETIMES: u64 = 256;

/// The order of writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// Anywhere, each place once.
    Random,
    /// From the start on.
    Sequential,
}

/// When it is made durable, and on which connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// At the end.
    Never,
    /// After every 256 writes.
    Sometimes,
    /// Each of 16 writes in flight on one connection.
    Each,
    /// Each of 16 connections with one write in flight.
    Writers,
    /// Each, and it is the only write in flight.
    Alone,
}

/// A load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Case {
    /// Where it writes.
    pub(crate) place: Place,
    /// Bytes of each write.
    pub(crate) bytes: u32,
    /// When that is made durable.
    pub(crate) mode: Mode,
}

impl Case {
    /// Random writes.
    pub(crate) const fn random(bytes: u32, mode: Mode) -> Self {
        Self { place: Place::Random, bytes, mode }
    }

    /// Sequential writes.
    pub(crate) const fn sequential(bytes: u32, mode: Mode) -> Self {
        Self { place: Place::Sequential, bytes, mode }
    }

    /// Its name in tables.
    pub(crate) fn name(self) -> String {
        let place = match self.place {
            Place::Random => "random",
            Place::Sequential => "sequential",
        };
        let size = match self.bytes >> 20 {
            0 => format!("{}k", self.bytes >> 10),
            mebibytes => format!("{mebibytes}M"),
        };
        let mode = match self.mode {
            Mode::Never => "",
            Mode::Sometimes => "-fsync-256",
            Mode::Each => "-fsync-each",
            Mode::Writers => "-fsync-each-16-writers",
            Mode::Alone => "-fsync-each-1-writer",
        };
        format!("{place}-{size}{mode}")
    }

    /// Its name in sentences.
    pub(crate) fn words(self) -> String {
        let name = self.name();
        let (load, mode) = name.split_once("-fsync").unwrap_or((&name, ""));
        let load = load.replace('-', " ").replace('k', " KiB").replace('M', " MiB");
        match mode {
            "" => format!("{load}, no fsync"),
            "-256" => format!("{load}, fsync every 256"),
            mode => format!("{load}, fsync{}", mode.replace('-', " ")),
        }
    }

    /// When what was written is made durable.
    pub(crate) fn durable(self) -> Durable {
        match self.mode {
            Mode::Never => Durable::AtEnd,
            Mode::Sometimes => Durable::Every(SOMETIMES),
            Mode::Each | Mode::Writers | Mode::Alone => Durable::Each,
        }
    }

    /// Connections, and writes in flight on each.
    pub(crate) fn connections(self) -> (usize, usize) {
        match self.mode {
            Mode::Never | Mode::Sometimes | Mode::Each => (1, DEPTH),
            Mode::Writers => (WRITERS, 1),
            Mode::Alone => (1, 1),
        }
    }

    /// How many writes it is made of: enough for about a second, on a disk where they touch many
    /// clusters without filling it.
    pub(crate) fn writes(self) -> usize {
        let many = match (self.bytes, self.place) {
            (..=4096, Place::Random) => 32768,
            (..=4096, Place::Sequential) => 131_072,
            (..=65536, Place::Random) => 16384,
            (..=65536, Place::Sequential) => 16384,
            _ => (1 << 30) / self.bytes as usize,
        };
        match self.mode {
            Mode::Never | Mode::Sometimes => many,
            Mode::Each | Mode::Writers => many.min(16384),
            Mode::Alone => 4096,
        }
    }

    /// Where it writes on a disk of `disk_bytes`, at most `most` times.
    pub(crate) fn offsets(self, disk_bytes: u64, most: usize, seed: u64) -> Vec<u64> {
        let bytes = u64::from(self.bytes);
        let places = disk_bytes / bytes;
        let writes = self.writes().min(most).min(usize::try_from(places / 2).unwrap_or(usize::MAX));
        match self.place {
            Place::Sequential => (0..).step_by(self.bytes as usize).take(writes).collect(),
            Place::Random => {
                let mut rng = Rng::new(seed);
                let mut seen = HashSet::new();
                std::iter::repeat_with(|| rng.below(places) * bytes)
                    .filter(|offset| seen.insert(*offset))
                    .take(writes)
                    .collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Case, Mode};

    #[test]
    fn a_case_has_one_name_and_one_sentence() {
        let case = Case::random(4096, Mode::Writers);
        assert_eq!(case.name(), "random-4k-fsync-each-16-writers");
        assert_eq!(case.words(), "random 4 KiB, fsync each 16 writers");
        let case = Case::sequential(1 << 20, Mode::Never);
        assert_eq!(
            (case.name(), case.words()),
            ("sequential-1M".into(), "sequential 1 MiB, no fsync".into())
        );
    }

    #[test]
    fn random_places_are_each_written_once() {
        let mut offsets = Case::random(4096, Mode::Never).offsets(1 << 26, 4000, 1);
        assert_eq!(offsets.len(), 4000);
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!(offsets.len(), 4000);
        assert!(offsets.iter().all(|offset| offset % 4096 == 0 && *offset < 1 << 26));
    }
}
