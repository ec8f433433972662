//! A store of objects that misbehaves, stacked on another, for tests.
//!
//! What happens to a request follows from the seed and from how many there were before it. A
//! request goes through these in order: throttled, refused, hung, slow, done (or lied about), lost.

use super::memory::pass;
use mica_block::{
    EndFuture, Entry, Error, ErrorKind, IoFuture, LocalFuture, Object, ObjectName, Objects, Put,
    PutFuture, PutPartsFuture, Result,
};
use mica_rt::{Buf, Parts, spawn};
use mica_units::Rng;
use std::future::pending;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A kind of request to a store of objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectOperation {
    /// Reading an object.
    Read,
    /// Putting an object.
    Put,
    /// Listing.
    List,
    /// Deleting an object, or giving back parts of one.
    Delete,
}

/// A store that accepts no more for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Throttle {
    /// So many requests are served.
    pub served: u64,
    /// Then so many fail, as with 429 or 503, and so on in turn.
    pub refused: u64,
}

/// How a store breaks its promises, without an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lie {
    /// It says of each put that it is done, and stores nothing.
    StoresNothing,
    /// It stores half of what is put.
    StoresHalf,
    /// It replaces objects, as stores do that do not know the condition.
    IgnoresCondition,
    /// It looks whether there is an object, and puts one a moment later: right as long as puts do
    /// not race.
    RacersWin,
    /// It says rightly which put was first, and then replaces the object nevertheless.
    ReplacesQuietly,
    /// It says of each put that there is an object.
    NothingIsFirst,
    /// It leaves the last object out of each listing.
    ListsLess,
    /// It says of each object that it is deleted, and deletes none.
    DeletesNothing,
}

impl Lie {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::StoresNothing,
        Self::StoresHalf,
        Self::IgnoresCondition,
        Self::RacersWin,
        Self::ReplacesQuietly,
        Self::NothingIsFirst,
        Self::ListsLess,
        Self::DeletesNothing,
    ];
}

/// Options of a [`FaultyObjects`]. Shares are between 0 and 1.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct FaultyOptions {
    /// Where all choices come from.
    pub seed: u64,
    /// The requests that something may happen to; all if it is `None`.
    pub only: Option<ObjectOperation>,
    /// How long each request takes more than in the store beneath.
    pub latency: Duration,
    /// See [`Throttle`].
    pub throttle: Option<Throttle>,
    /// Share of the requests that fail, and do nothing.
    pub refused: f64,
    /// The kind of error of what is throttled or refused; [`ErrorKind::Io`] if it is `None`.
    pub refused_as: Option<ErrorKind>,
    /// Share of the requests that are never answered. Half of them are done.
    pub hung: f64,
    /// Share of the requests that take `slow_by` longer.
    pub slow: f64,
    /// Share of the changes that fail, and are done `slow_by` later.
    pub late: f64,
    /// See `slow` and `late`.
    pub slow_by: Duration,
    /// Share of the requests that are done, and answered with an error.
    pub lost: f64,
    /// How it lies.
    pub lie: Option<Lie>,
}

/// A store of objects that misbehaves.
#[derive(Clone)]
pub struct FaultyObjects {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Arc<dyn Objects>,
    options: FaultyOptions,
    /// Requests that something might have happened to.
    requests: AtomicU64,
}

/// What happens to a request.
#[derive(Clone, Copy, Default)]
struct Fate {
    /// An error without an effect.
    refused: Option<&'static str>,
    /// Whether it is never answered, and whether it is done nevertheless.
    hung: Option<bool>,
    delay: Duration,
    late: bool,
    lost: bool,
}

impl FaultyObjects {
    /// Makes `inner` misbehave.
    pub fn new(inner: Arc<dyn Objects>, options: FaultyOptions) -> Self {
        Self { shared: Arc::new(Shared { inner, options, requests: AtomicU64::new(0) }) }
    }

