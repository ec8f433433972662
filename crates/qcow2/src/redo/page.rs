//! Checks that docs/formats/redo-log.md matches the code.

use super::baseline::{HeaderFields, HeaderState, SpaceState};
use super::expected::EXPECTED;
use super::format::{
    EARLY, EARLY_ZEROS, GROUP_HEAD_BYTES, GroupHead, HEADER, HEADER_BYTES, HEADERS_AT, LATE,
    LATE_ZEROS, LogHeader, MAGIC, RECORD_HEAD_BYTES, RECORDS_AT, SPACE, WITNESSES, ZERO_PAGES_MAX,
};
use mica_block::RedoOrigin;
use mica_units::HostCluster;

const PAGE: &str = include_str!("../../../../docs/formats/redo-log.md");

/// The value of `name` in the page's table of constants.
fn constant(name: &str) -> &'static str {
    let row = format!("| `{name}` | ");
    let said = PAGE.lines().find_map(|line| line.strip_prefix(&row)).expect("the page has it");
    said.split_once(" |").expect("a table").0
}

#[test]
fn page_has_the_constants_of_the_code() {
    let (version, letters) = MAGIC.split_last().expect("bytes");
    let letters = std::str::from_utf8(letters).expect("letters");
    assert_eq!(constant("MAGIC"), format!("`{letters}\\x{version:02x}`"));
    assert!(PAGE.contains(&format!("\n| {version} | ")), "the version is in the table of versions");
    let constants: [(&str, u64); 5] = [
        ("HEADER_BYTES", HEADER_BYTES as u64),
        ("RECORDS_AT", RECORDS_AT),
        ("GROUP_HEAD_BYTES", GROUP_HEAD_BYTES as u64),
        ("RECORD_HEAD_BYTES", RECORD_HEAD_BYTES as u64),
        ("ZERO_PAGES_MAX", ZERO_PAGES_MAX),
    ];
    for (name, value) in constants {
        assert_eq!(constant(name), value.to_string(), "{name}");
    }
    let [first, second] = HEADERS_AT;
    assert!(PAGE.contains(&format!("Two headers, at {first} and at {second}")));
}

#[test]
fn page_has_the_kinds_of_records() {
    for kinds in [
        format!("{EARLY}, {LATE}"),
        format!("{EARLY_ZEROS}, {LATE_ZEROS}"),
        EXPECTED.to_string(),
        SPACE.to_string(),
        HEADER.to_string(),
        WITNESSES.to_string(),
    ] {
        assert!(PAGE.contains(&format!("\n| {kinds} | ")), "kind {kinds}");
    }
}

#[test]
fn header_is_laid_out_as_the_page_says() {
    let header = LogHeader {
        salt: 0x1111_1111,
        names: [0x2222_2222, 0x3333_3333],
        origin: RedoOrigin { boot: 4, memory: 8 },
        start: 5,
        number: 6,
        sequence: 7,
        time_ns: 9,
        next: 10,
        replay_began: true,
    };
    let bytes = header.encode();
    assert_eq!(LogHeader::decode(&bytes), Some(header));
    let starts = [
        (8, 0x11),
        (12, 0x22),
        (16, 4),
        (32, 5),
        (40, 6),
        (48, 0x33),
        (52, 7),
        (60, 8),
        (76, 9),
        (84, 10),
        (92, 1),
    ];
    for (at, byte) in starts {
        assert_eq!(bytes[at], byte, "at {at}");
    }
    for at in 0..bytes.len() {
        let mut damaged = bytes;
        damaged[at] ^= 1;
        assert_eq!(LogHeader::decode(&damaged), None, "byte {at} is summed");
    }
}

#[test]
fn group_head_is_laid_out_as_the_page_says() {
    let head = GroupHead { number: 0x11, time_ns: 0x22, len: 0x33, sum: 0x44 };
    let bytes = head.encode();
    for (at, byte) in [(0, 0x11), (8, 0x22), (16, 0x33), (20, 0x44)] {
        assert_eq!(bytes[at], byte, "at {at}");
    }
    assert_eq!(GroupHead::decode(&bytes).encode(), bytes);
    let sum = |time_ns| GroupHead::of(1, 2, time_ns, b"records").sum;
    assert_ne!(sum(3), sum(4), "the time is summed");
}

#[test]
fn baseline_records_are_as_long_as_the_page_says() {
    let mut bytes = Vec::new();
    let now = HeaderFields::default();
    HeaderState { now, next: None }.append_to(&mut bytes);
    assert_eq!(bytes.len(), RECORD_HEAD_BYTES + 8 * 8);
    bytes.clear();
    SpaceState { min_file_len: 1, unused: vec![(HostCluster::new(2), 3)] }.append_to(&mut bytes);
    assert_eq!(bytes.len(), RECORD_HEAD_BYTES + 16);
}
