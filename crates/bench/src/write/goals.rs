//! The goals for writing, each judged by what was measured.

use super::images::Kind;
use super::loads::{Case, Mode};
use super::{KIB_4, KIB_64, MIB, counted_part, part};
use crate::goal::{Bound, Goal};
use crate::peers::{MICA, QEMU_NBD};
use crate::samples::Samples;

/// Images that start without data of their own.
const GROWING: [Kind; 3] = [Kind::Empty, Kind::Overlay, Kind::Subclusters];
const RATE: &str = "writes_per_s";

/// Judges all goals.
pub(super) fn judge(samples: &Samples) -> Vec<Goal> {
    let mut judge = Judge { samples, goals: Vec::new() };
    judge.syncs();
    judge.bytes();
    judge.synced_speed();
    judge.speed();
    judge.preallocation();
    judge.goals
}

struct Judge<'a> {
    samples: &'a Samples,
    goals: Vec<Goal>,
}

impl Judge<'_> {
    fn goal(&mut self, what: &str, bound: Bound, unit: &str, measured: Option<f64>) {
        self.goals.push(Goal::new(what, bound, unit, measured));
    }

    fn figure(&self, server: &str, kind: Kind, case: Case, metric: &str) -> Option<f64> {
        self.samples.median(&part(kind, case), server, kind.layers(), metric)
    }

    fn mica(&self, kind: Kind, case: Case, metric: &str) -> Option<f64> {
        self.figure(MICA, kind, case, metric)
    }

    fn counted(&self, kind: Kind, case: Case, metric: &str) -> Option<f64> {
        self.samples.median(&counted_part(kind, case), MICA, kind.layers(), metric)
    }

    fn share(&self, kind: Kind, case: Case, of: (&str, Kind)) -> Option<f64> {
        Some(self.mica(kind, case, RATE)? / self.figure(of.0, of.1, case, RATE)?)
    }

    /// fdatasync per guest fsync: counted by strace if one waits at a time; by mica itself if many
    /// wait, since strace would change which writers share a sync.
    fn syncs(&mut self) {
        let alone = Case::random(KIB_4, Mode::Alone);
        for (kind, most) in [(Kind::Overlay, 2.0), (Kind::Empty, 1.0), (Kind::Subclusters, 1.0)] {
            // The very first write has one extra sync, which marks the image as in use.
            let measured = self.counted(kind, alone, "syncs_per_flush");
            let measured = measured.map(|syncs| (syncs * 100.0).round() / 100.0);
            let what = format!("fdatasync per fsync, one writer, {}", kind.name());
            self.goal(&what, Bound::AtMost(most), "", measured);
        }
        let writers = Case::random(KIB_4, Mode::Writers);
        for kind in GROWING {
            let measured = self.mica(kind, writers, "syncs_per_flush");
            let what = format!("fdatasync per fsync, 16 writers, {}", kind.name());
            self.goal(&what, Bound::AtMost(0.3), "", measured);
        }
    }

    fn bytes(&mut self) {
        for kind in GROWING {
            // With many writers, one may have written what another copies: only mica itself can
            // distinguish copies from metadata there.
            let (alone, each) = (Case::random(KIB_4, Mode::Alone), Case::random(KIB_4, Mode::Each));
            let metric = "metadata_per_flush_kib";
            let figures =
                [(alone, self.counted(kind, alone, metric)), (each, self.mica(kind, each, metric))];
            for (case, measured) in figures {
                let what = format!("metadata per fsync, {}, {}", case.words(), kind.name());
                self.goal(&what, Bound::AtMost(6.0), " KiB", measured);
            }
        }
        let alone = Case::random(KIB_4, Mode::Alone);
        for kind in [Kind::Overlay, Kind::Subclusters] {
            let beyond = self
                .counted(kind, alone, "base_read_bytes")
                .and_then(|read| Some(read - self.counted(kind, alone, "copied_expected_bytes")?));
            let what = format!("bytes read from the base beyond what is needed, {}", kind.name());
            self.goal(&what, Bound::AtMost(0.0), "", beyond);
        }
        let each = Case::random(KIB_4, Mode::Each);
        for kind in [Kind::Empty, Kind::Subclusters] {
            let measured = self.counted(kind, each, "written_per_guest_byte");
            let what = format!("bytes written per guest byte, {}, {}", each.words(), kind.name());
            self.goal(&what, Bound::AtMost(2.0), "", measured);
        }
    }

    /// With an fsync each, against QEMU's raw file: what group sync has to achieve.
    fn synced_speed(&mut self) {
        for case in [
            Case::random(KIB_4, Mode::Each),
            Case::sequential(KIB_4, Mode::Each),
            Case::random(KIB_64, Mode::Each),
            Case::sequential(KIB_64, Mode::Each),
        ] {
            for kind in GROWING {
                let measured = self.share(kind, case, (QEMU_NBD, Kind::Raw));
                let what = format!("{}: {} / QEMU's raw", case.words(), kind.name());
                self.goal(&what, Bound::AtLeast(1.5), "", measured);
            }
        }
    }

    fn speed(&mut self) {
        let random = Case::random(KIB_4, Mode::Never);
        let peers = [(Kind::Overlay, 3.0), (Kind::Subclusters, 1.5)];
        for (theirs, least) in peers {
            let measured = self.share(Kind::Subclusters, random, (QEMU_NBD, theirs));
            let what = format!("{}: mica's overlay / QEMU's {}", random.words(), theirs.name());
            self.goal(&what, Bound::AtLeast(least), "", measured);
        }
        for case in [Case::sequential(KIB_64, Mode::Never), Case::sequential(MIB, Mode::Never)] {
            for kind in GROWING {
                let measured = self.share(kind, case, (MICA, Kind::Raw));
                let what = format!("{}: {} / mica's raw", case.words(), kind.name());
                self.goal(&what, Bound::AtLeast(0.98), "", measured);
            }
        }
    }

    fn preallocation(&mut self) {
        for case in [
            Case::random(KIB_4, Mode::Never),
            Case::random(KIB_4, Mode::Each),
            Case::sequential(KIB_4, Mode::Never),
            Case::sequential(KIB_64, Mode::Never),
        ] {
            for kind in [Kind::Falloc, Kind::Full] {
                let measured = self.share(Kind::Empty, case, (MICA, kind));
                let what = format!("{}: empty / {}", case.words(), kind.name());
                self.goal(&what, Bound::AtLeast(0.95), "", measured);
            }
        }
    }
}
