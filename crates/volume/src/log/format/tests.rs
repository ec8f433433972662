use super::*;
use mica_units::Rng;

fn device() -> DeviceHeader {
    DeviceHeader { id: [7; 16], segment_bytes: 1 << 20, segments: 9 }
}

fn segment(writers: u64) -> SegmentHeader {
    SegmentHeader {
        kind: Kind::Records,
        device: [7; 16],
        session: [8; 16],
        store: [9; 16],
        volume: [10; 16],
        number: 5,
        root: 3,
        oldest: 4,
        first: 1 << 40,
        freed: 1 << 30,
        durable: 1 << 31,
        writers: (1..=writers).map(|number| Writer::new(number).unwrap()).collect(),
    }
}

#[test]
fn headers_are_read_as_they_were_written() {
    assert_eq!(DeviceHeader::decode(&device().encode()), Ok(device()));
    for header in [segment(1), segment(WRITERS_MAX as u64)] {
        for kind in [Kind::Records, Kind::Ended, Kind::SetAside] {
            let header = SegmentHeader { kind, ..header.clone() };
            assert_eq!(SegmentHeader::decode(&header.encode()), Ok(header));
        }
    }
}

#[test]
fn file_of_any_length_has_segments_within_their_limits_or_is_too_short() {
    let of = |len| DeviceHeader::for_len([0; 16], len);
    assert_eq!(of(DeviceHeader::LEN_MIN - 1), None);
    assert_eq!(of(DeviceHeader::LEN_MIN).map(|header| header.segments), Some(3));
    assert_eq!(of(0), None);
    assert_eq!(of((1 << 30) + BLOCK_LEN).map(|header| header.segment_bytes), Some(4 << 20));
    let mut rng = Rng::new(1);
    for bits in 16..64 {
        for _ in 0..20 {
            let len = (1 << bits) | rng.below(1 << bits);
            let header = of(len).expect("long enough");
            assert!(header.len() <= len, "{header:?} in {len}");
            assert_eq!(DeviceHeader::decode(&header.encode()), Ok(header));
            // Little is left over, unless that is more than a log can have.
            let left = len - header.len();
            assert!(left < header.segment_bytes || header.segments == SEGMENTS_MAX, "{left}");
        }
    }
}

#[test]
fn newer_version_is_named_and_not_taken_for_damage() {
    for (mut block, frame) in [(device().encode(), FRAME), (segment(2).encode(), SEGMENT_FRAME)] {
        let newer = block[8] + 1;
        block[8] = newer;
        frame.seal(&mut block);
        let malformed = match frame.magic {
            MAGIC => DeviceHeader::decode(&block).err(),
            _ => SegmentHeader::decode(&block).err(),
        };
        let newer = Malformed::Version(newer.into());
        assert_eq!(malformed, Some(newer));
        assert!(newer.to_string().contains("a newer mica"));
    }
}

/// What is wrong in a header is found even if its sum is right.
#[test]
fn header_that_contradicts_itself_is_refused() {
    let no_device = |change: &dyn Fn(&mut DeviceHeader)| {
        let mut header = device();
        change(&mut header);
        assert_eq!(DeviceHeader::decode(&header.encode()), Err(Malformed::Content), "{header:?}");
    };
    no_device(&|header| header.segment_bytes = SEGMENT_BYTES_MIN - BLOCK_LEN);
    no_device(&|header| header.segment_bytes = SEGMENT_BYTES_MAX + BLOCK_LEN);
    no_device(&|header| header.segment_bytes += 512);
    no_device(&|header| header.segments = SEGMENTS_MIN - 1);
    no_device(&|header| header.segments = u32::MAX);
    let no_segment = |at: usize, byte: u8| {
        let mut block = segment(2).encode();
        block[at] = byte;
        SEGMENT_FRAME.seal(&mut block);
        assert_eq!(SegmentHeader::decode(&block), Err(Malformed::Content), "byte {at}");
    };
    // Kind, reserved bytes, a root that is newer than the oldest segment, an oldest one that is
    // newer, more that is freed or durable than there is, a writer too large, a writer behind the
    // last, padding.
    let writers = std::mem::offset_of!(RawSegment, writers);
    for (at, byte) in [
        (12, 3),
        (13, 1),
        (88, 5),
        (96, 6),
        (119, 1),
        (127, 1),
        (writers + 7, 1),
        (writers + 24, 1),
        (507, 1),
    ] {
        no_segment(at, byte);
    }
    no_segment(writers, 0);
}

#[test]
fn random_bytes_are_never_a_panic() {
    for seed in 0..2000 {
        let mut rng = Rng::new(seed);
        let mut bytes = if rng.percent(50) { device().encode() } else { segment(3).encode() };
        for _ in 0..1 + rng.below(8) {
            bytes[usize::try_from(rng.below(512)).unwrap()] = u8::try_from(rng.below(256)).unwrap();
        }
        for frame in [FRAME, SEGMENT_FRAME] {
            if rng.percent(50) {
                frame.seal(&mut bytes);
            }
            if let Ok(header) = DeviceHeader::decode(&bytes) {
                assert_eq!(header.encode()[..512], bytes[..512]);
            }
            if let Ok(header) = SegmentHeader::decode(&bytes) {
                assert_eq!(header.encode()[..512], bytes[..512]);
            }
            let _ = GroupHead::decode(&bytes);
        }
        let len = usize::try_from(rng.below(512)).unwrap();
        assert!(DeviceHeader::decode(&bytes[..len]).is_err());
        assert!(SegmentHeader::decode(&bytes[..len]).is_err());
    }
}

#[test]
fn group_counts_only_as_it_was_written_and_where() {
    let records = [3; 100];
    let head = GroupHead { len: 100, count: 4, segment: 5, first: 77, durable: Some(70) };
    let (device, session) = ([1; 16], [2; 16]);
    let mut bytes = head.encode(&device, &session, |sum| sum.add(&records)).to_vec();
    bytes.extend(records);
    bytes.extend([0; 9]);
    assert_eq!(GroupHead::decode(&bytes), Some(head));
    assert_eq!(head.records(&device, &session, &bytes), Some(&records[..]));
    assert_eq!(head.records(&session, &session, &bytes), None, "of another device");
    assert_eq!(head.records(&device, &device, &bytes), None, "of another time");
    assert_eq!(head.records(&device, &session, &bytes[..131]), None);
    for at in 0..132 {
        bytes[at] ^= 1;
        let changed = GroupHead::decode(&bytes);
        let counts = changed.is_some_and(|head| head.records(&device, &session, &bytes).is_some());
        assert!(!counts, "byte {at}");
        bytes[at] ^= 1;
    }
    for durable in [None, Some(0), Some(77)] {
        let head = GroupHead { durable, ..head };
        assert_eq!(
            GroupHead::decode(&head.encode(&device, &session, |sum| sum.add(&records))),
            Some(head)
        );
    }
    let too_long = GroupHead { len: GROUP_BYTES_MAX - GROUP_HEAD_BYTES + 1, ..head };
    let records = vec![0; too_long.len];
    assert_eq!(
        GroupHead::decode(&too_long.encode(&device, &session, |sum| sum.add(&records))),
        None
    );
    assert_eq!(GroupHead::decode(&[0; BLOCK]), None, "what was never written");
}
