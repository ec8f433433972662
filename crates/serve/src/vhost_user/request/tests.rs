use super::*;
use crate::vhost_user::testing::{Guest, MIB};

const RULES: Rules = Rules { disk_len: MIB, is_writable: true };
const HEADER: u64 = 0x100;
const DATA: u64 = 0x1000;

fn piece(at: u64, len: u32) -> Piece {
    Piece { at: GuestAddress(at), len }
}

/// A request with `readable` and `writable` bytes of data, and `data` in them.
fn parse(
    rules: Rules,
    kind: u32,
    sector: u64,
    (readable, writable): (u32, u32),
    data: &[u8],
) -> Result<Action, Malformed> {
    let guest = Guest::new(&[16 * MIB]);
    guest.put(HEADER, &[&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat());
    guest.put(DATA, data);
    // The header is in two pieces.
    let mut readable = vec![piece(HEADER, 7), piece(HEADER + 7, 9), piece(DATA, readable)];
    readable.retain(|piece| piece.len > 0);
    let mut chain = Chain { readable, writable: vec![piece(DATA, writable + 1)] };
    let request = Request::parse(&guest.memory.guest, &mut chain, rules)?;
    assert_eq!(request.status_at, GuestAddress(DATA + u64::from(writable)));
    Ok(request.action)
}

fn action(kind: u32, sector: u64, data: (u32, u32)) -> Action {
    parse(RULES, kind, sector, data, &[]).expect("a request")
}

fn range(start: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(start), len).expect("a range")
}

const IO_ERROR: Action = Action::Refuse(Status::IoError);
const UNSUPPORTED: Action = Action::Refuse(Status::Unsupported);

#[test]
fn reads_and_writes_lie_on_the_disk_in_whole_sectors() {
    assert_eq!(action(READ, 3, (0, 1024)), Action::Read(range(1536, 1024)));
    assert_eq!(action(WRITE, 3, (1024, 0)), Action::Write(range(1536, 1024)));
    assert_eq!(action(READ, 2047, (0, 512)), Action::Read(range(MIB - 512, 512)));
    for (sector, len) in [
        (2047, 1024),
        (2048, 512),
        (0, 511),
        (0, 513),
        (0, 0),
        (u64::MAX, 512),
        (u64::MAX / 512, 512),
        (u64::MAX / 512 + 2, 512),
    ] {
        assert_eq!(action(READ, sector, (0, len)), IO_ERROR, "{len} at {sector}");
        assert_eq!(action(WRITE, sector, (len, 0)), IO_ERROR, "{len} at {sector}");
    }
    assert_eq!(action(READ, 0, (512, 0)), IO_ERROR, "data that it cannot write");
    assert_eq!(action(WRITE, 0, (0, 512)), IO_ERROR, "data that it may not read");
}

#[test]
fn others_are_flushes_questions_or_unsupported() {
    assert_eq!(action(FLUSH, 0, (0, 0)), Action::Flush);
    assert_eq!(action(GET_ID, 0, (0, 20)), Action::GetId);
    assert_eq!(action(GET_ID, 0, (0, 512)), Action::GetId);
    assert_eq!(action(GET_ID, 0, (0, 19)), IO_ERROR);
    for kind in [2, 3, 5, 7, 9, 10, 12, 14, 16, 1 << 31, u32::MAX] {
        assert_eq!(action(kind, 0, (512, 512)), UNSUPPORTED, "kind {kind}");
    }
}

fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

fn emptied(kind: u32, ranges: &[Vec<u8>]) -> Action {
    let data = ranges.concat();
    let len = u32::try_from(data.len()).expect("short");
    parse(RULES, kind, 0, (len, 0), &data).expect("a request")
}

