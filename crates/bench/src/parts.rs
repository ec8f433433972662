//! The parts of the bench: which servers, on what, how often.

use super::measure::{self, Cold, Subject};
use super::peers::{MICA, Peer, all_installed};
use super::samples::{Sample, Samples};
use super::turns::{each_once, note};
use crate::load::{null, ratio};
use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use mica_gen::owner::{Owner, OwnerMap};
use mica_gen::{ChainSpec, DataMode, Manifest, generate};
use mica_tests::{clock, command, mica, tools};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A seal proves nothing about a layer that changed less than a second before: so chains are left
/// to age first.
pub(super) const SETTLE: Duration = Duration::from_millis(1500);
/// Layers at which budgets are compared: few enough for QEMU to open each by name.
const BUDGET_LAYERS: u32 = 100;
/// Budgets, for the whole chain.
const BUDGETS: &[u64] = &[256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 32 << 20];
/// Open files under which a chain must still work.
const HANDLES_LIMIT: &str = "--nofile=256:256";
/// QEMU's options for overlays with clusters of 64 KiB, and with subclusters of 4 KiB.
pub(super) const CLUSTERS: &str = "extended_l2=off";
pub(super) const SUBCLUSTERS: &str = "extended_l2=on,cluster_size=128k";
/// Layers up to which QEMU judges an image that was written.
const CHECKED_LAYERS_MAX: u32 = 50;
/// Length of the raw file and of the null disk.
const CEILING_BYTES: u64 = 4 << 30;
/// Length of the disk on which the paper counts its index.
const LARGE_DISK_BYTES: u64 = 50 << 30;

/// A part of the bench.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    /// Every server on every chain, warm.
    Warm,
    /// The same with the page cache dropped (root only).
    Cold,
    /// mica on chains that it has never seen.
    First,
    /// Speed by the memory that the map may use.
    Budget,
    /// Under a limit of 256 open files.
    Handles,
    /// Space that the index takes on disk.
    IndexSize,
    /// The most that the protocol and the device allow: raw files, null disks, the load generator.
    Ceiling,
}

