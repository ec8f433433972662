//! Chains of 100 to 1,000 layers, read in sequence by several clients with few descriptors. Between
//! the lives of servers QEMU commits layers into those below and writes to layers, and the index is
//! damaged or gone.
//!
//! Neighbours on the disk are in different files, so a server reads ahead over many of them, closes
//! and opens files all the time, and finds them as they are now, not as they were.

mod build;
mod index;
mod reader;

use super::aim::Aim;
use super::foreign;
use super::kinds::Kind;
use super::load::{Load, Mood, Phase, Stage};
use super::model::Model;
use super::place::Ground;
use super::stamp::{self, SECTOR, Stamper, Writer};
use super::story::{Fault, Outcome, Wrong};
use super::world::World;
use crate::server::Server;
use build::{OWNED, Template, name_of};
use mica_units::Rng;
use std::fs::{self, File, FileTimes};
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;

const CLUSTERS: u64 = 512;
const LAYERS: [usize; 6] = [100, 100, 130, 200, 300, 1000];
const LIVES: [u64; 3] = [3, 4, 5];
/// QEMU opens all layers below the one that it changes.
const CHANGED_MAX: usize = 120;

/// A chain, and what is known of it.
struct Deep<'a> {
    world: &'a World<'a>,
    dir: PathBuf,
    cluster: u64,
    layers: usize,
    model: Model,
    stamper: Stamper,
    /// The uppermost layer that owns each cluster; `None` if none does.
    owners: Vec<Option<usize>>,
    /// A server was killed that guests wrote to: which clusters the active layer owns is known when
    /// the next one has closed it.
    is_unsettled: bool,
}

/// Lets a storm go over one.
pub(super) fn storm(world: &World<'_>, rng: &mut Rng) -> Outcome {
    world.counts.deep.add();
    let mut deep = Deep::build(world, rng)?;
    for _ in 0..rng.choose(&LIVES) {
        deep.live(rng)?;
        deep.rest(rng)?;
    }
    deep.live(rng)
}

impl<'a> Deep<'a> {
    fn build(world: &'a World<'a>, rng: &mut Rng) -> Outcome<Self> {
        let has_ext4 = world.places.grounds().contains(&Ground::Ext4);
        let dir = if has_ext4 { world.places.images(Ground::Ext4) } else { world.images.clone() };
        let (layers, cluster) = (rng.choose(&LAYERS), rng.choose(&[4096, 4096, 16384]));
        let cluster = if layers > 300 { 4096 } else { cluster };
        let sectors = CLUSTERS * cluster / SECTOR as u64;
        world.story.tell(format_args!("{layers} layers, clusters of {cluster} bytes"));
        let mut deep = Self {
            world,
            dir,
            cluster,
            layers,
            model: Model::new(world.seed, sectors),
            stamper: Stamper::new(world.seed),
            owners: vec![None; usize::try_from(CLUSTERS).expect("few")],
            is_unsettled: false,
        };
        let base = Template::make(&deep.dir, cluster, sectors, false)?;
        let other = Template::make(&deep.dir, cluster, sectors, true)?;
        for layer in 0..layers {
            let template = if layer == 0 { &base } else { &other };
            let (first, seq) =
                (rng.below(CLUSTERS - OWNED + 1), deep.stamper.next(Writer::Foreign));
            let bytes = template.layer(layer.saturating_sub(1), first, deep.stamper.disk(), seq)?;
            fs::write(deep.dir.join(name_of(layer)), bytes)?;
            deep.owned_by(layer, first..first + OWNED, seq);
        }
        let (corruptions, leaks) =
            foreign::check(&deep.dir, &name_of(layers.min(CHANGED_MAX) - 1))?;
        if corruptions + leaks > 0 {
            return Err(super::story::trouble("a layer is not as QEMU makes them"));
        }
        // Only what is durable leaves the page cache.
        rustix::fs::syncfs(File::open(&deep.dir)?).map_err(std::io::Error::from)?;
        Ok(deep)
    }

