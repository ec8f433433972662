//! Chains that QEMU made, and what they show.

use mica_tests::command::{self, Finished};
use mica_tests::{judge, mica, qemu};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Layers of a chain, from the base.
pub(crate) const LAYERS: [&str; 5] =
    ["base.qcow2", "one.qcow2", "two.qcow2", "three.qcow2", "top.qcow2"];
/// Bytes of the disk.
pub(crate) const LEN: usize = 24 << 20;

/// The kinds of chains: the options of the base, and of the layers above it.
pub(crate) const KINDS: [(&str, &str); 5] = [
    ("raw", "compat=1.1"),
    ("compat=1.1,cluster_size=4k", "extended_l2=on"),
    ("extended_l2=on", "cluster_size=16k"),
    ("compat=0.10", "compat=0.10,cluster_size=32k"),
    ("cluster_size=2M", "cluster_size=512"),
];

/// A chain in a folder of its own.
pub(crate) struct Chain {
    dir: tempfile::TempDir,
    base: String,
}

impl Chain {
    /// Five layers with data, zeros and compressed clusters in each; the base is shorter than the
    /// others.
    pub(crate) fn new(kind: (&str, &str)) -> Self {
        Self::new_in(&std::env::temp_dir(), kind)
    }

    /// The same in a folder of this one.
    pub(crate) fn new_in(folder: &Path, (base, options): (&str, &str)) -> Self {
        let dir = tempfile::tempdir_in(folder).expect("a folder");
        let at = dir.path();
        let name = if base == "raw" { "base.raw" } else { LAYERS[0] };
        match base {
            "raw" => {
                let byte = |at: u32| u8::try_from(at / 512 % 256).expect("a byte") | 1;
                let bytes: Vec<u8> = (0..18 << 20).map(byte).collect();
                fs::write(at.join(name), bytes).expect("written");
            }
            base => {
                qemu::create(at, name, &["-o", base], "18M");
                qemu::io(
                    at,
                    &[],
                    name,
                    &["write -c -P 2 14M 2M", "write -P 1 0 14M", "write -P 3 16M 1M"],
                );
            }
        }
        let mut below = name.to_owned();
        let format = if base == "raw" { "raw" } else { "qcow2" };
        for (number, layer) in LAYERS.iter().enumerate().skip(1) {
            let format = if number == 1 { format } else { "qcow2" };
            let size = LEN.to_string();
            qemu::create(at, layer, &["-o", options, "-b", &below, "-F", format], &size);
            let start = (number * 3) << 20;
            let byte = number * 16;
            let mut writes = Vec::new();
            // QEMU compresses only what is not there yet.
            if !options.contains("extended_l2") {
                writes.push(format!("write -c -P {} {} 2M", byte + 3, ((number - 1) * 4) << 20));
            }
            writes.extend([
                format!("write -P {byte} {start} 1M"),
                format!("write -P {} {} 1536", byte + 1, start + (3 << 19) + 512),
                format!("write -P {} {} 2048", byte + 2, 20 << 20),
            ]);
            if !options.contains("0.10") {
                writes.push(format!("write -z {} 512k", ((number + 1) * 2) << 20));
                writes.push(format!("write -zu {} 2M", (12 + number) << 20));
            }
            let writes: Vec<_> = writes.iter().map(String::as_str).collect();
            qemu::io(at, &[], layer, &writes);
            below = (*layer).to_owned();
        }
        qemu::flatten(at, LAYERS[4], "expected.raw");
        Self { dir, base: name.to_owned() }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    pub(crate) fn top(&self) -> PathBuf {
        self.path(LAYERS[4])
    }

    /// What the disk showed at first.
    pub(crate) fn expected(&self) -> Vec<u8> {
        fs::read(self.path("expected.raw")).expect("it was just written")
    }

    /// Runs mica in the folder.
    #[track_caller]
    pub(crate) fn mica(&self, args: &[&str]) -> Finished {
        command::finish(Command::new(mica::binary()).current_dir(self.dir()).args(args))
    }

    /// The names of the chain's files, from the top, as QEMU sees them.
    #[track_caller]
    pub(crate) fn names(&self, top: &str) -> Vec<String> {
        let told = qemu::img(self.dir(), ["info", "--backing-chain", "--output", "json", top]);
        let told = told.json();
        let images = told.as_array().expect("an array");
        let name = |image: &serde_json::Value| {
            let path = Path::new(image["filename"].as_str().expect("a name"));
            path.file_name().expect("a name").to_string_lossy().into_owned()
        };
        images.iter().map(name).collect()
    }

    /// QEMU reads `wanted`, every layer is sound, and QEMU can write.
    #[track_caller]
    pub(crate) fn judge(&self, wanted: &[u8]) {
        for image in self.names(LAYERS[4]).iter().filter(|name| !name.ends_with(".raw")) {
            let said = qemu::img(self.dir(), ["check", "-f", "qcow2", image]);
            assert_eq!(said.code(), Some(0), "{image}: {said}");
        }
        qemu::flatten(self.dir(), LAYERS[4], "now.raw");
        let now = fs::read(self.path("now.raw")).expect("flat");
        judge::same_bytes("what QEMU reads", &now, wanted);
    }
}
