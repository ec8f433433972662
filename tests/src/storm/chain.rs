//! The chain that a storm passes over, and what the storm knows of it.

use super::aim::Aim;
use super::formats::format_of;
use super::judge;
use super::keys;
use super::kinds::Kind;
use super::log_limit::LogLimit;
use super::loss::{Cause, Loss, Trace};
use super::model::{Model, View};
use super::place::Ground;
use super::second_disk::SecondDisk;
use super::shape::{self, Shape};
use super::stamp::SECTOR;
use super::stamp::{Seq, Stamper, Writer};
use super::state::{Layer, State};
use super::story::{Fault, Outcome};
use super::world::World;
use super::{foreign, stamp};
use mica_units::Rng;
use std::fs;
use std::ops::Range;
use std::path::PathBuf;

/// A chain and its storm.
#[derive(Debug)]
pub(super) struct Chain<'a> {
    pub(super) world: World<'a>,
    pub(super) state: State,
    pub(super) stamper: Stamper,
    pub(super) hot: u64,
    /// Files made so far, for names.
    pub(super) made: u64,
    /// Copies of all files, by folder.
    pub(super) copies: Vec<(PathBuf, State)>,
    /// What its servers serve besides.
    pub(super) second: Option<SecondDisk>,
}

impl<'a> Chain<'a> {
    fn new(world: World<'a>, (stamper, hot): (Stamper, u64), second: Option<SecondDisk>) -> Self {
        let state = State {
            layers: Vec::new(),
            model: Model::new(world.seed, 0),
            snapshots: Vec::new(),
            is_pending: false,
            loss: Loss::default(),
            is_contested: false,
            left: None,
            other_len: None,
            leaks: Some(0),
        };
        Self { world, state, stamper, hot, made: 0, copies: Vec::new(), second }
    }
}