    /// Write `seq` is in `clusters` of `layer`: seen where no layer above owns them.
    fn owned_by(&mut self, layer: usize, clusters: Range<u64>, seq: u64) {
        let sectors = self.cluster / SECTOR as u64;
        for cluster in clusters {
            let owner = &mut self.owners[usize::try_from(cluster).expect("few")];
            if owner.is_none_or(|owner| owner <= layer) {
                *owner = Some(layer);
                self.model.foreign(&(cluster * sectors..(cluster + 1) * sectors), seq);
            }
        }
    }

    fn serve(&self, rng: &mut Rng, access: &[&str]) -> Outcome<Server> {
        let world = self.world;
        let files = rng.choose(&[256, 256, 256, 300, 1024, 20000]);
        let mut more = vec!["--queues", rng.choose(&["1", "1", "2"])];
        more.extend([
            "--index",
            rng.choose(&["auto", "auto", "auto", "auto", "auto", "read", "off"]),
        ]);
        if rng.percent(20) {
            more.extend(["--cache", "none"]);
        }
        if rng.percent(30) {
            more.extend(["--index-cache", "1M"]);
        }
        more.extend(access);
        world.story.tell(format_args!("  serve {more:?} with {files} files"));
        let server = Server::start("", |socket| {
            let mut serve = Command::new("sh");
            let limit = format!("ulimit -n {files}; exec \"$0\" \"$@\"");
            serve.args(["-c", &limit]).arg(world.binary).arg("serve").arg("--nbd").arg(socket);
            serve.args(["--format", "qcow2"]).args(world.image_args()).args(more);
            serve.arg(self.dir.join(name_of(self.layers - 1)));
            serve
        });
        server.map_err(|error| Fault::new(Wrong::NotServed, format!("{error:#}")))
    }

    /// It is served, and read in sequence more than once; perhaps it is written, too.
    fn live(&mut self, rng: &mut Rng) -> Outcome {
        let counts = self.world.counts;
        counts.lives.add();
        if rng.percent(60) {
            index::forget(&self.dir, self.layers)?;
        }
        let is_writable = rng.percent(40);
        let server = self.serve(rng, if is_writable { &[] } else { &["--read-only"] })?;
        self.read(&server, rng)?;
        if is_writable {
            self.write(&server, rng)?;
            self.read(&server, rng)?;
        }
        if self.world.does(rng, Kind::Kill, 40) {
            self.world.story.tell("  killed");
            drop(server);
            counts.kills.add();
            self.is_unsettled |= is_writable;
            return Ok(());
        }
        let stopped = server.stop()?;
        if !stopped.status.success() || stopped.log.contains("panicked") {
            return Err(Fault::new(Wrong::Died, format!("{:?}: {}", stopped.status, stopped.log)));
        }
        self.model.closed();
        counts.closes.add();
        if is_writable {
            self.find_owned_by_active()?;
        }
        Ok(())
    }

    /// Takes note of what guests made the active layer own.
    fn find_owned_by_active(&mut self) -> Outcome {
        let active = self.layers - 1;
        let bytes = fs::read(self.dir.join(name_of(active)))?;
        let entries = build::entries(&bytes, self.owners.len())?;
        for (owner, _) in self.owners.iter_mut().zip(entries).filter(|(_, entry)| *entry != 0) {
            *owner = Some(active);
        }
        self.is_unsettled = false;
        Ok(())
    }

    fn read(&self, server: &Server, rng: &mut Rng) -> Outcome {
        for _ in 0..1 + rng.below(2) {
            self.world.counts.reads.add();
            let read = reader::read(&server.socket(), &self.model, rng);
            read.map_err(|fault| {
                Fault::new(fault.wrong, format!("{}\n{}", fault.what, server.log()))
            })?;
        }
        Ok(())
    }

    fn write(&mut self, server: &Server, rng: &mut Rng) -> Outcome {
        let model = std::mem::replace(&mut self.model, Model::new(0, 0));
        let load = Load {
            clients: 1 + rng.below(2),
            requests: 10 + rng.below(60),
            seed: rng.next_u64(),
            aim: Aim::new(model.len(), self.cluster, 0),
            mood: Mood::random(rng),
            export: String::new(),
        };
        let stage = Stage::new(model, self.stamper.clone());
        stage.enter(Phase::Steady);
        let went = stage.run(&server.socket(), &load, self.world.counts, || Ok(()));
        (self.model, self.stamper) = stage.end();
        // What a reader sees of a trim is not decided before it is read.
        went?;
        self.settle(server)
    }

