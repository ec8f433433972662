//! The life of a disk: debugfs changes its file system, and QEMU's tools put each change into a new
//! layer.

use super::said;
use super::tree::{Change, Tree, change_name};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Unit in which changes are found and written: the clusters of the layers.
const CLUSTER_BYTES: usize = 64 << 10;

/// A disk and its chain of snapshots.
pub(crate) struct Life {
    dir: PathBuf,
    /// The disk as it is now, raw: the expected content of the chain.
    raw: PathBuf,
    file: File,
    /// The disk as the active layer has it.
    known: Vec<u8>,
    active: PathBuf,
}

impl Life {
    /// Makes the disk from the tree in `dir`, and its first layer.
    pub(crate) fn begin(dir: &Path, disk_bytes: u64) -> Result<Self> {
        let raw = dir.join("disk.raw");
        let blocks = format!("{}k", disk_bytes >> 10);
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-t", "ext4", "-d"]).arg(dir.join("files")).arg(&raw).arg(blocks);
        said(&mut mke2fs)?;
        let active = dir.join("layer-0000.qcow2");
        let convert = ["convert", "-f", "raw", "-O", "qcow2"];
        said(Command::new("qemu-img").args(convert).arg(&raw).arg(&active))?;
        let file = File::open(&raw)?;
        let known = fs::read(&raw)?;
        Ok(Self { dir: dir.to_owned(), raw, file, known, active })
    }

    /// The disk, raw.
    pub(crate) fn raw(&self) -> &Path {
        &self.raw
    }

    /// The active layer.
    pub(crate) fn active(&self) -> &Path {
        &self.active
    }

    /// A snapshot, then a day of changes on top of it; returns how many bytes changed.
    pub(crate) fn snapshot(&mut self, tree: &mut Tree, number: u32) -> Result<u64> {
        let changes = tree.edit_some(number)?;
        self.change_files(tree, &changes)?;
        let layer = self.dir.join(format!("layer-{number:04}.qcow2"));
        let below = self.active.file_name().context("a layer has a name")?.to_owned();
        // -u: the layers below are not opened, which at 500 of them would take a second each time.
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(below);
        create.arg(&layer).arg(self.known.len().to_string());
        said(&mut create)?;
        self.active = layer;
        self.write_changes()
    }

    /// Makes the changes of the tree on the disk's file system.
    fn change_files(&self, tree: &Tree, changes: &[Change]) -> Result<()> {
        let script = self.dir.join("debugfs.commands");
        let mut commands = File::create(&script)?;
        for change in changes {
            let name = change_name(change);
            if !matches!(change, Change::Written(_)) {
                writeln!(commands, "rm /{name}")?;
            }
            if !matches!(change, Change::Removed(_)) {
                writeln!(commands, "write {} /{name}", tree.root().join(name).display())?;
            }
        }
        drop(commands);
        let mut debugfs = Command::new("debugfs");
        said(debugfs.args(["-w", "-f"]).arg(script).arg(&self.raw))?;
        Ok(())
    }

    /// Writes every cluster that changed into the active layer, with qemu-io.
    fn write_changes(&mut self) -> Result<u64> {
        let mut now = vec![0; CLUSTER_BYTES];
        let mut qemu_io = Command::new("qemu-io");
        let mut changed = 0;
        let pieces = self.dir.join("pieces");
        fs::create_dir_all(&pieces)?;
        for (offset, known) in
            (0_u64..).step_by(CLUSTER_BYTES).zip(self.known.chunks_mut(CLUSTER_BYTES))
        {
            let now = &mut now[..known.len()];
            self.file.read_exact_at(now, offset)?;
            if *now != *known {
                let piece = pieces.join(offset.to_string());
                fs::write(&piece, &*now)?;
                let len = now.len();
                qemu_io.arg("-c").arg(format!("write -q -s {} {offset} {len}", piece.display()));
                known.copy_from_slice(now);
                changed += len as u64;
            }
        }
        ensure!(changed > 0, "nothing changed on the disk");
        // Whole clusters need nothing from below: the chain is not opened here either.
        let node = format!(
            "json:{{\"driver\":\"qcow2\",\"backing\":null,\"file\":{{\"driver\":\"file\",\
             \"filename\":\"{}\"}}}}",
            self.active.display()
        );
        let said = said(qemu_io.arg(node))?;
        ensure!(!said.contains("fail") && !said.contains("rror"), "qemu-io: {said}");
        fs::remove_dir_all(pieces)?;
        Ok(changed)
    }
}
