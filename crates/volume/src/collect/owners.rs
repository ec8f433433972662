//! Who names something, as a number that fits beside each block: all that the same roots name has
//! the same one.
//!
//! Invariants
//! - I1 What is joined names no less than both did: an owner only goes up, from nobody over one
//!   root and one volume to many.

use std::collections::HashMap;

/// Volumes that can be told apart, whoever else names something, at most.
pub(crate) const TRACKED_MAX: usize = 64;

/// A root: of a volume's map, or of a snapshot's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct RootOf {
    /// The volume's number among the names.
    pub(crate) name: u32,
    /// The snapshot's number; `None` for what the volume is now.
    pub(crate) snapshot: Option<u64>,
}

/// Who names something.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub(crate) enum Who {
    #[default]
    Nobody,
    /// Only this root.
    Root(RootOf),
    /// Only the volume with this number among the names: several of its roots.
    Volume(u32),
    /// Several volumes, or a snapshot of which nobody wants to know more.
    Many,
}

/// Who names something, and which of the volumes that are tracked are among them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub(crate) struct Owner {
    pub(crate) who: Who,
    /// A bit for each.
    pub(crate) tracked: u64,
}

/// The number of an [`Owner`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub(crate) struct OwnerId(u32);

/// All owners that were seen.
pub(crate) struct Owners {
    all: Vec<Owner>,
    ids: HashMap<Owner, OwnerId>,
}

impl Who {
    fn volume(self) -> Option<u32> {
        match self {
            Self::Root(root) => Some(root.name),
            Self::Volume(name) => Some(name),
            Self::Nobody | Self::Many => None,
        }
    }

    fn join(self, other: Self) -> Self {
        match (self, other) {
            (Self::Nobody, who) | (who, Self::Nobody) => who,
            (one, other) if one == other => one,
            (one, other) => match (one.volume(), other.volume()) {
                (Some(name), Some(also)) if name == also => Self::Volume(name),
                _ => Self::Many,
            },
        }
    }
}

impl Owners {
    /// Only nobody is known yet.
    pub(crate) fn new() -> Self {
        let mut this = Self { all: Vec::new(), ids: HashMap::new() };
        assert_eq!(this.id(Owner::default()), OwnerId::default(), "nobody is the first");
        this
    }

    /// The number of `owner`.
    pub(crate) fn id(&mut self, owner: Owner) -> OwnerId {
        *self.ids.entry(owner).or_insert_with(|| {
            self.all.push(owner);
            OwnerId(u32::try_from(self.all.len() - 1).expect("fewer than roots and blocks"))
        })
    }

    /// Who has this number.
    pub(crate) fn of(&self, id: OwnerId) -> Owner {
        self.all[id.0 as usize]
    }

    /// Both together.
    pub(crate) fn join(&mut self, one: OwnerId, other: OwnerId) -> OwnerId {
        if one == other || other == OwnerId::default() {
            return one;
        }
        if one == OwnerId::default() {
            return other;
        }
        let (one, other) = (self.of(one), self.of(other));
        let (who, tracked) = (one.who.join(other.who), one.tracked | other.tracked);
        self.id(Owner { who, tracked })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_of_one_volume_join_to_it_and_those_of_two_to_many() {
        let root = |name, snapshot| Who::Root(RootOf { name, snapshot });
        let (now, old, other) = (root(1, None), root(1, Some(7)), root(2, None));
        for (one, with, wanted) in [
            (Who::Nobody, now, now),
            (now, now, now),
            (now, old, Who::Volume(1)),
            (Who::Volume(1), old, Who::Volume(1)),
            (now, other, Who::Many),
            (Who::Volume(1), other, Who::Many),
            (Who::Many, now, Who::Many),
        ] {
            assert_eq!(one.join(with), wanted, "{one:?} {with:?}");
            assert_eq!(with.join(one), wanted, "{with:?} {one:?}");
        }
        let mut owners = Owners::new();
        let [one, two] =
            [(now, 1), (other, 2)].map(|(who, tracked)| owners.id(Owner { who, tracked }));
        let both = owners.join(one, two);
        assert_eq!(owners.of(both), Owner { who: Who::Many, tracked: 3 });
        assert_eq!(owners.join(both, one), both);
        assert_eq!(owners.join(OwnerId::default(), two), two);
    }
}
