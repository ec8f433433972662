use super::*;
use crate::state::Root;
use mica_units::Rng;

fn id(writer: u64, sequence: u32) -> ExtentId {
    ExtentId { writer: Writer::new(writer).expect("a writer"), sequence }
}

fn header() -> Header {
    let node = Some(Place::new(id(7, 3), 8192, 99));
    Header {
        kind: Kind::Extent,
        id: id(7, 3),
        store: [1; 16],
        volume: [2; 16],
        nonce: [3; 16],
        state: State {
            map: Root { node, height: 7 },
            len: 1 << 40,
            snapshots: Root::default(),
            next_snapshot: 4,
            records: 5,
            time_ns: 6,
        },
        by: Writer::new(7).expect("a writer"),
        blocks: 3,
        frames_len: 0,
        nodes_len: 266,
        entries: 2,
        table_sum: 8,
    }
}

#[test]
fn header_survives_and_says_where_everything_is() {
    let header = header();
    let bytes = header.encode();
    assert_eq!(bytes.len(), HEADER_BYTES);
    assert_eq!(Header::decode(&bytes), Ok(header.clone()));
    assert_eq!(header.nodes_at(), 4 * 4096);
    assert_eq!(header.len(), 4 * 4096 + 266 + 2 * ENTRY_BYTES);
    let framed = Header { frames_len: 640, ..header.clone() };
    let bytes = framed.encode();
    assert_eq!((header.encode()[8], bytes[8]), (1, 2), "older versions read what has no frames");
    assert_eq!(framed.frames_at(), header.nodes_at());
    assert_eq!(framed.len(), header.len() + 640);
    assert_eq!(Header::decode(&bytes), Ok(framed));
    let fence = Header { kind: Kind::Fence, ..header };
    assert_eq!(Header::decode(&fence.encode()), Ok(fence));
}

#[test]
fn header_with_a_flipped_bit_or_a_lost_end_is_refused() {
    let good = header().encode();
    for bit in 0..RAW_BYTES * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(Header::decode(&bad).is_err(), "bit {bit}");
    }
    for len in 0..RAW_BYTES {
        assert_eq!(Header::decode(&good[..len]), Err(Malformed::Truncated));
    }
}

#[test]
fn header_of_another_version_is_named_and_not_taken_for_damage() {
    let mut bytes = header().encode();
    bytes[8] = 3;
    FRAME.seal(&mut bytes);
    assert_eq!(Header::decode(&bytes), Err(Malformed::Version(3)));
}

#[test]
fn header_that_contradicts_itself_is_refused() {
    let later = Some(Place::new(id(7, 4), 8192, 99));
    let state = header().state;
    for bad in [
        Header { blocks: LEN_MAX / BLOCK_BYTES, ..header() },
        Header { nodes_len: LEN_MAX, ..header() },
        Header { entries: LEN_MAX, ..header() },
        Header { frames_len: 100, ..header() },
        Header { frames_len: FramePart::FRAMES_LEN_END + 128, ..header() },
        Header { state: State { map: Root { node: later, height: 7 }, ..state }, ..header() },
        Header { state: State { snapshots: Root { node: later, height: 1 }, ..state }, ..header() },
        Header { state: State { len: State::LEN_MAX + 512, ..state }, ..header() },
        Header { state: State { len: 100, ..state }, ..header() },
        Header { state: State { map: Root { node: None, height: 17 }, ..state }, ..header() },
    ] {
        assert_eq!(Header::decode(&bad.encode()), Err(Malformed::Content), "{bad:?}");
    }
}

