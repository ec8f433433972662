//! The disk of an image while it is open, and its last figures afterwards.

use mica_block::{Error, ErrorKind, Manage, MapStats, Result, VolumeStats, WriteStats};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::sync::Arc;

/// What a closed disk still shows of itself, also in another process.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Default, Debug)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Shown {
    pub(crate) len: u64,
    pub(crate) layers: usize,
    pub(crate) is_writable: bool,
}

/// An open disk, or what remains of a closed one.
pub(crate) enum Opened {
    Open(Arc<dyn Manage>),
    /// Its image is closed, and none of its files is open.
    Closed(Figures),
}

/// What a disk reports of itself.
#[derive(Clone, Default)]
pub(crate) struct Figures {
    pub(crate) len: u64,
    /// Whether it is writable, or was until it was closed.
    pub(crate) is_writable: bool,
    pub(crate) weakness: Option<Cow<'static, str>>,
    /// Why it acknowledges no more writes, if so.
    pub(crate) latch: Option<Error>,
    pub(crate) layers: usize,
    /// Layers that an index covers; `None` if it cannot have an index.
    pub(crate) indexed_layers: Option<usize>,
    pub(crate) map: MapStats,
    pub(crate) write: WriteStats,
    /// Of a volume that is open for writing.
    pub(crate) volume: Option<Box<VolumeStats>>,
}

impl Opened {
    pub(crate) fn disk(&self) -> Result<Arc<dyn Manage>> {
        match self {
            Self::Open(disk) => Ok(Arc::clone(disk)),
            Self::Closed(_) => Err(Error::new(ErrorKind::Denied, "the disk is closed")),
        }
    }

    pub(crate) fn figures(&self) -> Figures {
        match self {
            Self::Open(disk) => Figures::of(&**disk),
            Self::Closed(figures) => figures.clone(),
        }
    }

    /// Keeps only the figures. Returns the disk if it was open.
    pub(crate) fn close(&mut self) -> Option<Arc<dyn Manage>> {
        // A disk that is closed promises nothing.
        let figures = Figures { weakness: None, latch: None, volume: None, ..self.figures() };
        match std::mem::replace(self, Self::Closed(figures)) {
            Self::Open(disk) => Some(disk),
            Self::Closed(_) => None,
        }
    }
}

/// Whether it is a raw image that is written, on top of which nothing is yet.
pub(crate) fn is_raw(disk: &dyn Manage) -> bool {
    disk.chain().is_some_and(|chain| chain.cluster_bytes().is_none())
}

impl From<Shown> for Figures {
    fn from(shown: Shown) -> Self {
        let Shown { len, layers, is_writable } = shown;
        Self { len, layers, is_writable, ..Self::default() }
    }
}

impl Figures {
    pub(crate) fn shown(&self) -> Shown {
        Shown { len: self.len, layers: self.layers, is_writable: self.is_writable }
    }

    fn of(disk: &dyn Manage) -> Self {
        // A raw image has an index once there is a layer on top of it.
        let index = disk.index().filter(|_| !is_raw(disk));
        Self {
            len: disk.geometry().len,
            is_writable: disk.is_writable(),
            weakness: disk.weakness(),
            latch: disk.latch(),
            layers: disk.layer_count(),
            indexed_layers: index.map(|index| index.covered_layers()),
            map: disk.map_stats(),
            write: disk.write_stats(),
            volume: disk.volume().map(|volume| Box::new(volume.figures())),
        }
    }
}
