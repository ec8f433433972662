//! That docs/formats/boot.md, extent.md and head.md say what the code does.

use super::boot::{self, RawHeader as RawBoot, RawRange};
use super::extent::{
    ENTRY_BYTES, HEADER_BYTES, LEN_MAX, MAGIC, RawHeader, VERSION, VERSION_WITH_FRAMES,
};
use super::head::{
    self, CLIENT_LEN_MAX, HEAD_BYTES, HOST_LEN_MAX, RawHead, VERSION_WITH_PROPERTIES,
};
use super::origin::{ORIGIN_BYTES, ORIGIN_MAGIC, ORIGIN_VERSION, RawOrigin};
use super::snapshot::{RECORD_BYTES, RawRecord};
use crate::frames::{FRAME_HEADER_BYTES, RawFrame};
use crate::place::{BLOCK_BYTES, FRAME_BLOCKS_MAX, FRAME_LENS, FRAME_UNIT_BYTES, Place};
use crate::properties::RawProperties;
use crate::state::RawState;
use mica_block::LABEL_BYTES_MAX;

const EXTENT: &str = include_str!("../../../../docs/formats/extent.md");
const BOOT: &str = include_str!("../../../../docs/formats/boot.md");
const HEAD: &str = include_str!("../../../../docs/formats/head.md");

/// What the table of constants of `page` says of `name`.
pub(crate) fn constant(page: &'static str, name: &str) -> &'static str {
    let row = format!("| `{name}` | ");
    let said = page.lines().find_map(|line| line.strip_prefix(&row)).expect("the page has it");
    said.split_once(" |").expect("a table").0
}

/// A magic as a page shows it.
pub(crate) fn as_written(magic: [u8; 8]) -> String {
    let magic = String::from_utf8(magic.to_vec()).expect("letters");
    format!("`{}`", magic.replace('\n', "\\n"))
}

#[test]
fn pages_have_the_constants_of_the_code() {
    assert_eq!(constant(EXTENT, "MAGIC"), as_written(MAGIC));
    assert_eq!(constant(HEAD, "MAGIC"), as_written(head::MAGIC));
    assert_eq!(constant(HEAD, "ORIGIN_MAGIC"), as_written(ORIGIN_MAGIC));
    assert_eq!(constant(BOOT, "MAGIC"), as_written(boot::MAGIC));
    for (page, name, value) in [
        (EXTENT, "VERSION", VERSION as usize),
        (EXTENT, "VERSION_WITH_FRAMES", VERSION_WITH_FRAMES as usize),
        (EXTENT, "BLOCK_BYTES", BLOCK_BYTES),
        (EXTENT, "FRAME_UNIT_BYTES", FRAME_UNIT_BYTES),
        (EXTENT, "FRAME_HEADER_BYTES", FRAME_HEADER_BYTES),
        (EXTENT, "FRAME_BLOCKS_MAX", FRAME_BLOCKS_MAX),
        (EXTENT, "HEADER_BYTES", HEADER_BYTES),
        (EXTENT, "ENTRY_BYTES", ENTRY_BYTES),
        (EXTENT, "LEN_MAX", LEN_MAX),
        (EXTENT, "UNIT_BYTES", Place::UNIT_BYTES),
        (EXTENT, "LABEL_BYTES_MAX", LABEL_BYTES_MAX),
        (BOOT, "VERSION", boot::VERSION as usize),
        (BOOT, "HEADER_BYTES", boot::HEADER_BYTES),
        (BOOT, "RANGE_BYTES", boot::RANGE_BYTES),
        (BOOT, "RANGES_MAX", boot::RANGES_MAX),
        (BOOT, "BLOCKS_MAX", usize::try_from(boot::BLOCKS_MAX).expect("small")),
        (BOOT, "MISSED_MAX", boot::MISSED_MAX as usize),
        (HEAD, "VERSION", head::VERSION as usize),
        (HEAD, "VERSION_WITH_PROPERTIES", VERSION_WITH_PROPERTIES as usize),
        (HEAD, "HEAD_BYTES", HEAD_BYTES),
        (HEAD, "ORIGIN_VERSION", ORIGIN_VERSION as usize),
        (HEAD, "ORIGIN_BYTES", ORIGIN_BYTES),
        (HEAD, "HOST_LEN_MAX", HOST_LEN_MAX),
        (HEAD, "CLIENT_LEN_MAX", CLIENT_LEN_MAX),
    ] {
        assert_eq!(constant(page, name), value.to_string(), "{name}");
    }
    let lens = FRAME_LENS.map(|len| len.to_string()).join(", ");
    assert_eq!(constant(EXTENT, "FRAME_LENS"), lens);
}

/// Checks that `page` has a row for each of `fields`, which end at `end`.
pub(crate) fn has_layout(page: &str, fields: &[(&str, usize)], end: usize) {
    let ends = fields.iter().skip(1).map(|(_, offset)| *offset).chain([end]);
    for ((name, offset), end) in fields.iter().zip(ends) {
        let row = format!("\n| {offset} | {} | `{name}` |", end - offset);
        assert!(page.contains(&row), "the page lacks {row}");
    }
}

/// The names and offsets of the fields of a struct.
macro_rules! fields {
    ($raw:ident: $($field:ident)*) => {
        [$((stringify!($field), std::mem::offset_of!($raw, $field))),*]
    };
}
pub(crate) use fields;

#[test]
fn pages_have_the_layouts_of_the_code() {
    let header = fields! { RawHeader:
        magic version kind reserved store volume nonce writer by sequence blocks nodes_len entries
        table_sum frames_len state padding checksum
    };
    has_layout(EXTENT, &header, size_of::<RawHeader>());
    let state = fields! { RawState:
        map snapshots len next_snapshot records time_ns map_height snapshots_height reserved
    };
    has_layout(EXTENT, &state, size_of::<RawState>());
    let record = fields! { RawRecord:
        number time_ns records len map map_height label_len has_origin reserved
    };
    has_layout(EXTENT, &record, RECORD_BYTES);
    let boot = fields! { RawBoot:
        magic version ranges store image nonce boots time_ns ranges_sum reserved checksum
    };
    has_layout(BOOT, &boot, boot::HEADER_BYTES);
    has_layout(BOOT, &fields! { RawRange: start count missed }, boot::RANGE_BYTES);
    let head = fields! { RawHead:
        magic version life host_len heir_len flags number store volume nonce writer sequence reserved_too
        state time_ns host heir properties image client name_sum log padding checksum
    };
    has_layout(HEAD, &head, size_of::<RawHead>());
    let origin = fields! { RawOrigin:
        magic version has_snapshot name_len reserved volume snapshot name padding checksum
    };
    has_layout(HEAD, &origin, ORIGIN_BYTES);
    let properties = fields! { RawProperties:
        compression encryption reserved key secret_nonce secret
    };
    has_layout(HEAD, &properties, size_of::<RawProperties>());
    let frame = fields! { RawFrame: len blocks codec reserved };
    has_layout(EXTENT, &frame, FRAME_HEADER_BYTES);
}
