//! Memory that outlives a process of the world, but not a power cut.

use super::World;
use mica_block::{Error, ErrorKind, RedoMemory, RedoOrigin, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Small, so that it fills up; [`World::set_log_capacity`] makes it smaller still.
pub(super) const CAPACITY: u64 = 256 << 10;

/// What is there for one image.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    /// Never the same again.
    number: u64,
    changed_ns: i128,
    bytes: Vec<u8>,
}

impl Memory {
    /// Puts it back, as one that was made later and has this `number`, or into the one that it is a
    /// copy of.
    pub(super) fn put_back(&mut self, number: Option<u64>, now_ns: i128) {
        self.number = number.unwrap_or(self.number);
        self.changed_ns = now_ns;
    }
}

/// Copies of all that is there.
#[derive(Debug)]
pub struct LogCopies(pub(super) BTreeMap<PathBuf, Memory>);

/// One process's part of the memory for the image at `path`.
pub(super) struct SimRedoMemory {
    world: World,
    path: PathBuf,
    /// The process dies with the next cut.
    cuts: u64,
}

impl SimRedoMemory {
    pub(super) fn new(world: &World, path: PathBuf) -> Self {
        Self { world: world.clone(), path, cuts: world.cuts() }
    }

    fn is_dead(&self) -> bool {
        self.world.cuts() > self.cuts
    }
}

impl RedoMemory for SimRedoMemory {
    fn renew(&self) -> Result<RedoOrigin> {
        if self.is_dead() {
            return Err(Error::new(ErrorKind::Io, "the process is dead"));
        }
        let mut state = self.world.state.lock();
        state.memories_made += 1;
        let number = state.memories_made;
        let changed_ns = state.now_ns;
        let memory = Memory { number, changed_ns, bytes: Vec::new() };
        state.redo_memories.insert(self.path.clone(), memory);
        drop(state);
        self.world.complete_memory_change();
        self.origin()
    }

    fn origin(&self) -> Result<RedoOrigin> {
        let state = self.world.state.lock();
        let number = state.redo_memories.get(&self.path).map_or(0, |memory| memory.number);
        Ok(RedoOrigin { boot: state.changes.boots.into(), memory: number.into() })
    }

    fn now_ns(&self) -> i128 {
        self.world.state.lock().now_ns
    }

    fn changed_ns(&self) -> Result<i128> {
        let state = self.world.state.lock();
        Ok(state.redo_memories.get(&self.path).map_or(0, |memory| memory.changed_ns))
    }

    fn capacity(&self) -> u64 {
        self.world.state.lock().memory_capacity
    }

    fn read_at(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let state = self.world.state.lock();
        let bytes = state.redo_memories.get(&self.path).map_or(&[][..], |memory| &memory.bytes);
        let start = usize::try_from(at).expect("small").min(bytes.len());
        let there = &bytes[start..(start + buf.len()).min(bytes.len())];
        buf.fill(0);
        buf[..there.len()].copy_from_slice(there);
        Ok(())
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()> {
        if self.is_dead() {
            return Err(Error::new(ErrorKind::Io, "the process is dead"));
        }
        let start = usize::try_from(at).expect("small");
        // A process that dies in the middle leaves any part of it.
        let bytes = match self.world.dies_with_memory_change() {
            true => {
                let kept = self.world.random_below(bytes.len() as u64 + 1);
                &bytes[..usize::try_from(kept).expect("small")]
            }
            false => bytes,
        };
        let mut state = self.world.state.lock();
        if state.memory_is_full {
            return Err(Error::new(ErrorKind::NoSpace, "the memory is full"));
        }
        let now_ns = state.now_ns;
        let Some(memory) = state.redo_memories.get_mut(&self.path) else {
            return Err(Error::new(ErrorKind::Io, "there is no memory"));
        };
        memory.changed_ns = now_ns;
        let memory = &mut memory.bytes;
        memory.resize(memory.len().max(start + bytes.len()), 0);
        memory[start..start + bytes.len()].copy_from_slice(bytes);
        drop(state);
        self.world.complete_memory_change();
        match self.is_dead() {
            true => Err(Error::new(ErrorKind::Io, "the process is dead")),
            false => Ok(()),
        }
    }

    fn remove(&self) {
        if !self.is_dead() {
            self.world.state.lock().redo_memories.remove(&self.path);
            self.world.complete_memory_change();
        }
    }
}
