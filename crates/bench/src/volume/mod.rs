//! `cargo xtask bench volume`: volumes beside a raw file and a qcow2 image through the same server,
//! and beside RBD on the same OSDs if there is a cluster; snapshots and clones of volumes, and the
//! collection of their stores.

mod cold;
mod collection;
mod disks;
mod goals;
mod loads;
mod report;
mod snapshots;

use super::machine::Machine;
use super::page::Found;
use super::samples::{Sample, Samples};
use super::turns::{in_order, note};
use crate::extent::{Extent, Usual};
use anyhow::Result;
use clap::{Args, ValueEnum};
use disks::{Disk, Place};
use mica_tests::shell;
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

/// What is usual here.
const REPEATS: Usual<u32> = Usual::new(3, 1);
const SECONDS: Usual<f64> = Usual::new(1.0, 0.3);
const GIB: Usual<u64> = Usual::new(1, 1);

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    /// What to measure.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// On which disks.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Disk::value_variants().to_vec())]
    disks: Vec<Disk>,
    /// The configuration of a Ceph cluster, for the disks that are in one.
    #[arg(long, value_name = "FILE")]
    ceph_conf: Option<PathBuf>,
    /// A pool of it, whose images and objects named "bench" are replaced.
    #[arg(long, default_value = "mica", value_name = "POOL")]
    pool: String,
    #[command(flatten)]
    extent: Extent,
}

/// A part of the bench.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Sequential and random loads.
    Loads,
    /// Snapshots of a volume that is written, and what they cost.
    Snapshots,
    /// Clones of one volume.
    Clones,
    /// Boots of clones in a store that is far.
    Cold,
    /// Collection of a store while a volume of it is read.
    Collection,
}

/// What all runs share.
struct Context<'a> {
    place: Place<'a>,
    limit: Duration,
    disk_bytes: u64,
}

/// Measures and writes it all.
pub(crate) fn run(options: &Options) -> Result<()> {
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    let work = options.extent.folders.work()?;
    let context = Context {
        place: Place {
            folder: work.path(),
            ceph: options.ceph_conf.as_deref(),
            pool: &options.pool,
        },
        limit: options.extent.time(SECONDS),
        disk_bytes: options.extent.gib(GIB) << 30,
    };
    let mut samples = Samples::default();
    for repeat in 0..options.extent.repeats(REPEATS) {
        for &part in &options.parts {
            let disks = options.disks.iter().copied();
            let disks = disks.filter(|disk| context.place.has(*disk) && part.is_of(*disk));
            for disk in in_order(&disks.collect::<Vec<_>>(), repeat) {
                let mut sample = Sample::new(part.name(), disk.name(), 1, repeat);
                note(&mut sample, |sample| match part {
                    Part::Loads => loads::run(&context, *disk, sample),
                    Part::Snapshots => snapshots::run(&context, *disk, sample),
                    Part::Clones => snapshots::clones(&context, *disk, sample),
                    Part::Cold => cold::run(&context, *disk, sample),
                    Part::Collection => collection::run(&context, *disk, sample),
                });
                samples.push(sample);
            }
        }
    }
    write(options, &samples)
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Loads => "loads",
            Self::Snapshots => "snapshots",
            Self::Clones => "clones",
            Self::Cold => "cold",
            Self::Collection => "collection",
        }
    }

    fn is_of(self, disk: Disk) -> bool {
        match self {
            Self::Loads => true,
            // Nothing is written: a log makes no difference.
            Self::Cold => disk.is_durable_in_store(),
            Self::Snapshots | Self::Clones | Self::Collection => disk.is_volume(),
        }
    }
}

fn write(options: &Options, samples: &Samples) -> Result<()> {
    let machine = Machine::query()?;
    let name = format!("{}-volume", machine.date);
    let goals = goals::judge(samples);
    let document = json!({
        "machine": machine.facts,
        "date": machine.date,
        "disk_gib": options.extent.gib(GIB),
        "quick": options.extent.quick,
        "seconds": options.extent.time(SECONDS).as_secs_f64(),
        "goals": goals,
        "samples": samples,
    });
    let (machine, quick) = (&machine.facts, options.extent.quick);
    let page = report::page(&Found { machine, quick, samples, goals: &goals, plots: &[] });
    options.extent.folders.put(&name, &document, &page)
}
