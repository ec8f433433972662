//! What is kept beside the images of the world: sidecars, and the logs of writers.

use super::redo::SimRedoMemory;
use super::{World, normal};
use mica_block::{Error, LocalFuture, NewSidecar, RedoLogs, RedoMemory, Result, Sidecars, Store};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Sidecars for World {
    fn open(&self, path: &Path) -> Result<Option<Arc<dyn Store>>> {
        let found = self.state.lock().sidecars.get(&normal(path)).cloned();
        Ok(found.map(|file| self.store(file)))
    }

    fn write_all<'a>(&'a self, sidecars: &'a [NewSidecar<'a>]) -> LocalFuture<'a, Result<()>> {
        let written = sidecars.iter().try_for_each(|new| self.write_sidecar(new.path, new.content));
        Box::pin(std::future::ready(written))
    }

    fn chain_is_open(&self) {}

    fn remove(&self, path: &Path) -> Result<()> {
        self.state.lock().sidecars.remove(&normal(path));
        Ok(())
    }
}

impl World {
    /// Puts a sidecar in its place.
    ///
    /// # Errors
    /// `Denied` if that was asked for.
    pub fn write_sidecar(&self, path: &Path, content: &[u8]) -> Result<()> {
        let path = normal(path);
        let mut state = self.state.lock();
        if state.sidecars_denied {
            let what = format!("writing the index of {}", path.display());
            return Err(Error::from_io(what, io::ErrorKind::PermissionDenied.into()));
        }
        let file = state.make_file(&path, content.to_vec());
        state.sidecars.insert(path, file);
        Ok(())
    }
}

impl RedoLogs for World {
    fn log(&self, path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        // That of the file, by the name that it had first.
        let file = self.file(path);
        let name = file.map_or_else(|_| normal(path), |file| file.lock().path.clone());
        Ok(Some(Arc::new(SimRedoMemory::new(self, name))))
    }

    fn unnamed_log(&self, path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        self.log(path)
    }

    fn orphaned(&self, path: &Path) -> Result<Vec<Arc<dyn RedoMemory>>> {
        let file = self.file(path)?;
        let is_written = file.lock().writer.upgrade().is_some();
        if is_written { Ok(Vec::new()) } else { Ok(self.log(path)?.into_iter().collect()) }
    }

    fn elsewhere(&self, _path: &Path) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    fn of_another(&self, _path: &Path) -> Result<Option<PathBuf>> {
        Ok(None)
    }
}
