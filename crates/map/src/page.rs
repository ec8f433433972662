//! Checks that docs/formats/map-node.md agrees with the code.

use crate::node::BITMAP_BYTES;
use crate::testing::Place;
use crate::{Directory, FANOUT, FANOUT_BITS, HEIGHT_MAX, NODE_HEADER_BYTES, Reference};
use crate::{encode_node, node_len};

const PAGE: &str = include_str!("../../../docs/formats/map-node.md");

/// What the page's table of constants says of `name`.
fn constant(name: &str) -> usize {
    let row = format!("| `{name}` | ");
    let said = PAGE.lines().find_map(|line| line.strip_prefix(&row)).expect("the page has it");
    let (value, _) = said.split_once(" |").expect("a table");
    value.parse().expect("a number")
}

#[test]
fn page_has_the_constants_of_the_code() {
    assert_eq!(constant("FANOUT_BITS"), FANOUT_BITS as usize);
    assert_eq!(constant("FANOUT"), FANOUT);
    assert_eq!(constant("HEIGHT_MAX"), usize::from(HEIGHT_MAX));
    assert_eq!(constant("NODE_HEADER_BYTES"), NODE_HEADER_BYTES);
    assert_eq!(constant("BITMAP_BYTES"), BITMAP_BYTES);
}

/// The page's layout, byte by byte.
#[test]
fn node_is_laid_out_as_the_page_says() {
    for row in [
        "| 0 | 4 | `len` |",
        "| 4 | 4 | `checksum` |",
        "| 8 | `len` | `payload` |",
        "| 0 | 2 | `bitmap` |",
        "| 2 | *n* × reference | `children` |",
    ] {
        assert!(PAGE.contains(row), "{row}");
    }
    let (at, child) = (Place { extent: 7, block: 1 }, Place { extent: 5, block: 9 });
    let mut directory = Directory::default();
    directory.set_child(3, Some(child));
    let mut payload = vec![0b1000, 0];
    payload.extend(child.to_bytes());
    assert_eq!(directory.encode(), payload);

    let mut node = Vec::new();
    encode_node(&mut node, at, &payload);
    assert_eq!(node_len(&node), Some(node.len()));
    let summed = [&at.to_bytes()[..], &payload].concat();
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &summed);
    let sum = u32::try_from(sum).expect("32 bits").to_le_bytes();
    let len = u32::try_from(payload.len()).expect("small").to_le_bytes();
    assert_eq!(node, [&len[..], &sum, &payload].concat());
}
