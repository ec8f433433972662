//! Chains of random shape that are written.

use crate::qemu;
use mica_block::{Images, LocalFuture, Manage, Result, Store};
use mica_gen::owner::Owner;
use mica_gen::{ChainSpec, Distribution, Feature, Features, content, generate};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache};
use mica_qcow2_format::{Header, RefcountTableEntry};
use mica_qcow2_tools::check::{Finding, check};
use mica_qcow2_tools::open_for_check;
use mica_qcow2_tools::recover::repair_for_opening;
use mica_sim::crash::{Mode, Subject};
use mica_sim::{Latency, ModelDisk, World};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Folder of the chain in the world.
pub(crate) const FOLDER: &str = "/chain";
/// Findings of a check that are listed.
const FINDINGS_MAX: usize = 8;

/// A chain and what it shows at first.
#[derive(Clone)]
pub(crate) struct Shape {
    pub(crate) files: Vec<(PathBuf, Vec<u8>)>,
    pub(crate) top: PathBuf,
    /// Bytes of a cluster of the active layer.
    pub(crate) cluster_bytes: u64,
    /// Version of the active layer's format.
    pub(crate) version: u32,
    /// Whether the active layer has an internal snapshot.
    pub(crate) has_snapshot: bool,
    pub(crate) initial: Vec<u8>,
    /// A description.
    pub(crate) about: String,
}

impl Shape {
    /// A chain of random shape.
    pub(crate) fn random(world: &World) -> Self {
        Self::random_of(world, 1 + u32::try_from(world.random_below(4)).unwrap())
    }

    /// A chain of random shape with so many layers.
    pub(crate) fn random_of(world: &World, layers: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut spec = ChainSpec::new(folder.path());
        spec.layers = layers;
        spec.cluster_bytes = match world.random_below(12) {
            0 => 2 << 20,
            1 => 256 << 10,
            2..=3 => 64 << 10,
            _ => 512 << world.random_below(6),
        };
        let clusters = 1 + world.random_below(300);
        let sectors =
            clusters * spec.cluster_bytes / 512 - world.random_below(spec.cluster_bytes / 512);
        spec.disk_bytes = sectors.clamp(8, 12 << 11) * 512;
        spec.fill = [0.0, 0.1, 0.5, 1.0][usize::try_from(world.random_below(4)).unwrap()];
        spec.distribution = match world.random_below(2) {
            0 => Distribution::Uniform,
            _ => Distribution::NewestHeavy,
        };
        spec.seed = world.random_below(u64::MAX);
        let wanted = 1 + world.random_below(3);
        spec.features =
            Feature::ALL.iter().copied().filter(|_| world.random_below(4) < wanted).collect();
        Self::generate(world, &spec)
    }

    /// A raw image. What it says of clusters is of no consequence.
    pub(crate) fn raw(world: &World) -> Self {
        let sectors = usize::try_from(8 + world.random_below(4096)).unwrap();
        let top = Path::new(FOLDER).join("base.raw");
        let mut initial = vec![0; sectors * 512];
        for (sector, number) in initial.chunks_mut(512).zip((0..=250).cycle()) {
            sector.fill(number);
        }
        Self {
            files: vec![(top.clone(), initial.clone())],
            top,
            cluster_bytes: 512,
            version: 3,
            has_snapshot: false,
            initial,
            about: format!("a raw image of {sectors} sectors"),
        }
    }

    /// A base and an overlay of one size of clusters, small.
    pub(crate) fn small(cluster_bytes: u64, clusters: u64, fill: f64, features: Features) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut spec = ChainSpec::new(folder.path());
        spec.layers = 2;
        spec.cluster_bytes = cluster_bytes;
        spec.disk_bytes = clusters * cluster_bytes;
        spec.fill = fill;
        spec.features = features;
        Self::generate(&World::new(1), &spec)
    }

    fn generate(world: &World, spec: &ChainSpec) -> Self {
        let manifest = generate(spec, |_| {}).unwrap();
        let top = spec.dir.join(&manifest.top);
        let entry = manifest.layer.last().unwrap().qcow2.clone().unwrap();
        let mut about = format!("{} layers, active {entry:?}, {}", spec.layers, spec.features);
        let has_snapshot =
            entry.data_file.is_none() && world.random_below(6) == 0 && qemu::snapshot(&top);
        if has_snapshot {
            about.push_str(", with a snapshot");
        }
        if entry.version == 3 && world.random_below(6) == 0 {
            make_lazy(&top);
            about.push_str(", lazy refcounts");
        }
        let owners = manifest.load_owners(&spec.dir).unwrap();
        let mut initial = vec![0; usize::try_from(spec.disk_bytes).unwrap()];
        for (at, sector) in (0..).step_by(512).zip(initial.chunks_mut(512)) {
            if let Owner::Data(layer) = owners.at(at) {
                content::fill(sector, at, layer);
            }
        }
        let in_world = |name: &Path| Path::new(FOLDER).join(name.file_name().unwrap());
        let files = std::fs::read_dir(&spec.dir).unwrap().filter_map(|entry| {
            let path = entry.unwrap().path();
            let is_link = path.is_symlink();
            (!is_link).then(|| (in_world(&path), std::fs::read(&path).unwrap()))
        });
        Self {
            files: files.collect(),
            top: in_world(&top),
            cluster_bytes: entry.cluster,
            version: entry.version,
            has_snapshot,
            initial,
            about,
        }
    }

    pub(crate) fn put_in(&self, world: &World) {
        world.trace(|| self.about.clone());
        for (path, bytes) in &self.files {
            world.put(path, bytes.clone());
            let latency = [Latency::Cached, Latency::Flash, Latency::Remote];
            let choice = usize::try_from(world.random_below(3)).unwrap();
            world.set_latency(path, latency[choice]);
        }
        world.pass_time(Duration::from_secs(3600));
    }

    pub(crate) fn model(&self) -> ModelDisk {
        ModelDisk::new(self.initial.clone())
    }
}