    /// How many requests there were that something might have happened to.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    /// A request that asks for nothing with a buffer.
    fn request<T: 'static>(
        &self,
        operation: ObjectOperation,
        act: impl AsyncFnOnce(&Shared) -> Result<T> + 'static,
    ) -> impl Future<Output = Result<T>> + 'static {
        let act = async move |shared: &Shared, _: Buf| (act(shared).await, Buf::new(0));
        let request = self.request_with(operation, Buf::new(0), act);
        async move { request.await.0 }
    }

    /// A request with a buffer. It begins now, and goes on if what this gives is dropped.
    fn request_with<T: 'static>(
        &self,
        operation: ObjectOperation,
        buf: Buf,
        act: impl AsyncFnOnce(&Shared, Buf) -> (Result<T>, Buf) + 'static,
    ) -> impl Future<Output = (Result<T>, Buf)> + 'static {
        let shared = Arc::clone(&self.shared);
        let fate = shared.fate(operation);
        spawn(async move {
            pass(shared.options.latency / 2).await;
            let failed = |what| Err(shared.failure(operation, what));
            if let Some(what) = fate.refused {
                let refused = Err(shared.refusal(operation, what));
                return (refused, buf);
            }
            if fate.late && operation != ObjectOperation::Read {
                let copy = Buf::from_slice(&buf);
                let shared = Arc::clone(&shared);
                spawn(async move {
                    pass(fate.delay).await;
                    // Nobody waits for its answer.
                    let _ = act(&shared, copy).await;
                });
                return (failed("no answer"), buf);
            }
            pass(fate.delay).await;
            if fate.hung == Some(false) {
                pending::<()>().await;
            }
            let (result, buf) = act(&shared, buf).await;
            if fate.hung.is_some() {
                pending::<()>().await;
            }
            pass(shared.options.latency / 2).await;
            (if fate.lost { failed("the answer is lost") } else { result }, buf)
        })
    }
}

impl Shared {
    /// What happens to the next request.
    fn fate(&self, operation: ObjectOperation) -> Fate {
        let options = &self.options;
        if options.only.is_some_and(|only| only != operation) {
            return Fate::default();
        }
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        // Each fault draws its own number, so that one does not shift the others.
        let mut random = Rng::for_part(options.seed, number);
        let mut happens = |share: f64| random.fraction() < share;
        let is_refused = happens(options.refused);
        let (is_hung, is_done) = (happens(options.hung), happens(0.5));
        let (is_slow, late, lost) =
            (happens(options.slow), happens(options.late), happens(options.lost));
        let is_throttled = options.throttle.is_some_and(|Throttle { served, refused }| {
            number % served.saturating_add(refused).max(1) >= served
        });
        Fate {
            refused: match (is_throttled, is_refused) {
                (true, _) => Some("slow down"),
                (false, true) => Some("refused"),
                (false, false) => None,
            },
            hung: is_hung.then_some(is_done),
            delay: if is_slow || late { options.slow_by } else { Duration::ZERO },
            late,
            lost,
        }
    }

    fn failure(&self, operation: ObjectOperation, what: &str) -> Error {
        let what = format!("injected: {operation:?} in {}: {what}", self.inner.name());
        Error::new(ErrorKind::Io, what)
    }

    fn refusal(&self, operation: ObjectOperation, what: &str) -> Error {
        let error = self.failure(operation, what);
        match self.options.refused_as {
            Some(kind) => Error::new(kind, error.in_one_line()),
            None => error,
        }
    }

    /// Puts, truthfully or not.
    async fn put(&self, name: &ObjectName, content: Buf) -> (Result<Put>, Buf) {
        let inner = &self.inner;
        match self.options.lie {
            Some(Lie::StoresNothing) => (Ok(Put::Done), content),
            Some(Lie::StoresHalf) => {
                let half = Buf::from_slice(&content[..content.len() / 2]);
                (inner.put_if_absent(name, half).await.0, content)
            }
            Some(Lie::IgnoresCondition) => {
                let (replaced, content) = self.replace(name, content).await;
                (replaced, content)
            }
            Some(Lie::RacersWin) => {
                let (found, _) = inner.open(name).read_end(Buf::new(0)).await;
                match found {
                    Ok(_) => (Ok(Put::Exists), content),
                    Err(error) if error.kind() == ErrorKind::NotFound => {
                        pass(self.options.latency.max(RACE)).await;
                        self.replace(name, content).await
                    }
                    Err(error) => (Err(error), content),
                }
            }
            Some(Lie::ReplacesQuietly) => match inner.put_if_absent(name, content).await {
                (Ok(Put::Exists), content) => {
                    let (replaced, content) = self.replace(name, content).await;
                    (replaced.map(|_| Put::Exists), content)
                }
                put => put,
            },
            Some(Lie::NothingIsFirst) => {
                let (put, content) = inner.put_if_absent(name, content).await;
                (put.map(|_| Put::Exists), content)
            }
            Some(Lie::ListsLess | Lie::DeletesNothing) | None => {
                inner.put_if_absent(name, content).await
            }
        }
    }

