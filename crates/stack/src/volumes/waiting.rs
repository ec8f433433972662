//! A wrapper around a store that reports, once, when requests take long: otherwise a verb, or a
//! server, would be silent while a bucket or a folder hangs. A server also says when that is over.
//! It does not look at reads of a folder.
//!
//! Invariant: every request and answer passes through unchanged.

use mica_block::{
    EndFuture, Entry, IoFuture, LocalFuture, Object, ObjectName, Objects, Put, PutFuture,
    PutPartsFuture, Result,
};
use mica_rt::{Buf, Parts, timeout};
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// How long a request may take before it is reported, while somebody waits for a verb.
const SAY_AFTER: Duration = Duration::from_secs(3);
/// The same for a server. Opening a volume is waited for as long.
pub(super) const SAY_AFTER_OF_SERVERS: Duration = Duration::from_secs(10);

/// Who waits for a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waiting {
    /// A verb, of whose requests each takes so long at most, if that is known.
    Verb(Option<Duration>),
    /// A server, whose guests wait for as long as it takes.
    Server,
}

/// The store.
pub(super) struct WaitedFor {
    inner: Arc<dyn Objects>,
    said: Arc<Said>,
}

/// What is said of it.
struct Said {
    name: String,
    waiting: Waiting,
    /// Requests that take long.
    late: AtomicUsize,
    /// Whether it was said that one does. A request that fails, as some do after a time, is no
    /// answer: the next one may take as long.
    is_said: AtomicBool,
}

/// A request that takes long, until it is answered, or nobody waits for it any more.
struct Late<'a>(&'a Said);

/// What a request has come to.
trait Outcome {
    fn is_answer(&self) -> bool;
}

impl<T> Outcome for Result<T> {
    fn is_answer(&self) -> bool {
        self.is_ok()
    }
}

impl<T> Outcome for (Result<T>, Buf) {
    fn is_answer(&self) -> bool {
        self.0.is_ok()
    }
}

impl WaitedFor {
    /// The store `inner`, for which somebody is `waiting`.
    pub(super) fn new(inner: Arc<dyn Objects>, waiting: Waiting) -> Self {
        Self { said: Arc::new(Said::new(inner.name(), waiting)), inner }
    }

    fn wait<T: Outcome>(
        &self,
        request: impl Future<Output = T> + 'static,
    ) -> LocalFuture<'static, T> {
        let said = Arc::clone(&self.said);
        Box::pin(async move { said.wait(request).await })
    }
}

impl Said {
    fn new(name: String, waiting: Waiting) -> Self {
        Self { name, waiting, late: AtomicUsize::new(0), is_said: AtomicBool::new(false) }
    }

    async fn wait<T: Outcome>(&self, request: impl Future<Output = T>) -> T {
        let mut request = pin!(request);
        let outcome = match timeout(self.say_after(), request.as_mut()).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let (_late, first) = self.late();
                first.into_iter().for_each(|first| tracing::warn!("{first}"));
                request.await
            }
        };
        if outcome.is_answer() {
            self.answered().into_iter().for_each(|over| tracing::info!("{over}"));
        }
        outcome
    }

    fn say_after(&self) -> Duration {
        match self.waiting {
            Waiting::Verb(_) => SAY_AFTER,
            Waiting::Server => SAY_AFTER_OF_SERVERS,
        }
    }

    /// Notes that a request takes long. What is to be said then, if it was not said already.
    fn late(&self) -> (Late<'_>, Option<String>) {
        self.late.fetch_add(1, Ordering::Relaxed);
        let is_said = self.is_said.swap(true, Ordering::Relaxed);
        (Late(self), (!is_said).then(|| self.is_late()))
    }

    /// A request was answered. What is to be said then, if none takes long any more.
    fn answered(&self) -> Option<String> {
        let is_over = self.is_said.load(Ordering::Relaxed)
            && self.late.load(Ordering::Relaxed) == 0
            && self.is_said.swap(false, Ordering::Relaxed);
        let says_so = is_over && self.waiting == Waiting::Server;
        says_so.then(|| format!("{} answers again", self.name))
    }

    fn is_late(&self) -> String {
        let (name, seconds) = (&self.name, self.say_after().as_secs());
        let more = match self.waiting {
            Waiting::Verb(None) => String::new(),
            Waiting::Verb(Some(limit)) => {
                let limit = limit.as_secs();
                format!("; a request is given up after {limit} s, and tried once more")
            }
            Waiting::Server => ": disks that need it wait".to_owned(),
        };
        format!("waiting for {name}: no answer for {seconds} s{more}")
    }
}

