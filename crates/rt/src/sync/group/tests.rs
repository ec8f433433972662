use super::*;
use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Wake;
use std::thread::Thread;

type Result<T> = std::result::Result<T, &'static str>;

/// Wakes a thread that is parked.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Counts how often it is woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A call, polled by hand.
struct Call<'a> {
    future: Pin<Box<dyn Future<Output = Result<()>> + 'a>>,
    woken: Arc<Woken>,
}

impl<'a> Call<'a> {
    fn new(future: impl Future<Output = Result<()>> + 'a) -> Self {
        Self { future: Box::pin(future), woken: Arc::default() }
    }

    fn poll(&mut self) -> Poll<Result<()>> {
        let waker = Waker::from(Arc::clone(&self.woken));
        self.future.as_mut().poll(&mut Context::from_waker(&waker))
    }

    fn is_pending(&mut self) -> bool {
        self.poll().is_pending()
    }

    fn woken(&self) -> usize {
        self.woken.0.load(Ordering::SeqCst)
    }
}

/// A sync that ends on demand.
#[derive(Default)]
struct Device {
    runs: Cell<u32>,
    is_open: Cell<bool>,
    fails: Cell<bool>,
}

impl Device {
    async fn sync(&self) -> Result<()> {
        self.runs.set(self.runs.get() + 1);
        let ready = || if self.is_open.get() { Poll::Ready(()) } else { Poll::Pending };
        poll_fn(|_| ready()).await;
        match self.fails.get() {
            true => Err("the device is broken"),
            false => Ok(()),
        }
    }
}

#[test]
fn calls_during_a_run_share_the_next_one() {
    let (group, device) = (GroupSync::new(), Device::default());
    let call = || Call::new(group.run(async || device.sync().await));
    let mut first = call();
    assert!(first.is_pending());
    let mut later = [call(), call(), call()];
    assert!(later.iter_mut().all(Call::is_pending));
    assert_eq!(device.runs.get(), 1, "the later ones wait");

    device.is_open.set(true);
    assert!(matches!(first.poll(), Poll::Ready(Ok(()))));

    let woken: Vec<_> = later.iter().map(Call::woken).collect();
    assert_eq!(woken, [1, 0, 0], "one of those who wait is to lead");
    device.is_open.set(false);
    assert!(later.iter_mut().all(Call::is_pending));
    assert_eq!(device.runs.get(), 2, "a run that began before a call is not the call's");
    device.is_open.set(true);
    assert!(later.iter_mut().all(|call| matches!(call.poll(), Poll::Ready(Ok(())))));
    assert_eq!(device.runs.get(), 2, "one run for all three");
}

#[test]
fn failure_reaches_every_waiter_and_nobody_else() {
    let (group, device) = (GroupSync::new(), Device::default());
    let call = || Call::new(group.run(async || device.sync().await));
    let (mut first, mut second, mut third) = (call(), call(), call());
    assert!(first.is_pending() && second.is_pending() && third.is_pending());
    device.is_open.set(true);
    assert!(matches!(first.poll(), Poll::Ready(Ok(()))));

    device.fails.set(true);
    let failed = |call: &mut Call<'_>| match call.poll() {
        Poll::Ready(Err(error)) => error == "the device is broken",
        _ => false,
    };
    assert!(failed(&mut second) && failed(&mut third));
    device.fails.set(false);
    assert!(matches!(call().poll(), Poll::Ready(Ok(()))));
}

#[test]
fn a_leader_that_is_dropped_half_way_hands_over() {
    let (group, device) = (GroupSync::new(), Device::default());
    let call = || Call::new(group.run(async || device.sync().await));
    let (mut leader, mut first, mut second) = (call(), call(), call());
    assert!(leader.is_pending() && first.is_pending() && second.is_pending());

    drop(leader);
    assert_eq!((first.woken(), second.woken()), (1, 0));
    assert!(first.is_pending());
    assert_eq!(device.runs.get(), 2);
    // The one that took over is dropped too: the other leads then.
    drop(first);
    assert_eq!(second.woken(), 1);
    device.is_open.set(true);
    assert!(matches!(second.poll(), Poll::Ready(Ok(()))));
    assert_eq!(device.runs.get(), 3);
}

#[test]
fn a_waiter_that_is_dropped_after_it_was_woken_wakes_another() {
    let (group, device) = (GroupSync::new(), Device::default());
    let call = || Call::new(group.run(async || device.sync().await));
    let (mut leader, mut first, mut second) = (call(), call(), call());
    assert!(leader.is_pending() && first.is_pending() && second.is_pending());
    device.is_open.set(true);
    assert!(leader.poll().is_ready());
    assert_eq!((first.woken(), second.woken()), (1, 0));

    drop(first);

    assert_eq!(second.woken(), 1);
    assert!(second.poll().is_ready());
}

#[test]
fn a_leader_that_panics_leaves_the_group_usable() {
    let group = GroupSync::<Result<()>>::new();
    let panics = std::panic::AssertUnwindSafe(|| {
        block_on(group.run(async || panic!("this panic is part of the test")))
    });
    assert!(std::panic::catch_unwind(panics).is_err());
    assert!(block_on(group.run(async || Ok(()))).is_ok());
}

#[test]
fn threads_find_everything_that_they_did_before_in_their_run() {
    const THREADS: usize = 8;
    const CALLS: u64 = 300;
    let group = GroupSync::<Result<()>>::new();
    let is_running = AtomicBool::new(false);
    let done = AtomicU64::new(0);
    let durable = AtomicU64::new(0);
    let runs = AtomicU64::new(0);
    let sync = async || {
        assert!(!is_running.swap(true, Ordering::SeqCst), "two runs at once");
        let seen = done.load(Ordering::SeqCst);
        runs.fetch_add(1, Ordering::SeqCst);
        std::thread::yield_now();
        durable.fetch_max(seen, Ordering::SeqCst);
        is_running.store(false, Ordering::SeqCst);
        Ok(())
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..CALLS {
                    let mine = done.fetch_add(1, Ordering::SeqCst) + 1;
                    block_on(group.run(sync)).expect("it never fails");
                    assert!(durable.load(Ordering::SeqCst) >= mine, "acknowledged too early");
                }
            });
        }
    });
    assert!(runs.load(Ordering::SeqCst) <= THREADS as u64 * CALLS);
    let state = group.lock();
    assert!(!state.is_running && state.waiting.is_empty());
}
