use super::*;
use crate::place::{ExtentId, Writer};
use std::cell::Cell;

fn key(byte: u8) -> VolumeKey {
    VolumeKey::of_file("key", &[byte; 32]).expect("a key")
}

fn random() -> impl Fn() -> Id {
    let next = Cell::new(0);
    move || [next.replace(next.get() + 1); 16]
}

#[test]
fn key_is_32_bytes_or_as_many_in_digits() {
    let digits = format!(" {}\n", "0a".repeat(32));
    let of_digits = VolumeKey::of_file("key", digits.as_bytes()).expect("a key");
    assert_eq!(of_digits.name(), key(10).name());
    assert_ne!(of_digits.name(), key(11).name());
    for content in ["", "secret", &digits[..63], &"0x".repeat(32), &"0a".repeat(33)] {
        let refused = VolumeKey::of_file("my.key", content.as_bytes()).expect_err("none");
        assert!(refused.to_string().starts_with("my.key has no key"), "{refused}");
        assert_eq!(refused.kind(), ErrorKind::Invalid);
    }
    assert!(!format!("{of_digits:?}").contains("10, 10"), "a key is not shown");
}

#[test]
fn secret_is_unwrapped_by_the_key_that_wrapped_it_and_by_no_other() {
    let (cipher, wrapped) = key(1).new_secret(random());
    assert_eq!(wrapped.by, key(1).name());
    assert_eq!(key(1).unwrap(&wrapped).expect("the same").name(), cipher.name());
    assert!(key(2).unwrap(&wrapped).is_none());
    for bit in 0..8 * WrappedSecret::SEALED_BYTES {
        let mut bad = wrapped;
        bad.sealed[bit / 8] ^= 1 << (bit % 8);
        assert!(key(1).unwrap(&bad).is_none(), "bit {bit}");
    }
}

#[test]
fn same_bytes_are_different_in_each_place_and_log() {
    let (cipher, _) = key(1).new_secret(random());
    let place = |writer, sequence, offset, sum| {
        let writer = Writer::new(writer).expect("a writer");
        Place::new(ExtentId { writer, sequence }, offset, sum)
    };
    let mut seen = Vec::new();
    for place in [place(1, 0, 4096, 0), place(1, 0, 8192, 0), place(1, 1, 4096, 0)] {
        let mut bytes = [7; 64];
        cipher.encrypt(place, &mut bytes);
        seen.push(bytes);
        cipher.decrypt(place, &mut bytes);
        assert_eq!(bytes, [7; 64]);
    }
    for (device, session, segment, record) in
        [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]
    {
        let log = cipher.of_log(&[device; 16], &[session; 16]);
        let mut bytes = [7; 64];
        log.encrypt(segment, record, &mut bytes);
        seen.push(bytes);
        log.decrypt(segment, record, &mut bytes);
        assert_eq!(bytes, [7; 64]);
    }
    let mut different = seen.clone();
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), seen.len());
    // The sum is that of what was encrypted, and not known before.
    let mut bytes = [7; 64];
    cipher.encrypt(place(1, 0, 4096, 99), &mut bytes);
    assert_eq!(bytes, seen[0]);
}
