//! The anti-forensic splitter: a key becomes stripes, all of which are needed to get it back.

use crate::hash::Hash;
use zeroize::Zeroizing;

/// Splits `key` into as many stripes as `out` has room for; `random` fills all but the last.
///
/// # Panics
/// If `out` is no multiple of the key, or empty.
pub(super) fn split(hash: Hash, key: &[u8], out: &mut [u8], random: impl Fn(&mut [u8])) {
    assert!(!out.is_empty() && out.len().is_multiple_of(key.len()), "whole stripes");
    let (front, last) = out.split_at_mut(out.len() - key.len());
    random(front);
    let sum = folded(hash, front, key.len());
    for ((to, key), sum) in last.iter_mut().zip(key).zip(&*sum) {
        *to = key ^ sum;
    }
}

/// The key of `len` bytes that was split into `stripes`.
///
/// # Panics
/// As [`split`].
pub(super) fn merge(hash: Hash, stripes: &[u8], len: usize) -> Zeroizing<Vec<u8>> {
    assert!(!stripes.is_empty() && stripes.len().is_multiple_of(len), "whole stripes");
    let (front, last) = stripes.split_at(stripes.len() - len);
    let mut key = folded(hash, front, len);
    key.iter_mut().zip(last).for_each(|(key, last)| *key ^= last);
    key
}

/// What all stripes but the last come to.
fn folded(hash: Hash, stripes: &[u8], len: usize) -> Zeroizing<Vec<u8>> {
    let mut sum = Zeroizing::new(vec![0; len]);
    for stripe in stripes.chunks_exact(len) {
        sum.iter_mut().zip(stripe).for_each(|(sum, byte)| *sum ^= byte);
        diffuse(hash, &mut sum);
    }
    sum
}

/// Spreads each bit of `bytes` over a sum of the hash.
fn diffuse(hash: Hash, bytes: &mut [u8]) {
    let mut input = Zeroizing::new(Vec::with_capacity(4 + hash.len()));
    for (number, part) in (0_u32..).zip(bytes.chunks_mut(hash.len())) {
        input.clear();
        input.extend_from_slice(&number.to_be_bytes());
        input.extend_from_slice(part);
        let sum = hash.digest(&input);
        part.copy_from_slice(&sum.as_ref()[..part.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_key_comes_back_and_each_byte_of_each_stripe_is_needed() {
        for (hash, len) in [(Hash::Sha256, 64), (Hash::Sha1, 32), (Hash::Sha512, 16)] {
            let key: Vec<u8> = (0..len).map(|at| u8::try_from(at).expect("short")).collect();
            let mut stripes = vec![0; len * 40];
            split(hash, &key, &mut stripes, |bytes| bytes.fill(0x5a));
            assert_eq!(*merge(hash, &stripes, len), key);
            for at in [0, len + 3, len * 39 - 1, len * 40 - 1] {
                let mut bad = stripes.clone();
                bad[at] ^= 1;
                assert_ne!(*merge(hash, &bad, len), key, "byte {at}");
            }
        }
    }
}
