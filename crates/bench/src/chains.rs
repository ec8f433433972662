//! Chains that are made to be measured.

use super::measure::Subject;
use crate::load::ratio;
use anyhow::{Result, ensure};
use mica_gen::owner::{Owner, OwnerMap};
use mica_gen::{ChainSpec, Manifest, generate};
use mica_tests::{clock, command, mica, tools};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A seal proves nothing about a layer that changed less than a second before: so chains are left
/// to age first.
pub(super) const SETTLE: Duration = Duration::from_millis(1500);
/// QEMU's options for overlays with clusters of 64 KiB, and with subclusters of 4 KiB.
pub(super) const CLUSTERS: &str = "extended_l2=off";
pub(super) const SUBCLUSTERS: &str = "extended_l2=on,cluster_size=128k";
/// Layers up to which QEMU judges an image that was written.
const CHECKED_LAYERS_MAX: u32 = 50;

/// What all parts of a bench share.
pub(super) struct Context<'a> {
    /// Folder for chains.
    pub(super) work: &'a Path,
    /// How long random reads last.
    pub(super) random: Duration,
    /// How long sequential reads last at most.
    pub(super) sequential: Duration,
    /// The chain that is wanted, except for its number of layers.
    pub(super) spec: ChainSpec,
}

impl Context<'_> {
    /// A disk whose content is not verified.
    pub(super) fn unverified<'a>(&self, image: &'a Path, format: &'static str) -> Subject<'a> {
        let (random, sequential) = (self.random, self.sequential);
        Subject { image, format, owners: None, table_bytes: 0, random, sequential }
    }
}

/// A chain on disk; dropping it removes it.
pub(super) struct Chain {
    folder: tempfile::TempDir,
    /// The active layer.
    pub(super) image: PathBuf,
    /// The owner of each part of the disk.
    pub(super) owners: OwnerMap,
    /// How many layers there are.
    pub(super) layers: u32,
    /// Bytes of the disk that one L2 table covers.
    pub(super) table_bytes: u64,
}

impl Chain {
    /// Makes it in a new folder.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(super) fn make(context: &Context<'_>, spec: ChainSpec) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("chain-").tempdir_in(context.work)?;
        let spec = ChainSpec { dir: folder.path().to_owned(), ..spec };
        let manifest = generate(&spec, |_| {})?;
        rustix::fs::sync();
        clock::sleep(SETTLE);
        let owners = manifest.load_owners(folder.path())?;
        let image = folder.path().join(&manifest.top);
        let table_bytes = spec.cluster_bytes * (spec.cluster_bytes / 8);
        Ok(Self { folder, image, owners, layers: spec.layers, table_bytes })
    }

    /// Its disk, as it is read.
    pub(super) fn subject<'a>(&'a self, context: &Context<'_>) -> Subject<'a> {
        Subject {
            image: &self.image,
            format: "qcow2",
            owners: Some(&self.owners),
            table_bytes: self.table_bytes,
            random: context.random,
            sequential: context.sequential,
        }
    }

    /// Where its files are.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Layers that a walk from the active one down asks for a read of data, in the mean.
    pub(super) fn walk_lookups(&self) -> f64 {
        let (mut asked, mut units) = (0, 0);
        for at in self.owners.data_units() {
            if let Owner::Data(layer) = self.owners.at(at) {
                asked += u64::from(self.layers) - u64::from(layer.as_u16());
                units += 1;
            }
        }
        ratio(asked, units.max(1))
    }

    /// Runs an `index` verb of mica on it.
    ///
    /// # Errors
    /// If mica fails.
    pub(super) fn index(&self, verb: &str) -> Result<Duration> {
        let mut index = Command::new(mica::binary());
        index.args(["index", verb, "--format", "qcow2"]).arg(&self.image);
        let done = command::finish_within(&mut index, Duration::from_secs(1800));
        ensure!(done.status.success(), "{done}");
        Ok(done.wall)
    }

    /// Reads all its files, so that the page cache has them: otherwise only the second server would
    /// find them there.
    ///
    /// # Errors
    /// If one cannot be read.
    pub(super) fn read_all(&self) -> Result<()> {
        let mut room = vec![0; 1 << 20];
        for file in fs::read_dir(self.folder.path())? {
            let mut file = File::open(file?.path())?;
            while file.read(&mut room)? > 0 {}
        }
        Ok(())
    }

    /// Its layers, from the base up.
    ///
    /// # Errors
    /// If its description cannot be read.
    pub(super) fn layer_paths(&self) -> Result<Vec<PathBuf>> {
        let manifest = Manifest::load(self.folder.path())?;
        let names = manifest.layer.into_iter().map(|layer| layer.file);
        Ok(names.map(|name| self.folder.path().join(name)).collect())
    }

    /// Checks what was read at `offset` of its disk.
    ///
    /// # Errors
    /// If it is not what the owner wrote there.
    pub(super) fn verify(&self, data: &[u8], offset: u64) -> Result<()> {
        let wrong = self.owners.verify(data, offset).err();
        ensure!(wrong.is_none(), "WRONG CONTENT: {wrong:?}");
        Ok(())
    }

    /// A new layer on top of it, with QEMU's `options`.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(super) fn overlay(&self, context: &Context<'_>, options: &str) -> Result<PathBuf> {
        let path = context.work.join("overlay.qcow2");
        let mut create = Command::new(tools::QEMU_IMG.program);
        // -u: the layers below are not opened, which takes seconds where there are many.
        create.args(["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-o", options, "-b"]);
        create.arg(&self.image).arg(&path).arg(self.owners.disk_bytes().to_string());
        let done = command::finish(&mut create);
        ensure!(done.status.success(), "{done}");
        Ok(path)
    }

    /// Has QEMU check an overlay of this chain that was written, unless the chain is too long for
    /// it.
    ///
    /// # Errors
    /// With QEMU's output.
    pub(super) fn check_overlay(&self, overlay: &Path) -> Result<()> {
        if self.layers > CHECKED_LAYERS_MAX { Ok(()) } else { qemu_checks(overlay) }
    }

    /// Bytes of all sidecars.
    pub(super) fn index_bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        for file in fs::read_dir(self.folder.path())? {
            let file = file?;
            if file.file_name().to_string_lossy().ends_with(".mica-index") {
                bytes += file.metadata()?.len();
            }
        }
        Ok(bytes)
    }
}

/// Checks with QEMU that the qcow2 `image` is neither corrupt nor leaking.
///
/// # Errors
/// With QEMU's output.
pub(super) fn qemu_checks(image: &Path) -> Result<()> {
    let mut check = Command::new(tools::QEMU_IMG.program);
    let said = command::finish(check.args(["check", "-f", "qcow2"]).arg(image));
    ensure!(said.status.success(), "{said}");
    Ok(())
}
