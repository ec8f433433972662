//! The name of a backing file. See `mica_sim::hostile::image_name`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_sim::hostile::image_name(input));
