//! The mark of a layer that is merged. See `mica_stack::hostile::merge_mark`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_stack::hostile::merge_mark(input));
