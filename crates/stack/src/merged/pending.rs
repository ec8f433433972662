//! Which commits that did not end another one completes.

use super::{FileMark, Until};

impl Until {
    /// Whether what has only a part until then has all of it when a commit is `done` so, into which
    /// the layers `went`, besides the active one.
    fn is_ended_by(self, (done, went): (Self, &[FileMark])) -> bool {
        match (self, done) {
            // It shows what the disk shows: nothing of the chain is left above.
            (_, Self::Empty(_)) => true,
            (Self::Unsaid, _) => false,
            (Self::Beneath(above), Self::Beneath(next)) if above == next => true,
            (Self::Beneath(layer) | Self::Empty(layer), _) => went.contains(&layer),
        }
    }
}

/// Until when the base has only a part of something after a commit that is `done` so, if it has:
/// it, or what went into it, had only `parts` before.
pub(super) fn left_by(done: (Until, &[FileMark]), parts: &[Until]) -> Option<Until> {
    let mut left = parts.iter().copied().filter(|part| !part.is_ended_by(done));
    let first = left.next()?;
    // Of two nobody here knows which is the later one.
    Some(if left.all(|part| part == first) { first } else { Until::Unsaid })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(inode: u64) -> FileMark {
        FileMark { inode, made_ns: 0 }
    }

    #[test]
    fn commit_completes_another_if_all_of_that_is_in_it() {
        let [one, two, three] = [1, 2, 3].map(layer);
        let of_one: (Until, &[FileMark]) = (Until::Beneath(two), &[one]);
        let of_two: (Until, &[FileMark]) = (Until::Beneath(three), &[one, two]);
        let all: (Until, &[FileMark]) = (Until::Empty(three), &[one, two]);
        let left = |done, parts: &[Until]| left_by(done, parts);
        assert_eq!(left(of_one, &[]), None);
        assert_eq!(left(of_one, &[Until::Beneath(two)]), None, "once more");
        assert_eq!(left(of_one, &[Until::Beneath(three)]), Some(Until::Beneath(three)));
        assert_eq!(left(of_two, &[Until::Beneath(two), Until::Beneath(three)]), None);
        assert_eq!(left(of_two, &[Until::Empty(two)]), None, "it was the active one");
        assert_eq!(left(of_two, &[Until::Empty(three)]), Some(Until::Empty(three)));
        assert_eq!(left(of_two, &[Until::Unsaid]), Some(Until::Unsaid));
        let differ = [Until::Empty(three), Until::Beneath(layer(4)), Until::Beneath(two)];
        assert_eq!(left(of_two, &differ), Some(Until::Unsaid));
        assert_eq!(left(all, &[Until::Unsaid, differ[0], differ[1]]), None);
    }
}
