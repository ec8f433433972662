//! That docs/formats/backup.md says what the code does.

use crate::format::{
    BEGIN_BYTES, BEGIN_MAGIC, DATA_BYTES_MAX, ENTRIES_MAX, ENTRY_BYTES, HEAD_BYTES, MANIFEST_MAGIC,
    PART_BYTES, RawBegin, RawEntry, RawHead, RawPart, VERSION,
};
use crate::names::STATE_BYTES_MAX;

const PAGE: &str = include_str!("../../../docs/formats/backup.md");

#[test]
fn page_has_the_constants_of_the_code() {
    let magic = |magic: [u8; 8]| {
        let magic = String::from_utf8(magic.to_vec()).unwrap();
        format!("`{}`", magic.replace('\n', "\\n"))
    };
    for (name, value) in [
        ("BEGIN_MAGIC", magic(BEGIN_MAGIC)),
        ("MANIFEST_MAGIC", magic(MANIFEST_MAGIC)),
        ("VERSION", VERSION.to_string()),
        ("DATA_BYTES_MAX", DATA_BYTES_MAX.to_string()),
        ("ENTRIES_MAX", ENTRIES_MAX.to_string()),
        ("STATE_BYTES_MAX", STATE_BYTES_MAX.to_string()),
    ] {
        let row = format!("| `{name}` | {value} |");
        assert!(PAGE.contains(&row), "the page lacks {row}");
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

/// The names and offsets of the fields of a struct.
macro_rules! fields {
    ($raw:ident: $($field:ident)*) => {
        [$((stringify!($field), std::mem::offset_of!($raw, $field))),*]
    };
}

#[test]
fn page_has_the_layouts_of_the_code() {
    let begin = fields! { RawBegin:
        magic version disk_len state_len base_len reserved len time_ns disk state base padding
        checksum
    };
    has_layout(&begin, BEGIN_BYTES);
    has_layout(&fields! { RawPart: kind checksum sequence start len stored sum }, PART_BYTES);
    let head = fields! { RawHead:
        magic version total number key entries data_bytes file_bytes content checksum
    };
    has_layout(&head, HEAD_BYTES);
    has_layout(&fields! { RawEntry: start len at stored sum }, ENTRY_BYTES);
}
