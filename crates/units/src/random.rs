//! Random numbers that follow from a seed alone (SplitMix64 of Steele, Lea and Flood), for
//! simulations, generated chains and injected faults. The same seed gives the same numbers on every
//! machine and in every version of mica; that is why it is not somebody else's.

/// What the state grows by with each number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The next number of the stream whose state is `state`; at first that is the seed.
#[inline]
pub const fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(STEP);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Number `index` of the stream of `seed`, from 1.
#[inline]
pub const fn random_at(seed: u64, index: u64) -> u64 {
    let mut state = seed.wrapping_add(index.wrapping_sub(1).wrapping_mul(STEP));
    next_random(&mut state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_reference_and_any_can_be_had_alone() {
        let mut state = 1_234_567;
        let stream: Vec<_> = (0..5).map(|_| next_random(&mut state)).collect();
        let known = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(stream, known);
        let alone: Vec<_> = (1..=5).map(|index| random_at(1_234_567, index)).collect();
        assert_eq!(alone, known);
    }
}
