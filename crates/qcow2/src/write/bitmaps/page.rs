//! Checks that docs/formats/kept-bitmaps.md matches the code.

use super::bits::PAGE_BITS;
use super::recorder::REGION_BITS_MIN;
use mica_qcow2_format::Autoclear;

const PAGE: &str = include_str!("../../../../../docs/formats/kept-bitmaps.md");

#[test]
fn page_has_the_numbers_of_the_code() {
    let first = Autoclear::kept_bitmap(0).trailing_zeros();
    let last = 63 - Autoclear::KEPT_BITMAPS.leading_zeros();
    let says = [
        format!("the autoclear bits {first} to {last} of the header"),
        format!("for at most {} bitmaps", Autoclear::KEPT_BITMAPS_MAX),
        format!("(2^{REGION_BITS_MIN} bytes)"),
        format!("pages of {PAGE_BITS} bits"),
        format!("an index above {}", Autoclear::KEPT_BITMAPS_MAX - 1),
    ];
    for part in says {
        assert!(PAGE.contains(&part), "{part}");
    }
    assert_eq!(Autoclear::kept_bitmap(Autoclear::KEPT_BITMAPS_MAX), 0);
}