/// What all parts share.
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
    fn unverified<'a>(&self, image: &'a Path, format: &'static str) -> Subject<'a> {
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

    /// Layers that a walk from the active one down asks for a read of data, in the mean.
    fn walk_lookups(&self) -> f64 {
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

    /// Rebuilds the index and records what that took.
    fn build(&self, context: &Context<'_>, samples: &mut Samples) {
        let mut build = Sample::new("index", MICA, self.layers, 0);
        note(&mut build, |sample| {
            self.index("drop")?;
            sample.put("build_s", self.index("build")?.as_secs_f64());
            sample.put("index_bytes", ratio(self.index_bytes()?, 1));
            sample.put("copied_tables_bytes", copied_tables_bytes(&context.spec, self.layers));
            sample.put("walk_lookups_per_read", self.walk_lookups());
            Ok(())
        });
        samples.push(build);
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
    fn index_bytes(&self) -> Result<u64> {
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

/// All that is measured on chains. All lengths are made first, and then measured in turns: a
/// machine whose speed drifts slows every length alike.
pub(super) fn of_chains(
    context: &Context<'_>,
    layers: &[u32],
    repeats: impl Fn(u32) -> u32,
    wanted: impl Fn(Part) -> bool,
    samples: &mut Samples,
) -> Result<()> {
    let on_chain =
        [Part::Warm, Part::Cold, Part::First, Part::Budget, Part::Handles, Part::IndexSize];
    if !on_chain.into_iter().any(&wanted) {
        return Ok(());
    }
    let mut chains = Vec::new();
    for &layers in layers {
        println!("\n== {layers} layers");
        let chain = Chain::make(context, ChainSpec { layers, ..context.spec.clone() })?;
        if wanted(Part::First) {
            first(context, &chain, repeats(layers), samples)?;
        }
        chain.build(context, samples);
        chains.push(chain);
    }
    let peers = Peer::for_chains();
    if wanted(Part::Warm) {
        println!("\n== warm");
        let measure = |peer: &Peer, chain: &Chain, sample: &mut Sample| {
            measure::warm(peer, chain.subject(context), sample)
        };
        in_turns("warm", &peers, &chains, &repeats, samples, measure);
    }
    if wanted(Part::Cold) {
        println!("\n== cold");
        cold(context, &chains, &peers, &repeats, samples);
    }
    let few = |layers| repeats(layers).min(3);
    let for_budgets = chains.iter().find(|chain| chain.layers == BUDGET_LAYERS);
    if let (true, Some(chain)) = (wanted(Part::Budget), for_budgets) {
        println!("\n== budgets");
        budgets(context, chain, few, samples);
    }
    if wanted(Part::Handles) {
        println!("\n== handles");
        let limit = ["prlimit", HANDLES_LIMIT];
        let measure = |peer: &Peer, chain: &Chain, sample: &mut Sample| {
            measure::random_only(peer, chain.subject(context), &limit, sample)
        };
        in_turns("handles", &[Peer::mica(&[])], &chains, few, samples, measure);
    }
    Ok(())
}

/// Space that the paper's method takes: a copy of all L2 tables in every layer.
fn copied_tables_bytes(spec: &ChainSpec, layers: u32) -> f64 {
    let clusters = spec.disk_bytes.div_ceil(spec.cluster_bytes);
    let tables = clusters.div_ceil(spec.cluster_bytes / 8);
    ratio(tables * spec.cluster_bytes * u64::from(layers), 1)
}

/// mica on a chain without any index, which it then writes.
fn first(context: &Context<'_>, chain: &Chain, repeats: u32, samples: &mut Samples) -> Result<()> {
    for repeat in 0..repeats.min(3) {
        chain.index("drop")?;
        let mut sample = Sample::new("first", MICA, chain.layers, repeat);
        let subject = chain.subject(context);
        note(&mut sample, |sample| measure::without_index(&Peer::mica(&[]), subject, sample));
        samples.push(sample);
    }
    Ok(())
}

fn cold(
    context: &Context<'_>,
    chains: &[Chain],
    peers: &[Peer],
    repeats: impl Fn(u32) -> u32,
    samples: &mut Samples,
) {
    if let Err(error) = drop_caches() {
        println!("cold: not measured: {error}");
        return;
    }
    in_turns("cold", peers, chains, repeats, samples, |peer, chain, sample| {
        for what in [Cold::Random, Cold::Sequential] {
            drop_caches()?;
            measure::cold(peer, chain.subject(context), what, sample)?;
        }
        Ok(())
    });
}

/// Speed by memory for the map. QEMU has a cache per layer, so its budget is divided.
fn budgets(
    context: &Context<'_>,
    chain: &Chain,
    repeats: impl Fn(u32) -> u32,
    samples: &mut Samples,
) {
    for &budget in BUDGETS {
        let text = budget.to_string();
        let mica = Peer::mica(&["--index-cache", &text]);
        let mut peers = vec![mica];
        // A cache of QEMU's holds at least two slices of 4 KiB.
        let per_layer = (budget / u64::from(chain.layers)).max(8 << 10);
        if per_layer * u64::from(chain.layers) <= budget && all_installed(&[tools::QEMU_NBD]) {
            peers.push(Peer::qemu_nbd(&[]).on_node(&json_chain(chain, per_layer)));
        }
        let part = format!("budget-{budget}");
        let chains = std::slice::from_ref(chain);
        in_turns(&part, &peers, chains, &repeats, samples, |peer, chain, sample| {
            measure::random_only(peer, chain.subject(context), &[], sample)
        });
    }
}

/// The budgets in MiB, and the parts that they are measured in.
pub(super) fn budgets_measured() -> impl Iterator<Item = (f64, String)> {
    BUDGETS.iter().map(|&budget| (ratio(budget, 1 << 20), format!("budget-{budget}")))
}

/// The chain as one QEMU block-device name, each layer with an L2 cache of `bytes`.
fn json_chain(chain: &Chain, bytes: u64) -> String {
    let folder = chain.folder.path().display();
    (0..chain.layers).fold(String::new(), |below, layer| {
        let backing = if below.is_empty() { "null".to_owned() } else { below };
        format!(
            "{{\"driver\":\"qcow2\",\"l2-cache-size\":{bytes},\"l2-cache-entry-size\":4096,\
             \"file\":{{\"driver\":\"file\",\"filename\":\"{folder}/layer-{layer:04}.qcow2\"}},\
             \"backing\":{backing}}}"
        )
    })
}

/// What the protocol and the device allow: a null disk behind the protocol, and a raw file.
pub(super) fn ceiling(context: &Context<'_>, repeats: u32, samples: &mut Samples) -> Result<()> {
    println!("\n== ceilings");
    for repeat in 0..repeats {
        let mut sample = Sample::new("null", "load generator alone", 1, repeat);
        note(&mut sample, |sample| {
            sample.put("random_32_per_s", null::ceiling(32, context.random)?.per_second());
            Ok(())
        });
        samples.push(sample);
    }
    let size = PathBuf::from(CEILING_BYTES.to_string());
    let mut peers = vec![Peer::mica(&[])];
    if all_installed(&[tools::NBDKIT]) {
        peers.push(Peer::nbdkit(&["null", &CEILING_BYTES.to_string()]));
    }
    for repeat in 0..repeats {
        each_once("null", &peers, 1, repeat, samples, |peer, sample| {
            measure::random_only(peer, context.unverified(&size, "null"), &[], sample)
        });
    }
    raw(context, repeats, samples)
}

/// Random reads of a raw file past the page cache, by servers and by fio on the file itself.
///
/// # Errors
/// If there is no room for the file.
pub(super) fn raw(context: &Context<'_>, repeats: u32, samples: &mut Samples) -> Result<()> {
    let raw = tempfile::Builder::new().prefix("raw-").tempfile_in(context.work)?;
    fill(raw.as_file())?;
    let raw = raw.path();
    let mut peers = vec![Peer::mica(&["--cache", "none"])];
    if all_installed(&[tools::QEMU_NBD]) {
        peers.push(Peer::qemu_nbd(&["--cache=none", "--aio=io_uring"]));
    }
    let fio_there = all_installed(&[tools::FIO]);
    for repeat in 0..repeats {
        // fio takes its turn before and after the servers: devices warm up too.
        let fio_turn = |samples: &mut Samples| {
            let mut sample = Sample::new("raw", "fio on the file", 1, repeat);
            note(&mut sample, |sample| fio(raw, context.random, sample));
            samples.push(sample);
        };
        if fio_there && repeat % 2 == 0 {
            fio_turn(samples);
        }
        each_once("raw", &peers, 1, repeat, samples, |peer, sample| {
            measure::random_only(peer, context.unverified(raw, "raw"), &[], sample)
        });
        if fio_there && repeat % 2 == 1 {
            fio_turn(samples);
        }
    }
    Ok(())
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

/// Random 4 KiB reads by fio with io_uring, past the page cache, 32 in flight.
fn fio(file: &Path, time: Duration, sample: &mut Sample) -> Result<()> {
    let seconds = time.as_secs().max(1);
    let name = format!("--filename={}", file.display());
    let runtime = format!("--runtime={seconds}");
    let arguments = [
        "--name=ceiling",
        &name,
        &runtime,
        "--ioengine=io_uring",
        "--direct=1",
        "--readonly",
        "--rw=randread",
        "--bs=4k",
        "--iodepth=32",
        "--time_based",
        "--norandommap",
        "--randrepeat=0",
        "--output-format=json",
    ];
    let figures = command::run(tools::FIO.program, arguments).json();
    let read = &figures["jobs"][0]["read"];
    sample.put("random_32_per_s", read["iops"].as_f64().unwrap_or(0.0));
    Ok(())
}

/// Fills `file` with bytes that no layer of storage can compress.
fn fill(mut file: &File) -> Result<()> {
    let mut rng = mica_gen::Rng::new(7);
    let mut piece = vec![0; 4 << 20];
    for _ in 0..CEILING_BYTES / piece.len() as u64 {
        for word in piece.as_chunks_mut::<8>().0 {
            *word = rng.next_u64().to_le_bytes();
        }
        file.write_all(&piece)?;
    }
    file.sync_all()?;
    Ok(())
}

/// Space that the index takes for a large disk, without its data.
pub(super) fn index_size(
    context: &Context<'_>,
    layers: &[u32],
    samples: &mut Samples,
) -> Result<()> {
    let Some(&layers) = layers.iter().max() else { return Ok(()) };
    println!("\n== index of a large disk");
    let spec = ChainSpec {
        layers,
        disk_bytes: LARGE_DISK_BYTES,
        data: DataMode::Holes,
        ..context.spec.clone()
    };
    let mut sample = Sample::new("index-50g", MICA, layers, 0);
    note(&mut sample, |sample| {
        let chain = Chain::make(context, spec.clone())?;
        sample.put("build_s", chain.index("build")?.as_secs_f64());
        sample.put("index_bytes", ratio(chain.index_bytes()?, 1));
        sample.put("copied_tables_bytes", copied_tables_bytes(&spec, layers));
        Ok(())
    });
    samples.push(sample);
    Ok(())
}

/// Runs all `peers` on all `chains` in turns, as often as `repeats` says for a length, every other
/// time in reverse order.
fn in_turns(
    part: &str,
    peers: &[Peer],
    chains: &[Chain],
    repeats: impl Fn(u32) -> u32,
    samples: &mut Samples,
    measure: impl Fn(&Peer, &Chain, &mut Sample) -> Result<()>,
) {
    let most = chains.iter().map(|chain| repeats(chain.layers)).max().unwrap_or(0);
    for repeat in 0..most {
        let mut order: Vec<_> = chains.iter().collect();
        if repeat % 2 == 1 {
            order.reverse();
        }
        for chain in order.into_iter().filter(|chain| repeat < repeats(chain.layers)) {
            each_once(part, peers, chain.layers, repeat, samples, |peer, sample| {
                measure(peer, chain, sample)
            });
        }
    }
}

/// Whether the page cache can be dropped here.
pub(super) fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    fs::write(Path::new("/proc/sys/vm/drop_caches"), "3").context("dropping the page cache")
}
