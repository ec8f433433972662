//! The note of images that stand on a layer. See `mica_stack::hostile::overlay_note`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_stack::hostile::overlay_note(input));
