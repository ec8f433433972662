//! A stranger's session with a vhost-user device: what its memory holds, its messages and what
//! descriptors come with them.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    mica_serve::vhost_user::survive(input);
});
