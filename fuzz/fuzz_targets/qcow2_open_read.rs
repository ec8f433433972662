//! An image, alone and in a chain, planned, indexed and read. See `mica_sim::hostile::open_read`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_sim::hostile::open_read(input));
