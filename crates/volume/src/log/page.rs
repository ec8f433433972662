//! That docs/formats/log.md says what the code does.

use super::format::{
    BLOCK, GROUP_BYTES_MAX, GROUP_HEAD_BYTES, MAGIC, NUMBER_MAX, RawDevice, RawGroup, RawSegment,
    SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SEGMENT_MAGIC, SEGMENTS_MAX, SEGMENTS_MIN, VERSION,
    WRITERS_MAX,
};
use super::record::{LABEL_LEN_MAX, RECORD_HEAD_BYTES};
use std::mem::offset_of;

const PAGE: &str = include_str!("../../../../docs/formats/log.md");

#[test]
fn page_has_the_constants_of_the_code() {
    let constant = |name: &str| {
        let row = format!("| `{name}` | ");
        let said = PAGE.lines().find_map(|line| line.strip_prefix(&row)).expect("the page has it");
        said.split_once(" |").expect("a table").0
    };
    for (name, magic) in [("MAGIC", MAGIC), ("SEGMENT_MAGIC", SEGMENT_MAGIC)] {
        let magic = String::from_utf8(magic.to_vec()).expect("letters");
        assert_eq!(constant(name), format!("`{}`", magic.replace('\n', "\\n")));
    }
    for (name, value) in [
        ("VERSION", u64::from(VERSION)),
        ("BLOCK", BLOCK as u64),
        ("SEGMENT_BYTES_MIN", SEGMENT_BYTES_MIN),
        ("SEGMENT_BYTES_MAX", SEGMENT_BYTES_MAX),
        ("SEGMENTS_MIN", u64::from(SEGMENTS_MIN)),
        ("SEGMENTS_MAX", u64::from(SEGMENTS_MAX)),
        ("WRITERS_MAX", WRITERS_MAX as u64),
        ("NUMBER_MAX", NUMBER_MAX),
        ("GROUP_HEAD_BYTES", GROUP_HEAD_BYTES as u64),
        ("GROUP_BYTES_MAX", GROUP_BYTES_MAX as u64),
        ("RECORD_HEAD_BYTES", RECORD_HEAD_BYTES as u64),
        ("LABEL_LEN_MAX", LABEL_LEN_MAX as u64),
    ] {
        assert_eq!(constant(name), value.to_string(), "{name}");
    }
}

/// Checks that the page has a row for each of `fields`, which end at `end`.
fn has_layout(fields: &[(&str, usize)], end: usize) {
    let ends = fields.iter().skip(1).map(|(_, offset)| *offset).chain([end]);
    for ((name, offset), end) in fields.iter().zip(ends) {
        let row = format!("\n| {offset} | {} | `{name}` |", end - offset);
        assert!(PAGE.contains(&row), "the page lacks {row}");
    }
}

#[test]
fn page_has_the_layouts_of_the_code() {
    macro_rules! fields {
        ($raw:ident: $($field:ident)*) => {
            [$((stringify!($field), offset_of!($raw, $field))),*]
        };
    }
    let device = fields! { RawDevice: magic version segments segment_bytes id padding checksum };
    has_layout(&device, size_of::<RawDevice>());
    let segment = fields! { RawSegment:
        magic version kind reserved device session store volume number root oldest first freed
        writers padding checksum
    };
    has_layout(&segment, size_of::<RawSegment>());
    let group = fields! { RawGroup: len count segment first reserved sum };
    has_layout(&group, size_of::<RawGroup>());
}
