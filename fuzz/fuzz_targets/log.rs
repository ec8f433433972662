//! The log of volumes. See `mica_sim::hostile::log`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_sim::hostile::log(input));
