//! Options of verbs that look at all images of folders, and the looking itself.

use crate::failure::{Failure, tell};
use crate::output::progress_bar;
use clap::Args;
use mica_stack::forest::{Forest, ForestImage, Problem, ScanDepth, ScanOptions};
use mica_stack::{SidecarPlace, standing_allow_paths};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Problems that are told one by one; more are only counted.
const TOLD_MAX: usize = 20;

// Options of verbs that look at folders. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(crate) struct FoldersArgs {
    /// Also look at files in this directory that images name.
    ///
    /// Files in this directory and below. Can be repeated. Files elsewhere that images name are
    /// shown by name only.
    #[arg(long, value_name = "DIR")]
    allow_path: Vec<PathBuf>,
    /// Where the indexes of layers are, if not beside them.
    #[arg(long, value_name = "DIRECTORY", hide_short_help = true, help_heading = "Engine")]
    index_dir: Option<PathBuf>,
    /// Folders, including everything below; or single images.
    #[arg(value_name = "DIR", required = true)]
    folders: Vec<PathBuf>,
}

impl FoldersArgs {
    /// The images in them.
    pub(crate) fn scan(&self) -> Result<Forest, Failure> {
        let mut allow_paths = self.allow_path.clone();
        allow_paths.extend_from_slice(standing_allow_paths());
        let sidecars = match &self.index_dir {
            None => SidecarPlace::BesideLayers,
            Some(directory) => {
                SidecarPlace::Directory(directory.canonicalize().map_err(|error| {
                    Failure::from(error).within(format!("--index-dir {}", directory.display()))
                })?)
            }
        };
        let options = ScanOptions {
            allow_paths,
            files: Vec::new(),
            depth: ScanDepth::All,
            sidecars: Some(sidecars),
        };
        let bar = progress_bar(0, "files");
        let forest = Forest::scan(&self.folders, &options, |seen| {
            bar.set_length(seen);
            bar.set_position(seen);
            ControlFlow::Continue(())
        });
        bar.finish_and_clear();
        Ok(forest?)
    }

    /// The folders, as they were given.
    pub(crate) fn given(&self) -> &[PathBuf] {
        &self.folders
    }

    /// Says on standard error that no image is in them, if it is so.
    pub(crate) fn tell_if_empty(&self, forest: &Forest) {
        if forest.images().is_empty() && forest.problems().is_empty() {
            let given: Vec<_> =
                self.folders.iter().map(|path| path.display().to_string()).collect();
            let what = "no qcow2 image is there, and raw images alone are not shown";
            let line = format!("{}: {what}", given.join(", "));
            tell(&format!("mica: warning: {}", crate::plain::plain(&line)));
        }
    }

    /// The name of an image for people: from its folder on, if there is only one.
    pub(crate) fn shown(&self, path: &Path) -> String {
        let inner = match &self.folders[..] {
            [folder] => path.strip_prefix(folder).ok(),
            _ => None,
        };
        let inner = inner.filter(|inner| !inner.as_os_str().is_empty());
        crate::plain::plain(&inner.unwrap_or(path).display().to_string())
    }
}

/// Says on standard error what was left out, and what is odd.
pub(crate) fn tell_problems(problems: &[Problem]) {
    for Problem { path, what, .. } in problems.iter().take(TOLD_MAX) {
        let line = format!("{}: {what}", path.display());
        tell(&format!("mica: warning: {}", crate::plain::plain(&line)));
    }
    if let more @ 1.. = problems.len().saturating_sub(TOLD_MAX) {
        tell(&format!("mica: warning: {more} more; --output json lists all"));
    }
}

/// The format of an image, by its name.
pub(crate) fn format_name(image: &ForestImage) -> &'static str {
    match image {
        ForestImage { qcow2: Some(_), .. } => "qcow2",
        ForestImage { is_luks: true, .. } => "luks",
        ForestImage { .. } => "raw",
    }
}
