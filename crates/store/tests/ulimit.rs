//! A chain of a thousand layers under `ulimit -n 256`. A binary of its own: the limit is the
//! process's.

#![expect(clippy::unwrap_used, reason = "a test fails at the first error")]

use mica_block::read_exact;
use mica_rt::{Backend, Executor};
use mica_store::{CacheMode, FileStore, Handles, Located, raise_open_files_limit};
use mica_units::HostOffset;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

const LAYERS: u16 = 1000;

async fn read_all(stores: &[Arc<FileStore>]) {
    let read = async |number: u16| {
        let store = &stores[usize::from(number)];
        let buf = read_exact(&**store, HostOffset::new(2048), 2).await.unwrap();
        assert_eq!(*buf, number.to_le_bytes());
    };
    mica_rt::join_all((0..LAYERS).map(read)).await;
}

/// The story: idle layers and the rest of the process took all descriptors, and nobody could
/// connect, though any of the layers could have been opened again.
fn connections_find_room(handles: &Handles, file: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let clients: Vec<_> = (0..20).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let others: Vec<_> =
        std::iter::repeat_with(|| std::fs::File::open(file)).map_while(Result::ok).collect();
    let accepted: Vec<_> =
        clients.iter().map(|_| mica_rt::descriptors::accept(&listener).unwrap()).collect();
    assert!(handles.open_count() <= 192 - 64, "room for what comes with a connection");
    drop((accepted, others));
}

#[test]
fn thousand_layers_are_read_at_once_under_256_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    let path = |number| folder.path().join(format!("layer{number}"));
    for number in 0..LAYERS {
        std::fs::write(path(number), number.to_le_bytes().repeat(2048)).unwrap();
    }
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), maximum: hard }).unwrap();

    let handles = Handles::for_process(64);
    assert_eq!(handles.bound(), 192);
    for backend in [Backend::Uring, Backend::Pool] {
        let Ok(executor) = Executor::new(backend) else { continue };
        for cache in [CacheMode::Writeback, CacheMode::None] {
            let open = |number| {
                let located = Located::find(&path(number)).unwrap();
                Arc::new(FileStore::new(&located, cache, &handles).unwrap())
            };
            let stores: Vec<_> = (0..LAYERS).map(open).collect();
            executor.block_on(read_all(&stores));
            assert_eq!(handles.open_count(), 192);

            // Sockets use more than the reserve: the cache gives up descriptors.
            let mut sockets: Vec<std::fs::File> = std::iter::repeat_with(|| path(0))
                .map_while(|path| std::fs::File::open(path).ok())
                .collect();
            sockets.truncate(sockets.len() - 2);
            executor.block_on(read_all(&stores));
            drop(sockets);
            executor.block_on(read_all(&stores));
            connections_find_room(&handles, &path(0));
            executor.block_on(read_all(&stores));
        }
    }

    let raised = raise_open_files_limit().unwrap();
    assert_eq!(Some(raised), hard.or(Some(u64::MAX)));
    assert_eq!(getrlimit(Resource::Nofile).current, hard);
}
