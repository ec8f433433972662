//! Objects in memory, for tests and for the simulator.
//!
//! A request takes its way to the store and back, half of the latency each; what it does happens
//! between the two, at once. As on a network, a request whose sender is gone arrives nevertheless.

use mica_block::{
    EndFuture, Entry, Error, ErrorKind, IoFuture, LIST_MAX, LocalFuture, Object, ObjectName,
    Objects, Put, PutFuture, PutPartsFuture, Result,
};
use mica_rt::{Buf, Parts, simulate, sleep, spawn};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::ops::{Bound, Range};
use std::sync::Arc;
use std::time::Duration;

/// Objects in memory. A clone has the same objects, so that each simulated host can have one.
/// Nothing bounds what they take.
#[derive(Clone)]
pub struct MemoryObjects {
    name: String,
    latency: Latency,
    /// Whether only single folders can be listed.
    is_by_folder: bool,
    objects: Arc<Mutex<Contents>>,
    holes: Arc<Mutex<BTreeMap<ObjectName, BTreeSet<u64>>>>,
    /// What was put early, and nothing into its folder since: a power cut takes it.
    early: Arc<Mutex<BTreeSet<ObjectName>>>,
}

/// How long a request takes.
#[derive(Clone, Copy)]
enum Latency {
    About(Duration),
    Exactly(Duration),
}

impl Latency {
    /// Whether it is any.
    fn is_some(self) -> bool {
        let (Self::About(latency) | Self::Exactly(latency)) = self;
        !latency.is_zero()
    }

    /// One of the two ways.
    async fn pass_half(self) {
        match self {
            Self::About(latency) => pass(latency / 2).await,
            Self::Exactly(latency) => sleep(latency / 2).await,
        }
    }
}

/// What is given back of objects, in bytes: as file systems do it.
const PAGE_BYTES: u64 = 4096;

type Contents = BTreeMap<ObjectName, Arc<[u8]>>;

