use super::*;
use crate::{Loss, scenario};
use mica_block::{Run, RunKind, Space, read_exact, write_all};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::future::Future;

fn block_on<F: Future<Output = ()>>(body: impl Fn(World) -> F) {
    scenario(8, body);
}

#[test]
fn read_past_the_end_is_zeros() {
    block_on(|world| async move {
        world.put("/a", vec![7; 10]);
        let image = world.open(Path::new("/a")).unwrap();
        let buf = read_exact(&*image.store, HostOffset::new(8), 4).await.unwrap();
        assert_eq!(&*buf, [7, 7, 0, 0]);
        let buf = read_exact(&*image.store, HostOffset::new(u64::MAX), 1).await.unwrap();
        assert_eq!(&*buf, [0]);
    });
}

#[test]
fn open_store_keeps_the_replaced_file_and_an_opener_gets_the_new_one() {
    block_on(|world| async move {
        let path = Path::new("/a");
        world.put(path, vec![1; 4]);
        let old = world.open(path).unwrap();
        world.put(path, vec![2; 4]);
        let new = world.open(path).unwrap();
        assert_ne!(old.identity, new.identity);
        assert_eq!(&*read_exact(&*old.store, HostOffset::ZERO, 4).await.unwrap(), [1; 4]);
        assert_eq!(&*read_exact(&*new.store, HostOffset::ZERO, 4).await.unwrap(), [2; 4]);
    });
}

#[test]
fn change_shows_in_the_identity() {
    let world = World::new(0);
    let path = Path::new("/d/../a");
    world.put(path, vec![1; 4]);
    let before = world.identify(path).unwrap();
    world.change_keeping_mtime("/a", |bytes| bytes[0] = 9);
    let after = world.identify(path).unwrap();
    assert_eq!(before.mtime_ns, after.mtime_ns);
    assert_ne!(before.ctime_ns, after.ctime_ns);
    world.change("/a", |bytes| bytes[0] = 8);
    assert_ne!(world.identify(path).unwrap().mtime_ns, after.mtime_ns);
}

#[test]
fn nth_read_fails_and_the_next_does_not() {
    block_on(|world| async move {
        world.put("/a", vec![1; 4]);
        world.inject("/a", ReadFault::FailNth(2, 5));
        let image = world.open(Path::new("/a")).unwrap();
        assert!(read_exact(&*image.store, HostOffset::ZERO, 1).await.is_ok());
        let error = read_exact(&*image.store, HostOffset::ZERO, 1).await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5));
        assert!(read_exact(&*image.store, HostOffset::ZERO, 1).await.is_ok());
        assert_eq!(world.reads_of("/a"), 3);
    });
}

#[test]
fn runs_cover_the_request_and_never_are_empty() {
    let world = World::new(0);
    let mut bytes = vec![0; 3 * 4096 + 100];
    bytes[4096] = 1;
    bytes[3 * 4096] = 1;
    world.put("/a", bytes);
    let image = world.open(Path::new("/a")).unwrap();
    let run = |at, len| image.store.run_at(HostOffset::new(at), len).unwrap();
    assert_eq!(run(0, 100_000), Run { kind: RunKind::Hole, len: 4096 });
    assert_eq!(run(4097, 100_000), Run { kind: RunKind::Data, len: 4095 });
    assert_eq!(run(4097, 5), Run { kind: RunKind::Data, len: 5 });
    assert_eq!(run(3 * 4096, 100_000), Run { kind: RunKind::Data, len: 4096 });
    assert_eq!(run(1 << 40, 1 << 50), Run { kind: RunKind::Hole, len: 1 << 50 });
}

#[test]
fn sidecars_are_kept_and_can_be_made_to_lie() {
    let world = World::new(3);
    let path = Path::new("/a");
    assert!(world.sidecars().open(path).unwrap().is_none());
    world.write_sidecar(path, &[0; 16]).unwrap();
    let byte = world.flip_sidecar_bit(path).unwrap();
    assert_eq!(world.sidecar(path).unwrap()[byte].count_ones(), 1);
    world.deny_sidecars(true);
    assert_eq!(world.write_sidecar(path, &[1]).unwrap_err().kind(), ErrorKind::Denied);
    world.sidecars().remove(path).unwrap();
    assert!(world.sidecars().open(path).unwrap().is_none());
}

#[test]
fn same_seed_gives_the_same_history() {
    let history = |seed| {
        let executor = mica_rt::Executor::new(mica_rt::Backend::Sim { seed }).unwrap();
        let world = World::new(seed);
        world.put("/a", vec![1; 64]);
        world.inject("/a", ReadFault::SpikeOneIn(3));
        let order = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        executor.block_on(async {
            let image = world.open(Path::new("/a")).unwrap();
            for number in 0..20_u64 {
                let (store, order) = (Arc::clone(&image.store), std::rc::Rc::clone(&order));
                mica_rt::spawn(async move {
                    read_exact(&*store, HostOffset::new(number), 1).await.unwrap();
                    order.borrow_mut().push(number);
                });
            }
            mica_rt::sleep(Duration::from_secs(1)).await;
        });
        order.take()
    };
    assert_eq!(history(1), history(1));
    assert_eq!(history(1).len(), 20);
    assert_ne!(history(1), history(2));
}

