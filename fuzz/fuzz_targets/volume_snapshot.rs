//! The record of a snapshot of a volume. See `mica_volume::hostile::snapshot_record`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_volume::hostile::snapshot_record(input));
