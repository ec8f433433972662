//! `chain.json`: what a generated chain is, beside its layers.

use crate::content;
use crate::owner::OwnerMap;
use crate::plan::{DataFile, LayerKind, LayerShape};
use crate::spec::ChainSpec;
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{Compression, Version};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// Name of the file, beside the layers.
const FILE_NAME: &str = "chain.json";

/// A generated chain.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// Number of layers.
    pub layers: u32,
    /// Length of the disk in bytes.
    pub vsize: u64,
    /// Bytes in a cluster of a layer that does not specify its own.
    pub cluster: u64,
    /// Bytes in a unit of the owner file.
    pub unit: u64,
    /// Part of the clusters that some layer owns.
    pub fill: f64,
    /// Which layers own them.
    pub distribution: String,
    /// Features mixed in, with commas between them.
    pub features: String,
    /// Seed of everything random.
    pub seed: u64,
    /// [`content::MAGIC`].
    pub magic: u64,
    /// Whether the guest's data was written.
    pub data: bool,
    /// File name of the active layer.
    pub top: String,
    /// The layers, from the base up.
    pub layer: Vec<LayerEntry>,
}

/// A layer of a generated chain.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayerEntry {
    /// File name.
    pub file: String,
    /// `qcow2` or `raw`.
    pub format: String,
    /// Length of the disk as the layer has it.
    pub len: u64,
    /// Properties of a qcow2 layer; `None` for a raw one.
    #[serde(flatten)]
    pub qcow2: Option<Qcow2Entry>,
}

/// Properties of a qcow2 layer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Qcow2Entry {
    /// 2 or 3.
    pub version: u32,
    /// Bytes in a cluster.
    pub cluster: u64,
    /// Bits of a refcount.
    pub refcount_bits: u32,
    /// Whether its L2 entries are extended.
    pub extended_l2: bool,
    /// `zlib` or `zstd`, as qemu-img names them.
    pub compression: String,
    /// File name of the external data file.
    pub data_file: Option<String>,
}

impl Manifest {
    /// Reads the file of the chain in `dir`.
    ///
    /// # Errors
    /// What the system reports; `Invalid` if the file is something else.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join(FILE_NAME);
        let name = path.display();
        let text =
            fs::read(&path).map_err(|error| Error::from_io(format!("reading {name}"), error))?;
        serde_json::from_slice(&text).map_err(|error| {
            Error::new(
                ErrorKind::Invalid,
                format!("{name} does not describe a generated chain: {error}"),
            )
        })
    }

    /// The owners of the chain in `dir`.
    ///
    /// # Errors
    /// What the system reports.
    pub fn load_owners(&self, dir: &Path) -> Result<OwnerMap> {
        OwnerMap::load(dir, self.vsize, self.unit)
    }

    pub(crate) fn save(&self, dir: &Path) -> Result<()> {
        let path = dir.join(FILE_NAME);
        let text = serde_json::to_vec_pretty(self).expect("numbers and strings have JSON forms");
        fs::write(&path, text)
            .map_err(|error| Error::from_io(format!("writing {}", path.display()), error))
    }

    pub(crate) fn describe(spec: &ChainSpec, shapes: &[LayerShape], unit: u64) -> Self {
        let layer: Vec<_> = shapes.iter().map(LayerEntry::describe).collect();
        let top = layer.last().map(|top| top.file.clone()).unwrap_or_default();
        Self {
            layers: spec.layers,
            vsize: spec.disk_bytes,
            cluster: spec.cluster_bytes,
            unit,
            fill: spec.fill,
            distribution: spec.distribution.to_string(),
            features: spec.features.to_string(),
            seed: spec.seed,
            magic: content::MAGIC,
            data: spec.data == crate::DataMode::Written,
            top,
            layer,
        }
    }
}

impl LayerEntry {
    /// The names of its files.
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        let data = self.qcow2.as_ref().and_then(|qcow2| qcow2.data_file.as_deref());
        [Some(self.file.as_str()), data].into_iter().flatten()
    }

    pub(crate) fn describe(shape: &LayerShape) -> Self {
        let index = shape.number.index();
        let (format, qcow2) = match &shape.kind {
            LayerKind::Raw => ("raw", None),
            LayerKind::Qcow2(qcow2) => {
                let external = qcow2.data_file != DataFile::Internal;
                let entry = Qcow2Entry {
                    version: if qcow2.l2.version == Version::V2 { 2 } else { 3 },
                    cluster: qcow2.l2.cluster_bits.bytes(),
                    refcount_bits: qcow2.refcount.bits(),
                    extended_l2: qcow2.l2.extended,
                    compression: match qcow2.compression {
                        Compression::Deflate => "zlib".to_owned(),
                        Compression::Zstd => "zstd".to_owned(),
                    },
                    data_file: external.then(|| format!("layer-{index:04}.data")),
                };
                ("qcow2", Some(entry))
            }
        };
        let file = format!("layer-{index:04}.{format}");
        Self { file, format: format.to_owned(), len: shape.len, qcow2 }
    }
}
