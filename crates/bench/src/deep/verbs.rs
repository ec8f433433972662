//! What the verbs take that go through all layers, each verified by what it prints.

use crate::chains;
use crate::peers::MICA;
use crate::samples::{Sample, Samples};
use crate::turns::{in_order, note};
use anyhow::{Context as _, Result, ensure};
use mica_gen::Manifest;
use mica_gen::owner::{Owner, OwnerMap};
use mica_tests::{clock, command, mica};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What is measured, in the order of a table; the names of their figures.
pub(super) const VERBS: [(&str, &str); 6] = [
    ("gen", "gen_s"),
    ("index build", "index_build_s"),
    ("index status", "index_status_s"),
    ("info --backing-chain", "info_s"),
    ("map", "map_s"),
    ("check", "check_s"),
];
/// How long a verb may take.
const LIMIT: Duration = Duration::from_secs(900);

/// Runs all verbs on chains of all `lengths`, in turns.
pub(super) fn measure(
    context: &chains::Context<'_>,
    lengths: &[u32],
    repeats: u32,
    samples: &mut Samples,
) {
    if !lengths.is_empty() {
        println!("\n== verbs");
    }
    for repeat in 0..repeats {
        for &layers in in_order(lengths, repeat) {
            let mut sample = Sample::new("verbs", MICA, layers, repeat);
            note(&mut sample, |sample| of_length(context, layers, sample));
            samples.push(sample);
        }
    }
}

fn of_length(context: &chains::Context<'_>, layers: u32, sample: &mut Sample) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("verbs-").tempdir_in(context.work)?;
    let size = context.spec.disk_bytes.to_string();
    let (count, fill) = (layers.to_string(), context.spec.fill.to_string());
    let generate = ["gen", "chain", "-n", &count, "-s", &size, "--fill", &fill, "--no-data"];
    timed(&generate, folder.path(), "gen_s", sample)?;
    let manifest = Manifest::load(folder.path())?;
    ensure!(manifest.layers == layers, "gen made {} layers", manifest.layers);
    rustix::fs::sync();
    clock::sleep(chains::SETTLE);
    let owners = manifest.load_owners(folder.path())?;
    let image = folder.path().join(&manifest.top);
    let frozen = u64::from(layers) - 1;

    let built: Value = json_of(&["index", "build"], &image, "index_build_s", sample)?;
    ensure!(built["indexed"] == frozen && built["unproven"] == 0, "index build: {built}");
    let status: Value = json_of(&["index", "status"], &image, "index_status_s", sample)?;
    ensure!(status["indexed"] == frozen, "index status: {} indexed", status["indexed"]);
    let info: Vec<Value> = json_of(&["info", "--backing-chain"], &image, "info_s", sample)?;
    ensure!(info.len() == layers as usize, "info shows {} images", info.len());
    let map = Mapped { extents: json_of(&["map"], &image, "map_s", sample)? };
    map.verify(&owners, layers)?;
    let check: Value = json_of(&["check"], &image, "check_s", sample)?;
    ensure!(check["check-errors"] == 0, "check: {check}");
    Ok(())
}

fn json_of<T: DeserializeOwned>(
    verb: &[&str],
    image: &Path,
    figure: &str,
    sample: &mut Sample,
) -> Result<T> {
    let said = timed(&[verb, &["--output", "json"]].concat(), image, figure, sample)?;
    serde_json::from_str(&said).with_context(|| format!("{verb:?} printed other JSON"))
}

fn timed(verb: &[&str], subject: &Path, figure: &str, sample: &mut Sample) -> Result<String> {
    let (said, wall) = finish(verb, subject)?;
    sample.put(figure, wall.as_secs_f64());
    Ok(said)
}

fn finish(verb: &[&str], subject: &Path) -> Result<(String, Duration)> {
    let done = command::finish_within(Command::new(mica::binary()).args(verb).arg(subject), LIMIT);
    ensure!(done.status.success(), "{done}");
    Ok((done.stdout, done.wall))
}

/// What `mica map` says.
pub(super) struct Mapped {
    extents: Vec<MappedExtent>,
}

#[derive(Deserialize)]
struct MappedExtent {
    start: u64,
    length: u64,
    /// Layers above the one that it is in.
    depth: u32,
    present: bool,
    offset: Option<u64>,
}

impl Mapped {
    /// Asks mica.
    ///
    /// # Errors
    /// If it fails.
    pub(super) fn query(image: &Path) -> Result<Self> {
        let (said, _) = finish(&["map", "--output", "json"], image)?;
        Ok(Self { extents: serde_json::from_str(&said)? })
    }

    /// Whether each part of the disk is in the layer that the generator put it in.
    ///
    /// # Errors
    /// With the first that is not.
    pub(super) fn verify(&self, owners: &OwnerMap, layers: u32) -> Result<()> {
        let mut end = 0;
        for extent in &self.extents {
            ensure!(extent.start == end, "map leaves out what follows {end}");
            end += extent.length;
            for at in (extent.start..end).step_by(usize::try_from(owners.unit_bytes())?) {
                let is_right = match owners.at(at) {
                    Owner::Data(layer) => {
                        extent.present && u32::from(layer.as_u16()) + extent.depth + 1 == layers
                    }
                    Owner::Hole | Owner::Zero(_) => !extent.present,
                };
                ensure!(is_right, "WRONG MAP at {at}: {:?} owns it", owners.at(at));
            }
        }
        ensure!(end == owners.disk_bytes(), "map ends at {end}");
        Ok(())
    }

    /// For each unit with data its place on the disk, the number of its layer, and its place there.
    pub(super) fn data_units(&self, layers: u32, unit_bytes: u64) -> Vec<(u64, usize, u64)> {
        let data = self.extents.iter().filter_map(|extent| Some((extent, extent.offset?)));
        data.flat_map(|(extent, offset)| {
            let layer = layers.saturating_sub(extent.depth + 1) as usize;
            let units = (0..extent.length / unit_bytes).map(move |unit| unit * unit_bytes);
            units.map(move |within| (extent.start + within, layer, offset + within))
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Mapped, MappedExtent};
    use mica_gen::owner::OwnerMap;

    fn extent(start: u64, length: u64, depth: u32, offset: Option<u64>) -> MappedExtent {
        MappedExtent { start, length, depth, present: offset.is_some(), offset }
    }

    #[test]
    fn each_unit_of_an_extent_has_its_layer_and_place() {
        let extents = vec![extent(0, 1 << 16, 9, None), extent(1 << 16, 2 << 16, 2, Some(5 << 16))];
        let units = Mapped { extents }.data_units(10, 1 << 16);
        assert_eq!(units, [(1 << 16, 7, 5 << 16), (2 << 16, 7, 6 << 16)]);
    }

    #[test]
    fn map_with_data_where_nobody_has_any_is_refused() {
        let owners = OwnerMap::new(2 << 16, 1 << 16);
        let (hole, data) = (extent(0, 1 << 16, 9, None), extent(1 << 16, 1 << 16, 0, Some(0)));
        assert!(Mapped { extents: vec![hole, data] }.verify(&owners, 10).is_err());
        let holes = vec![extent(0, 2 << 16, 9, None)];
        Mapped { extents: holes }.verify(&owners, 10).expect("right");
    }
}
