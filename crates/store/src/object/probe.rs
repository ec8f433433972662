//! Whether a store keeps the promise of put-if-absent, found out by trying.
//!
//! Several servers that speak S3 do not: some ignore the condition, and some are right only as long
//! as puts do not race, because they look before they store. So puts race here, short ones and long
//! ones. A store that passes may still be wrong; one that fails is certain to be.

use mica_block::{Entry, Error, ErrorKind, ObjectName, Objects, PROBE_FOLDER, Put, Result};
use mica_rt::{Buf, join_all};

/// Puts that race for one name.
const RACERS: usize = 8;
/// Races. Of the known stores that let several win now and then, the best is wrong in most.
const ROUNDS: usize = 6;
/// How long the objects are, in turn: one that arrives in a piece, and one that does not.
const LENS: [usize; 2] = [4 << 10, 256 << 10];

/// Finds out whether `objects` can be relied on, with some dozens of requests, and removes what it
/// put. `nonce` is a number that no other probe of the store has.
///
/// # Errors
/// `Unsupported` if the store broke a promise, in one line that says which; otherwise what it
/// reports.
pub async fn probe(objects: &dyn Objects, nonce: u64) -> Result<()> {
    let folder = ObjectName::new(&format!("{PROBE_FOLDER}/{nonce:016x}")).expect("a name");
    let names: Vec<_> = (0..ROUNDS)
        .map(|round| ObjectName::new(&format!("{folder}/{round:02}")).expect("a name"))
        .collect();
    let probe = Probe { objects, nonce, folder };
    let kept = probe.run(&names).await;
    let cleaned = join_all(names.iter().map(|name| objects.delete(name))).await;
    kept?;
    cleaned.into_iter().collect::<Result<()>>()?;
    let gone = join_all(names.iter().map(|name| probe.check_gone(name))).await;
    gone.into_iter().collect()
}

struct Probe<'a> {
    objects: &'a dyn Objects,
    nonce: u64,
    folder: ObjectName,
}

