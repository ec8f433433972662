//! A backup, as a stream and as a manifest. See `mica_sim::hostile::backup`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_sim::hostile::backup(input));
