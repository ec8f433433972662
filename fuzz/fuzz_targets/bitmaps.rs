//! The directory and the tables of dirty bitmaps. See `mica_sim::hostile::bitmaps`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_sim::hostile::bitmaps(input));