impl Probe<'_> {
    async fn run(&self, names: &[ObjectName]) -> Result<()> {
        // Side by side: whoever opens a volume waits for this.
        let rounds = names.iter().enumerate().map(|(round, name)| self.round(round, name));
        join_all(rounds).await.into_iter().collect::<Result<()>>()?;
        self.check_listing(names).await
    }

    async fn round(&self, round: usize, name: &ObjectName) -> Result<()> {
        let len = LENS[round % LENS.len()];
        self.check_gone(name).await?;
        let winner = self.race(name, round, len).await?;
        self.check_content(name, &winner).await?;
        // What knows nothing of the race, or has waited for long.
        let (late, _) = self.put(name, self.content(round, RACERS, len)).await?;
        if late == Put::Done {
            return Err(self.broken("replaces an object that is there"));
        }
        self.check_content(name, &winner).await
    }

    /// Lets puts race for `name`; returns what the one put that was first has stored.
    async fn race(&self, name: &ObjectName, round: usize, len: usize) -> Result<Buf> {
        let puts = (0..RACERS).map(|racer| self.put(name, self.content(round, racer, len)));
        let mut winners = Vec::new();
        for put in join_all(puts).await {
            if let (Put::Done, content) = put? {
                winners.push(content);
            }
        }
        match (winners.len(), winners.pop()) {
            (1, Some(winner)) => Ok(winner),
            (count, _) => {
                let what = format!("tells {count} of {RACERS} racing puts that they were first");
                Err(self.broken(&what))
            }
        }
    }

    async fn put(&self, name: &ObjectName, content: Buf) -> Result<(Put, Buf)> {
        let (put, content) = self.objects.put_if_absent(name, content).await;
        put.map(|put| (put, content)).map_err(|error| error.wrap(self.doing("putting", name)))
    }

    /// What racer `racer` puts: no two of them put the same.
    fn content(&self, round: usize, racer: usize, len: usize) -> Buf {
        let mut content = Buf::zeroed(len);
        let line = format!("mica probe {:016x} round {round} racer {racer}", self.nonce);
        content.put(0, line.as_bytes());
        // At the end as well, so that no half is taken for the whole.
        content.put(len - line.len(), line.as_bytes());
        content
    }

    async fn check_content(&self, name: &ObjectName, content: &[u8]) -> Result<()> {
        let (read, found) = self.objects.open(name).read_end(Buf::new(content.len())).await;
        match read {
            Ok(len) if len == content.len() as u64 && *found == *content => Ok(()),
            Ok(_) => Err(self.broken("has other bytes than the put that was first")),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(self.broken("does not have what it says it stored"))
            }
            Err(error) => Err(error.wrap(self.doing("reading", name))),
        }
    }

    async fn check_gone(&self, name: &ObjectName) -> Result<()> {
        match self.objects.open(name).read_end(Buf::new(0)).await.0 {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Ok(_) => Err(self.broken("has an object that was deleted, or never put")),
            Err(error) => Err(error.wrap(self.doing("reading", name))),
        }
    }

    async fn check_listing(&self, names: &[ObjectName]) -> Result<()> {
        let listed = self.objects.list(Some(&self.folder), None).await;
        let listed = listed.map_err(|error| error.wrap(self.doing("listing", &self.folder)))?;
        let expected = names.iter().enumerate().map(|(round, name)| Entry::Object {
            name: name.clone(),
            len: LENS[round % LENS.len()] as u64,
        });
        if listed.into_iter().eq(expected) {
            return Ok(());
        }
        Err(self.broken("does not list what it has"))
    }

    fn doing(&self, doing: &str, name: &ObjectName) -> String {
        format!("probing {}: {doing} {name}", self.objects.name())
    }

    fn broken(&self, what: &str) -> Error {
        let store = self.objects.name();
        let what = format!("{store} cannot hold volumes: it {what}; use another store");
        Error::new(ErrorKind::Unsupported, what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::{FaultyObjects, FaultyOptions, Lie, MemoryObjects};
    use mica_rt::{Backend, Executor};
    use std::sync::Arc;
    use std::time::Duration;

    /// The outcome of a probe of a store that lies, or not, and how many objects are left.
    fn probed(backend: Backend, lie: Option<Lie>) -> (Result<()>, usize) {
        let executor = Executor::new(backend).expect("a backend");
        executor.block_on(async {
            let memory = MemoryObjects::new("memory").with_latency(Duration::from_millis(1));
            let options = FaultyOptions { lie, ..Default::default() };
            let store = FaultyObjects::new(Arc::new(memory.clone()), options);
            let outcome = probe(&store, 77).await;
            (outcome, memory.contents().len())
        })
    }

    #[test]
    fn honest_store_passes_and_nothing_is_left_in_it() {
        for backend in [Backend::Sim { seed: 1 }, Backend::Sim { seed: 2 }, Backend::Pool] {
            let (outcome, left) = probed(backend, None);
            outcome.expect("it is honest");
            assert_eq!(left, 0);
        }
    }

    /// The story: the first opening of a volume in a far store took a second longer than the
    /// others.
    #[test]
    fn probe_waits_for_few_answers_one_after_the_other() {
        const LATENCY: Duration = Duration::from_millis(30);
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            let memory = MemoryObjects::new("memory").with_latency(LATENCY);
            let begun = mica_rt::now();
            probe(&memory, 1).await.expect("it is honest");
            let took = mica_rt::now().saturating_since(begun);
            // A round has five; then a listing, the deletions, and a look at what is gone. In the
            // simulator each takes up to half as long again.
            let trips = took.as_millis() / LATENCY.as_millis();
            assert!((8..=12).contains(&trips), "{took:?}");
        });
    }

    #[test]
    fn every_liar_is_refused_by_name_in_one_line() {
        for lie in Lie::ALL {
            for backend in (0..20).map(|seed| Backend::Sim { seed }).chain([Backend::Pool]) {
                let (outcome, left) = probed(backend, Some(lie));
                let error = outcome.expect_err(&format!("{lie:?} passes on {backend:?}"));
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{lie:?}: {error:?}");
                let line = error.in_one_line();
                assert!(line.starts_with("memory cannot hold volumes: it "), "{line}");
                assert!(!line.contains('\n'));
                assert!(left == 0 || lie == Lie::DeletesNothing, "{lie:?}: {left} objects left");
            }
        }
    }

    #[test]
    fn error_of_the_store_is_not_taken_for_a_broken_promise() {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            let options = FaultyOptions { refused: 1.0, ..Default::default() };
            let store = FaultyObjects::new(Arc::new(MemoryObjects::new("memory")), options);
            assert_eq!(probe(&store, 1).await.unwrap_err().kind(), ErrorKind::Io);
        });
    }
}
