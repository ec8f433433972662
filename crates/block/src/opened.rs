//! Images some of which the caller has open already, perhaps through a store of its own.

use crate::{
    Identity, Images, NoRedoLogs, NoSidecars, OpenImage, Passphrase, RedoLogs, Result, Sidecars,
    Upgradable,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Gives out what was opened, and has others open everything else. There are no sidecars and no
/// logs: what is shown of an image need not be in its file.
pub struct OpenedImages {
    others: Arc<dyn Images>,
    opened: Vec<(PathBuf, OpenImage)>,
}

impl OpenedImages {
    /// Those of `others`.
    pub fn new(others: Arc<dyn Images>) -> Self {
        Self { others, opened: Vec::new() }
    }

    /// Whoever opens `path` gets this `image` from now on.
    pub fn add(&mut self, path: &Path, image: OpenImage) {
        self.opened.push((path.to_owned(), image));
    }

    fn opened(&self, path: &Path) -> Option<OpenImage> {
        self.opened.iter().find(|(opened, _)| opened == path).map(|(_, image)| image.clone())
    }
}

impl Images for OpenedImages {
    fn resolve(&self, referrer: &Path, name: &Path) -> Result<PathBuf> {
        self.others.resolve(referrer, name)
    }

    fn open(&self, path: &Path) -> Result<OpenImage> {
        self.opened(path).map_or_else(|| self.others.open(path), Ok)
    }

    fn open_writable(&self, path: &Path) -> Result<OpenImage> {
        self.opened(path).map_or_else(|| self.others.open_writable(path), Ok)
    }

    fn open_frozen(&self, path: &Path) -> Result<OpenImage> {
        self.opened(path).map_or_else(|| self.others.open_frozen(path), Ok)
    }

    fn open_upgradable(&self, path: &Path) -> Result<Upgradable> {
        self.others.open_upgradable(path)
    }

    fn identify(&self, path: &Path) -> Result<Identity> {
        self.others.identify(path)
    }

    fn passphrase(&self, path: &Path) -> Result<Option<Arc<Passphrase>>> {
        self.others.passphrase(path)
    }

    fn sidecars(&self) -> &dyn Sidecars {
        &NoSidecars
    }

    fn redo_logs(&self) -> &dyn RedoLogs {
        &NoRedoLogs
    }

    fn now_ns(&self) -> i128 {
        self.others.now_ns()
    }
}
