//! The sidecar of a layer of a good chain. See `mica_sim::hostile::sidecar`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_sim::hostile::sidecar(input));
