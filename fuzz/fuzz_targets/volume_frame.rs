//! A frame of compressed blocks of a volume. See `mica_volume::hostile::frame`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_volume::hostile::frame(input));
