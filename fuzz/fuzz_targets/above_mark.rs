//! The mark of a frozen layer. See `mica_stack::hostile::above_mark`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_stack::hostile::above_mark(input));