impl Chain<'_> {
    fn add_first_layers(&mut self, rng: &mut Rng) -> Outcome {
        let shapes: Vec<_> = (0..rng.choose(&[1, 1, 2, 2, 3, 4, 6]))
            .map(|_| Shape::random(rng, self.world.kinds))
            .collect();
        let most = shapes.iter().map(Shape::sectors_max).min().unwrap_or(0);
        let is_small = self.world.ground != Ground::Folder;
        let most = if is_small { most.min(12 << 11) } else { most };
        let len = shape::sectors(rng, most);
        self.tell(format_args!("{shapes:#?}"));
        let has_keys = keys::secret(&self.world.images).is_some();
        if rng.percent(if has_keys { 40 } else { 15 }) {
            raw_base(self, rng, len)?;
        }
        for shape in shapes {
            let is_other = self.world.does(rng, Kind::Lengths, 30);
            let len = if is_other { shape::sectors(rng, most) } else { len };
            self.add_layer(rng, shape, len)?;
        }
        self.add_bitmaps()?;
        let content = self.judge_by_qemu(View::Kept, "a new chain")?;
        self.state.model.set_content(&content);
        Ok(())
    }

    pub(super) fn tell(&self, step: impl std::fmt::Display) {
        self.world.story.tell(step);
    }

    /// Something was refused, as is permitted; QEMU may leave clusters behind then.
    pub(super) fn refused(&mut self, said: &crate::command::Finished) {
        self.tell(format_args!("  refused: {}", said.stderr.trim()));
        self.state.leaks = None;
    }

    /// Records a fault that does not keep the chain from continuing.
    pub(super) fn note(&self, fault: Fault) {
        self.tell(format_args!("  {}: {}", fault.wrong.name(), fault.what));
        self.world.noted.lock().push(fault);
    }

    pub(super) fn active(&self) -> &Layer {
        self.state.layers.last().expect("a chain has a layer")
    }

    /// The name of the disk, for `mica ctl`.
    pub(super) fn disk_name(&self) -> &str {
        let name = &self.active().name;
        name.strip_suffix(".qcow2").unwrap_or(name)
    }

    /// The shape of the active layer, which is never raw.
    pub(super) fn shape(&self) -> Shape {
        self.active().shape.expect("the active layer is qcow2")
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.world.images.join(name)
    }

    pub(super) fn aim(&self) -> Aim {
        Aim::new(self.state.model.len(), self.shape().cluster, self.hot)
    }

    pub(super) fn new_name(&mut self, what: &str) -> String {
        self.made += 1;
        format!("{what}{}", self.made)
    }

    /// The longest disk that this chain may get.
    pub(super) fn sectors_max(&self) -> u64 {
        let shapes = self.state.layers.iter().filter_map(|layer| layer.shape);
        let most = shapes.map(|shape| shape.sectors_max()).min().unwrap_or(u64::MAX);
        if self.world.ground == Ground::Folder { most } else { most.min(12 << 11) }
    }

    /// Another program is about to write to the image.
    pub(super) fn contest(&mut self) {
        self.world.counts.foreign.add();
        self.state.endanger(Cause::Written);
        self.state.is_contested |= self.state.is_pending;
    }

    /// What a program that keeps logs in the usual place can see of a killed server.
    pub(super) fn usual_trace(&self) -> Outcome<Trace> {
        let image = self.path(&self.active().name);
        Trace::find(&image, Some(&self.world.log), self.world.log_limit)
    }

    /// What must be there now, given what killed servers left.
    pub(super) fn view(&self) -> View {
        if self.state.loss.may_be() { View::Lossy } else { View::Kept }
    }

    /// Creates image `name` of `shape`, by QEMU or mica, without counting it.
    pub(super) fn create(
        &self,
        rng: &mut Rng,
        name: &str,
        shape: &Shape,
        backing: Option<&Layer>,
        sectors: u64,
    ) -> Outcome {
        let len = (sectors * SECTOR as u64).to_string();
        let mut options = shape.options(name);
        if shape.is_encrypted {
            options.push(',');
            options.push_str(keys::OF_QCOW2);
        }
        // mica resolves a data file as it resolves all names; QEMU resolves it from its own
        // directory.
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        if let Some(backing) = backing {
            args.extend(["-b", &backing.name, "-F", backing.format()]);
        } else if shape.has_data_file && !shape.is_encrypted && rng.percent(30) {
            options.push_str(",data_file_raw=on");
        }
        args.extend(["-o", &options, name, &len]);
        self.tell(format_args!("  create {args:?}"));
        if shape.is_encrypted {
            // What lies beneath may need a key, too, and QEMU does not have to look at it.
            args.push("-u");
            foreign::img(&self.world.images, &[&args[..], &keys::OBJECT].concat())?;
        } else if rng.percent(40) {
            foreign::succeeded(self.world.mica(&args)?)?;
        } else {
            foreign::img(&self.world.images, &args)?;
        }
        Ok(())
    }

    /// QEMU writes to image `name`, `count` times; the model learns of it.
    pub(super) fn qemu_writes(
        &mut self,
        rng: &mut Rng,
        name: &str,
        aim: &Aim,
        count: u64,
    ) -> Outcome {
        let mut commands = Vec::new();
        for number in 0..count {
            let command = match rng.below(20) {
                0..13 => {
                    let range = aim.narrow(rng);
                    self.stamp_command(&range, number, "")?
                }
                13..15 => {
                    let range = aim.wide(rng);
                    self.state.model.foreign(&range, 0);
                    let unmap = if rng.percent(50) { "-u " } else { "" };
                    format!("write -z {unmap}{}", in_bytes(&range))
                }
                15..17 => {
                    let range = aim.wide(rng);
                    self.state.model.trim(&range);
                    format!("discard {}", in_bytes(&range))
                }
                17 => "flush".to_owned(),
                _ => format!("read {}", in_bytes(&aim.narrow(rng))),
            };
            commands.push(command);
        }
        self.tell(format_args!("  qemu-io {name} {commands:?}"));
        foreign::io(&self.world.images, "qcow2", name, &commands)
    }

    /// A `qemu-io` command that writes new stamps to `range`, with `flags`.
    fn stamp_command(&mut self, range: &Range<u64>, number: u64, flags: &str) -> Outcome<String> {
        let seq = self.stamper.next(Writer::Foreign);
        let pattern = self.world.run.join(format!("pattern{number}"));
        let count = range.end - range.start;
        fs::write(&pattern, stamp::bytes(self.stamper.disk(), range.start, count, seq))?;
        self.state.model.foreign(range, seq);
        Ok(format!("write -q {flags}-s {} {}", pattern.display(), in_bytes(range)))
    }

    /// QEMU writes compressed clusters to image `name`, which is still empty.
    pub(super) fn compressed_writes(&mut self, rng: &mut Rng, name: &str, aim: &Aim) -> Outcome {
        let (mut commands, mut from) = (Vec::new(), rng.below(2048));
        for number in 0..1 + rng.below(6) {
            let Some(range) = aim.clusters(rng, from) else { break };
            from = range.end;
            commands.push(self.stamp_command(&range, number, "-c ")?);
        }
        self.tell(format_args!("  qemu-io {name} {commands:?}"));
        foreign::io(&self.world.images, "qcow2", name, &commands)
    }

    /// The disk as QEMU reads it now, which must be right.
    pub(super) fn judge_by_qemu(&self, view: View, what: &str) -> Outcome<Vec<Seq>> {
        let raw = self.world.run.join("flat.raw");
        let bytes = foreign::flatten(&self.world.images, &self.active().name, &[], &raw)?;
        self.world.counts.reads.add();
        judge::disk(&self.state, &bytes, view, &format!("{what}, read by QEMU"))
    }

    /// Adds a layer with its own `shape` and length, and writes to it.
    pub(super) fn add_layer(&mut self, rng: &mut Rng, shape: Shape, sectors: u64) -> Outcome {
        let shape = match keys::secret(&self.world.images) {
            Some(_) => shape.perhaps_encrypted(rng),
            None => shape,
        };
        let name = format!("{}.qcow2", self.new_name("layer"));
        let backing = self.state.layers.last().cloned();
        self.create(rng, &name, &shape, backing.as_ref(), sectors)?;
        // Beyond the end of a shorter layer are zeros, whatever is below.
        self.state.model.resize(sectors);
        self.state.layers.push(Layer { name: name.clone(), shape: Some(shape) });
        let aim = self.aim();
        if shape.has_compressed {
            self.compressed_writes(rng, &name, &aim)?;
        }
        let count = rng.below(7);
        if count > 0 {
            self.qemu_writes(rng, &name, &aim, count)?;
        }
        Ok(())
    }

    /// Gives the active layer bitmaps, if its shape has some.
    pub(super) fn add_bitmaps(&mut self) -> Outcome {
        let name = self.active().name.clone();
        for number in 0..self.shape().bitmaps {
            let bitmap = format!("bitmap{number}");
            foreign::img(&self.world.images, &["bitmap", "--add", &name, &bitmap])?;
        }
        Ok(())
    }
}

