//! Bytes of a stranger against an NBD connection. The first byte says how far the handshake was
//! done properly before; what follows is sent as it is.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    mica_serve::nbd::survive(input);
});
