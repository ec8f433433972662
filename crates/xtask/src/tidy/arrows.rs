//! Which crate may name which: nothing below names anything above, no sibling names a sibling.

use super::Finding;
use anyhow::{Context, Result, ensure};
use mica_tests::shell;

/// Crates from the ground up; a crate may name those of lower rows only.
const ROWS: &[&[&str]] = &[
    &["mica-units"],
    &["mica-rt"],
    &["mica-block"],
    &["mica-crypt", "mica-map", "mica-qcow2-format"],
    &[
        "mica-store",
        "mica-s3",
        "mica-rados",
        "mica-qcow2",
        "mica-volume",
        "mica-backup",
        "mica-serve",
    ],
    &["mica-qcow2-tools"],
    &["mica-stack", "mica-sim", "mica-gen"],
    &["mica-daemon"],
    &["mica"],
    &["mica-tests"],
    &["mica-bench", "xtask"],
    // It names no other crate.
    &["mica-volume-model"],
];

/// Checks what the crates say they depend on. What only their tests need is free.
pub(super) fn check(findings: &mut Vec<Finding>) -> Result<()> {
    let metadata = ["metadata", "--no-deps", "--format-version", "1"];
    let metadata = shell::cargo(metadata).output()?;
    ensure!(metadata.status.success(), "cargo metadata: {}", metadata.status);
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout)?;
    for package in metadata["packages"].as_array().context("no packages")? {
        let name = package["name"].as_str().context("a package without a name")?;
        let Some(own) = row(name) else {
            findings.push(Finding::new(name, "give the crate a row in xtask's tidy/arrows.rs"));
            continue;
        };
        let dependencies = package["dependencies"].as_array().context("no dependencies")?;
        for dependency in dependencies.iter().filter(|dependency| dependency["kind"] != "dev") {
            let other = dependency["name"].as_str().context("a dependency without a name")?;
            if row(other).is_some_and(|other| other >= own) {
                let what = format!("names {other}, which is not below it");
                findings.push(Finding::new(name, what));
            }
        }
    }
    Ok(())
}

fn row(name: &str) -> Option<usize> {
    ROWS.iter().position(|row| row.contains(&name))
}
