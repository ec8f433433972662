use super::*;
use crate::place::Writer;
use crate::recent::Batch;
use crate::state::Root;
use crate::testing::{memory, run};
use mica_block::Objects;

/// A segment with data in so many scattered blocks, from `first` on, and a snapshot after them.
fn segment(first: u64, count: u64, number: u64) -> Segment {
    let mut batch = Batch::default();
    for index in 0..count {
        batch.put(first + index * 0x3456_7890, Block::new(&[7; BLOCK_BYTES]));
    }
    let cut = crate::segment::Cut::Take { number, label: String::new(), time_ns: 1, origin: None };
    let records = number * (count + 1);
    Segment { batch: Arc::new(batch), len: State::LEN_MAX, records, time_ns: 1, cuts: vec![cut] }
}

/// With room for little: neither the editor nor the cache keeps what the first segment made, and
/// the second goes on from it. The store does not have it yet.
#[test]
fn nodes_and_records_of_an_extent_are_read_from_it_while_it_is_made() {
    run(1, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let tree = Tree::new(Arc::clone(&objects), 1);
        let signature = Signature { store: [1; 16], volume: [2; 16] };
        let new = Builder::new(signature, State::empty(State::LEN_MAX));
        let mut builder = Builder { map: Editor::new(Root::default(), 0), ..new };
        let mut last = segment(1, 50, 2);
        let label = "new".to_owned();
        last.cuts.push(crate::segment::Cut::Label { number: 1, label });
        last.records += 1;
        let id = ExtentId { writer: Writer::FIRST, sequence: 0 };
        let segments = [segment(0, 50, 1), last];
        let built = builder.build(&tree, id, &segments, [3; 16]).await.expect("made");
        assert_eq!(built.blocks, 100);
        let content = built.content.to_buf(0..built.content.len());
        objects.put_if_absent(&id.name(), content).await.0.expect("put");
        for first in [0, 1] {
            for index in 0..50 {
                let block = first + index * 0x3456_7890;
                let place = tree.look_up(built.state.map, block).await.expect("read");
                let place = place.expect("it has data");
                let read = tree.read_blocks(place, [place], Buf::new(BLOCK_BYTES)).await;
                assert_eq!(*read.expect("read"), [7; BLOCK_BYTES]);
            }
        }
        let all = crate::snapshots::all(&tree, built.state.snapshots).await.expect("listed");
        let labels = all.iter().map(|record| (record.info.number, &*record.info.label));
        assert_eq!(labels.collect::<Vec<_>>(), [(1, "new"), (2, "")]);
    });
}
