//! A header, decoded and encoded. See `mica_sim::hostile::header`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_sim::hostile::header(input));
