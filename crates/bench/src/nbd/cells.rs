//! The cells of the table, and how mica stands in each beside a peer.

use super::Part;
use crate::chains;
use crate::peers::{MICA, QEMU_NBD};
use crate::samples::Samples;
use crate::write::images::Kind;
use crate::write::loads::{Case, Mode};
use crate::write::{KIB_4, KIB_64, Run, part};

/// Connections, and requests in flight on each, in the order of tables.
pub(super) const SHAPES: [(usize, usize); 4] = [(1, 1), (1, 32), (4, 1), (4, 32)];

/// A load on chains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChainLoad {
    Reads,
    Rewrites,
    Allocating(Overlay),
}

/// The format of a fresh layer on top.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Overlay {
    Clusters,
    Subclusters,
}

impl Overlay {
    /// QEMU's options for it.
    pub(super) fn options(self) -> &'static str {
        match self {
            Self::Clusters => chains::CLUSTERS,
            Self::Subclusters => chains::SUBCLUSTERS,
        }
    }
}

impl ChainLoad {
    pub(super) const ALL: [Self; 4] = [
        Self::Reads,
        Self::Rewrites,
        Self::Allocating(Overlay::Clusters),
        Self::Allocating(Overlay::Subclusters),
    ];

    /// The part of the bench that it belongs to.
    pub(super) fn part(self) -> Part {
        if self == Self::Reads { Part::Reads } else { Part::Writes }
    }

    /// Its name among the samples.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Reads => "reads",
            Self::Rewrites => "rewrites",
            Self::Allocating(Overlay::Clusters) => "allocating",
            Self::Allocating(Overlay::Subclusters) => "allocating-extended_l2",
        }
    }

    /// The same in words.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Reads => "Random 4 KiB reads, cached",
            Self::Rewrites => "Random 4 KiB writes to clusters that the active layer has",
            Self::Allocating(Overlay::Clusters) => {
                "Random 4 KiB writes to a fresh layer on top, 64 KiB clusters"
            }
            Self::Allocating(Overlay::Subclusters) => {
                "The same, subclusters of 4 KiB (extended_l2)"
            }
        }
    }
}

/// The prefix of the names of a shape's figures.
pub(super) fn shape_name((connections, depth): (usize, usize)) -> String {
    format!("c{connections}_d{depth}")
}

/// What writers do, on which image.
pub(super) fn writers() -> Vec<Run> {
    let cases = [
        Case::random(KIB_4, Mode::Alone),
        Case::sequential(KIB_4, Mode::Alone),
        Case::random(KIB_4, Mode::Writers),
        Case::sequential(KIB_4, Mode::Writers),
        Case::random(KIB_4, Mode::Never),
        Case::random(KIB_64, Mode::Never),
    ];
    let kinds = [Kind::Raw, Kind::Empty, Kind::Overlay, Kind::Subclusters];
    cases.into_iter().flat_map(|case| kinds.map(|kind| (kind, case))).collect()
}

/// What a cell is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Group {
    Chain(ChainLoad),
    /// Writers that wait for an fsync each.
    Synced,
    /// The same writes without.
    Unsynced,
}

/// A cell: a load on an image, and the names of its figures.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) group: Group,
    /// Its name in its table.
    pub(super) name: String,
    pub(super) layers: u32,
    part: String,
    rate: String,
    cpu: String,
    p50: String,
    p99: String,
    /// The peer's raw file under the same load, if that is a measure.
    raw: Option<String>,
}

/// Mica and a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub(super) mica: f64,
    pub(super) peer: f64,
}

impl Pair {
    pub(super) fn ratio(self) -> f64 {
        self.mica / self.peer
    }
}

/// A cell beside a peer.
#[derive(Clone, Debug)]
pub(super) struct Beside {
    pub(super) peer: String,
    pub(super) rate: Pair,
    pub(super) cpu: Pair,
    pub(super) p50: Pair,
    pub(super) p99: Pair,
    /// Mica's rate beside that of qemu-nbd with a raw file.
    pub(super) raw: Option<f64>,
}