impl MemoryObjects {
    /// No objects, named `name` in messages.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            latency: Latency::About(Duration::ZERO),
            is_by_folder: false,
            objects: Arc::default(),
            holes: Arc::default(),
            early: Arc::default(),
        }
    }

    /// The same objects, where a request takes about `latency`.
    #[must_use]
    pub fn with_latency(mut self, latency: Duration) -> Self {
        self.latency = Latency::About(latency);
        self
    }

    /// As [`Self::with_latency`], for those who count the answers that are waited for in sequence:
    /// a request takes just as long.
    #[must_use]
    pub fn with_exact_latency(mut self, latency: Duration) -> Self {
        self.latency = Latency::Exactly(latency);
        self
    }

    /// The same objects, of which only single folders can be listed, as in a directory.
    #[must_use]
    pub fn by_folder(mut self) -> Self {
        self.is_by_folder = true;
        self
    }

    /// The power of the store is cut: what is not durable is gone.
    pub fn cut_power(&self) {
        let lost = std::mem::take(&mut *self.early());
        let (mut objects, mut holes) = (self.lock(), self.holes());
        for name in lost {
            objects.remove(&name);
            holes.remove(&name);
        }
    }

    /// All objects now, for tests.
    pub fn contents(&self) -> BTreeMap<ObjectName, Arc<[u8]>> {
        self.lock().clone()
    }

    /// Bytes that all objects take now, without what was given back.
    pub fn stored_bytes(&self) -> u64 {
        let whole: u64 = self.lock().values().map(|content| content.len() as u64).sum();
        let pages: usize = self.holes().values().map(BTreeSet::len).sum();
        whole - pages as u64 * PAGE_BYTES
    }

    fn early(&self) -> MutexGuard<'_, BTreeSet<ObjectName>> {
        self.early.lock()
    }

    fn holes(&self) -> MutexGuard<'_, BTreeMap<ObjectName, BTreeSet<u64>>> {
        self.holes.lock()
    }

    /// See [`Objects::punch`].
    fn give_back(&self, name: &ObjectName, ranges: &[Range<u64>]) -> u64 {
        let mut objects = self.lock();
        let Some(content) = objects.get_mut(name) else { return 0 };
        let (mut bytes, mut holes) = (content.to_vec(), self.holes());
        let pages = holes.entry(name.clone()).or_default();
        let before = pages.len();
        for range in ranges {
            let part = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
            let (start, end) = (part(range.start), part(range.end));
            bytes[start..end].fill(0);
            pages.extend(range.start.div_ceil(PAGE_BYTES)..range.end / PAGE_BYTES);
        }
        *content = bytes.into();
        (pages.len() - before) as u64 * PAGE_BYTES
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.objects.lock()
    }

    /// A request that does `act`. It begins now, and runs on if what this gives is dropped.
    fn request<T: 'static>(
        &self,
        act: impl FnOnce(&Self) -> T + 'static,
    ) -> impl Future<Output = T> + 'static {
        let store = self.clone();
        spawn(async move {
            store.latency.pass_half().await;
            let output = act(&store);
            store.latency.pass_half().await;
            output
        })
    }

    fn put(&self, name: ObjectName, content: &[u8]) -> Result<Put> {
        let mut objects = self.lock();
        let is_folder = inside(&objects, Some(&name)).next().is_some();
        if is_folder || folders_of(&name).any(|folder| objects.contains_key(&folder)) {
            let what = format!("{name} in {} is a folder, or in what is an object", self.name);
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if objects.contains_key(&name) {
            return Ok(Put::Exists);
        }
        objects.insert(name, content.into());
        Ok(Put::Done)
    }

    /// As [`Self::put`], durable when that of another object in the same folder is.
    fn put_early(&self, name: ObjectName, content: &[u8]) -> Result<Put> {
        let put = self.put(name.clone(), content);
        if matches!(put, Ok(Put::Done)) {
            self.early().insert(name);
        }
        put
    }

    /// As [`Self::put`]; makes the names in the folder durable.
    fn put_durably(&self, name: ObjectName, content: &[u8]) -> Result<Put> {
        let put = self.put(name.clone(), content)?;
        let folder = |name: &ObjectName| folders_of(name).last();
        self.early().retain(|early| folder(early) != folder(&name));
        Ok(put)
    }

    fn find(&self, name: &ObjectName) -> Result<Arc<[u8]>> {
        self.lock().get(name).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("{} has no object {name}", self.name))
        })
    }

    fn entries(&self, folder: Option<&ObjectName>, after: Option<&ObjectName>) -> Vec<Entry> {
        let objects = self.lock();
        let skipped = folder.map_or(0, |folder| folder.as_str().len() + 1);
        let mut entries: BTreeMap<ObjectName, Entry> = BTreeMap::new();
        for (name, content) in inside(&objects, folder) {
            let entry = match name.as_str()[skipped..].find('/') {
                None => Entry::Object { name: name.clone(), len: content.len() as u64 },
                Some(end) => Entry::Folder(part_of(name, skipped + end)),
            };
            entries.insert(entry.name().clone(), entry);
        }
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let found = entries.range::<ObjectName, _>((from, Bound::Unbounded));
        found.take(LIST_MAX).map(|(_, entry)| entry.clone()).collect()
    }
}

/// The objects in `folder` and in its folders.
fn inside<'a>(
    objects: &'a Contents,
    folder: Option<&ObjectName>,
) -> impl Iterator<Item = (&'a ObjectName, &'a Arc<[u8]>)> {
    let prefix = folder.map_or(String::new(), |folder| format!("{folder}/"));
    // The first name that there can be. If it is too long for one, there is none.
    let first = ObjectName::new(&format!("{prefix}-")).ok();
    let found = first.map(|first| objects.range(first..));
    found.into_iter().flatten().take_while(move |(name, _)| name.as_str().starts_with(&prefix))
}

/// The folders that `name` is in.
fn folders_of(name: &ObjectName) -> impl Iterator<Item = ObjectName> {
    name.as_str().match_indices('/').map(|(end, _)| part_of(name, end))
}

/// The first `len` bytes of `name`, which end with a part.
fn part_of(name: &ObjectName, len: usize) -> ObjectName {
    ObjectName::new(&name.as_str()[..len]).expect("parts of a name are one")
}

/// Lets about `time` pass.
pub(super) async fn pass(time: Duration) {
    if time.is_zero() {
        return;
    }
    // In the simulator requests overtake each other; elsewhere this fails at once.
    let (simulated, _) = simulate(Buf::new(0), time, Box::new(|_| Ok(0))).await;
    if simulated.is_err() {
        sleep(time).await;
    }
}

impl Objects for MemoryObjects {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn is_far(&self) -> bool {
        self.latency.is_some()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        Arc::new(MemoryObject { store: self.clone(), name: name.clone() })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let name = name.clone();
        Box::pin(self.request(move |store| (store.put_durably(name, &content), content)))
    }

