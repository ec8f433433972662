//! One of the disks at shared addresses: its image, where it is served, and what it may hold.

use crate::nbd::{Connection, Wish};
use crate::storm::ailments::slowness;
use crate::storm::aim::Aim;
use crate::storm::foreign;
use crate::storm::judge;
use crate::storm::kinds::Kind;
use crate::storm::model::{Model, View};
use crate::storm::stamp::{self, SECTOR, Seq, Stamper, Writer};
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::{World, text};
use mica_units::Rng;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Sectors of a disk at first. Most have as many: a disk in the place of another one is to be
/// noticed by what it holds.
const SECTORS: u64 = 2 << 11;
/// The longest that one may become.
const SECTORS_MAX: u64 = 8 << 11;

/// What a server has to do with a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    Absent,
    Drained,
    Serving,
}

/// Who made a server serve a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    Configuration,
    Command,
}

/// A disk.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) name: String,
    image: PathBuf,
    /// Of a qcow2 image; `None` for a raw one.
    pub(super) cluster: Option<u64>,
    /// Where it is served.
    pub(super) sockets: Vec<PathBuf>,
    slow: Option<String>,
    pub(super) model: Model,
    /// Of an ephemeral one: what its image holds. The other model has what it shows.
    image_model: Option<Model>,
    /// An ephemeral one was removed, and what was written to it is gone.
    pub(super) is_thrown_away: bool,
    pub(super) stamper: Stamper,
    hot: u64,
    pub(super) standing: Standing,
    pub(super) source: Source,
    /// A server was killed that may have served it, and none has since.
    pub(super) is_pending: bool,
}

impl Disk {
    /// Number `number` of the run, with a new image, at some of `sockets`.
    pub(super) fn create(
        world: &World<'_>,
        rng: &mut Rng,
        number: u64,
        sockets: &[PathBuf],
    ) -> Outcome<Self> {
        let name = format!("disk{number}");
        let sectors = if rng.percent(80) { SECTORS } else { SECTORS + rng.below(SECTORS) };
        let cluster = rng.choose(&[None, Some(512), Some(4 << 10), Some(64 << 10)]);
        let (image, len) = (world.images.join(format!("{name}.img")), sectors * SECTOR as u64);
        match cluster {
            Some(cluster) => {
                let (options, len) = (format!("cluster_size={cluster}"), len.to_string());
                let args = ["create", "-q", "-f", "qcow2", "-o", &options, text(&image)?, &len];
                foreign::img(&world.images, &args)?;
            }
            None => File::create_new(&image)?.set_len(len)?,
        }
        // Their stamps differ in the bits that a stamp has of its disk.
        let id = (world.seed << 5) + 2 * number;
        let first = sockets[index(rng, sockets.len())].clone();
        let mut at = vec![first];
        at.extend(sockets.iter().filter(|_| rng.percent(30)).cloned());
        at.sort();
        at.dedup();
        let (slow, model) = (world.does(rng, Kind::Slow, 15), Model::new(id, sectors));
        let slow = slow.then(|| slowness(rng));
        Ok(Self {
            name,
            image,
            cluster,
            sockets: at,
            slow,
            model,
            image_model: None,
            is_thrown_away: false,
            stamper: Stamper::new(id),
            hot: rng.next_u64(),
            standing: Standing::Absent,
            source: Source::Configuration,
            is_pending: false,
        })
    }

    pub(super) fn is_serving(&self) -> bool {
        self.standing == Standing::Serving
    }

    /// What will be written to it ends with its server.
    pub(super) fn make_ephemeral(&mut self) {
        self.image_model = Some(self.model.clone());
    }

    pub(super) fn is_ephemeral(&self) -> bool {
        self.image_model.is_some()
    }

    /// What was written to an ephemeral one ended with its server, or with it.
    pub(super) fn throw_away(&mut self) {
        self.is_thrown_away = false;
        if let Some(image) = &self.image_model {
            self.model = image.clone();
        }
    }

    /// Its configuration gets another setting.
    pub(super) fn change_settings(&mut self, rng: &mut Rng) {
        self.slow = match self.slow {
            None => Some(slowness(rng)),
            Some(_) => None,
        };
    }

