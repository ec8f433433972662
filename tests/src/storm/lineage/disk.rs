//! A disk whose layers come and go: the files of its chain, and what each of them holds.

use super::forms::Form;
use super::frozen::Frozen;
use super::state_in;
use super::target::Target;
use crate::storm::aim::Aim;
use crate::storm::foreign;
use crate::storm::formats::{format_of, is_qcow2, is_raw};
use crate::storm::judge;
use crate::storm::keys;
use crate::storm::kinds::Kind;
use crate::storm::model::{Model, View};
use crate::storm::stamp::{self, SECTOR, Seq, Stamper, Writer};
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use crate::storm::world::{World, text};
use mica_units::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Sectors of a disk.
const SECTORS: u64 = 4 << 11;
/// Which program makes what is beneath a disk at first, and how.
const SHAPES: [&str; 5] = [
    "cluster_size=64k",
    "cluster_size=64k,extended_l2=on",
    "cluster_size=4k",
    "cluster_size=512",
    "cluster_size=16k,refcount_bits=1",
];
/// The random numbers of a seed that decide only on the forms of the first layers.
const FORMS_PART: u64 = 1 << 34;
/// Bytes of a cluster, for what clients aim at.
const CLUSTER: u64 = 64 << 10;

/// A disk.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    pub(super) name: String,
    /// The image that the configuration names: the first one, for as long as it is a layer.
    first: String,
    began_raw: bool,
    pub(super) socket: PathBuf,
    /// The files of its layers, from the base.
    pub(super) chain: Vec<String>,
    /// What the files hold that nobody writes, as far as is known: frozen layers, clones, and what
    /// has left the chain.
    pub(super) frozen: BTreeMap<String, Frozen>,
    /// How many merges went into a file, or began to.
    pub(super) merges: BTreeMap<String, u64>,
    /// How many sectors files that were merged into have at least.
    pub(super) lengths: BTreeMap<String, u64>,
    /// Files of kept states.
    pub(super) states: BTreeSet<String>,
    /// The state that is exported.
    pub(super) exported: Option<String>,
    /// The file of the state since which that tells the changes.
    pub(super) since: Option<String>,
    /// Where exported states are backed up.
    pub(super) target: Target,
    /// Overlays of frozen layers, which belong to nobody here.
    pub(super) clones: Vec<String>,
    /// Those of them that were moved without telling anybody where they are.
    pub(super) untold: BTreeSet<String>,
    /// Its server was killed, and kept no log of it.
    pub(super) may_lose: bool,
    pub(super) model: Model,
    pub(super) stamper: Stamper,
    hot: u64,
    /// Files so far, for names.
    made: u64,
}

/// The folder, among the images, of clones that are in another one.
pub(super) const FAR: &str = "far";

impl Disk {
    /// Number `number` of the run, with a chain of its own.
    pub(super) fn create(world: &World<'_>, rng: &mut Rng, number: u64) -> Outcome<Self> {
        let name = format!("disk{number}");
        // Their stamps differ in the bits that a stamp has of its disk.
        let id = (world.seed << 5) + 2 * number;
        let layers = rng.choose(&[1, 1, 2, 3]);
        // It gets its first layer while it is served.
        let ending = if layers == 1 && rng.percent(40) { "raw" } else { "qcow2" };
        let first = format!("{name}.{ending}");
        let (model, stamper) = (Model::new(id, 0), Stamper::new(id));
        let mut disk = Self::new(world, (name, first), (model, stamper), rng);
        for layer in 1..=layers {
            disk.add_first_layers(world, rng, layer == layers)?;
        }
        Ok(disk)
    }

    /// Number `number` of the run, on the layers of `other` up to the frozen one at position `at`.
    pub(super) fn beside(
        world: &World<'_>,
        rng: &mut Rng,
        number: u64,
        (other, at): (&Self, usize),
    ) -> Outcome<Self> {
        let name = format!("disk{number}");
        let first = format!("{name}.qcow2");
        let shared = &other.chain[..=at];
        let known = |file: &String| Some((file.clone(), other.frozen.get(file)?.clone()));
        let frozen: BTreeMap<_, _> = shared.iter().filter_map(known).collect();
        let model = frozen.get(&shared[at]).map(Frozen::model);
        let model = model.ok_or_else(|| trouble("nobody knows what is shared"))?;
        let stamper = other.stamper.of_sibling(number);
        let mut disk = Self::new(world, (name, first), (model, stamper), rng);
        disk.chain = shared.to_vec();
        disk.frozen = frozen;
        disk.add_first_layers(world, rng, true)?;
        Ok(disk)
    }

