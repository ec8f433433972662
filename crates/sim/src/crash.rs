//! Crashes: a guest works on a disk, the power goes, and what is left is judged.
//!
//! ```text
//! open ─▶ guest ─▶ power cut ─▶ sound? ─▶ open ─▶ what may be left? ─▶ guest ─▶ close ─▶ clean?
//!   └──────────────────────────── and once more ────────────────────────────────────────┘
//! ```

use crate::{ChangeFault, Errors, Guest, Load, Loss, ModelDisk, Operation, World};
use mica_block::{LocalFuture, Manage, Result};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// A guest that is not served within this simulated time never will be.
const PATIENCE: Duration = Duration::from_secs(600);

/// How a disk is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// For reading.
    Read,
    /// For writing too; damage from a crash may be repaired.
    Write,
}

/// The scenarios' interface to the disk under test.
pub trait Subject {
    /// Opens it.
    fn open<'a>(&'a self, world: &'a World, mode: Mode)
    -> LocalFuture<'a, Result<Arc<dyn Manage>>>;

    /// Judges the files while nobody has them open, and returns how much space they leak. Fails if
    /// they are corrupt.
    fn check<'a>(&'a self, world: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>>;

    /// Whether acknowledged writes survive the death of the process, flushed or not.
    fn outlives_the_process(&self) -> bool {
        false
    }

    /// Makes another program judge the files, which show what `model` allows.
    fn judge_elsewhere(&self, world: &World, model: &ModelDisk) {
        let _ = (world, model);
    }
}

/// What the next process does with what a crash left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    /// It may be asked to flush that, after which the power goes.
    MayFlush,
    /// It reads that, and closes the disk.
    Settles,
}

/// When the power goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// After this many operations that change files.
    After(u64),
    /// After this many syncs and then this many operations.
    AfterSyncs(u64, u64),
    /// When this much time has passed.
    At(Duration),
    /// Not at all, but the process dies when this much time has passed.
    KillAt(Duration),
    /// Not at all.
    Never,
}

/// How a round ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// In a clean close.
    Closed,
    /// In a power cut.
    Cut,
}

