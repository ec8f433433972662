//! Descriptor chains of a stranger, and the requests in them. The input is the guest's memory, with
//! the table at its start.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    mica_serve::vhost_user::survive_chains(input);
});
