//! What other threads read while the active layer becomes empty.

use crate::chain::merge::pace::Pace;
use crate::chain::{Chain, ChainOptions};
use crate::map::Map;
use crate::testing::{CLUSTER_BYTES, Folder, REFCOUNTS_AT, at_once, done_at_once, watched};
use mica_block::{
    ActiveAfter, CommitLayers, Disk as _, ErrorKind, LocalFuture, Manage as _, MergeControl,
    MergeProgress, Merged,
};
use mica_rt::{Backend, Buf, Executor};
use mica_units::GuestOffset;
use std::cell::{Cell, RefCell};
use std::future::{Future, ready};
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const DISK: u64 = 2 << 20;
const OLD: u8 = 0x0d;
const NEW: u8 = 0x2e;

struct Steadily;

impl MergeControl for Steadily {
    fn step(&self, _: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        Box::pin(ready(ControlFlow::Continue(())))
    }
}

fn run(test: impl Future<Output = ()> + 'static) {
    Executor::new(Backend::Sim { seed: 1 }).expect("starts").block_on(test);
}

async fn open(folder: &Folder, name: &str) -> Chain {
    let options = ChainOptions { writable: true, ..ChainOptions::default() };
    Chain::open(Arc::new(folder.clone()), &Folder::path(name), &options).await.expect("opens")
}

/// `base`, `mid` over it, and `active` over that; the upper two own the first cluster, which is
/// older in the lower one.
async fn chain_of_three() -> Chain {
    let folder = Folder::default();
    folder.make("base", DISK, None);
    folder.make("mid", DISK, Some("base"));
    folder.make("active", DISK, Some("mid"));
    for (name, byte) in [("mid", OLD), ("active", NEW)] {
        let chain = open(&folder, name).await;
        let bytes = Buf::from_slice(&[byte; CLUSTER_BYTES]);
        chain.write(GuestOffset::ZERO, bytes).await.0.expect("it is written");
        chain.close().await.expect("it is closed");
    }
    open(&folder, "active").await
}

/// The first byte of the disk as it is read by who has nothing of it in memory.
fn first_byte(map: &Arc<Map>) -> u8 {
    map.index.cache.retain(|_| false);
    let extents = done_at_once(map.extents_at(GuestOffset::ZERO, 512));
    done_at_once(map.read_extents(extents))[0]
}

async fn commit_to_base(chain: &Chain, active: ActiveAfter) {
    let base = Folder::path("base");
    let layers = CommitLayers { top: None, base: Some(&base), active };
    let merged = chain.commit(layers, &Steadily).await.expect("it is merged");
    assert!(matches!(merged, Merged::Done { .. }), "{merged:?}");
}

/// The story: the table of the active layer was empty for others before the layer in between had
/// left, and whoever had nothing of the slice in memory read what that one owned.
#[test]
fn reader_sees_nothing_of_the_layer_in_between_while_the_active_one_becomes_empty() {
    run(async {
        let chain = chain_of_three().await;
        let (map, seen) = (Arc::clone(&chain.map), Rc::new(RefCell::new(Vec::new())));
        let told = Rc::clone(&seen);
        let look = move |step| {
            if step != "layers are asked" {
                told.borrow_mut().push((step, first_byte(&map)));
            }
        };
        watched(look, commit_to_base(&chain, ActiveAfter::Emptied)).await;
        let seen = seen.take();
        assert!(seen.iter().any(|(step, _)| *step == "another L1 table"), "{seen:?}");
        assert!(seen.iter().all(|(_, byte)| *byte == NEW), "{seen:?}");
        assert_eq!(first_byte(&chain.map), NEW);
        assert_eq!(chain.layer_count(), 2);
        chain.close().await.expect("it is closed");
    });
}

/// The story: whoever had taken the layers asked the active one for what it owns when that was
/// empty, and the one in between, which had left, after that.
#[test]
fn reader_who_took_the_layers_before_looks_once_more() {
    run(async {
        let chain = chain_of_three().await;
        commit_to_base(&chain, ActiveAfter::Kept).await;
        let (merging, is_first) = (chain.clone(), Cell::new(true));
        let empty = move |step| {
            if step == "layers are asked" && is_first.replace(false) {
                let writer = merging.writer.load_full().expect("it is written");
                let base = Folder::path("base");
                let (base, name) = done_at_once(merging.plan_commit_active(&writer, Some(&base)));
                let _held = at_once(merging.gate.hold());
                done_at_once(merging.empty_active(&writer, base, name.as_ref()));
            }
        };
        let map = Arc::clone(&chain.map);
        assert_eq!(watched(empty, async { first_byte(&map) }).await, NEW);
        assert_eq!(chain.layer_count(), 2, "the active layer became empty meanwhile");
        chain.forget_retired().await;
        chain.close().await.expect("it is closed");
    });
}

/// The story: a file whose free space lies in pieces had no room for the empty table, and was told
/// of a longer one, and of `mica resize`, which does not help.
#[test]
fn file_without_room_for_the_empty_table_says_so() {
    run(async {
        let folder = Folder::default();
        folder.make("base", DISK, None);
        folder.make("active", DISK, Some("base"));
        // An L1 table of two clusters; of two clusters behind it one is in use.
        folder.put("active", 36, &1024_u32.to_be_bytes());
        folder.put("active", 4 * CLUSTER_BYTES, &[0; CLUSTER_BYTES]);
        folder.put("active", REFCOUNTS_AT, &[0b0101_0101; CLUSTER_BYTES]);
        folder.put("active", REFCOUNTS_AT, &[0b0101_1111]);
        let chain = open(&folder, "active").await;
        let layers = CommitLayers { top: None, base: None, active: ActiveAfter::Emptied };
        let error = chain.commit(layers, &Steadily).await.expect_err("it has no room");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error:?}");
        let line = error.in_one_line();
        assert!(line.contains("empty L1 table") && !line.contains("resize"), "{line}");
        assert_eq!(chain.layer_count(), 2);
        chain.close().await.expect("it is closed");
    });
}

/// Is paused for a minute whenever it is asked.
struct Paused;

impl MergeControl for Paused {
    fn step(&self, _: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        Box::pin(async {
            mica_rt::sleep(Duration::from_secs(60)).await;
            ControlFlow::Continue(())
        })
    }
}

/// The story: a merge was paused within the last round in which it slows the guest down, and all
/// that was written meanwhile was copied at once afterwards, while the guest waited.
#[test]
fn pause_within_a_round_is_known_when_the_next_begins() {
    run(async {
        let chain = chain_of_three().await;
        let mut pace = Pace::new(&chain, &chain.map.layers().all()[1..], &Paused);
        let progress = MergeProgress::default();
        assert!(pace.step(progress).await.is_continue());
        assert_eq!(
            pace.take_rested(),
            Duration::ZERO,
            "whoever waits for a rate gets nowhere else"
        );
        for _ in 0..2 {
            assert!(pace.ask(progress).await.is_continue());
        }
        assert!(pace.take_rested() >= Duration::from_secs(120));
        assert_eq!(pace.take_rested(), Duration::ZERO);
        drop(pace);
        chain.close().await.expect("it is closed");
    });
}
