use super::*;

fn environment() -> Environment {
    Environment::new("host", || 7, || [0; 16])
}

fn block(byte: u8) -> Block {
    Block::new(&[byte; 4096])
}

fn put(now: &mut Now, number: u64, byte: u8) {
    now.apply(Change::Data(number, block(byte)), &environment());
}

/// Makes the next extent, with a state that only has its records.
fn make(now: &mut Now) -> Option<u32> {
    let segments = now.take(&environment())?;
    let records = segments.last().expect("there are some").records;
    let sequence = now.next_sequence();
    now.begin(sequence, segments.len(), State { records, ..now.state });
    Some(sequence)
}

#[test]
fn extents_that_are_answered_out_of_order_become_the_state_in_order() {
    let mut now = Now::new(State::empty(1 << 20));
    for byte in 1..=4 {
        put(&mut now, 0, byte);
        now.want();
        assert_eq!(make(&mut now), Some(u32::from(byte) - 1));
    }
    put(&mut now, 0, 5);
    now.want();
    assert_eq!(make(&mut now), None, "enough is under way");
    let generation = now.generation;
    assert!(!now.answered(2) && !now.answered(1));
    assert_eq!((now.state.records, now.generation), (0, generation));
    assert_eq!(now.recent(0), Some(Known::Data(block(5))));
    assert!(now.answered(0));
    assert_eq!((now.state.records, now.sequence), (3, 3));
    assert_eq!(make(&mut now), Some(4));
    assert!(now.answered(3) && now.answered(4));
    assert_eq!((now.state.records, now.recent(0)), (5, None));
}

#[test]
fn what_waits_is_made_only_when_it_is_wanted_or_full() {
    let mut now = Now::new(State::empty(1 << 40));
    put(&mut now, 0, 1);
    assert_eq!((make(&mut now), now.waiting()), (None, Some(0)));
    now.want();
    assert_eq!(now.waiting(), None);
    assert_eq!((make(&mut now), make(&mut now)), (Some(0), None));
    for number in 0..WEIGHT_MAX as u64 {
        assert!(now.make_room(false, &environment()));
        put(&mut now, number, 2);
    }
    assert_eq!(make(&mut now), Some(1));
}

#[test]
fn batches_have_a_bound_and_room_comes_with_answers() {
    let mut now = Now::new(State::empty(1 << 40));
    let mut number = 0;
    while now.make_room(false, &environment()) {
        put(&mut now, number, 1);
        number += 1;
        assert!(number <= 9 * WEIGHT_MAX as u64, "it is full at last");
        make(&mut now);
    }
    assert_eq!(number, 9 * WEIGHT_MAX as u64);
    assert!(now.answered(0) && now.make_room(false, &environment()));
    assert_eq!(now.recent(0), None);
    assert!(now.recent(WEIGHT_MAX as u64).is_some());
}

/// Snapshots that are taken one after the other are cuts of one segment, as long as nothing is
/// written between them and it is not being made already.
#[test]
fn cuts_are_behind_what_was_done_before_and_in_front_of_what_came_later() {
    let mut now = Now::new(State::empty(1 << 20));
    let cut = |number| Change::Cut(Cut::Drop { number });
    put(&mut now, 0, 1);
    now.apply(cut(1), &environment());
    now.apply(cut(2), &environment());
    put(&mut now, 0, 2);
    now.apply(cut(3), &environment());
    assert!(now.has_waiting_cuts());
    now.want();
    assert!(!now.has_waiting_cuts());
    let segments = now.take(&environment()).expect("they are wanted");
    let shape: Vec<_> =
        segments.iter().map(|segment| (segment.records, segment.cuts.len())).collect();
    assert_eq!(shape, [(3, 2), (5, 1)]);
    assert_eq!(segments[0].batch.get(0), Some(Known::Data(block(1))));
    now.apply(cut(4), &environment());
    now.begin(now.next_sequence(), segments.len(), State { records: 5, ..now.state });
    assert!(now.answered(0) && now.heads.lacks_cuts);
    assert_eq!(now.waiting(), Some(5));
}

#[test]
fn small_segments_have_a_bound() {
    let mut now = Now::new(State::empty(1 << 20));
    let mut count = 0;
    while now.make_room(true, &environment()) {
        put(&mut now, 0, 1);
        now.apply(Change::Cut(Cut::Drop { number: 1 }), &environment());
        count += 1;
    }
    assert_eq!(count, SEGMENTS_MAX);
    now.want();
    assert_eq!(make(&mut now), Some(0));
    assert!(now.answered(0) && now.make_room(true, &environment()));
}
