//! That docs/formats/stream.md says what the code does.

use super::format::{BEGIN_BYTES, DATA_BYTES_MAX, MAGIC, PART_BYTES, RawBegin, RawPart, VERSION};
use crate::format::page::{as_written, fields, has_layout};

const PAGE: &str = include_str!("../../../../docs/formats/stream.md");

#[test]
fn page_has_the_constants_and_layouts_of_the_code() {
    assert!(PAGE.contains(&format!("| `magic` | {} |", as_written(MAGIC))));
    assert!(PAGE.contains(&format!("| `version` | {VERSION} |")));
    assert_eq!(DATA_BYTES_MAX, 1 << 20, "as the page says");
    let begin = fields! { RawBegin:
        magic version label_len has_base reserved volume number base_volume base_number time_ns len
        label padding checksum
    };
    has_layout(PAGE, &begin, BEGIN_BYTES);
    let part = fields! { RawPart: kind checksum sequence start len };
    has_layout(PAGE, &part, PART_BYTES);
}
