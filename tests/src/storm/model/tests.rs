use super::*;

const DISK: u64 = 5;

fn sees(model: &Model, seq: Seq, view: View) -> bool {
    let bytes = match seq {
        0 => vec![0; SECTOR],
        _ => stamp::bytes(DISK, 0, 1, seq),
    };
    model.judge(0, &bytes, view).is_ok()
}

fn one() -> Model {
    Model::new(DISK, 1)
}

const ALL: Range<u64> = 0..1;

#[test]
fn acknowledged_write_is_there_and_one_without_an_answer_may_be() {
    let mut model = one();
    model.send(&ALL, 1);
    assert!(sees(&model, 0, View::Kept) && sees(&model, 1, View::Kept));
    model.acknowledge(&ALL, 1, false);
    model.send(&ALL, 2);
    assert!(!sees(&model, 0, View::Kept));
    assert!([1, 2].iter().all(|seq| sees(&model, *seq, View::Kept)));
    assert!([0, 1, 2].iter().all(|seq| sees(&model, *seq, View::Lossy)));
    assert!(!sees(&model, 3, View::Lossy));
}

#[test]
fn flush_promises_what_was_acknowledged_before_it_was_sent() {
    let mut model = one();
    model.send(&ALL, 1);
    model.acknowledge(&ALL, 1, false);
    let mark = model.mark();
    model.send(&ALL, 2);
    model.acknowledge(&ALL, 2, false);
    model.flushed(mark);
    assert!(!sees(&model, 0, View::Lossy));
    assert!(sees(&model, 1, View::Lossy) && sees(&model, 2, View::Lossy));
    assert!(!sees(&model, 1, View::Kept));
    model.closed();
    assert!(!sees(&model, 1, View::Lossy));
}

#[test]
fn write_with_fua_is_durable_and_what_is_sent_after_it_is_not() {
    let mut model = one();
    model.send(&ALL, 1);
    model.acknowledge(&ALL, 1, false);
    model.send(&ALL, 2);
    model.acknowledge(&ALL, 2, true);
    assert!(!sees(&model, 1, View::Lossy) && sees(&model, 2, View::Lossy));
}

#[test]
fn trim_with_fua_is_durable_once_it_is_seen_and_nothing_else_left_zeros() {
    for (first, is_durable) in [(1, true), (0, false)] {
        let mut model = one();
        model.foreign(&ALL, 9);
        model.send(&ALL, first);
        model.acknowledge(&ALL, first, false);
        model.trim(&ALL);
        model.trimmed_durably(&ALL);
        assert!(sees(&model, first, View::Kept) && sees(&model, 9, View::Lossy));
        model.read(0, &[0]);
        assert!(sees(&model, 0, View::Lossy));
        assert_eq!(sees(&model, 9, View::Lossy), !is_durable);
    }
}

#[test]
fn what_another_program_wrote_stays_whatever_is_lost() {
    let mut model = one();
    model.send(&ALL, 1);
    model.acknowledge(&ALL, 1, false);
    model.foreign(&ALL, 9);
    assert!(sees(&model, 9, View::Lossy) && !sees(&model, 1, View::Lossy));
    model.closed();
    assert!(sees(&model, 9, View::Kept));
}

#[test]
fn zeros_that_another_program_commits_over_zeros_may_come_before_what_a_log_has() {
    for (there, is_trimmed) in [(0, false), (0, true), (1, false), (1, true)] {
        let mut model = one();
        model.send(&ALL, 1);
        model.acknowledge(&ALL, 1, false);
        let before = model.clone();
        // An earlier commit had something there, which the second one takes away.
        model.foreign(&ALL, 8);
        if is_trimmed {
            model.trim(&ALL);
        } else {
            model.foreign(&ALL, 0);
        }
        model.zeros_left_no_trace(&before, &[there]);
        assert!(sees(&model, 0, View::Lossy));
        assert_eq!(sees(&model, 8, View::Lossy), is_trimmed);
        assert_eq!(sees(&model, 1, View::Lossy), there == 0);
        assert!(!model.settle(&[0]), "another program's zeros are no loss");
    }
}

#[test]
fn what_a_start_does_not_show_is_gone_for_good() {
    let mut model = one();
    for seq in [1, 2] {
        model.send(&ALL, seq);
        model.acknowledge(&ALL, seq, false);
    }
    model.send(&ALL, 3);
    assert!(model.settle(&[1]), "an acknowledged write is lost");
    assert!(sees(&model, 1, View::Kept) && !sees(&model, 2, View::Lossy));
    assert!(!sees(&model, 3, View::Lossy));
    assert!(sees(&model, 0, View::Lossy), "nothing was flushed");
    assert!(!model.settle(&[1]));
}

#[test]
fn read_decides_what_a_trim_did() {
    let mut model = one();
    model.foreign(&ALL, 4);
    model.trim(&ALL);
    assert!(sees(&model, 4, View::Kept) && sees(&model, 0, View::Kept));
    model.read(0, &[0]);
    assert!(!sees(&model, 4, View::Kept) && sees(&model, 4, View::Lossy));
    model.closed();
    assert!(!sees(&model, 4, View::Lossy));
}

#[test]
fn disk_that_gets_longer_has_zeros_and_forgets_what_it_lost() {
    let mut model = Model::new(DISK, 2);
    model.send(&(1..2), 1);
    model.resize(1);
    model.resize(3);
    model.closed();
    assert_eq!(model.judge(1, &[0; 2 * SECTOR], View::Kept), Ok(vec![0, 0]));
}

#[test]
fn similar_neighbouring_errors_are_reported_as_one() {
    let model = Model::new(DISK, 4);
    let bytes = [stamp::bytes(DISK, 0, 3, 7), vec![3; SECTOR]].concat();
    let bad = model.judge(0, &bytes, View::Kept).expect_err("nobody wrote");
    let told: Vec<_> = bad.iter().map(|bad| (bad.sector, bad.count, bad.seen)).collect();
    assert_eq!(told, [(0, 3, Seen::Write(7)), (3, 1, Seen::Foreign)]);
}
