//! An image, checked. See `mica_sim::hostile::check`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_sim::hostile::check(input));