/// Sets the compatible bit of lazy refcounts in the header.
fn make_lazy(image: &Path) {
    const COMPATIBLE_LOW_BYTE: usize = 87;
    let mut bytes = std::fs::read(image).unwrap();
    bytes[COMPATIBLE_LOW_BYTE] |= 1;
    std::fs::write(image, bytes).unwrap();
}

/// A chain as the subject of the scenarios.
pub(crate) struct ChainSubject {
    pub(crate) shape: Shape,
}

impl Subject for ChainSubject {
    fn open<'a>(
        &'a self,
        world: &'a World,
        mode: Mode,
    ) -> LocalFuture<'a, Result<Arc<dyn Manage>>> {
        Box::pin(async move {
            let images: Arc<dyn Images> = Arc::new(world.clone());
            let cache_bytes = CACHE_BYTES_MIN << (4 * world.random_below(3));
            let writable = mode == Mode::Write;
            let options = ChainOptions {
                cache: MapCache::new(cache_bytes),
                writable,
                repair: Some(repair_for_opening),
                ..ChainOptions::default()
            };
            Ok(Arc::new(Chain::open(images, &self.shape.top, &options).await?) as Arc<dyn Manage>)
        })
    }

    fn check<'a>(&'a self, world: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>> {
        Box::pin(self.check_top(world))
    }

    fn outlives_the_process(&self) -> bool {
        // Version 2 has no bits that name a log, and QEMU forgets snapshots where one is named.
        self.shape.version == 3 && !self.shape.has_snapshot
    }

    fn judge_elsewhere(&self, world: &World, model: &ModelDisk) {
        let bytes = model.bytes().expect("what a closed disk shows is known");
        qemu::judge(&world.files(), &self.shape.top, &bytes, &self.shape.about);
    }
}

impl ChainSubject {
    async fn check_top(&self, world: &World) -> std::result::Result<u64, String> {
        let told = |error: mica_block::Error| format!("{error:?}");
        let (image, header) = open_for_check(world, &self.shape.top).await.map_err(told)?;
        let header = if header.incompatible.dirty {
            // Its refcounts cannot be trusted: opening for writing repairs them.
            drop(image);
            let disk = self.open(world, Mode::Write).await.map_err(told)?;
            disk.close().await.map_err(told)?;
            open_for_check(world, &self.shape.top).await.map_err(told)?.1
        } else {
            header
        };
        let plain = world.open(&self.shape.top).map_err(told)?.store;
        let leaks = self.check_clean_image(world, &header, plain).await?;
        if header.autoclear.unknown == 0 {
            return Ok(leaks);
        }
        // What others see is sound, and so is what mica sees, which knows of the log.
        let (image, header) = open_for_check(world, &self.shape.top).await.map_err(told)?;
        self.check_clean_image(world, &header, image.store).await
    }

    async fn check_clean_image(
        &self,
        world: &World,
        header: &Header,
        store: Arc<dyn Store>,
    ) -> std::result::Result<u64, String> {
        if header.incompatible.dirty || header.incompatible.corrupt {
            return Err(format!("the header says {:?}", header.incompatible));
        }
        let mut findings = Vec::new();
        let mut observer = |finding: Finding| findings.push(finding.to_string());
        let report = check(store, header, &mut observer).await;
        let report = report.map_err(|error| format!("{error:?}"))?;
        if report.corruptions + report.check_errors > 0 {
            findings.truncate(FINDINGS_MAX);
            let about = &self.shape.about;
            return Err(format!("{about}: {report:?}: {}", findings.join("; ")));
        }
        let beyond = world.inspect(&self.shape.top, |bytes| counts_beyond_end(bytes, header));
        Ok(report.leaks + beyond)
    }
}

/// Clusters beyond the end of the file that have a count. A check does not call them leaks, but
/// they are when the file has grown over them.
fn counts_beyond_end(file: &[u8], header: &Header) -> u64 {
    let bits = header.cluster_bits;
    let cluster_bytes = usize::try_from(bits.bytes()).unwrap();
    let clusters = bits.clusters_for(file.len() as u64);
    let table = usize::try_from(header.refcount_table_offset.bytes()).unwrap();
    let table = &file[table..table + header.refcount_table_clusters as usize * cluster_bytes];
    let width = header.refcount_width;
    let per_block = width.block_entries(bits);
    let mut beyond = 0;
    for (first, entry) in
        (0..).step_by(usize::try_from(per_block).unwrap()).zip(table.as_chunks().0)
    {
        let entry = RefcountTableEntry(u64::from_be_bytes(*entry));
        let Ok(Some(block)) = entry.decode(bits) else { continue };
        let block = usize::try_from(block.bytes()).unwrap();
        let Some(block) = file.get(block..block + cluster_bytes) else { continue };
        let outside = clusters.saturating_sub(first).min(per_block)..per_block;
        let counted = outside.filter(|index| {
            let count = width.get(block, usize::try_from(*index).unwrap());
            count.is_some_and(|count| count > 0)
        });
        beyond += counted.count() as u64;
    }
    beyond
}
