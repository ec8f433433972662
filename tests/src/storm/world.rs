//! What the steps of a chain do their work with: the program, the places, the counts, the story.

use super::foreign;
use super::keys;
use super::kinds::{Kind, Kinds};
use super::log_limit::LogLimit;
use super::place::{Ground, Places};
use super::stamp::SECTOR;
use super::story::{Counts, Fault, Outcome, Story, Wrong, trouble};
use mica_units::Rng;
use parking_lot::Mutex;
use std::fs;
use std::path::{Path, PathBuf};

/// A run's context for the steps of a chain.
#[derive(Debug)]
pub(super) struct World<'a> {
    pub(super) binary: &'a Path,
    /// The option of `mica` for the place of a writer's log.
    pub(super) log_option: &'a str,
    /// How much memory logs have, if it is less than usual.
    pub(super) log_limit: Option<LogLimit>,
    pub(super) kinds: &'a Kinds,
    pub(super) counts: &'a Counts,
    pub(super) places: &'a Places,
    pub(super) story: Story,
    pub(super) seed: u64,
    /// Maximum number of clients.
    pub(super) clients: u64,
    pub(super) run: PathBuf,
    pub(super) log: PathBuf,
    pub(super) images: PathBuf,
    pub(super) ground: Ground,
    /// The faults found so far.
    pub(super) noted: &'a Mutex<Vec<Fault>>,
}

impl<'a> World<'a> {
    /// Whether the run includes this, and the dice choose it.
    pub(super) fn does(&self, rng: &mut Rng, kind: Kind, percent: u64) -> bool {
        rng.percent(percent) && self.kinds.has(kind)
    }

    /// Makes a LUKS image of zeros: what is never written to it reads as noise.
    pub(super) fn create_luks(&self, name: &str, sectors: u64) -> Outcome {
        let zeros = self.run.join("zeros.raw");
        fs::File::create(&zeros)?.set_len(sectors * SECTOR as u64)?;
        let args = ["convert", "-f", "raw", "-O", "luks", "-o", keys::OF_LUKS, text(&zeros)?, name];
        self.story.tell(format_args!("  {args:?}"));
        foreign::img(&self.images, &[&args[..], &keys::OBJECT].concat())?;
        Ok(fs::remove_file(zeros)?)
    }

    /// The key of a configuration for that place.
    pub(super) fn log_key(&self) -> &'a str {
        self.log_option.trim_start_matches('-')
    }

    /// The options of any program that opens images, for logs and keys.
    pub(super) fn image_args(&self) -> Vec<String> {
        let place = [self.log_option.to_owned(), self.log.display().to_string()];
        let limit = self.log_limit.map(|limit| ["--inject".to_owned(), limit.option()]);
        let keys = keys::options(&self.images);
        place.into_iter().chain(limit.into_iter().flatten()).chain(keys).collect()
    }

    /// Runs a verb of `mica` that has no log of an image.
    pub(super) fn mica_alone(&self, args: &[&str]) -> Outcome<crate::command::Finished> {
        foreign::run(&self.binary.display().to_string(), &self.images, args)
    }

    /// Runs `mica` among the images; it has to end by itself, and not with a panic.
    pub(super) fn mica(&self, args: &[&str]) -> Outcome<crate::command::Finished> {
        let binary = self.binary.display().to_string();
        // `ctl` has no images, and so no log.
        let more = if args.first() == Some(&"ctl") { Vec::new() } else { self.image_args() };
        let more: Vec<_> = more.iter().map(String::as_str).collect();
        let said = foreign::run(&binary, &self.images, &[args, &more].concat())?;
        if said.code().is_none() || said.stderr.contains("panicked") {
            return Err(Fault::new(Wrong::Panicked, said.to_string()));
        }
        Ok(said)
    }
}

/// A path as an argument.
pub(super) fn text(path: &Path) -> Outcome<&str> {
    path.to_str().ok_or_else(|| trouble("a folder has no plain name"))
}
