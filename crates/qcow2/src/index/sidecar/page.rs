//! That docs/formats/sidecar.md says what the code does.

use super::{CONTEXT, HEADER_BYTES, MAGIC, RawHeader, VERSION};
use crate::index::slice::{RUN_BYTES, SLICE_BITS};
use crate::index::tables;
use mica_block::Identity;
use std::mem::offset_of;

const PAGE: &str = include_str!("../../../../../docs/formats/sidecar.md");

/// What the page's table of constants says of `name`.
fn constant(name: &str) -> &'static str {
    let row = format!("| `{name}` | ");
    let said = PAGE.lines().find_map(|line| line.strip_prefix(&row)).expect("the page has it");
    said.split_once(" |").expect("a table").0
}

#[test]
fn page_has_the_constants_of_the_code() {
    let magic = String::from_utf8(MAGIC.to_vec()).expect("letters").replace('\n', "\\n");
    assert_eq!(constant("MAGIC"), format!("`{magic}`"));
    assert_eq!(constant("VERSION"), VERSION.to_string());
    assert_eq!(constant("HEADER_BYTES"), HEADER_BYTES.to_string());
    assert_eq!(constant("SLICE_BITS"), SLICE_BITS.to_string());
    assert_eq!(constant("RUN_BYTES"), RUN_BYTES.to_string());
    for context in [CONTEXT, tables::CONTEXT] {
        assert!(PAGE.contains(&format!("`{context}`")), "{context}");
    }
    assert!(PAGE.contains(&format!("\n| {VERSION} | ")), "the version is in the table of versions");
}

#[test]
fn page_has_the_margins_of_the_seal() {
    for (name, ctime_ns) in [("RACY_NS", 7_000_000_001), ("COARSE_RACY_NS", 7_000_000_000)] {
        let margin_ns: i128 = constant(name).parse().expect("a number");
        let identity = Identity { device: 0, inode: 0, len: 0, mtime_ns: 0, ctime_ns };
        assert!(!identity.proves_unchanged_since(ctime_ns + margin_ns), "{name}");
        assert!(identity.proves_unchanged_since(ctime_ns + margin_ns + 1), "{name}");
    }
}

#[test]
fn page_has_the_layout_of_the_header() {
    macro_rules! fields {
        ($($field:ident)*) => {
            [$((stringify!($field), offset_of!(RawHeader, $field))),*]
        };
    }
    let fields = fields! {
        magic version layer height reserved root len layer_len device inode file_len mtime_ns
        ctime_ns sealed_ns id parent digest padding checksum
    };
    let ends = fields.iter().skip(1).map(|(_, offset)| *offset).chain([HEADER_BYTES]);
    let expected: Vec<String> = fields
        .iter()
        .zip(ends)
        .map(|((name, offset), end)| format!("| {offset} | {} | `{name}` |", end - offset))
        .collect();
    let is_row = |line: &&str| line.starts_with("| ") && line.as_bytes()[2].is_ascii_digit();
    let rows = PAGE.lines().skip_while(|line| *line != "The header:").skip(1);
    let rows = rows.skip_while(|line| !is_row(line)).take_while(|line| is_row(line));
    let rows: Vec<&str> = rows.collect();
    assert_eq!(rows.len(), expected.len());
    for (row, expected) in rows.iter().zip(&expected) {
        assert!(row.starts_with(expected), "the page says {row}, the code {expected}");
    }
}