    fn put_parts(&self, name: &ObjectName, content: &Arc<Parts>) -> Option<PutPartsFuture> {
        let (name, content) = (name.clone(), Arc::clone(content));
        Some(Box::pin(self.request(move |store| {
            let bytes: Vec<u8> = content.pieces(0..content.len()).flatten().copied().collect();
            store.put_durably(name, &bytes)
        })))
    }

    fn put_early(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let name = name.clone();
        Box::pin(self.request(move |store| (store.put_early(name, &content), content)))
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let (folder, after) = (folder.cloned(), after.cloned());
        Box::pin(self.request(move |store| Ok(store.entries(folder.as_ref(), after.as_ref()))))
    }

    fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        if self.is_by_folder {
            let what = format!("{} lists each folder by itself", self.name);
            return Box::pin(ready(Err(Error::new(ErrorKind::Unsupported, what))));
        }
        let (folder, after) = (folder.clone(), after.cloned());
        Box::pin(self.request(move |store| {
            let objects = store.lock();
            let found = inside(&objects, Some(&folder));
            let found = found.filter(|(name, _)| after.as_ref().is_none_or(|after| *name > after));
            let entry = |(name, content): (&ObjectName, &Arc<[u8]>)| Entry::Object {
                name: name.clone(),
                len: content.len() as u64,
            };
            Ok(found.take(LIST_MAX).map(entry).collect())
        }))
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        let name = name.clone();
        Box::pin(self.request(move |store| {
            store.lock().remove(&name);
            store.holes().remove(&name);
            store.early().remove(&name);
            Ok(())
        }))
    }

    fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> LocalFuture<'static, Result<u64>> {
        let (name, ranges) = (name.clone(), ranges.to_vec());
        Box::pin(self.request(move |store| Ok(store.give_back(&name, &ranges))))
    }
}

struct MemoryObject {
    store: MemoryObjects,
    name: ObjectName,
}

impl Object for MemoryObject {
    fn read_at(&self, mut buf: Buf, offset: u64) -> IoFuture {
        let name = self.name.clone();
        let read = self.store.request(move |store| {
            let read = store.find(&name).map(|content| {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let there = content.get(start..).unwrap_or_default();
                let count = there.len().min(buf.len());
                buf.put(0, &there[..count]);
                buf.fill_part(count..buf.len(), 0);
            });
            (read, buf)
        });
        IoFuture::boxed(read)
    }

    fn read_end(&self, mut buf: Buf) -> EndFuture {
        let name = self.name.clone();
        Box::pin(self.store.request(move |store| {
            let read = store.find(&name).map(|content| {
                let start = content.len().saturating_sub(buf.len());
                buf.put(0, &content[start..]);
                content.len() as u64
            });
            (read, buf)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::testing::conform;
    use mica_rt::{Backend, Executor};

    #[test]
    fn memory_keeps_the_promises_of_a_store() {
        let latency = Duration::from_millis(3);
        for seed in 0..3 {
            let objects = MemoryObjects::new("memory").with_latency(latency);
            conform(Backend::Sim { seed }, &(Arc::new(objects) as _));
        }
        conform(Backend::Pool, &(Arc::new(MemoryObjects::new("memory")) as _));
    }

    #[test]
    fn name_of_a_folder_or_in_an_object_is_refused() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            let objects = MemoryObjects::new("memory");
            let put = async |name: &str| {
                let name = ObjectName::new(name).expect("a name");
                objects.put_if_absent(&name, Buf::new(0)).await.0
            };
            assert_eq!(put("a/b").await.expect("put"), Put::Done);
            assert_eq!(put("a-").await.expect("put"), Put::Done);
            assert_eq!(put("a").await.unwrap_err().kind(), ErrorKind::Invalid);
            assert_eq!(put("a/b/c").await.unwrap_err().kind(), ErrorKind::Invalid);
            assert_eq!(put("a/b").await.expect("put"), Put::Exists);
        });
    }

    #[test]
    fn put_whose_sender_is_gone_arrives() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            let objects = MemoryObjects::new("memory").with_latency(Duration::from_millis(10));
            let name = ObjectName::new("late").expect("a name");
            drop(objects.put_if_absent(&name, Buf::from_slice(b"here")));
            assert!(objects.contents().is_empty());
            sleep(Duration::from_millis(100)).await;
            assert_eq!(&*objects.contents()[&name], b"here");
        });
    }
}