impl Drop for Late<'_> {
    fn drop(&mut self) {
        self.0.late.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Objects for WaitedFor {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn is_far(&self) -> bool {
        self.inner.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        let inner = self.inner.open(name);
        // A timer would cost a guest more than a read of a folder may. If the folder hangs, what
        // is put there tells.
        if self.said.waiting == Waiting::Server && !self.inner.is_far() {
            return inner;
        }
        Arc::new(WaitedForObject { inner, said: Arc::clone(&self.said) })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.wait(self.inner.put_if_absent(name, content))
    }

    fn put_parts(&self, name: &ObjectName, content: &Arc<Parts>) -> Option<PutPartsFuture> {
        let put = self.inner.put_parts(name, content)?;
        Some(self.wait::<Result<Put>>(put))
    }

    fn put_early(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.wait(self.inner.put_early(name, content))
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.wait(self.inner.list(folder, after))
    }

    fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.wait(self.inner.list_all(folder, after))
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        self.wait(self.inner.delete(name))
    }

    fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> LocalFuture<'static, Result<u64>> {
        self.wait(self.inner.punch(name, ranges))
    }

    fn give_up_reserve(&self) -> LocalFuture<'static, Result<bool>> {
        self.inner.give_up_reserve()
    }

    fn client(&self) -> Option<String> {
        self.inner.client()
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        self.wait(self.inner.shut_out(client))
    }
}

struct WaitedForObject {
    inner: Arc<dyn Object>,
    said: Arc<Said>,
}

impl Object for WaitedForObject {
    fn read_at(&self, buf: Buf, offset: u64) -> IoFuture {
        let (said, read) = (Arc::clone(&self.said), self.inner.read_at(buf, offset));
        IoFuture::boxed(async move { said.wait(read).await })
    }

    fn read_end(&self, buf: Buf) -> EndFuture {
        let (said, read) = (Arc::clone(&self.said), self.inner.read_end(buf));
        Box::pin(async move { said.wait(read).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(waiting: Waiting) -> Said {
        Said::new("file:///far".to_owned(), waiting)
    }

    /// The story: the folder of a store hung while its volumes were served, and the server's log
    /// had nothing of it.
    #[test]
    fn server_says_once_that_its_store_hangs_and_once_that_it_no_longer_does() {
        let said = said(Waiting::Server);
        assert_eq!(said.answered(), None, "nobody said anything");
        for _ in 0..2 {
            let (first, is_late) = said.late();
            let is_late = is_late.expect("nobody has said so");
            assert!(is_late.contains("file:///far: no answer for 10 s"), "{is_late}");
            let (second, again) = said.late();
            assert_eq!(again, None);
            drop(first);
            assert_eq!(said.answered(), None, "another one still waits");
            drop(second);
            assert_eq!(said.answered().as_deref(), Some("file:///far answers again"));
        }
    }

    /// The story: a bucket hung for an hour, of which each request was given up after a minute.
    #[test]
    fn request_that_fails_or_is_given_up_is_no_answer() {
        let said = said(Waiting::Server);
        let (late, first) = said.late();
        assert!(first.is_some());
        drop(late);
        let failed: Result<()> = Err(mica_block::Error::new(mica_block::ErrorKind::Io, "late"));
        assert!(!failed.is_answer() && Ok::<_, mica_block::Error>(()).is_answer());
        assert_eq!(said.late().1, None, "it was said");
        assert_eq!(said.answered().as_deref(), Some("file:///far answers again"));
    }

    #[test]
    fn verb_says_when_its_request_is_given_up_and_not_that_it_was_answered() {
        let said = said(Waiting::Verb(Some(Duration::from_secs(60))));
        let (late, is_late) = said.late();
        let is_late = is_late.expect("nobody has said so");
        assert!(
            is_late.contains("no answer for 3 s; a request is given up after 60 s"),
            "{is_late}"
        );
        drop(late);
        assert_eq!(said.answered(), None);
    }
}
