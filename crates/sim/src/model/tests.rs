use super::*;
use mica_units::GuestOffset;

const SECTORS: u64 = 4;

fn model() -> ModelDisk {
    ModelDisk::new(vec![7; place(SECTORS - 1).end])
}

fn sector(number: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(number * SECTOR_BYTES), SECTOR_BYTES).unwrap()
}

/// Starts a request for sector 0.
fn begin(model: &mut ModelDisk, request: Request) -> Ticket {
    model.begin(request, sector(0))
}

/// A request for sector 0 that is acknowledged; what it writes.
fn run(model: &mut ModelDisk, request: Request) -> Vec<u8> {
    let ticket = begin(model, request);
    let content = model.content(&ticket);
    model.end(&ticket, true);
    content
}

fn reads(model: &mut ModelDisk, bytes: &[u8]) -> bool {
    let ticket = begin(model, Request::Read);
    model.end_read(&ticket, bytes).is_ok()
}

/// Whether sector 0 may be `bytes` after a crash now.
fn survives(model: &ModelDisk, bytes: &[u8]) -> bool {
    let mut model = model.clone();
    model.crash();
    model.settle(0, bytes).is_ok()
}

const OLD: [u8; SECTOR] = [7; SECTOR];
const ZEROS: [u8; SECTOR] = [0; SECTOR];

#[test]
fn acknowledged_write_is_read_and_nothing_else() {
    let mut model = model();
    let first = run(&mut model, Request::Write);
    let second = run(&mut model, Request::Write);
    assert!(reads(&mut model, &second));
    assert!(!reads(&mut model, &first));
    assert!(!reads(&mut model, &OLD));
}

#[test]
fn write_in_flight_is_read_old_or_new_per_sector() {
    let mut model = model();
    let range = GuestRange::new(GuestOffset::ZERO, 2 * SECTOR_BYTES).unwrap();
    let write = model.begin(Request::Write, range);
    let content = model.content(&write);
    for mix in [[&OLD[..], &content[SECTOR..]].concat(), [&content[..SECTOR], &OLD].concat()] {
        let read = model.begin(Request::Read, range);
        assert!(model.end_read(&read, &mix).is_ok());
    }
    let swapped = [&content[SECTOR..], &content[..SECTOR]].concat();
    let read = model.begin(Request::Read, range);
    let wrong = model.end_read(&read, &swapped).unwrap_err();
    assert!(format!("{wrong:?}").contains("sector 0 shows write 1 of sector 1"), "{wrong:?}");
}

#[test]
fn read_that_began_before_the_acknowledgement_may_be_old() {
    let mut model = model();
    let write = begin(&mut model, Request::Write);
    let read = begin(&mut model, Request::Read);
    model.end(&write, true);
    assert!(model.end_read(&read, &OLD).is_ok());
    assert!(!reads(&mut model, &OLD));
}

/// The model once took this for a foreign value: the flush made it forget what the read may show.
#[test]
fn read_that_began_before_write_and_flush_may_be_old() {
    let mut model = model();
    let read = begin(&mut model, Request::Read);
    run(&mut model, Request::Write);
    run(&mut model, Request::Flush);
    assert!(!survives(&model, &OLD));
    assert!(model.end_read(&read, &OLD).is_ok());
    run(&mut model, Request::Flush);
    assert!(!reads(&mut model, &OLD));
}

#[test]
fn either_of_two_overlapping_writes_stays_once_it_was_read() {
    let mut model = model();
    let writes = [begin(&mut model, Request::Write), begin(&mut model, Request::Write)];
    let contents = writes.each_ref().map(|write| model.content(write));
    for write in &writes {
        model.end(write, true);
    }
    assert!(!reads(&mut model, &OLD));
    assert!(reads(&mut model, &contents[0]));
    assert!(!reads(&mut model, &contents[1]));
}

#[test]
fn crash_leaves_what_was_flushed_or_anything_later() {
    let mut model = model();
    let first = run(&mut model, Request::Write);
    assert!(survives(&model, &OLD) && survives(&model, &first));
    run(&mut model, Request::Flush);
    assert!(!survives(&model, &OLD) && survives(&model, &first));
    let second = run(&mut model, Request::Write);
    let third = begin(&mut model, Request::Write);
    let third = model.content(&third);
    for allowed in [&first, &second, &third] {
        assert!(survives(&model, allowed));
    }
    assert!(!survives(&model, &OLD));
}

#[test]
fn write_acknowledged_during_a_flush_is_not_durable_by_it() {
    let mut model = model();
    let flush = begin(&mut model, Request::Flush);
    let write = run(&mut model, Request::Write);
    model.end(&flush, true);
    assert!(survives(&model, &OLD) && survives(&model, &write));
}

#[test]
fn failed_flush_makes_nothing_durable() {
    let mut model = model();
    run(&mut model, Request::Write);
    let flush = begin(&mut model, Request::Flush);
    model.end(&flush, false);
    assert!(survives(&model, &OLD));
}

#[test]
fn failed_write_is_old_or_new() {
    let mut model = model();
    let write = begin(&mut model, Request::Write);
    let content = model.content(&write);
    model.end(&write, false);
    run(&mut model, Request::Flush);
    assert!(survives(&model, &OLD) && survives(&model, &content));
    assert!(reads(&mut model, &content) && !reads(&mut model, &OLD));
}

#[test]
fn discard_is_old_or_zeros_and_stays_once_read() {
    let mut model = model();
    run(&mut model, Request::Discard);
    run(&mut model, Request::Flush);
    assert!(survives(&model, &OLD) && survives(&model, &ZEROS));
    assert!(reads(&mut model, &ZEROS) && !reads(&mut model, &OLD));
    run(&mut model, Request::Flush);
    assert!(!survives(&model, &OLD));
}

#[test]
fn zeroes_are_zeros() {
    let mut model = model();
    run(&mut model, Request::Zeroes);
    assert!(!reads(&mut model, &OLD) && reads(&mut model, &ZEROS));
}

#[test]
fn after_a_crash_it_stays_as_it_was_found() {
    let mut model = model();
    let write = run(&mut model, Request::Write);
    model.crash();
    assert!(model.bytes().is_none());
    assert!(model.settle(0, &OLD).is_ok());
    assert_eq!(model.bytes().unwrap()[..SECTOR], OLD);
    assert!(!reads(&mut model, &write) && !survives(&model, &write));
}
