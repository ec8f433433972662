use super::*;
use crate::place::{ExtentId, Writer};
use mica_units::Rng;

fn place(sequence: u32, offset: usize) -> Place {
    let writer = Writer::new(7).expect("a writer");
    Place::new(ExtentId { writer, sequence }, offset, 99)
}

fn at() -> Place {
    place(3, 8192)
}

fn record(label: &str) -> Record {
    Record {
        info: SnapshotInfo {
            number: 5,
            label: label.to_owned(),
            time_ns: 1_795_000_000_000_000_000,
            len: 1 << 40,
            records: 77,
        },
        map: Root { node: Some(place(3, 4096)), height: 7 },
        origin: None,
    }
}

#[test]
fn record_survives_with_each_label_and_without_a_map() {
    let long = "l".repeat(LABEL_BYTES_MAX);
    for label in ["", "before the update", "ä", &long] {
        let record = record(label);
        let bytes = record.encode();
        assert_eq!(bytes.len(), RECORD_BYTES + label.len());
        assert!(bytes.len() + NODE_HEADER_BYTES <= FRAMED_BYTES_MAX);
        assert_eq!(Record::decode(&bytes, at()), Ok(record));
    }
    let empty = Record { map: Root::default(), ..record("nothing written yet") };
    assert_eq!(Record::decode(&empty.encode(), at()), Ok(empty));
}

#[test]
fn record_keeps_where_it_was_received_from() {
    let origin = Origin { volume: [9; 16], number: 31 };
    let long = "l".repeat(LABEL_BYTES_MAX);
    for label in ["", "monday", &long] {
        let received = Record { origin: Some(origin), ..record(label) };
        let bytes = received.encode();
        assert_eq!(bytes.len(), RECORD_BYTES + ORIGIN_BYTES + label.len());
        assert!(bytes.len() + NODE_HEADER_BYTES <= FRAMED_BYTES_MAX);
        assert_eq!(received.identity([1; 16]), origin);
        assert_eq!(Record::decode(&bytes, at()), Ok(received));
    }
    assert_eq!(record("here").identity([1; 16]), Origin { volume: [1; 16], number: 5 });
    let zero = Record { origin: Some(Origin { number: 0, ..origin }), ..record("") };
    assert_eq!(Record::decode(&zero.encode(), at()), Err(Malformed::Content));
}

#[test]
fn record_that_contradicts_itself_is_refused() {
    let good = record("good");
    let with = |change: &dyn Fn(&mut Record)| {
        let mut bad = good.clone();
        change(&mut bad);
        bad.encode()
    };
    for bad in [
        with(&|bad| bad.info.number = 0),
        with(&|bad| bad.info.label = "123".to_owned()),
        with(&|bad| bad.info.label = "a@b".to_owned()),
        with(&|bad| bad.info.label = "\u{1b}[2J".to_owned()),
        with(&|bad| bad.info.len = State::LEN_MAX + 512),
        with(&|bad| bad.info.len = 100),
        with(&|bad| bad.map.height = HEIGHT_MAX + 1),
        with(&|bad| bad.map.node = Some(at())),
        with(&|bad| bad.map.node = Some(place(4, 4096))),
    ] {
        assert_eq!(Record::decode(&bad, at()), Err(Malformed::Content), "{bad:?}");
    }
    // No text, another length than the label has, something in what is reserved, no writer.
    for (byte, value) in [(RECORD_BYTES, 0xff), (49, 3), (49, 5), (50, 1), (36, 0)] {
        let mut bad = good.encode();
        bad[byte] = value;
        if byte == 36 {
            bad[32..37].fill(0);
        }
        assert_eq!(Record::decode(&bad, at()), Err(Malformed::Content), "byte {byte}");
    }
}

#[test]
fn record_with_a_lost_end_is_refused() {
    let good = record("good").encode();
    for len in 0..good.len() {
        let refused = Record::decode(&good[..len], at()).expect_err("too short");
        let is_cut = len < RECORD_BYTES;
        assert_eq!(refused, if is_cut { Malformed::Truncated } else { Malformed::Content });
    }
}

/// Whatever is decoded is what its own bytes say, and keeps the promises of the type.
#[test]
fn random_bytes_are_never_a_panic_and_what_is_decoded_is_sound() {
    let mut decoded = 0;
    for seed in 0..20_000 {
        let mut rng = Rng::new(seed);
        let mut bytes =
            record(["", "a", "two words"][usize::try_from(seed % 3).expect("small")]).encode();
        for _ in 0..rng.below(4) {
            let index = usize::try_from(rng.below(bytes.len() as u64)).expect("small");
            bytes[index] = u8::try_from(rng.below(256)).expect("a byte");
        }
        if rng.percent(10) {
            let len = usize::try_from(rng.below(400)).expect("small");
            bytes.resize(len, u8::try_from(rng.below(256)).expect("a byte"));
        }
        let Ok(found) = Record::decode(&bytes, at()) else { continue };
        decoded += 1;
        assert_eq!(found.encode(), bytes, "seed {seed}");
        check_label(&found.info.label).expect("a label");
        assert!(State::is_len(found.info.len));
        assert!(found.map.node.is_none_or(|node| at().may_name(node)));
    }
    assert!(decoded > 1000, "the test meets records that are sound: {decoded}");
}
