//! What is linked into the program, and under which licences: they ask that their texts come with
//! it.

use anyhow::{Context, Result, ensure};
use mica_tests::shell;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

/// How the names of files begin that have a licence.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// Every crate of others in `mica`, and then each text once.
pub(super) fn licences() -> Result<String> {
    let metadata = metadata()?;
    let linked = linked(&metadata)?;
    let mut list = String::from("Libraries that are part of mica:\n\n");
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let packages = metadata["packages"].as_array().context("no packages")?;
    for package in packages.iter().filter(|package| {
        linked.contains(package["id"].as_str().unwrap_or_default()) && !package["source"].is_null()
    }) {
        let word = |key: &str| package[key].as_str().unwrap_or("unknown").to_owned();
        let name = format!("{} {}", word("name"), word("version"));
        writeln!(list, "{name}: {}", word("license"))?;
        let manifest = word("manifest_path");
        for text in texts_in(Path::new(&manifest).parent().context("no folder")?)? {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    let mut texts: Vec<_> = texts.into_iter().map(|(text, crates)| (crates, text)).collect();
    texts.sort();
    for (crates, text) in texts {
        write!(list, "\n{0}\n{1}:\n\n{2}\n", "-".repeat(80), crates.join(", "), text.trim_end())?;
    }
    Ok(list)
}

fn metadata() -> Result<Value> {
    let host = super::output(std::process::Command::new("rustc").args(["--print", "host-tuple"]))?;
    let options = ["metadata", "--format-version", "1", "--locked", "--filter-platform", &host];
    Ok(serde_json::from_str(&super::output(&mut shell::cargo(options))?)?)
}

/// The packages that `mica` is linked with: what only tests and build scripts use is not.
fn linked(metadata: &Value) -> Result<BTreeSet<&str>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("nothing is resolved")?;
    let by_id: BTreeMap<_, _> =
        nodes.iter().filter_map(|node| Some((node["id"].as_str()?, node))).collect();
    let packages = metadata["packages"].as_array().context("no packages")?;
    let mica = packages.iter().find(|package| package["name"] == "mica");
    let mut left = vec![mica.and_then(|mica| mica["id"].as_str()).context("no package mica")?];
    let mut seen = BTreeSet::new();
    while let Some(id) = left.pop() {
        if !seen.insert(id) {
            continue;
        }
        for dependency in
            by_id.get(id).and_then(|node| node["deps"].as_array()).into_iter().flatten()
        {
            let kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            if kinds.into_iter().any(|kind| kind["kind"].is_null()) {
                left.extend(dependency["pkg"].as_str());
            }
        }
    }
    ensure!(seen.len() > 1, "mica has no dependencies");
    Ok(seen)
}

/// The texts of licences in `folder`.
fn texts_in(folder: &Path) -> Result<BTreeSet<String>> {
    let mut texts = BTreeSet::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        if entry.file_type()?.is_file() && NAMES.iter().any(|begin| name.starts_with(begin)) {
            texts.insert(String::from_utf8_lossy(&std::fs::read(entry.path())?).into_owned());
        }
    }
    Ok(texts)
}
