//! The head of a volume, and what a clone was made of. See `mica_volume::hostile::head`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_volume::hostile::head(input));
