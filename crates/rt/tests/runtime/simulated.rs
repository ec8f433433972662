//! The simulator's backend: time is virtual, order follows from the seed, a deadlock panics.

use mica_rt::{Backend, Buf, Executor, now, simulate, sleep, spawn, yield_now};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

fn sim(seed: u64) -> Executor {
    Executor::new(Backend::Sim { seed }).unwrap()
}

async fn take(latency: Duration) -> u8 {
    let work = |buf: &mut Buf| {
        buf.own_bytes()[0] = 42;
        Ok(1)
    };
    let (count, buf) = simulate(Buf::new(1), latency, Box::new(work)).await;
    assert_eq!(count.unwrap(), 1);
    buf[0]
}

#[test]
fn years_pass_at_once() {
    sim(1).block_on(async {
        let began = now();
        sleep(Duration::from_secs(365 * 86400)).await;
        assert!(now().saturating_since(began) >= Duration::from_secs(365 * 86400));
        assert_eq!(take(Duration::from_secs(86400)).await, 42);
    });
}

#[test]
fn order_follows_from_the_seed() {
    let order = |seed| {
        sim(seed).block_on(async {
            let order: Rc<RefCell<Vec<u32>>> = Rc::default();
            for number in 0..50 {
                let order = Rc::clone(&order);
                spawn(async move {
                    take(Duration::from_micros(50)).await;
                    order.borrow_mut().push(number);
                });
            }
            sleep(Duration::from_secs(1)).await;
            order.take()
        })
    };
    assert_eq!(order(3).len(), 50);
    assert_eq!(order(3), order(3));
    assert_ne!(order(3), order(4));
}

#[test]
#[should_panic(expected = "never happens")]
fn deadlock_panics() {
    sim(1).block_on(std::future::pending::<()>());
}

/// On a real machine time passes even while a task spins.
#[test]
fn task_that_spins_lets_time_pass() {
    sim(1).block_on(async {
        let done = Rc::new(Cell::new(false));
        let told = Rc::clone(&done);
        spawn(async move {
            take(Duration::from_millis(1)).await;
            told.set(true);
        });
        while !done.get() {
            yield_now().await;
        }
    });
}

#[test]
fn executor_drains_abandoned_operations() {
    let ran = Rc::new(Cell::new(0));
    let executor = sim(7);
    executor.block_on(async {
        for _ in 0..1000 {
            let ran = Rc::clone(&ran);
            let work = move |_: &mut Buf| {
                ran.set(ran.get() + 1);
                Ok(0)
            };
            drop(simulate(Buf::new(16), Duration::from_secs(1), Box::new(work)));
        }
    });
    drop(executor);
    assert_eq!(ran.get(), 1000);
}