/// A new chain of random shape.
pub(super) fn build<'a>(mut world: World<'a>, rng: &mut Rng) -> Outcome<Chain<'a>> {
    let (stamper, hot) = (Stamper::new(world.seed), rng.next_u64());
    world.log_limit = log_limit(&world, rng);
    let is_alone = !world.does(rng, Kind::SecondDisk, 35);
    let second = if is_alone { None } else { Some(SecondDisk::create(&world, rng)?) };
    let mut chain = Chain::new(world, (stamper, hot), second);
    chain.add_first_layers(rng)?;
    Ok(chain)
}

/// As [`build`], for a chain that nobody serves.
pub(super) fn build_at_rest<'a>(world: World<'a>, rng: &mut Rng) -> Outcome<Chain<'a>> {
    let (stamper, hot) = (Stamper::new(world.seed), rng.next_u64());
    let mut chain = Chain::new(world, (stamper, hot), None);
    chain.add_first_layers(rng)?;
    Ok(chain)
}

/// A raw base, or, where images may be encrypted, perhaps a LUKS image.
fn raw_base(chain: &mut Chain<'_>, rng: &mut Rng, len: u64) -> Outcome {
    let is_luks = keys::secret(&chain.world.images).is_some() && rng.percent(70);
    let name = if is_luks { "base.luks" } else { "base.raw" };
    chain.state.model.resize(len);
    match is_luks {
        true => chain.world.create_luks(name, len)?,
        false => fs::File::create_new(chain.path(name))?.set_len(len * SECTOR as u64)?,
    }
    let (aim, mut commands) = (Aim::new(len, 64 << 10, chain.hot), Vec::new());
    for number in 0..rng.below(8) {
        let range = aim.wide(rng);
        commands.push(chain.stamp_command(&range, number, "")?);
    }
    if !commands.is_empty() {
        foreign::io(&chain.world.images, format_of(name), name, &commands)?;
    }
    chain.state.layers.push(Layer { name: name.to_owned(), shape: None });
    Ok(())
}

/// Offset and length of a range of sectors.
pub(super) fn in_bytes(range: &Range<u64>) -> String {
    let sector = SECTOR as u64;
    format!("{} {}", range.start * sector, (range.end - range.start) * sector)
}

/// One chain in four has tiny logs.
fn log_limit(world: &World<'_>, rng: &mut Rng) -> Option<LogLimit> {
    let limit = LogLimit::random(rng);
    let is_small = world.does(rng, Kind::LogMemory, 25);
    is_small.then(|| {
        world.counts.small_logs.add();
        limit
    })
}
