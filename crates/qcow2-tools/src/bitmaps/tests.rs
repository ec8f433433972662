//! Bits that are set, and power cuts while bitmaps of an image with a long header change.

use super::*;
use crate::create::{ImageWish, Stores, create};
use crate::recover::tests::power::{Random, states};
use crate::recover::tests::store::Logged;
use futures_util::FutureExt;
use mica_store::MemoryStore;
use std::future::Future;

/// Everything here is ready at once.
fn run<T>(future: impl Future<Output = Result<T>>) -> T {
    future.now_or_never().expect("a store of memory never waits").expect("it succeeds")
}

/// An image over a backing file with so long a name that the header has more than one sector.
fn with_long_name() -> (Vec<u8>, String) {
    let name = "a/".repeat(295) + "base.qcow2";
    let wish = ImageWish {
        cluster_bytes: Some(4096),
        backing_name: Some(name.clone().into()),
        backing_format: Some("qcow2".to_owned()),
        ..ImageWish::default()
    };
    let store = MemoryStore::new_writable("image", Vec::new());
    let plan = wish.plan(1 << 20).expect("a plan");
    run(create(plan, Stores { image: &store, data: None }));
    let len = usize::try_from(store.len().expect("memory")).expect("small");
    (run(read_exact(&store, HostOffset::ZERO, len)).to_vec(), name)
}

fn header_of(bytes: &[u8]) -> Header {
    Header::decode(bytes, bytes.len() as u64).expect("a header")
}

/// Every state that a power cut leaves of what was done to `store`, which was `before`, has the
/// backing file of that name.
fn assert_name_is_kept(before: &[u8], store: &Logged, name: &str, random: &mut Random) {
    let events = store.events();
    for end in 0..=events.len() {
        for state in states(before, &events, end, random) {
            let backing = header_of(&state).backing.expect("it has one");
            assert!(backing.name == name, "cut after {end} of {}", events.len());
            run(list_bitmaps(&*Logged::new(&state), &header_of(&state)));
        }
    }
}

#[test]
fn power_cut_while_bitmaps_change_leaves_a_long_name_whole() {
    let (image, name) = with_long_name();
    for seed in 1..20 {
        let mut random = Random(seed);
        let mut bytes = image.clone();
        for action in [
            BitmapAction::Add(None),
            BitmapAction::Disable,
            BitmapAction::Clear,
            BitmapAction::Enable,
            BitmapAction::Remove,
        ] {
            let store = Logged::new(&bytes);
            let header = header_of(&bytes);
            let entries = run(list_bitmaps(&*store, &header));
            let editor = Editor::new(store.clone(), header, entries);
            run(editor.edit("b", vec![action]));
            assert_name_is_kept(&bytes, &store, &name, &mut random);
            bytes = store.content();
        }
    }
}

#[test]
fn power_cut_while_bitmaps_get_another_length_leaves_a_long_name_whole() {
    let (image, name) = with_long_name();
    let store = Logged::new(&image);
    let editor = Editor::new(store.clone(), header_of(&image), Vec::new());
    run(editor.edit("b", vec![BitmapAction::Add(None)]));
    // The name is not where a header that is laid out again has it.
    let mut before = store.content();
    before[512..2048].fill(0);
    before[8..16].copy_from_slice(&2048_u64.to_be_bytes());
    before[2048..2048 + name.len()].copy_from_slice(name.as_bytes());
    for seed in 1..20 {
        let store = Logged::new(&before);
        let as_store: Arc<dyn Store> = store.clone();
        let mut header = header_of(&before);
        let resized = run(ResizedBitmaps::prepare(&as_store, &mut header, 2 << 20));
        let resized = resized.expect("it has bitmaps");
        let new = Header { size: 2 << 20, bitmaps: Some(resized.of_new_length()), ..header };
        run(replace_header(&*as_store, &new));
        run(resized.finish(&as_store, Ok(())));
        assert!(header_of(&store.content()).autoclear.bitmaps_consistent);
        assert_name_is_kept(&before, &store, &name, &mut Random(seed));
    }
}

#[test]
fn header_that_no_single_write_replaces_is_refused_before_anything_is_written() {
    let (image, _) = with_long_name();
    let store = Logged::new(&image);
    let mut header = header_of(&image);
    let unknown = mica_qcow2_format::Extension { magic: 7, data: vec![1; 500] };
    header.unknown_extensions.push(unknown);
    let editor = Editor::new(store.clone(), header, Vec::new());
    let edited = editor.edit("b", vec![BitmapAction::Add(None)]).now_or_never();
    let error = edited.expect("ready").expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(store.content() == image, "it is as it was");
}

#[test]
fn bits_are_set_from_one_to_another() {
    let bits = |first, last| {
        let mut bits = [0; 4];
        set(&mut bits, first, last);
        bits
    };
    assert_eq!(bits(0, 0), [1, 0, 0, 0]);
    assert_eq!(bits(3, 5), [0b0011_1000, 0, 0, 0]);
    assert_eq!(bits(7, 8), [0x80, 1, 0, 0]);
    assert_eq!(bits(4, 27), [0xf0, 0xff, 0xff, 0x0f]);
    assert_eq!(bits(0, 31), [0xff; 4]);
}