    fn format(&self) -> &'static str {
        if self.cluster.is_some() { "qcow2" } else { "raw" }
    }

    /// Its options, as keys of a configuration.
    pub(super) fn options<'a>(&self, world: &World<'a>) -> Outcome<Vec<(&'a str, String)>> {
        let mut options = vec![
            ("name", self.name.clone()),
            ("format", self.format().to_owned()),
            (world.log_key(), text(&world.log)?.to_owned()),
        ];
        for socket in &self.sockets {
            options.push(("nbd", text(socket)?.to_owned()));
        }
        options.extend(self.slow.iter().map(|slow| ("inject", slow.clone())));
        options.extend(self.is_ephemeral().then(|| ("ephemeral", "true".to_owned())));
        Ok(options)
    }

    pub(super) fn image(&self) -> Outcome<&str> {
        text(&self.image)
    }

    pub(super) fn aim(&self) -> Aim {
        Aim::new(self.model.len(), self.cluster.unwrap_or(4 << 10), self.hot)
    }

    /// A greater length, in sectors, if it may grow any more.
    pub(super) fn longer(len: u64, rng: &mut Rng) -> Option<u64> {
        let longer = len + 1 + rng.below(SECTORS);
        (longer <= SECTORS_MAX).then_some(longer)
    }

    /// A connection to it, by its name.
    pub(super) fn connect(&self, socket: &Path) -> anyhow::Result<Connection> {
        Connection::open(socket, &self.name, &Wish::default())
    }

    /// Reads all of it wherever it is served, and judges it; what is read is decided.
    pub(super) fn judge(&mut self, world: &World<'_>, what: &str) -> Outcome {
        for socket in &self.sockets {
            let what = format!("{what}: {} at {}", self.name, socket.display());
            let read = self.connect(socket).and_then(|mut connection| connection.read_all());
            let bytes =
                read.map_err(|error| Fault::new(Wrong::Failed, format!("{what}: {error:#}")))?;
            world.counts.reads.add();
            let content = judge_bytes(&self.model, &bytes, &what)?;
            self.model.settle(&content);
        }
        self.is_pending = false;
        Ok(())
    }

    /// Holds its image against what is known, by QEMU: nobody serves it, and nobody was killed who
    /// did.
    pub(super) fn look(&self, world: &World<'_>, what: &str) -> Outcome {
        if self.cluster.is_some() {
            world.counts.checks.add();
            let (corruptions, leaks) = foreign::check(&world.images, self.image()?)?;
            if corruptions > 0 {
                let what = format!("{what}: {}: {corruptions} corruptions, {leaks}", self.name);
                return Err(Fault::new(Wrong::Corrupt, what));
            }
        }
        let raw = world.run.join("shared.raw");
        let args = ["convert", "-f", self.format(), "-O", "raw", self.image()?, text(&raw)?];
        foreign::img(&world.images, &args)?;
        world.counts.reads.add();
        let model = self.image_model.as_ref().unwrap_or(&self.model);
        judge_bytes(model, &fs::read(&raw)?, &format!("{what}: {}, read by QEMU", self.name))?;
        Ok(())
    }

    /// QEMU writes to its image, which nobody serves: somebody else may have it.
    pub(super) fn foreign_write(&mut self, world: &World<'_>, rng: &mut Rng) -> Outcome {
        world.counts.foreign.add();
        let range = self.aim().narrow(rng);
        let seq = self.stamper.next(Writer::Foreign);
        let (disk, count) = (self.stamper.disk(), range.end - range.start);
        let pattern = world.run.join("pattern");
        fs::write(&pattern, stamp::bytes(disk, range.start, count, seq))?;
        let sector = SECTOR as u64;
        let (at, len) = (range.start * sector, count * sector);
        let command = format!("write -q -s {} {at} {len}", pattern.display());
        foreign::io(&world.images, self.format(), self.image()?, &[command])?;
        self.model.foreign(&range, seq);
        if let Some(image) = &mut self.image_model {
            image.foreign(&range, seq);
        }
        Ok(())
    }
}

fn judge_bytes(model: &Model, bytes: &[u8], what: &str) -> Outcome<Vec<Seq>> {
    let (len, wanted) = ((bytes.len() / SECTOR) as u64, model.len());
    if len != wanted {
        let what = format!("{what}: the disk has {len} sectors, not {wanted}");
        return Err(Fault::new(Wrong::Length, what));
    }
    model.judge(0, bytes, View::Kept).map_err(|bad| judge::fault(&bad, what))
}

/// One of `count` places.
pub(super) fn index(rng: &mut Rng, count: usize) -> usize {
    usize::try_from(rng.below(count as u64)).expect("it is below a usize")
}
