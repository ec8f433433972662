//! A stream of `volume receive`. See `mica_sim::hostile::stream`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_sim::hostile::stream(input));
