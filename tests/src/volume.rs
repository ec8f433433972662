//! Volumes for black-box tests: a store in a folder of its own, and servers of what is in it.

use crate::command::Finished;
use crate::mica;
use crate::server::Server;
use anyhow::Result;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// A store in a directory that is removed with this.
#[derive(Debug)]
pub struct Store {
    folder: TempDir,
}

impl Store {
    /// No store yet: what creates the first volume makes one.
    ///
    /// # Panics
    /// If the folder cannot be made.
    #[expect(clippy::new_without_default, reason = "it makes a folder")]
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("mica-").tempdir().expect("a folder");
        Self { folder }
    }

    /// A folder for other files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its own URL.
    pub fn url(&self) -> String {
        format!("file://{}/store", self.folder.path().display())
    }

    /// The URL of a volume, or of `NAME@LABEL`.
    pub fn volume(&self, name: &str) -> String {
        format!("{}/{name}", self.url())
    }

    /// Creates a volume.
    ///
    /// # Panics
    /// If that fails.
    #[track_caller]
    pub fn create(&self, name: &str, size: &str) {
        run(["create", "-q", &self.volume(name), size]).ok();
    }

    /// Serves a volume, or a snapshot of one, with `more` options.
    ///
    /// # Errors
    /// If it does not get to serve.
    pub fn serve(&self, name: &str, more: &[&str]) -> Result<Server> {
        serve(&self.volume(name), more)
    }
}

/// Serves what `url` names, with `more` options.
///
/// # Errors
/// If it does not get to serve.
pub fn serve(url: &str, more: &[&str]) -> Result<Server> {
    Server::start("", |socket| {
        let mut serve = Command::new(mica::binary());
        serve.args(["serve", "--volume", url]).args(more).arg("--nbd").arg(socket);
        serve
    })
}

/// Runs a verb of `mica volume` to its end.
#[track_caller]
pub fn run<'a>(words: impl IntoIterator<Item = &'a str>) -> Finished {
    mica::run(["volume"].into_iter().chain(words))
}
