//! CRC-32C, and sums of bytes of which parts have been summed up before.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let sum = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes);
    u32::try_from(sum).expect("a 32-bit sum")
}

/// CRC-32C of several pieces, one after the other.
pub fn crc32c_of(pieces: &[&[u8]]) -> u32 {
    let mut sum = RunningSum::default();
    pieces.iter().for_each(|piece| sum.add(piece));
    sum.finish()
}

/// The CRC-32C of what is added to it, one after the other.
pub struct RunningSum(Digest);

impl Default for RunningSum {
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }
}

impl RunningSum {
    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Adds as many bytes as `over` is for, whose own CRC-32C is `sum`, without looking at them.
    pub fn add_summed(&mut self, sum: u32, over: &Shift) {
        let sum = over.apply(self.finish()) ^ sum;
        // Its state is the sum before its last step, which inverts it.
        self.0 = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!sum));
    }

    /// The sum of all that was added.
    pub fn finish(&self) -> u32 {
        u32::try_from(self.0.finalize()).expect("a 32-bit sum")
    }
}

/// What so many bytes behind it do to a sum, whatever they are: a linear map of its bits, as a
/// table for each of its bytes.
pub struct Shift([[u32; 256]; 4]);

/// The polynomial, its lowest power in the highest bit.
const POLYNOMIAL: u32 = 0x82f6_3b78;

impl Shift {
    /// The sum for blocks of `len` bytes, a power of two.
    ///
    /// # Panics
    /// If it is none.
    pub const fn over(len: usize) -> Self {
        assert!(len.is_power_of_two(), "a power of two");
        // What one bit does to each bit, and then twice as many bits, again and again.
        let mut bits = [0; 32];
        bits[0] = POLYNOMIAL;
        let mut at = 1;
        while at < 32 {
            bits[at] = 1 << (at - 1);
            at += 1;
        }
        let mut doubled = 0;
        while doubled < len.trailing_zeros() + 3 {
            bits = squared(&bits);
            doubled += 1;
        }
        let mut tables = [[0; 256]; 4];
        let mut byte = 0;
        while byte < 4 {
            let (mut at, mut value) = (0, 0_u32);
            while value < 256 {
                tables[byte][at] = times(&bits, value << (8 * byte));
                (at, value) = (at + 1, value + 1);
            }
            byte += 1;
        }
        Self(tables)
    }

    fn apply(&self, sum: u32) -> u32 {
        let bytes = sum.to_le_bytes();
        self.0.iter().zip(bytes).fold(0, |all, (table, byte)| all ^ table[usize::from(byte)])
    }
}

/// What a linear map, which says what becomes of each bit, makes of `value`.
const fn times(bits: &[u32; 32], mut value: u32) -> u32 {
    let mut product = 0;
    while value != 0 {
        product ^= bits[value.trailing_zeros() as usize];
        value &= value - 1;
    }
    product
}

const fn squared(bits: &[u32; 32]) -> [u32; 32] {
    let (mut square, mut at) = ([0; 32], 0);
    while at < 32 {
        square[at] = times(bits, bits[at]);
        at += 1;
    }
    square
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_is_that_of_the_standard() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn bytes_that_were_summed_before_are_not_looked_at() {
        static OVER: Shift = Shift::over(4096);
        for seed in 0..50_u8 {
            let bytes = |len: usize, factor: usize| -> Vec<u8> {
                (0..len).map(|at| ((at * factor) >> 3).to_le_bytes()[0] ^ seed).collect()
            };
            let pieces = [bytes(seed.into(), 7), bytes(4096, 11), bytes(16, 13), bytes(4096, 17)];
            let mut sum = RunningSum::default();
            for piece in &pieces {
                match piece.len() {
                    4096 => sum.add_summed(crc32c(piece), &OVER),
                    _ => sum.add(piece),
                }
            }
            assert_eq!(sum.finish(), crc32c(&pieces.concat()), "seed {seed}");
        }
    }

    #[test]
    fn shift_is_of_so_many_bytes() {
        for bits in 0..14 {
            let zeros = vec![0; 1 << bits];
            let mut sum = RunningSum::default();
            sum.add(b"before");
            sum.add_summed(crc32c(&zeros), &Shift::over(zeros.len()));
            assert_eq!(sum.finish(), crc32c_of(&[b"before", &zeros]), "{} bytes", zeros.len());
        }
    }
}
