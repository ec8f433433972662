//! The rules of the protocol, each of which can be taken away to see what it is for.

/// A rule. The specification (`README.md`) says what it demands, under the same name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rule {
    /// Who takes over puts a fence at the first free sequence of the old writer.
    Fence,
    /// The fence is there before the new head is put, not after it.
    FenceBeforeHead,
    /// Who loses the put of a head reads again, instead of going on.
    LoserReadsAgain,
    /// Who put a head looks whether there is a higher one before relying on it.
    HeadLooksUp,
    /// A writer puts no extent before its head is won.
    HeadBeforeExtents,
    /// An extent is acknowledged when all before it are answered, too.
    AckInOrder,
    /// A put without an answer is repeated, and has not succeeded before it is answered.
    UnclearIsRepeated,
    /// What is at the name of a refused put is read, and counts only if it is one's own.
    RefusedIsRead,
    /// After a head that closes the volume was sent, its writer puts no extent.
    CloseIsLast,
    /// A fence is never deleted.
    FencesStay,
    /// Writers' claims are deleted only below a boundary that was put before.
    BoundaryFirst,
    /// A claim is compared with the boundary after it was put.
    ClaimLooksUp,
    /// The highest head of a name is never deleted, whatever it says: so a tombstone stays.
    HighestHeadStays,
    /// A forced delete fences the writer.
    DeleteFences,
    /// What counts ends at the first gap.
    StopAtGap,
    /// A local log is replayed only directly after its own writer.
    LogAfterItsWriter,
    /// The log names the next writer number before a head gives it to that writer.
    LogNamesNext,
    /// A log that is not replayed is set aside before the head is put.
    LogSetAside,
    /// The log's space is freed up to the first extent that is not answered.
    LogFreedInOrder,
    /// Extents above the sequence of their writer's head are left alone.
    AboveHeadStays,
    /// What is marked, and from where on extents are left alone, comes from heads, not from newer
    /// trailers.
    MarkFromHeads,
    /// Extents are listed before heads are read.
    ListBeforeHeads,
    /// Heads are read until no name has a new volume since the pass before.
    ReadHeadsTwice,
    /// A clone looks whether its source still has the snapshot, after its head was put.
    CloneLooksBack,
    /// Until it has looked, a clone's head says that the clone is not ready.
    ClonePins,
}

/// Which rules hold: all, but those taken away.
#[derive(Clone, Default, Debug)]
pub(crate) struct Rules {
    without: Vec<Rule>,
}

impl Rules {
    /// All rules but `rule`.
    pub(crate) fn without(rule: Rule) -> Self {
        Self { without: vec![rule] }
    }

    /// Whether `rule` holds.
    pub(crate) fn hold(&self, rule: Rule) -> bool {
        !self.without.contains(&rule)
    }
}
