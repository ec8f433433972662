//! That docs/formats/log.md says what the code does.

use super::format::{
    BLOCK, GROUP_BYTES_MAX, GROUP_HEAD_BYTES, MAGIC, NUMBER_MAX, RawDevice, RawGroup, RawSegment,
    SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SEGMENT_MAGIC, SEGMENT_VERSION, SEGMENTS_MAX,
    SEGMENTS_MIN, VERSION, WRITERS_MAX,
};
use super::record::{LABEL_LEN_MAX, RECORD_HEAD_BYTES};
use crate::format::page::{as_written, constant, fields, has_layout};

const PAGE: &str = include_str!("../../../../docs/formats/log.md");

#[test]
fn page_has_the_constants_of_the_code() {
    for (name, magic) in [("MAGIC", MAGIC), ("SEGMENT_MAGIC", SEGMENT_MAGIC)] {
        assert_eq!(constant(PAGE, name), as_written(magic));
    }
    for (name, value) in [
        ("VERSION", u64::from(VERSION)),
        ("SEGMENT_VERSION", u64::from(SEGMENT_VERSION)),
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
        assert_eq!(constant(PAGE, name), value.to_string(), "{name}");
    }
}

#[test]
fn page_has_the_layouts_of_the_code() {
    let device = fields! { RawDevice: magic version segments segment_bytes id padding checksum };
    has_layout(PAGE, &device, size_of::<RawDevice>());
    let segment = fields! { RawSegment:
        magic version kind reserved device session store volume number root oldest first freed
        durable writers padding checksum
    };
    has_layout(PAGE, &segment, size_of::<RawSegment>());
    let group = fields! { RawGroup: len count segment first pending sum };
    has_layout(PAGE, &group, size_of::<RawGroup>());
}
