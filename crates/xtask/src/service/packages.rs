//! Two packages of one program: the second only has a higher version.

use super::container::Container;
use anyhow::{Context, Result};
use mica_tests::shell;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Where they are in the container.
const FOLDER: &str = "/root";

/// A package in the container.
pub(super) struct Package {
    path: String,
    pub(super) version: String,
}

pub(super) struct Packages {
    pub(super) old: Package,
    pub(super) new: Package,
}

impl Packages {
    /// Puts them into the system at `root`.
    pub(super) fn new(first: &Path, root: &Path) -> Result<Self> {
        let place = |name: &str| root.join(FOLDER.trim_start_matches('/')).join(name);
        fs::copy(first, place("old.deb")).with_context(|| first.display().to_string())?;
        let content = tempfile::tempdir()?;
        let raw = content.path().join("mica");
        shell::run(Command::new("dpkg-deb").arg("--raw-extract").arg(first).arg(&raw))?;
        let file = raw.join("DEBIAN/control");
        let control = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let version = control.lines().find_map(|line| line.strip_prefix("Version: "));
        let version = version.context("a package without a version")?.to_owned();
        let higher = format!("{version}+upgrade");
        let line = |version: &str| format!("\nVersion: {version}\n");
        fs::write(&file, control.replace(&line(&version), &line(&higher)))?;
        let mut pack = Command::new("dpkg-deb");
        pack.args(["--root-owner-group", "-Znone", "--build"]).arg(&raw).arg(place("new.deb"));
        shell::run(&mut pack)?;
        let package = |name: &str, version| Package { path: format!("{FOLDER}/{name}"), version };
        Ok(Self { old: package("old.deb", version), new: package("new.deb", higher) })
    }
}

impl Package {
    /// Installs it, whatever was there; returns what that says.
    pub(super) fn install(&self, container: &Container) -> Result<String> {
        // Output that is no error can be in either.
        let line = format!("dpkg --force-downgrade --install {} 2>&1", self.path);
        let said = container.shell(&line)?;
        let asked = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", "mica"];
        let status = container.ok(asked)?;
        anyhow::ensure!(status == format!("installed {}", self.version), "dpkg: {status}: {said}");
        Ok(said)
    }
}