fn put_writable(world: &World) -> Arc<dyn Store> {
    world.put("/a", vec![1; 1024]);
    world.open_writable(Path::new("/a")).unwrap().store
}

async fn write(store: &dyn Store, at: u64, byte: u8, len: usize) -> Result<()> {
    write_all(store, Buf::from_slice(&vec![byte; len]), HostOffset::new(at)).await
}

fn content(world: &World) -> Vec<u8> {
    world.files().pop().unwrap().1
}

#[test]
fn written_bytes_are_read_at_once_and_durable_after_a_sync() {
    block_on(|world| async move {
        let store = put_writable(&world);
        write(&*store, 512, 2, 1024).await.unwrap();
        store.sync().await.unwrap();
        write(&*store, 0, 3, 512).await.unwrap();
        let buf = read_exact(&*store, HostOffset::ZERO, 512).await.unwrap();
        assert_eq!(buf[..], [3; 512]);
        world.cut_power(Loss::Everything);
        assert_eq!(content(&world), [vec![1; 512], vec![2; 1024]].concat());
    });
}

#[test]
fn sync_does_not_wait_for_what_completes_during_it() {
    block_on(|world| async move {
        let store = put_writable(&world);
        let sync = store.sync();
        write(&*store, 0, 2, 512).await.unwrap();
        sync.await.unwrap();
        world.cut_power(Loss::Everything);
        assert_eq!(content(&world), [1; 1024]);
    });
}

#[test]
fn space_changes_and_lengths_are_volatile_too() {
    block_on(|world| async move {
        let store = put_writable(&world);
        store.space(Space::Punch, HostOffset::new(512), 4096).await.unwrap();
        store.space(Space::Allocate, HostOffset::new(1024), 512).await.unwrap();
        store.sync().await.unwrap();
        store.set_len(100).await.unwrap();
        assert_eq!(store.len().unwrap(), 100);
        world.cut_power(Loss::Everything);
        assert_eq!(content(&world), [vec![1; 512], vec![0; 1024]].concat());
    });
}

#[test]
fn stores_of_a_machine_that_lost_power_change_nothing() {
    block_on(|world| async move {
        let store = put_writable(&world);
        let late = store.write_at(Buf::zeroed(512), HostOffset::ZERO);
        world.kill();
        assert_eq!(late.await.0.unwrap_err().raw_os_error(), Some(5));
        assert!(write(&*store, 0, 2, 512).await.is_err() && store.sync().await.is_err());
        // What was in flight is done, or half done, or not; what comes later is not.
        let now = content(&world);
        assert!(now[..512].iter().all(|byte| *byte < 2) && now[512..] == [1; 512]);
        // Nor do they keep others from writing.
        assert!(world.open_writable(Path::new("/a")).is_ok());
    });
}

#[test]
fn one_writer_at_a_time() {
    block_on(|world| async move {
        let store = put_writable(&world);
        let again = || world.open_writable(Path::new("/a")).map(drop);
        assert_eq!(again().unwrap_err().kind(), ErrorKind::Denied);
        let reader = world.open(Path::new("/a")).unwrap();
        let denied = write(&*reader.store, 0, 2, 1).await.unwrap_err();
        assert_eq!(denied.kind(), ErrorKind::Denied);
        drop(store);
        again().unwrap();
    });
}

#[test]
fn nth_change_fails_once_or_for_good() {
    block_on(|world| async move {
        let store = put_writable(&world);
        let fault = ChangeFault { operation: Operation::Write, nth: 2, lasting: false, errno: 28 };
        world.inject_change(fault);
        write(&*store, 0, 2, 512).await.unwrap();
        assert!(!world.fault_struck());
        assert_eq!(write(&*store, 0, 3, 512).await.unwrap_err().kind(), ErrorKind::NoSpace);
        assert!(world.heal_changes());
        world.inject_change(ChangeFault { nth: 1, lasting: true, ..fault });
        for _ in 0..3 {
            assert!(write(&*store, 0, 4, 512).await.is_err());
            store.sync().await.unwrap();
        }
    });
}

#[test]
fn power_goes_after_the_operation_that_was_named() {
    block_on(|world| async move {
        let store = put_writable(&world);
        world.cut_power_after(2, Loss::Nothing);
        let cut = world.power_cut();
        write(&*store, 0, 2, 512).await.unwrap();
        assert_eq!(world.cuts(), 0);
        write(&*store, 512, 3, 512).await.unwrap();
        cut.await;
        assert_eq!((world.cuts(), world.changes_completed()), (1, 2));
        assert_eq!(content(&world), [vec![2; 512], vec![3; 512]].concat());
    });
}
