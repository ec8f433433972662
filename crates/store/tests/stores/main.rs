//! Stores from outside, on each backend that does real I/O.

#![expect(clippy::unwrap_used, reason = "a test fails at the first error")]

mod faulty;
mod files;
mod handles;
mod judged;
mod locks;
mod reopened;
mod shared;
mod writable;

use mica_block::Store;
use mica_rt::{Backend, Buf, Executor};
use mica_store::{CacheMode, FileStore, Handles, Located};
use mica_units::HostOffset;
use std::path::Path;
use std::sync::Arc;

/// Runs `test` on an executor of each backend that does real I/O.
fn on_each_backend<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for backend in [Backend::Uring, Backend::Pool] {
        match Executor::new(backend) {
            Ok(executor) => executor.block_on(test()),
            Err(error) => eprintln!("skipped on {backend:?}: {error}"),
        }
    }
}

/// Bytes of which no two neighbours of a block are the same.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at + at / 251) % 251).unwrap()).collect()
}

fn open(path: &Path, cache: CacheMode, handles: &Arc<Handles>) -> mica_block::Result<FileStore> {
    FileStore::new(&Located::find(path)?, cache, handles)
}

async fn read(store: &dyn Store, offset: u64, len: usize) -> mica_block::Result<Vec<u8>> {
    let (result, buf) = store.read_at(Buf::new(len), HostOffset::new(offset)).await;
    result.map(|()| buf.to_vec())
}