    /// Puts the parts, or all of them in one piece where the store wants that, or lies.
    async fn put_parts(&self, name: &ObjectName, content: &Arc<Parts>) -> Result<Put> {
        let put = self.options.lie.is_none().then(|| self.inner.put_parts(name, content));
        match put.flatten() {
            Some(put) => put.await,
            None => self.put(name, content.to_buf(0..content.len())).await.0,
        }
    }

    async fn put_early(&self, name: &ObjectName, content: Buf) -> (Result<Put>, Buf) {
        match self.options.lie {
            None => self.inner.put_early(name, content).await,
            Some(_) => self.put(name, content).await,
        }
    }

    /// What a listing says, truthfully or not.
    fn as_listed(&self, mut entries: Vec<Entry>) -> Vec<Entry> {
        if self.options.lie == Some(Lie::ListsLess) {
            entries.pop();
        }
        entries
    }

    /// Puts an object in the place of what is there.
    async fn replace(&self, name: &ObjectName, mut content: Buf) -> (Result<Put>, Buf) {
        loop {
            if let Err(error) = self.inner.delete(name).await {
                return (Err(error), content);
            }
            let put;
            (put, content) = self.inner.put_if_absent(name, content).await;
            // Another may have put one in between.
            if !matches!(put, Ok(Put::Exists)) {
                return (put, content);
            }
        }
    }
}

/// How long a store looks away in [`Lie::RacersWin`].
const RACE: Duration = Duration::from_millis(2);

impl Objects for FaultyObjects {
    fn name(&self) -> String {
        self.shared.inner.name()
    }

    fn is_far(&self) -> bool {
        self.shared.inner.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        let object = self.shared.inner.open(name);
        Arc::new(FaultyObject { store: self.clone(), object })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let name = name.clone();
        let put = async move |shared: &Shared, content| shared.put(&name, content).await;
        Box::pin(self.request_with(ObjectOperation::Put, content, put))
    }

    fn put_parts(&self, name: &ObjectName, content: &Arc<Parts>) -> Option<PutPartsFuture> {
        let (name, content) = (name.clone(), Arc::clone(content));
        Some(Box::pin(self.request(ObjectOperation::Put, async move |shared| {
            shared.put_parts(&name, &content).await
        })))
    }

    fn put_early(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let name = name.clone();
        let put = async move |shared: &Shared, content| shared.put_early(&name, content).await;
        Box::pin(self.request_with(ObjectOperation::Put, content, put))
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let (folder, after) = (folder.cloned(), after.cloned());
        Box::pin(self.request(ObjectOperation::List, async move |shared| {
            let listed = shared.inner.list(folder.as_ref(), after.as_ref()).await;
            listed.map(|entries| shared.as_listed(entries))
        }))
    }

    fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let (folder, after) = (folder.clone(), after.cloned());
        Box::pin(self.request(ObjectOperation::List, async move |shared| {
            let listed = shared.inner.list_all(&folder, after.as_ref()).await;
            listed.map(|entries| shared.as_listed(entries))
        }))
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        let name = name.clone();
        Box::pin(self.request(
            ObjectOperation::Delete,
            async move |shared| match shared.options.lie {
                Some(Lie::DeletesNothing) => Ok(()),
                _ => shared.inner.delete(&name).await,
            },
        ))
    }

    fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> LocalFuture<'static, Result<u64>> {
        let (name, ranges) = (name.clone(), ranges.to_vec());
        Box::pin(self.request(ObjectOperation::Delete, async move |shared| {
            shared.inner.punch(&name, &ranges).await
        }))
    }

    fn give_up_reserve(&self) -> LocalFuture<'static, Result<bool>> {
        self.shared.inner.give_up_reserve()
    }

    fn client(&self) -> Option<String> {
        self.shared.inner.client()
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        self.shared.inner.shut_out(client)
    }
}

struct FaultyObject {
    store: FaultyObjects,
    object: Arc<dyn Object>,
}

impl Object for FaultyObject {
    fn read_at(&self, buf: Buf, offset: u64) -> IoFuture {
        let object = Arc::clone(&self.object);
        let read = async move |_: &Shared, buf| object.read_at(buf, offset).await;
        IoFuture::boxed(self.store.request_with(ObjectOperation::Read, buf, read))
    }