/// Runs `future` until it ends or the power goes.
pub async fn until_power_cut<F: Future>(world: &World, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut cut = world.power_cut();
    poll_fn(|context| {
        if Pin::new(&mut cut).poll(context).is_ready() {
            return Poll::Ready(None);
        }
        let polled = future.as_mut().poll(context);
        // The power may have gone while it was polled.
        match polled {
            Poll::Ready(output) if Pin::new(&mut cut).poll(context).is_pending() => {
                Poll::Ready(Some(output))
            }
            Poll::Ready(_) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// A scenario on one disk: rounds of work, each ending in a power cut or a close.
pub struct Crashes<'a> {
    world: &'a World,
    subject: &'a dyn Subject,
    model: Rc<RefCell<ModelDisk>>,
    /// Leaked space: what a crash leaked may stay.
    leaks: u64,
}

impl<'a> Crashes<'a> {
    /// A disk that shows `model` and leaks nothing.
    pub fn new(world: &'a World, subject: &'a dyn Subject, model: ModelDisk) -> Self {
        Self { world, subject, model: Rc::new(RefCell::new(model)), leaks: 0 }
    }

    /// The model of the disk.
    pub fn model(&self) -> Rc<RefCell<ModelDisk>> {
        Rc::clone(&self.model)
    }

    /// A guest works until the power goes, or until it is done and closes the disk; then the result
    /// is judged.
    ///
    /// # Panics
    /// If the result is not permitted.
    pub async fn round(&mut self, cut: Cut, loss: Loss, work: impl AsyncFnOnce(&Guest)) -> Ending {
        let armed = Rc::new(Cell::new(true));
        match cut {
            Cut::After(operations) => self.world.cut_power_after(operations, loss),
            Cut::AfterSyncs(syncs, then) => self.world.cut_power_after_syncs(syncs, then, loss),
            Cut::At(delay) | Cut::KillAt(delay) => {
                let loss = matches!(cut, Cut::At(_)).then_some(loss);
                let (world, armed) = (self.world.clone(), Rc::clone(&armed));
                mica_rt::spawn(async move {
                    mica_rt::sleep(delay).await;
                    match loss {
                        _ if !armed.get() => {}
                        Some(loss) => world.cut_power(loss),
                        None => world.kill(),
                    }
                });
            }
            Cut::Never => {}
        }
        let before = self.world.cuts();
        let all = async {
            let disk = self.open(Mode::Write).await;
            if self.world.cuts() > before {
                return;
            }
            let disk = disk.expect("the disk opens");
            let guest = Guest::new(self.world, disk, &self.model, Errors::Unexpected);
            work(&guest).await;
            guest.close().await.expect("the disk closes");
        };
        let all = async { mica_rt::timeout(PATIENCE, all).await.expect("the guest is served") };
        let ending = match until_power_cut(self.world, all).await {
            Some(()) => Ending::Closed,
            None => Ending::Cut,
        };
        armed.set(false);
        self.world.keep_power();
        match ending {
            Ending::Closed => {
                self.expect_clean().await;
                let disk = self.open(Mode::Read).await.expect("the disk that was closed opens");
                let guest = Guest::new(self.world, disk, &self.model, Errors::Unexpected);
                guest.read_all().await;
            }
            Ending::Cut if matches!(cut, Cut::KillAt(_)) && self.subject.outlives_the_process() => {
                self.model.borrow_mut().die();
                self.expect_takeover(Next::MayFlush).await;
            }
            Ending::Cut => self.expect_survival().await,
        }
        ending
    }

    /// A guest works while `fault` strikes, whatever the consequences; then the power goes, or if
    /// `loss` is `None` the process dies, and the result is judged. Returns whether it struck.
    ///
    /// # Panics
    /// If nobody gets an error from the fault, or the result is not permitted.
    pub async fn fault_round(
        &mut self,
        fault: ChangeFault,
        loss: Option<Loss>,
        work: impl AsyncFnOnce(&Guest),
    ) -> bool {
        self.world.inject_change(fault);
        let all = async {
            let Ok(disk) = self.open(Mode::Write).await else { return 1 };
            // What a failed sync has lost is lost, whatever the reason.
            let errors = match (fault.operation, fault.errno) {
                (Operation::Write, crate::ENOSPC) => Errors::ForLackOfSpace,
                _ => Errors::Expected,
            };
            let guest = Guest::new(self.world, disk, &self.model, errors);
            work(&guest).await;
            // It counts as the guest's own.
            drop(guest.close().await);
            guest.failed()
        };
        let failed = mica_rt::timeout(PATIENCE, all).await.expect("the guest is served");
        let struck = self.world.heal_changes();
        assert!(struck || failed == 0, "nothing struck, but {failed} requests failed");
        // Operations that only free space, or a first attempt at something not needed yet, may fail
        // silently.
        let matters = match fault.operation {
            Operation::Sync => true,
            Operation::Write => fault.lasting,
            _ => false,
        };
        assert!(failed > 0 || !struck || !matters, "nobody noticed that {fault:?} struck");
        match loss {
            Some(loss) => self.world.cut_power(loss),
            None => self.world.kill(),
        }
        // What a failed sync was to write is lost with the power, and the kernel tells that to the
        // process that asked for the sync, and to no later one.
        let next = match fault.operation {
            Operation::Sync => Next::Settles,
            _ => Next::MayFlush,
        };
        match loss {
            // After a failure, no more can be demanded than after a crash.
            None if self.subject.outlives_the_process() => {
                self.model.borrow_mut().crash();
                self.expect_takeover(next).await;
            }
            _ => self.expect_survival_with(next).await,
        }
        struck
    }

    /// After a power cut, or when the process died.
    ///
    /// # Panics
    /// If the disk is not sound, or shows what must not be left.
    pub async fn expect_survival(&mut self) {
        self.expect_survival_with(Next::MayFlush).await;
    }

    async fn expect_survival_with(&mut self, next: Next) {
        self.model.borrow_mut().crash();
        let checked = self.subject.check(self.world).await;
        self.leaks = checked.unwrap_or_else(|error| panic!("after the crash: {error}"));
        self.settle_in_turn(next).await;
        self.expect_clean().await;
    }

    /// After the process died: the next process to open the disk for writing continues where it
    /// was. A reader sees the same.
    async fn expect_takeover(&mut self, next: Next) {
        let checked = self.subject.check(self.world).await;
        self.leaks = checked.unwrap_or_else(|error| panic!("after the process died: {error}"));
        self.settle_in_turn(next).await;
        let checked = self.subject.check(self.world).await;
        self.leaks = checked.unwrap_or_else(|error| panic!("after the log was replayed: {error}"));
    }

    /// Others open what is left; the last one writes, and closes it.
    async fn settle_in_turn(&mut self, next: Next) {
        // A reader repairs nothing, and must see the same.
        if self.world.random_below(2) == 0 {
            self.settle(Mode::Read).await;
        }
        if self.world.random_below(4) == 0 && next == Next::MayFlush {
            self.flush_what_is_left().await;
        }
        self.settle(Mode::Write).await;
    }

    /// The next process to open the disk for writing is asked to flush, and for nothing else; then
    /// the power goes. What the process before it left is durable.
    async fn flush_what_is_left(&mut self) {
        let disk = self.open(Mode::Write).await.expect("the disk opens after the crash");
        let guest = Guest::new(self.world, disk, &self.model, Errors::Unexpected);
        guest.settle().await.expect("what is left can be read");
        guest.flush().await.expect("the disk is flushed");
        drop(guest);
        self.world.cut_power(loss_at_random(self.world));
        self.model.borrow_mut().crash();
        let checked = self.subject.check(self.world).await;
        self.leaks = checked.unwrap_or_else(|error| panic!("after the second crash: {error}"));
    }

    /// After a clean close.
    ///
    /// # Panics
    /// If the disk is not sound, or leaks more than it did.
    pub async fn expect_clean(&mut self) {
        let checked = self.subject.check(self.world).await;
        let leaks = checked.unwrap_or_else(|error| panic!("after the close: {error}"));
        assert!(
            leaks <= self.leaks,
            "{leaks} clusters leak after a clean close, not {}",
            self.leaks
        );
        self.leaks = leaks;
    }

    /// Makes another program judge.
    ///
    /// # Panics
    /// As [`Subject::judge_elsewhere`] does.
    pub fn judge_elsewhere(&self) {
        self.subject.judge_elsewhere(self.world, &self.model.borrow());
    }

    async fn settle(&self, mode: Mode) {
        let disk = self.open(mode).await.expect("the disk opens after the crash");
        let guest = Guest::new(self.world, disk, &self.model, Errors::Unexpected);
        guest.settle().await.expect("what is left can be read");
        if mode == Mode::Write {
            guest.close().await.expect("the disk closes after the crash");
        }
    }

    async fn open(&self, mode: Mode) -> Result<Arc<dyn Manage>> {
        self.subject.open(self.world, mode).await
    }
}

/// A random cut: within the first `operations` operations, or within about the time that they take.
pub fn cut_at_random(world: &World, operations: u64) -> (Cut, Loss) {
    let loss = loss_at_random(world);
    let number = 1 + world.random_below(operations);
    let cut = match world.random_below(7) {
        0 => Cut::At(Duration::from_micros(number * 60)),
        6 => Cut::KillAt(Duration::from_micros(number * 60)),
        1..=3 => Cut::AfterSyncs(1 + number / 8, world.random_below(4)),
        _ => Cut::After(number),
    };
    (cut, loss)
}

/// A random loss.
pub fn loss_at_random(world: &World) -> Loss {
    let losses = Loss::ALL.len() as u64;
    usize::try_from(world.random_below(losses)).map_or(Loss::Torn, |at| Loss::ALL[at])
}

/// A random load for a disk of `sectors` sectors.
pub fn load_at_random(world: &World, sectors: u64) -> Load {
    let longest = [16, 64, 1024][usize::try_from(world.random_below(3)).unwrap_or(0)];
    Load {
        tasks: 1 + world.random_below(6),
        requests: 5 + world.random_below(25),
        sectors_max: sectors.min(longest),
        flush_one_in: 2 + world.random_below(12),
        give_up_one_in: 0,
    }
}