impl Cell {
    fn on_chain(load: ChainLoad, layers: u32, shape: (usize, usize)) -> Self {
        let metric = |what: &str| format!("{}_{what}", shape_name(shape));
        Self {
            group: Group::Chain(load),
            name: format!("{} connections, depth {}", shape.0, shape.1),
            layers,
            part: load.name().to_owned(),
            rate: metric("per_s"),
            cpu: metric("cpu_us"),
            p50: metric("p50_us"),
            p99: metric("p99_us"),
            raw: None,
        }
    }

    fn of_writers((kind, case): Run) -> Self {
        // Without an fsync each there is one at the end, which measures the device.
        let (group, rate, timed) = match case.mode {
            Mode::Never => (Group::Unsynced, "unflushed_per_s", "write"),
            _ => (Group::Synced, "writes_per_s", "flush"),
        };
        let raw = (group == Group::Synced).then(|| part(Kind::Raw, case));
        Self {
            group,
            name: format!("{}: {}", kind.name(), case.words()),
            layers: kind.layers(),
            part: part(kind, case),
            rate: rate.to_owned(),
            cpu: "cpu_us".to_owned(),
            p50: format!("{timed}_p50_us"),
            p99: format!("{timed}_p99_us"),
            raw,
        }
    }

    /// Beside each peer that was measured.
    pub(super) fn beside(&self, samples: &Samples) -> Vec<Beside> {
        let peers = samples.servers(&self.part).into_iter().filter(|server| server != MICA);
        peers.filter_map(|peer| self.beside_one(samples, peer)).collect()
    }

    fn beside_one(&self, samples: &Samples, peer: String) -> Option<Beside> {
        let pair = |metric: &str| {
            let of = |server: &str| samples.median(&self.part, server, self.layers, metric);
            Some(Pair { mica: of(MICA)?, peer: of(&peer)? })
        };
        let rate = pair(&self.rate)?;
        let raw = self.raw.as_ref().and_then(|part| {
            Some(rate.mica / samples.median(part, QEMU_NBD, Kind::Raw.layers(), &self.rate)?)
        });
        let (cpu, p50, p99) = (pair(&self.cpu)?, pair(&self.p50)?, pair(&self.p99)?);
        Some(Beside { rate, cpu, p50, p99, raw, peer })
    }
}

/// All cells that there are figures for.
pub(super) fn of(samples: &Samples) -> Vec<Cell> {
    let chains = ChainLoad::ALL.into_iter().flat_map(|load| {
        let layers = samples.layers(load.name()).into_iter();
        layers.flat_map(move |layers| SHAPES.map(|shape| Cell::on_chain(load, layers, shape)))
    });
    let writers = writers().into_iter().map(Cell::of_writers);
    chains.chain(writers).filter(|cell| !samples.servers(&cell.part).is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::{Group, of, writers};
    use crate::samples::{Sample, Samples};
    use crate::write::part;

    #[test]
    fn cell_has_the_ratios_to_each_peer_and_to_its_raw_file() {
        let (kind, case) = writers()[1];
        let (raw, _) = writers()[0];
        let mut samples = Samples::default();
        for (image, server, rate) in [
            (kind, "mica", 300.0),
            (kind, "qemu-nbd", 200.0),
            (kind, "qemu-storage-daemon", 100.0),
            (raw, "qemu-nbd", 400.0),
        ] {
            let mut sample = Sample::new(&part(image, case), server, image.layers(), 0);
            sample.put("writes_per_s", rate);
            for metric in ["cpu_us", "flush_p50_us", "flush_p99_us"] {
                sample.put(metric, 1.0);
            }
            samples.add(sample);
        }
        let cells = of(&samples);
        let cell = cells.iter().find(|cell| cell.name.starts_with(kind.name())).expect("measured");
        assert_eq!(cell.group, Group::Synced);
        let beside = cell.beside(&samples);
        let ratios: Vec<_> =
            beside.iter().map(|one| (one.peer.as_str(), one.rate.ratio(), one.raw)).collect();
        let wanted = [("qemu-nbd", 1.5, Some(0.75)), ("qemu-storage-daemon", 3.0, Some(0.75))];
        assert_eq!(ratios, wanted);
    }
}