    fn new(
        world: &World<'_>,
        (name, first): (String, String),
        (model, stamper): (Model, Stamper),
        rng: &mut Rng,
    ) -> Self {
        Self {
            began_raw: is_raw(&first),
            first,
            socket: world.run.join(format!("{name}.nbd")),
            name,
            chain: Vec::new(),
            frozen: BTreeMap::new(),
            merges: BTreeMap::new(),
            lengths: BTreeMap::new(),
            states: BTreeSet::new(),
            exported: None,
            since: None,
            target: Target::default(),
            clones: Vec::new(),
            untold: BTreeSet::new(),
            may_lose: false,
            model,
            stamper,
            hot: rng.next_u64(),
            made: 0,
        }
    }

    /// One of the layers that are there at the beginning.
    fn add_first_layers(&mut self, world: &World<'_>, rng: &mut Rng, is_last: bool) -> Outcome {
        let is_other = !is_last && rng.percent(25);
        let sectors = if is_other { SECTORS / 2 + rng.below(SECTORS) } else { SECTORS };
        let has_keys = keys::secret(&world.images).is_some();
        let is_raw_base =
            !is_last && self.chain.is_empty() && rng.percent(if has_keys { 50 } else { 25 });
        let name = match is_last {
            true => self.first.clone(),
            false if is_raw_base && has_keys && rng.percent(70) => {
                format!("{}.luks", self.new_name("base"))
            }
            false if is_raw_base => format!("{}.raw", self.new_name("base")),
            false => self.new_name("base"),
        };
        if let Some(beneath) = self.chain.last() {
            self.frozen.insert(beneath.clone(), Frozen::as_now(&self.model));
        }
        let (shape, len) = (rng.choose(&SHAPES), (sectors * SECTOR as u64).to_string());
        let is_encrypted = has_keys && rng.percent(50);
        let form = match is_encrypted || !is_qcow2(&name) {
            true => None,
            false => self.form_of_first_layer(world),
        };
        match format_of(&name) {
            "luks" => world.create_luks(&name, sectors)?,
            format => {
                let mut args = vec!["create", "-q", "-f", format];
                let shape = match &form {
                    _ if is_encrypted => [shape, keys::OF_QCOW2].join(","),
                    Some(form) => form.options(&name, self.chain.is_empty()),
                    None => shape.to_owned(),
                };
                if format == "qcow2" {
                    args.extend(["-o", &*shape]);
                }
                if let Some(beneath) = self.chain.last() {
                    // Without a key QEMU could not open it.
                    args.extend(["-u", "-b", beneath, "-F", format_of(beneath)]);
                }
                args.extend([&*name, &*len]);
                world.story.tell(format_args!("  {args:?}"));
                if is_encrypted {
                    args.extend(keys::OBJECT);
                }
                foreign::img(&world.images, &args)?;
            }
        }
        let keeps_bitmaps = is_qcow2(&name) && form.is_none_or(Form::has_bitmaps);
        if keeps_bitmaps && world.does(rng, Kind::Bitmaps, 30) {
            // What its merges have to carry on. For an encrypted image QEMU would need its key.
            let args = ["bitmap", "--add", &name, "changes"];
            match is_encrypted {
                true => foreign::succeeded(world.mica(&args)?)?,
                false => foreign::img(&world.images, &args)?,
            };
        }
        // Beyond the end of a shorter layer are zeros, whatever is below.
        self.model.resize(sectors);
        self.chain.push(name);
        for _ in 0..rng.below(6) {
            self.write_by_qemu(world, rng)?;
        }
        Ok(())
    }

    /// What is odd about the next of the layers that are there at the beginning.
    fn form_of_first_layer(&self, world: &World<'_>) -> Option<Form> {
        let number = (self.stamper.disk() << 8) + self.chain.len() as u64;
        Form::random(world, &mut Rng::for_part(world.seed, FORMS_PART + number), 25)
    }

    /// Whether servers find a disk of these layers by what the configuration says.
    pub(super) fn is_named_by(&self, chain: &[String]) -> bool {
        chain.contains(&self.first)
    }

    /// The configuration names the active layer.
    pub(super) fn name_active(&mut self) {
        self.first = self.active().to_owned();
    }

    /// A name for a file.
    pub(super) fn new_name(&mut self, what: &str) -> String {
        self.made += 1;
        format!("{}-{what}{}.qcow2", self.name, self.made)
    }

