//! Another disk of the same server, on another file system where there is one, with clients of its
//! own: whatever happens to the chain, requests to this one are answered, and what was acknowledged
//! is there.

use super::ailments::slowness;
use super::aim::Aim;
use super::foreign;
use super::judge;
use super::kinds::Kind;
use super::load::{Load, Mood, Stage};
use super::model::{Model, View};
use super::place::Ground;
use super::stamp::{SECTOR, Seq, Stamper};
use super::story::{Counts, Fault, Outcome, Wrong};
use super::toml::toml_of_disk;
use super::world::{World, text};
use crate::nbd;
use mica_units::Rng;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

const NAME: &str = "second";
const SECTORS: u64 = 4 << 11;

/// Where it is served, by a server whose chain is served at `socket`.
pub(super) fn socket_beside(socket: &Path) -> PathBuf {
    socket.with_file_name("second.nbd")
}

/// Another disk.
#[derive(Debug)]
pub(super) struct SecondDisk {
    image: PathBuf,
    socket: PathBuf,
    /// Where its writers' logs are; nobody else puts anything there, or takes it away.
    log: PathBuf,
    log_key: String,
    cluster: Option<u64>,
    slow: Option<String>,
    model: Model,
    stamper: Stamper,
    hot: u64,
}

impl SecondDisk {
    /// Creates its image, on the file system that can be frozen unless the chain is there.
    pub(super) fn create(world: &World<'_>, rng: &mut Rng) -> Outcome<Self> {
        let is_on_ext4 =
            world.ground != Ground::Ext4 && world.places.grounds().contains(&Ground::Ext4);
        let folder = match is_on_ext4 {
            true => world.places.images(Ground::Ext4),
            false => world.run.clone(),
        };
        let log = world.run.join("second-log");
        fs::create_dir(&log)?;
        let cluster = rng.choose(&[None, Some(512), Some(4 << 10), Some(64 << 10)]);
        let (image, len) = (folder.join("second.img"), SECTORS * SECTOR as u64);
        match cluster {
            Some(cluster) => {
                let (options, len) = (format!("cluster_size={cluster}"), len.to_string());
                let args = ["create", "-q", "-f", "qcow2", "-o", &options, text(&image)?, &len];
                foreign::img(&folder, &args)?;
            }
            None => File::create_new(&image)?.set_len(len)?,
        }
        // Its stamps are those of another disk.
        let disk = world.seed ^ 0x80_0000;
        Ok(Self {
            image,
            socket: socket_beside(&world.run.join("socket")),
            log,
            log_key: world.log_key().to_owned(),
            cluster,
            slow: world.does(rng, Kind::Slow, 25).then(|| slowness(rng)),
            model: Model::new(disk, SECTORS),
            stamper: Stamper::new(disk),
            hot: rng.next_u64(),
        })
    }

    fn format(&self) -> &'static str {
        if self.cluster.is_some() { "qcow2" } else { "raw" }
    }

    /// Its table in the server's configuration.
    pub(super) fn toml(&self) -> String {
        let path = |path: &Path| path.display().to_string();
        let mut disk = vec![
            ("name", NAME.to_owned()),
            ("image", path(&self.image)),
            ("format", self.format().to_owned()),
            ("nbd", path(&self.socket)),
            (&*self.log_key, path(&self.log)),
        ];
        disk.extend(self.slow.iter().map(|slow| ("inject", slow.clone())));
        toml_of_disk(&disk)
    }

    /// Reads all of it from a server that just started, and judges it.
    pub(super) fn judge(&mut self, counts: &Counts) -> Outcome {
        let what = "another disk of a server that starts";
        let bytes = nbd::read_disk(&self.socket)
            .map_err(|error| Fault::new(Wrong::Failed, format!("{what}: {error:#}")))?;
        counts.reads.add();
        let content = self.judge_bytes(&bytes, what)?;
        self.model.settle(&content);
        Ok(())
    }

    fn judge_bytes(&self, bytes: &[u8], what: &str) -> Outcome<Vec<Seq>> {
        if bytes.len() as u64 != SECTORS * SECTOR as u64 {
            let what = format!("{what}: {} bytes", bytes.len());
            return Err(Fault::new(Wrong::Length, what));
        }
        self.model.judge(0, bytes, View::Kept).map_err(|bad| judge::fault(&bad, what))
    }

    /// Its clients' part in a round of the server whose phases `stage` has.
    pub(super) fn begin(&mut self, stage: &Stage, rng: &mut Rng) -> SecondClients {
        let model = std::mem::replace(&mut self.model, Model::new(0, 0));
        let aim = Aim::new(SECTORS, self.cluster.unwrap_or(4 << 10), self.hot);
        let load = Load {
            clients: 1 + rng.below(2),
            requests: 10 + rng.below(150),
            seed: rng.next_u64(),
            aim,
            mood: Mood::random(rng),
            export: String::new(),
        };
        let stage = stage.of_second_disk(model, self.stamper.clone());
        SecondClients { stage, load, socket: self.socket.clone() }
    }

    /// The round is over.
    pub(super) fn end(&mut self, others: SecondClients) {
        (self.model, self.stamper) = others.stage.end();
    }

    /// Its server has closed it well.
    pub(super) fn closed(&mut self) {
        self.model.closed();
    }

    /// Holds its image against what is known, by QEMU.
    pub(super) fn look(&self, world: &World<'_>) -> Outcome {
        let what = "another disk at the end";
        if self.cluster.is_some() {
            let (corruptions, leaks) = foreign::check(&world.images, text(&self.image)?)?;
            if corruptions > 0 {
                let what = format!("{what}: {corruptions} corruptions, {leaks} leaks");
                return Err(Fault::new(Wrong::Corrupt, what));
            }
        }
        let raw = world.run.join("second.raw");
        let said = [text(&self.image)?, text(&raw)?];
        let args = [&["convert", "-f", self.format(), "-O", "raw"], &said[..]].concat();
        foreign::img(&world.run, &args)?;
        self.judge_bytes(&fs::read(&raw)?, what).map(drop)
    }
}

/// The clients of another disk.
#[derive(Debug)]
pub(super) struct SecondClients {
    pub(super) stage: Stage,
    load: Load,
    socket: PathBuf,
}

impl SecondClients {
    /// Lets them work besides what `meanwhile` does.
    pub(super) fn run<T>(
        &self,
        counts: &Counts,
        meanwhile: impl FnOnce() -> Outcome<T>,
    ) -> Outcome<T> {
        self.stage.run(&self.socket, &self.load, counts, meanwhile)
    }
}