#[test]
fn table_survives_and_has_to_fit_its_extent() {
    let entries = [
        Entry::Data { first: 9, count: 2 },
        Entry::Nothing { first: 0, count: State::LEN_MAX / 4096 },
        Entry::Data { first: 1 << 30, count: 1 },
        Entry::Length { bytes: State::LEN_MAX },
        Entry::Take { number: 1, record: header().nodes_at() as u64 + 57472 },
        Entry::Label { number: u64::MAX, record: header().table_at() as u64 + 57472 - 16 },
        Entry::Drop { number: 1 },
        Entry::Rollback { number: 2 },
        Entry::Frame { first: 5, count: 16, len: 57344 },
        Entry::Frame { first: 1 << 30, count: 1, len: 128 },
        Entry::End { entries: 11 },
    ];
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.encode()).collect();
    let frames_len = 57344 + 128;
    let header = Header { entries: entries.len(), frames_len, ..header() };
    let header = Header { table_sum: crc32c(&bytes), ..header };
    assert_eq!(decode_table(&header, &bytes), Ok(entries.to_vec()));
    let frames: Vec<_> = frames_in(&entries).map(|f| (f.offset, f.len, f.blocks)).collect();
    assert_eq!(frames, [(16384, 57344, 16), (16384 + 57344, 128, 1)]);
    let end = [&[5; 99], &*bytes].concat();
    assert_eq!(table_at_end(&end), Ok(Ok(entries.to_vec())));
    assert_eq!(table_at_end(&bytes[16..]), Ok(Err(bytes.len())));
    assert_eq!(table_at_end(&bytes[..160]), Err(Malformed::Content));
    let without_end = Header { entries: 10, table_sum: crc32c(&bytes[..160]), ..header.clone() };
    assert_eq!(decode_table(&without_end, &bytes[..160]), Err(Malformed::Content));
    for record in [0, header.nodes_at() as u64 - 16, header.table_at() as u64] {
        let mut bytes = bytes.clone();
        bytes[4 * ENTRY_BYTES..5 * ENTRY_BYTES]
            .copy_from_slice(&Entry::Take { number: 3, record }.encode());
        let entries = entries.len();
        let header = Header { entries, table_sum: crc32c(&bytes), ..header.clone() };
        let refused = decode_table(&header, &bytes);
        assert_eq!(refused, Err(Malformed::Content), "a record at {record}");
    }
    let others = [
        (Header { blocks: 4, ..header.clone() }, Malformed::Content),
        (Header { frames_len: frames_len + 128, ..header.clone() }, Malformed::Content),
        (Header { table_sum: 1, ..header.clone() }, Malformed::Checksum),
        (Header { entries: 12, ..header }, Malformed::Truncated),
    ];
    for (header, why) in others {
        assert_eq!(decode_table(&header, &bytes), Err(why));
    }
}

#[test]
fn entries_that_nobody_writes_are_refused() {
    let good = Entry::Data { first: 1, count: 1 }.encode();
    for (at, byte) in [(15, 0), (15, 10), (15, 255), (8, 0), (7, 255), (14, 255)] {
        let mut bad = good;
        bad[at] = byte;
        assert_eq!(Entry::decode(bad), None, "{bad:?}");
    }
    let frame = Entry::Frame { first: 1, count: 2, len: 256 }.encode();
    for (at, byte) in [(8, 0), (8, 17), (9, 1), (10, 225), (11, 1), (7, 255)] {
        let mut bad = frame;
        bad[at] = byte;
        assert_eq!(Entry::decode(bad), None, "{bad:?}");
    }
    for kind in 4..8 {
        let mut bad = [0; ENTRY_BYTES];
        bad[15] = kind;
        assert_eq!(Entry::decode(bad), None, "no snapshot has the number 0");
    }
    for good in [Entry::Drop { number: 1 }, Entry::Rollback { number: 1 }] {
        let mut bad = good.encode();
        bad[8] = 1;
        assert_eq!(Entry::decode(bad), None, "a count that means nothing: {bad:?}");
    }
}

#[test]
fn random_bytes_are_never_taken_for_a_header_and_never_a_panic() {
    let mut rng = Rng::new(1);
    for _ in 0..2000 {
        let mut bytes = header().encode();
        for _ in 0..=rng.below(8) {
            let at = usize::try_from(rng.below(RAW_BYTES as u64)).expect("small");
            bytes[at] = u8::try_from(rng.below(256)).expect("a byte");
        }
        // As if somebody had meant it.
        FRAME.seal(&mut bytes);
        if let Ok(header) = Header::decode(&bytes) {
            assert!(header.len() <= LEN_MAX);
        }
    }
}