    /// A name for a state.
    pub(super) fn new_state(&mut self) -> String {
        self.made += 1;
        format!("s{}", self.made)
    }

    pub(super) fn active(&self) -> &str {
        self.chain.last().map_or("", |name| name)
    }

    /// The file of `state`, which is kept, or will be that of the present state.
    pub(super) fn file_of(&self, state: &str) -> String {
        let kept = self.states.iter().find(|file| state_in(file) == Some(state));
        if let Some(kept) = kept {
            return kept.clone();
        }
        let active = self.active();
        format!("{}@{state}.qcow2", active.strip_suffix(".qcow2").unwrap_or(active))
    }

    /// Its options, as keys of a configuration.
    pub(super) fn options<'a>(&self, world: &World<'a>) -> Outcome<Vec<(&'a str, String)>> {
        let mut options = vec![
            ("name", self.name.clone()),
            ("image", text(&world.images.join(&self.first))?.to_owned()),
            ("format", format_of(&self.first).to_owned()),
            (world.log_key(), text(&world.log)?.to_owned()),
            ("nbd", text(&self.socket)?.to_owned()),
        ];
        if let Some(secret) = keys::secret(&world.images) {
            options.push(("secret", text(&secret)?.to_owned()));
        }
        if self.tells_depth() && world.kinds.has(Kind::BlockStatus) {
            options.push(("allocation-depth", "true".to_owned()));
        }
        Ok(options)
    }

    /// Whether clients are told which layer has what: a raw image has but one.
    pub(super) fn tells_depth(&self) -> bool {
        !self.began_raw
    }

    /// What is said to a merge of noted images that are gone.
    pub(super) fn of_gone(&self, rng: &mut Rng) -> Option<&'static str> {
        // The dice do not depend on what came before.
        let says_so = rng.percent(75);
        (says_so && self.untold.is_empty()).then_some("--ignore-gone")
    }

    pub(super) fn aim(&self) -> Aim {
        Aim::new(self.model.len(), CLUSTER, self.hot)
    }

    /// What the disk shows, as read by `what`, is right; it is decided then.
    pub(super) fn judge(&mut self, bytes: &[u8], what: &str) -> Outcome {
        let content = self.judge_bytes(bytes, what)?;
        self.model.settle(&content);
        self.may_lose = false;
        Ok(())
    }

    fn judge_bytes(&self, bytes: &[u8], what: &str) -> Outcome<Vec<Seq>> {
        let (len, wanted) = ((bytes.len() / SECTOR) as u64, self.model.len());
        if len != wanted {
            let what = format!("{what}: {} has {len} sectors, not {wanted}", self.name);
            return Err(Fault::new(Wrong::Length, what));
        }
        let what = format!("{what}: {}", self.name);
        let view = if self.may_lose { View::Lossy } else { View::Kept };
        self.model.judge(0, bytes, view).map_err(|bad| judge::fault(&bad, &what))
    }

    /// Reads `file`, of which something is known, and judges it; nobody writes it.
    pub(super) fn look_at(&mut self, world: &World<'_>, file: &str, what: &str) -> Outcome {
        let Some(frozen) = self.frozen.get_mut(file) else { return Ok(()) };
        let raw = world.run.join("frozen.raw");
        let bytes = match is_raw(file) {
            true => fs::read(world.images.join(file))?,
            false => {
                let format = format_of(file);
                foreign::flatten_as(&world.images, (format, file), &["-U"], &raw)?
            }
        };
        world.counts.reads.add();
        frozen.decide(&bytes, &format!("{what}: {file}")).map(drop)
    }

    /// Nobody serves it, and it was closed: QEMU finds nothing wrong in any of its files, and reads
    /// from each what it has to hold.
    pub(super) fn look(&mut self, world: &World<'_>, what: &str) -> Outcome {
        for file in self.chain.iter().chain(&self.clones).filter(|file| is_qcow2(file)) {
            world.counts.checks.add();
            let (corruptions, leaks) = foreign::check(&world.images, file)?;
            if corruptions > 0 {
                let what = format!("{what}: {file}: {corruptions} corruptions, {leaks} leaks");
                return Err(Fault::new(Wrong::Corrupt, what));
            }
        }
        let raw = world.run.join("active.raw");
        let bytes = match is_raw(self.active()) {
            true => fs::read(world.images.join(self.active()))?,
            false => foreign::flatten(&world.images, self.active(), &[], &raw)?,
        };
        world.counts.reads.add();
        self.judge_bytes(&bytes, &format!("{what}, by QEMU"))?;
        let files: Vec<_> = self.frozen.keys().cloned().collect();
        files.iter().try_for_each(|file| self.look_at(world, file, what))
    }

    /// What mica reads from the disk, which nobody serves.
    pub(super) fn shown_by_mica(&self, world: &World<'_>) -> Outcome<Vec<u8>> {
        let raw = world.run.join("shown.raw");
        let format = if is_raw(self.active()) { "raw" } else { "qcow2" };
        let args = ["convert", "-q", "-f", format, "-O", "raw", self.active(), text(&raw)?];
        let said = world.mica(&args)?;
        if !said.status.success() {
            return Err(Fault::new(Wrong::Unusable, said.to_string()));
        }
        world.counts.reads.add();
        let bytes = fs::read(&raw)?;
        fs::remove_file(&raw)?;
        Ok(bytes)
    }

    /// The files of the chain, as its headers name them.
    pub(super) fn read_chain(&self, world: &World<'_>, active: &Path) -> Outcome<Vec<String>> {
        let active = text(active)?;
        let args = ["info", "-U", "-f", format_of(active), "--backing-chain", "--output", "json"];
        let said = foreign::img(&world.images, &[&args[..], &[active]].concat())?;
        let told: serde_json::Value = serde_json::from_str(&said)
            .map_err(|error| Fault::new(Wrong::Unusable, format!("{error}: {said}")))?;
        let names = told.as_array().into_iter().flatten().filter_map(|image| {
            let name = Path::new(image["filename"].as_str()?).file_name()?;
            Some(name.to_str()?.to_owned())
        });
        let mut names: Vec<_> = names.collect();
        names.reverse();
        Ok(names)
    }

    /// QEMU writes to the active layer, which nobody serves.
    pub(super) fn write_by_qemu(&mut self, world: &World<'_>, rng: &mut Rng) -> Outcome {
        let (active, aim) = (self.active().to_owned(), self.aim());
        let (range, seq) = self.write_to(world, rng, &active, &aim)?;
        self.model.foreign(&range, seq);
        Ok(())
    }

    /// QEMU writes to a clone.
    pub(super) fn write_to_clone(&mut self, world: &World<'_>, rng: &mut Rng) -> Outcome {
        let Some(clone) = self.clones.last().cloned() else { return Ok(()) };
        let Some(len) = self.frozen.get(&clone).map(Frozen::len) else { return Ok(()) };
        // What it holds is decided before it changes.
        self.look_at(world, &clone, "a clone")?;
        let aim = Aim::new(len, CLUSTER, self.hot);
        let (range, seq) = self.write_to(world, rng, &clone, &aim)?;
        if let Some(frozen) = self.frozen.get_mut(&clone) {
            frozen.write(&range, seq);
        }
        Ok(())
    }

    fn write_to(
        &mut self,
        world: &World<'_>,
        rng: &mut Rng,
        file: &str,
        aim: &Aim,
    ) -> Outcome<(Range<u64>, Seq)> {
        world.counts.foreign.add();
        let sector = SECTOR as u64;
        if rng.percent(20) {
            let range = aim.wide(rng);
            let (at, len) = (range.start * sector, (range.end - range.start) * sector);
            let unmap = if rng.percent(50) { "-u " } else { "" };
            let command = format!("write -q -z {unmap}{at} {len}");
            foreign::io(&world.images, format_of(file), file, &[command])?;
            return Ok((range, 0));
        }
        let range = if rng.percent(30) { aim.long(rng) } else { aim.narrow(rng) };
        let seq = self.stamper.next(Writer::Foreign);
        let count = range.end - range.start;
        let pattern = world.run.join("pattern");
        fs::write(&pattern, stamp::bytes(self.stamper.disk(), range.start, count, seq))?;
        let (at, len) = (range.start * sector, count * sector);
        let command = format!("write -q -s {} {at} {len}", pattern.display());
        foreign::io(&world.images, format_of(file), file, &[command])?;
        Ok((range, seq))
    }

    /// A user removes a file that has left the chain, unless something may stand on it.
    pub(super) fn remove(&mut self, world: &World<'_>, file: &str) -> Outcome {
        if !self.clones.is_empty() {
            return Ok(());
        }
        world.story.tell(format_args!("  {file} is removed"));
        self.frozen.remove(file);
        // Its data file, if it has one, may be that of a state that was kept of it.
        let path = world.images.join(file);
        if path.exists() {
            fs::remove_file(path)?;
        }
        Ok(())
    }
}