    /// What is there now stays.
    fn settle(&mut self, server: &Server) -> Outcome {
        let bytes = crate::nbd::read_disk(&server.socket())
            .map_err(|error| Fault::new(Wrong::Failed, format!("{error:#}: {}", server.log())))?;
        let judged = self.model.judge(0, &bytes, super::model::View::Kept);
        let content = judged.map_err(|bad| super::judge::fault(&bad, "after writes"))?;
        self.model.read(0, &content);
        Ok(())
    }

    /// Something happens while nobody serves it. Half of the time that is only what leaves all
    /// files as long as they were: all else makes the index of the layers above it new.
    fn rest(&mut self, rng: &mut Rng) -> Outcome {
        let kinds = self.world.kinds.of(&[Kind::CommitDown, Kind::Write, Kind::Index]);
        if kinds.contains(&Kind::Write) && rng.percent(50) {
            return (0..1 + rng.below(2)).try_for_each(|_| self.change(rng, true));
        }
        let count = if kinds.is_empty() { 0 } else { rng.below(4) };
        (0..count).try_for_each(|_| match rng.choose(&kinds) {
            Kind::CommitDown => self.commit(rng),
            Kind::Write => self.change(rng, false),
            _ => {
                let done = index::damage(&self.dir, rng)?;
                self.world.counts.indexes.add();
                self.world.story.tell(format_args!("  {done}"));
                Ok(())
            }
        })
    }

    /// One of the layers that QEMU may change, not the active one.
    fn some_layer(&self, rng: &mut Rng) -> usize {
        let most = CHANGED_MAX.min(self.layers - 1);
        usize::try_from(rng.below(most as u64)).unwrap_or(0)
    }

    fn commit(&mut self, rng: &mut Rng) -> Outcome {
        let layer = self.some_layer(rng).max(1);
        self.world.story.tell(format_args!("  QEMU commits layer {layer} into the one below"));
        self.world.counts.commits.add();
        foreign::img(&self.dir, &["commit", "-q", "-f", "qcow2", &name_of(layer)])?;
        for owner in self.owners.iter_mut().filter(|owner| **owner == Some(layer)) {
            *owner = Some(layer - 1);
        }
        Ok(())
    }

    /// QEMU writes to a layer, or makes some of it zeros, which leaves the file as long as it was;
    /// then somebody may set back the time of the last write.
    fn change(&mut self, rng: &mut Rng, is_zeros: bool) -> Outcome {
        if self.is_unsettled {
            return Ok(());
        }
        self.world.counts.foreign.add();
        let (layer, cluster) = (self.some_layer(rng), rng.below(CLUSTERS - 64));
        let path = self.dir.join(name_of(layer));
        let modified = path.metadata()?.modified()?;
        let count = if is_zeros { 1 + rng.below(64) } else { 1 + rng.below(8) };
        let sets_back = self.world.does(rng, Kind::Touch, 50);
        self.world.story.tell(format_args!(
            "  QEMU writes {count} at {cluster} of layer {layer}; zeros: {is_zeros}, its time is \
             set back: {sets_back}"
        ));
        let [at, len] = [cluster, count].map(|clusters| clusters * self.cluster);
        let (seq, command) = if is_zeros {
            (0, format!("write -q -z {at} {len}"))
        } else {
            let (seq, pattern) =
                (self.stamper.next(Writer::Foreign), self.world.run.join("pattern"));
            let sectors = self.cluster / SECTOR as u64;
            let disk = self.stamper.disk();
            fs::write(&pattern, stamp::bytes(disk, cluster * sectors, count * sectors, seq))?;
            (seq, format!("write -q -s {} {at} {len}", pattern.display()))
        };
        foreign::io(&self.dir, "qcow2", &name_of(layer), &[command])?;
        if sets_back {
            let file = File::options().write(true).open(&path)?;
            file.set_times(FileTimes::new().set_modified(modified))?;
        }
        self.owned_by(layer, cluster..cluster + count, seq);
        Ok(())
    }
}
