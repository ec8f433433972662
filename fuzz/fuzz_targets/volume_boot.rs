//! The boot record of an image. See `mica_volume::hostile::boot_record`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_volume::hostile::boot_record(input));