/// Virtio 1.3, section 5.2.6.2.
#[test]
fn flags_of_emptied_ranges_are_those_of_the_specification() {
    let one = |may_unmap| vec![ZeroRange { range: range(512, 1024), may_unmap }];
    assert_eq!(emptied(DISCARD, &[segment(1, 2, 0)]), Action::Discard(one(false)));
    assert_eq!(emptied(DISCARD, &[segment(1, 2, 1)]), UNSUPPORTED);
    assert_eq!(emptied(WRITE_ZEROES, &[segment(1, 2, 0)]), Action::WriteZeroes(one(false)));
    assert_eq!(emptied(WRITE_ZEROES, &[segment(1, 2, 1)]), Action::WriteZeroes(one(true)));
    for kind in [DISCARD, WRITE_ZEROES] {
        assert_eq!(emptied(kind, &[segment(1, 2, 2)]), UNSUPPORTED);
        assert_eq!(emptied(kind, &[segment(1, 2, 1 << 31)]), UNSUPPORTED);
        assert_eq!(emptied(kind, &[segment(1, 2, 0), segment(1, 2, 4)]), UNSUPPORTED);
    }
}

#[test]
fn emptied_ranges_are_bounded() {
    for kind in [DISCARD, WRITE_ZEROES] {
        let many = |count: usize| vec![segment(0, 1, 0); count];
        assert!(!matches!(emptied(kind, &many(32)), Action::Refuse(_)));
        assert_eq!(emptied(kind, &many(33)), IO_ERROR);
        assert_eq!(emptied(kind, &[]), IO_ERROR);
        assert_eq!(emptied(kind, &[vec![0; 15]]), IO_ERROR);
        assert_eq!(emptied(kind, &[vec![0; 17]]), IO_ERROR);
        assert_eq!(emptied(kind, &[segment(2047, 2, 0)]), IO_ERROR);
        assert_eq!(emptied(kind, &[segment(0, 1, 0), segment(u64::MAX, 1, 0)]), IO_ERROR);
        assert_eq!(emptied(kind, &[segment(0, RANGE_SECTORS_MAX + 1, 0)]), IO_ERROR);
        let nothing = emptied(kind, &[segment(5, 0, 0)]);
        assert!(
            matches!(nothing, Action::Discard(all) | Action::WriteZeroes(all) if all.is_empty())
        );
    }
}

#[test]
fn disk_that_is_only_read_is_not_changed() {
    let rules = Rules { is_writable: false, ..RULES };
    let data = segment(0, 1, 0);
    assert_eq!(parse(rules, WRITE, 0, (512, 0), &[]), Ok(IO_ERROR));
    assert_eq!(parse(rules, DISCARD, 0, (16, 0), &data), Ok(IO_ERROR));
    assert_eq!(parse(rules, WRITE_ZEROES, 0, (16, 0), &data), Ok(IO_ERROR));
    assert_eq!(parse(rules, FLUSH, 0, (0, 0), &[]), Ok(Action::Flush));
}

#[test]
fn request_without_header_or_status_is_none() {
    let guest = Guest::new(&[MIB]);
    let parse = |readable: &[Piece], writable: &[Piece]| {
        let mut chain = Chain { readable: readable.to_vec(), writable: writable.to_vec() };
        Request::parse(&guest.memory.guest, &mut chain, RULES).err()
    };
    let (header, status) = (piece(0, 16), piece(64, 1));
    assert_eq!(parse(&[header], &[]), Some(Malformed::TooShort));
    assert_eq!(parse(&[piece(0, 15)], &[status]), Some(Malformed::TooShort));
    assert_eq!(parse(&[], &[status]), Some(Malformed::TooShort));
    assert_eq!(parse(&[piece(MIB - 8, 16)], &[status]), Some(Malformed::NotMapped));
    assert_eq!(parse(&[piece(u64::MAX, 16)], &[status]), Some(Malformed::NotMapped));
    assert_eq!(parse(&[header], &[piece(u64::MAX, 2)]), Some(Malformed::NotMapped));
    assert_eq!(parse(&[header], &[status]), None, "a read of nothing, which is refused");
}