    fn read_end(&self, buf: Buf) -> EndFuture {
        let object = Arc::clone(&self.object);
        let read = async move |_: &Shared, buf| object.read_end(buf).await;
        Box::pin(self.store.request_with(ObjectOperation::Read, buf, read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::MemoryObjects;
    use crate::object::testing::conform;
    use mica_rt::{Backend, Executor, sleep, timeout};

    const SECOND: Duration = Duration::from_secs(1);

    fn name(text: &str) -> ObjectName {
        ObjectName::new(text).expect("a name")
    }

    /// Puts `count` objects through a store with `options`; which of them say that they failed, and
    /// which are there at once, and a second later.
    fn put_many(options: FaultyOptions, count: usize) -> Vec<(bool, bool, bool)> {
        let executor = Executor::new(Backend::Sim { seed: 7 }).expect("the simulator");
        executor.block_on(async {
            let memory = MemoryObjects::new("memory");
            let faulty = FaultyObjects::new(Arc::new(memory.clone()), options);
            let mut outcomes = Vec::new();
            for number in 0..count {
                let name = name(&format!("object{number}"));
                let (put, _) = faulty.put_if_absent(&name, Buf::zeroed(10)).await;
                let is_there = memory.contents().contains_key(&name);
                sleep(SECOND).await;
                outcomes.push((put.is_err(), is_there, memory.contents().contains_key(&name)));
            }
            outcomes
        })
    }

    #[test]
    fn store_without_faults_keeps_its_promises() {
        for backend in [Backend::Sim { seed: 5 }, Backend::Pool] {
            let options = FaultyOptions { latency: Duration::from_millis(1), ..Default::default() };
            let memory = Arc::new(MemoryObjects::new("memory"));
            conform(backend, &(Arc::new(FaultyObjects::new(memory, options)) as _));
        }
    }

    #[test]
    fn refused_puts_do_nothing_and_lost_ones_are_there() {
        let share = 0.4;
        let refused = put_many(FaultyOptions { refused: share, ..Default::default() }, 100);
        assert!(refused.iter().all(|(failed, there, later)| failed != there && there == later));
        let lost = put_many(FaultyOptions { lost: share, ..Default::default() }, 100);
        assert!(lost.iter().all(|(_, there, later)| *there && *later));
        let late = FaultyOptions { late: share, slow_by: SECOND / 4, ..FaultyOptions::default() };
        let late = put_many(late, 100);
        assert!(late.iter().all(|(failed, there, later)| failed != there && *later));
        for outcomes in [refused, lost, late] {
            let failed = outcomes.iter().filter(|(failed, ..)| *failed).count();
            assert!((20..60).contains(&failed), "{failed} of 100 failed");
        }
    }

    #[test]
    fn choices_follow_from_the_seed() {
        let of = |seed| put_many(FaultyOptions { seed, refused: 0.5, ..Default::default() }, 50);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn throttled_store_serves_again_after_a_while() {
        let throttle = Some(Throttle { served: 3, refused: 2 });
        let outcomes = put_many(FaultyOptions { throttle, ..Default::default() }, 10);
        let failed: Vec<bool> = outcomes.into_iter().map(|(failed, ..)| failed).collect();
        assert_eq!(failed, [false, false, false, true, true].repeat(2));
    }

    #[test]
    fn hung_request_is_never_answered_and_half_of_them_are_done() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            let memory = MemoryObjects::new("memory");
            let options = FaultyOptions { hung: 1.0, ..Default::default() };
            let faulty = FaultyObjects::new(Arc::new(memory.clone()), options);
            for number in 0..100 {
                let put = faulty.put_if_absent(&name(&format!("o{number}")), Buf::new(0));
                assert!(timeout(SECOND, put).await.is_err());
            }
            let done = memory.contents().len();
            assert!((30..70).contains(&done), "{done} of 100 are done");
        });
    }

    #[test]
    fn faults_spare_other_requests_if_only_one_kind_is_asked_for() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            let memory = Arc::new(MemoryObjects::new("memory"));
            let only = Some(ObjectOperation::Read);
            let options = FaultyOptions { only, refused: 1.0, ..Default::default() };
            let faulty = FaultyObjects::new(memory, options);
            assert!(faulty.put_if_absent(&name("a"), Buf::new(0)).await.0.is_ok());
            assert!(faulty.open(&name("a")).read_end(Buf::new(0)).await.0.is_err());
            assert_eq!(faulty.list(None, None).await.expect("listed").len(), 1);
            assert!(faulty.delete(&name("a")).await.is_ok());
            assert_eq!(faulty.requests(), 1);
        });
    }
}
