//! A disk that a machine boots from: a root file system with programs, files and a database, its
//! clusters spread over the layers of a chain.
//!
//! ```text
//! programs, files, database ─▶ folder ─▶ mke2fs -d ─▶ raw disk ─▶ the chain's data clusters
//! ```
//!
//! The chain is one of `mica_gen`, with tables and without data: every layer owns as much of the
//! disk as any other. Its clusters get the bytes of the raw disk where `mica map` says that they
//! are. So the same disk is served at every length.

use super::Context;
use crate::chains::Chain;
use crate::demo::tree::Tree;
use anyhow::{Context as _, Result, ensure};
use mica_gen::{ChainSpec, DataMode};
use mica_tests::machine::{self, parts};
use mica_tests::tools::{self, Tool};
use mica_tests::{command, mica};
use serde::Deserialize;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long another project's tool may take.
const LIMIT: Duration = Duration::from_secs(600);
/// Bytes of a value of the database.
pub(super) const VALUE_BYTES: u64 = 1000;
/// Where the database is in the machine.
pub(super) const DATABASE: &str = "/db";
/// Room on the disk besides the database.
const DISK_BYTES_MIN: u64 = 512 << 20;
/// Names under which busybox is called in the machine.
const APPLETS: &[&str] = &["sh", "cat", "find", "xargs", "getty", "mount", "hostname"];
/// The disk's init program: it reads what a booting system reads, and shows a login prompt.
const BOOT: &str = r#"#!/bin/sh
hostname machine
for folder in /files/*; do
    find "$folder" -type f | xargs cat > /dev/null
done
perl -e 'print "PERL\n"'
bash -c 'echo BASH'
echo "BOOT-STAT $(cat /sys/block/vda/stat)"
exec getty -L 115200 ttyS0 vt100
"#;

/// The disk as a raw file, and what is on it.
pub(super) struct RootDisk {
    path: PathBuf,
    disk_bytes: u64,
    /// Entries of the database.
    pub(super) entries: u64,
}

impl RootDisk {
    /// Makes it with a database of `entries`, in the folder that `context` works in.
    ///
    /// # Errors
    /// If a tool is missing or fails.
    pub(super) fn make(context: &Context<'_>, entries: u64) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("root-").tempdir_in(context.parts.work)?;
        let root = folder.path();
        for name in ["bin", "sbin", "etc", "proc", "sys", "dev", "tmp", "var/tmp"] {
            fs::create_dir_all(root.join(name))?;
        }
        program(&root.join("bin/busybox"), &parts::busybox()?)?;
        for applet in APPLETS {
            symlink("busybox", root.join("bin").join(applet))?;
        }
        program(&root.join("sbin/boot"), BOOT.as_bytes())?;
        for name in ["bash", "perl"] {
            install(root, Tool { program: name, packages: &[] })?;
        }
        for tool in [tools::FIO, tools::DB_BENCH] {
            install(root, tool)?;
        }
        fs::write(root.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\n")?;
        Tree::gather(&root.join("files"))?;
        database(&root.join(DATABASE.trim_start_matches('/')), entries)?;
        let path = context.parts.work.join("root.raw");
        let disk_bytes = (DISK_BYTES_MIN + 2 * entries * VALUE_BYTES).next_multiple_of(64 << 20);
        let mut mke2fs = Command::new(tools::MKE2FS.find().context("mke2fs")?);
        mke2fs.args(["-q", "-t", "ext4", "-O", "^metadata_csum_seed", "-d"]).arg(root).arg(&path);
        done(mke2fs.arg(format!("{}k", disk_bytes >> 10)))?;
        Ok(Self { path, disk_bytes, entries })
    }

    /// A chain of `layers` that shows it.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(super) fn spread(&self, context: &Context<'_>, layers: u32) -> Result<Chain> {
        let spec = ChainSpec {
            layers,
            disk_bytes: self.disk_bytes,
            fill: 1.0,
            data: DataMode::Holes,
            ..context.parts.spec.clone()
        };
        let chain = Chain::make(&context.parts, spec)?;
        let mut map = Command::new(mica::binary());
        map.args(["map", "--format", "qcow2", "--output", "json"]).arg(&chain.image);
        let mut places: Vec<Place> = serde_json::from_str(&done(&mut map)?)?;
        // Each layer is opened once.
        places.sort_by_key(|place| place.depth);
        let folder = chain.image.parent().context("a chain is in a folder")?;
        let raw = File::open(&self.path)?;
        for of_layer in places.chunk_by(|one, other| one.depth == other.depth) {
            let Some(Place { depth, .. }) = of_layer.first() else { continue };
            let number = layers.checked_sub(depth + 1).context("a layer below the base")?;
            let layer = folder.join(format!("layer-{number:04}.qcow2"));
            let layer = OpenOptions::new().write(true).open(layer)?;
            for place in of_layer {
                place.copy(&raw, &layer)?;
            }
        }
        chain.index("build")?;
        Ok(chain)
    }
}

/// A run of the disk, as `mica map` has it.
#[derive(Deserialize)]
struct Place {
    start: u64,
    length: u64,
    depth: u32,
    offset: u64,
}

impl Place {
    /// Copies it from the disk to where its layer has it; zeros are there already.
    fn copy(&self, raw: &File, layer: &File) -> Result<()> {
        let mut bytes = vec![0; usize::try_from(self.length)?];
        raw.read_exact_at(&mut bytes, self.start)?;
        if bytes.iter().any(|byte| *byte != 0) {
            layer.write_all_at(&bytes, self.offset)?;
        }
        Ok(())
    }
}

/// Fills a database with `entries`, uncompressed: then each read of the guest is one of the disk.
fn database(folder: &Path, entries: u64) -> Result<()> {
    let mut fill = Command::new(tools::DB_BENCH.find().context("db_bench")?);
    fill.args(["--benchmarks=fillseq", "--compression_type=none", "--disable_wal=1"]);
    fill.arg(format!("--db={}", folder.display())).arg(format!("--num={entries}"));
    fill.arg(format!("--value_size={VALUE_BYTES}"));
    done(&mut fill)?;
    Ok(())
}

/// Puts `tool` of this machine, with the libraries that it needs, below `root`.
fn install(root: &Path, tool: Tool) -> Result<()> {
    let file = tool.find().with_context(|| format!("{} is missing", tool.program))?;
    program(&root.join("bin").join(tool.program), &fs::read(&file)?)?;
    for library in machine::libraries(&file)? {
        let to = root.join(library.trim_start_matches('/'));
        if !to.exists() {
            fs::create_dir_all(to.parent().context("a library is in a folder")?)?;
            program(&to, &fs::read(&library)?)?;
        }
    }
    Ok(())
}

fn program(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

fn done(command: &mut Command) -> Result<String> {
    let finished = command::finish_within(command, LIMIT);
    ensure!(finished.status.success(), "{finished}");
    Ok(finished.stdout)
}
