//! Requests to objects: so many at a time, and the rest in the order in which they came.
//!
//! ```text
//! begin ─▶ (waiting) ─▶ librados ─▶ its thread: answer ─▶ wakes the executor's task
//!                                               └──────▶ begins what waits
//! ```
//!
//! Invariants
//! - I1 A request that was begun goes on, whether or not anybody waits for its answer.
//! - I2 librados never makes a caller wait: what is under way is less than it allows.

use crate::ffi::{Answer, Cluster, Context, Errno, Request};
use crate::layout::Place;
use crate::threads::Threads;
use futures_channel::oneshot;
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::ffi::CString;
use std::future::Future;
use std::sync::Arc;

/// Requests under way, at most.
pub(crate) const COUNT_MAX: usize = 64;
/// Bytes of requests under way, at most, unless one alone is longer.
pub(crate) const BYTES_MAX: usize = 256 << 20;
/// Longer content is copied on a thread of its own, not on one that serves a disk.
const COPY_MAX: usize = 256 << 10;

/// The namespace of a pool in which the objects are.
pub(crate) struct Home {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) pool: i64,
    pub(crate) namespace: CString,
}

/// The requests of all threads to one store.
pub(crate) struct Requests {
    pub(crate) home: Home,
    /// It copies what is long.
    copier: Threads,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    count: usize,
    bytes: usize,
    waiting: VecDeque<Begun>,
}

/// A request that was made.
struct Begun {
    place: Place,
    request: Request,
    answer: oneshot::Sender<Answer>,
}

impl State {
    /// Takes `len` bytes in, if there is room.
    fn admit(&mut self, len: usize) -> bool {
        let fits = self.count == 0 || self.count < COUNT_MAX && self.bytes + len <= BYTES_MAX;
        if fits {
            self.count += 1;
            self.bytes += len;
        }
        fits
    }
}

impl Requests {
    pub(crate) fn new(home: Home) -> mica_block::Result<Arc<Self>> {
        let copier = Threads::start("mica-rados-put", 1)?;
        Ok(Arc::new(Self { home, copier, state: Mutex::default() }))
    }

    /// Begins `request` with the object at `place`.
    pub(crate) fn begin(
        self: &Arc<Self>,
        place: Place,
        request: Request,
    ) -> impl Future<Output = Answer> + Send + 'static {
        let (answer, answered) = oneshot::channel();
        let begun = Begun { place, request, answer };
        let mut state = self.lock();
        // Nobody overtakes.
        if state.waiting.is_empty() && state.admit(begun.request.len()) {
            drop(state);
            self.send(begun);
        } else {
            state.waiting.push_back(begun);
        }
        async move { answered.await.expect("every request is answered") }
    }

    /// Hands a request that was admitted to librados.
    fn send(self: &Arc<Self>, begun: Begun) {
        if !matches!(&begun.request, Request::Create(content) if content.len() > COPY_MAX) {
            return self.submit(begun);
        }
        let shared = Arc::clone(self);
        self.copier.run(move || shared.submit(begun));
    }

    fn submit(self: &Arc<Self>, begun: Begun) {
        let Begun { place, request, answer } = begun;
        let len = request.len();
        let shared = Arc::clone(self);
        let done = Box::new(move |of_request: Answer| {
            // Perhaps nobody waits any more.
            let _ = answer.send(of_request);
            shared.end(len);
        });
        let Home { cluster, pool, namespace } = &self.home;
        let (of_request, done) = match Context::new(cluster, *pool, namespace, Some(&place.locator))
        {
            Ok(context) => match context.begin(&place.name, request, done) {
                Ok(()) => return,
                Err(refused) => refused,
            },
            Err(errno) => (Answer::failed(request, errno), done as _),
        };
        // Elsewhere, because it begins another, which may fail as well.
        self.copier.run(move || done(of_request));
    }

    /// Ends a request of `len` bytes, and begins those for which there is room now.
    fn end(self: &Arc<Self>, len: usize) {
        let mut state = self.lock();
        state.count -= 1;
        state.bytes -= len;
        let mut admitted = Vec::new();
        while let Some(next) = state.waiting.front().map(|next| next.request.len())
            && state.admit(next)
        {
            admitted.extend(state.waiting.pop_front());
        }
        drop(state);
        for begun in admitted {
            self.send(begun);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// What a listing of the namespace goes by.
    pub(crate) fn listing_context(&self) -> Result<Context, Errno> {
        let Home { cluster, pool, namespace } = &self.home;
        Context::new(cluster, *pool, namespace, None)
    }
}
