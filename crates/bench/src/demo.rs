//! The demonstration: a disk with a file system full of files goes through snapshots, made and
//! written by QEMU's own tools; mica serves the chain; every file is read back and compared.

mod life;
pub(crate) mod tree;

use crate::glance;
use anyhow::{Context, Result, ensure};
use clap::Args;
use life::Life;
use mica_tests::server::Server;
use mica_tests::{command, mica, shell};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tree::Tree;

/// Length of the disk.
const DISK_BYTES: u64 = 256 << 20;
/// How long another project's tool may take.
const LIMIT: Duration = Duration::from_secs(600);

/// Options of the demonstration.
#[derive(Args)]
pub(crate) struct Options {
    /// Snapshots that the disk goes through.
    #[arg(long, default_value_t = 500)]
    snapshots: u32,
    /// Seconds of each load of the table.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Folder to work in.
    #[arg(long, default_value = "demo")]
    dir: PathBuf,
    /// Keep the chain in the folder, for inspection.
    #[arg(long)]
    keep: bool,
}

/// Runs it all.
pub(crate) fn run(options: &Options) -> Result<()> {
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    fs::create_dir_all(&options.dir)?;
    let folder = tempfile::Builder::new().prefix("life-").tempdir_in(&options.dir)?;
    let dir = folder.path().canonicalize()?;
    let outcome = show(&dir, options);
    if options.keep || outcome.is_err() {
        println!("\nkept: {}", folder.keep().display());
    }
    outcome
}

fn show(dir: &Path, options: &Options) -> Result<()> {
    println!("\n== a disk with a file system of real files");
    let mut tree = Tree::gather(&dir.join("files"))?;
    println!("{} files, {} MiB", tree.count(), tree.bytes() >> 20);
    let mut life = Life::begin(dir, DISK_BYTES)?;

    println!("\n== {} snapshots by qemu-img, each written by qemu-io", options.snapshots);
    for number in 1..=options.snapshots {
        let changed = life.snapshot(&mut tree, number)?;
        if number.is_multiple_of(50) || number == options.snapshots {
            println!("snapshot {number}: {} KiB changed, {} files", changed >> 10, tree.count());
        }
    }
    let top = life.active().to_owned();

    println!("\n== mica serves the chain of {} layers", options.snapshots + 1);
    let server = Server::mica(&top, "qcow2", &[])?;
    println!("it serves after {:.0} ms", server.open.as_secs_f64() * 1e3);
    let back = dir.join("back.raw");
    said(Command::new("nbdcopy").arg(server.uri()).arg(&back))?;
    ensure!(server.stop()?.status.success(), "mica did not exit cleanly");
    ensure!(same_bytes(&back, life.raw())?, "the disk came back different");
    println!("nbdcopy: every byte of the disk came back");
    said(Command::new("e2fsck").args(["-f", "-n"]).arg(&back))?;
    println!("e2fsck: the file system is clean");
    let out = dir.join("out");
    fs::create_dir(&out)?;
    said(Command::new("debugfs").args(["-R", &format!("rdump / {}", out.display())]).arg(&back))?;
    let (files, bytes) = tree.compare(&out)?;
    println!("{files} files, {} MiB: every one of them came back whole", bytes >> 20);

    println!("\n== mica beside qemu-nbd, the same disk in one layer and in all of them");
    let one = dir.join("one.qcow2");
    said(
        Command::new("qemu-img").args(["convert", "-O", "qcow2", "-f", "raw"]).arg(&back).arg(&one),
    )?;
    // mica indexes a chain while it serves it; here it gets the time before the clock starts.
    said(Command::new(mica::binary()).args(["index", "build"]).arg(&top))?;
    let images = [(1, one.as_path()), (options.snapshots + 1, top.as_path())];
    let time = Duration::from_secs_f64(options.seconds);
    println!("{}", glance::table(&images, time)?);
    Ok(())
}

/// Runs another project's tool, which has to succeed.
fn said(command: &mut Command) -> Result<String> {
    let finished = command::finish_within(command, LIMIT);
    ensure!(finished.status.success(), "{finished}");
    Ok(finished.stdout)
}

fn same_bytes(one: &Path, other: &Path) -> Result<bool> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("reading {}", path.display()));
    Ok(read(one)? == read(other)?)
}
