//! How a server is started: where its log is, what ails its storage, and its other options.

use super::ailments::{sickness, slowness};
use super::chain::Chain;
use super::kinds::Kind;
use super::loss::{LogAt, Trace};
use super::story::Outcome;
use super::toml::{toml, toml_of_disk};
use super::world::text;
use mica_units::Rng;
use std::fs;
use std::path::PathBuf;

/// How a server is started.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    pub(super) log: LogAt,
    queues: u64,
    slow: Option<String>,
    sick: Option<String>,
    aio: Option<&'static str>,
    more: Vec<(&'static str, &'static str)>,
}

impl Manner {
    pub(super) fn random(chain: &Chain<'_>, rng: &mut Rng) -> Self {
        let world = &chain.world;
        let log = if world.places.small_log().is_some() && world.does(rng, Kind::LogSpace, 8) {
            LogAt::Small
        } else if world.does(rng, Kind::LogPlace, 5) {
            rng.choose(&[LogAt::Elsewhere, LogAt::Nowhere])
        } else {
            LogAt::Usual
        };
        let slow = world.does(rng, Kind::Slow, 25).then(|| slowness(rng));
        let sick = world.does(rng, Kind::Sick, 12).then(|| sickness(rng));
        let aio = rng.percent(10).then_some("threads");
        let mut more = Vec::new();
        if rng.percent(10) {
            more.push(("discard", "ignore"));
        }
        if rng.percent(20) {
            more.push(("index", rng.choose(&["off", "read"])));
        }
        Self { log, queues: rng.choose(&[1, 1, 2]), slow, sick, aio, more }
    }

    /// Whether its reads and writes fail at times.
    pub(super) fn is_sick(&self) -> bool {
        self.sick.is_some()
    }

    /// Whether what it wrote need not be there: a failed sync says so, whereas a failed write
    /// concerns nothing else.
    pub(super) fn may_lose(&self) -> bool {
        self.sick.as_ref().is_some_and(|sick| sick.contains("sync") || sick.contains("all"))
    }

    /// Without such failures.
    pub(super) fn be_well(&mut self) {
        self.sick = None;
    }

    /// What a server that is started like this can see of the one before.
    pub(super) fn trace(&self, chain: &Chain<'_>) -> Outcome<Trace> {
        let path = chain.path(&chain.active().name);
        Trace::find(&path, self.log_place(chain).as_deref(), chain.world.log_limit)
    }

    /// Where it keeps its log.
    fn log_place(&self, chain: &Chain<'_>) -> Option<PathBuf> {
        let world = &chain.world;
        match self.log {
            LogAt::Usual => Some(world.log.clone()),
            LogAt::Small => world.places.small_log(),
            LogAt::Elsewhere => Some(world.run.clone()),
            LogAt::Nowhere => None,
        }
    }

    /// The options of server `name`. Where it serves another disk besides, they name a
    /// configuration that has all of them.
    pub(super) fn options(&self, chain: &Chain<'_>, name: &str) -> Outcome<Vec<String>> {
        let world = &chain.world;
        let mut process = vec![("queues", self.queues.to_string())];
        process.extend(self.aio.map(|aio| ("aio", aio.to_owned())));
        let log = self.log_place(chain).unwrap_or_else(|| PathBuf::from("off"));
        let mut disk =
            vec![("nbd", "socket".to_owned()), (world.log_key(), text(&log)?.to_owned())];
        disk.extend(world.log_limit.map(|limit| ("inject", limit.option())));
        let faults = [&self.slow, &self.sick].into_iter().flatten();
        disk.extend(faults.map(|fault| ("inject", fault.clone())));
        disk.extend(self.more.iter().map(|(key, value)| (*key, (*value).to_owned())));
        let image = chain.path(&chain.active().name);
        let image = text(&image)?;
        let Some(second) = &chain.second else {
            let options = process.into_iter().chain(disk);
            let options = options.flat_map(|(key, value)| [format!("--{key}"), value]);
            return Ok(options.chain([image.to_owned()]).collect());
        };
        disk.extend([("name", chain.disk_name().to_owned()), ("image", image.to_owned())]);
        let text = format!("{}{}{}", toml(&process), toml_of_disk(&disk), second.toml());
        let file = format!("{name}.toml");
        fs::write(world.run.join(&file), text)?;
        // A server that cannot open the first disk is to say so, and not to serve the second alone.
        Ok(["--config", &file, "--strict"].map(str::to_owned).to_vec())
    }
}
