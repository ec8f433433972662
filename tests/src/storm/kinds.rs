//! The parts of a storm, by name: shapes of images, and what happens to them. A run can be
//! restricted to some of them.

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal, $group:ident;)+) => {
        /// One thing that a storm does.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Kind { $($(#[doc = $doc])+ $name),+ }

        impl Kind {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Its name.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),+ }
            }

            /// A description.
            pub fn about(self) -> &'static str {
                match self { $(Self::$name => concat!($($doc),+).trim_ascii()),+ }
            }

            fn group(self) -> Group {
                match self { $(Self::$name => Group::$group),+ }
            }
        }
    };
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    Course,
    Shape,
    Event,
}

impl Group {
    const ALL: [Self; 3] = [Self::Course, Self::Shape, Self::Event];
}

kinds! {
    /// What most seeds are about: a chain of random shape
    Chain = "chain", Course;
    /// Several disks at one address, among kills, takeovers and `mica ctl` (one seed in seven)
    Shared = "shared", Course;
    /// The power is cut beneath a writer that flushes each write (one seed in 25)
    PowerCut = "power-cut", Course;
    /// Chains of 100 to 1,000 layers, read in sequence with few descriptors (one seed in 16)
    Deep = "deep", Course;
    /// Volumes in a store, served by two hosts (one seed in eight)
    Volume = "volume", Course;
    /// Layers that come and go while their disks are served (one seed in nine)
    Lineage = "lineage", Course;
    /// Verbs on chains that nobody serves, killed at any instant (one seed in nine)
    Verbs = "verbs", Course;
    /// Clusters below 4 KiB, whose tables are tiny
    Tiny = "tiny", Shape;
    /// Subclusters
    Extended = "extended", Shape;
    /// Refcounts of other than 16 bits
    Refcounts = "refcounts", Shape;
    /// Version 2
    Old = "v2", Shape;
    /// Lazy refcounts
    Lazy = "lazy", Shape;
    /// Compressed clusters
    Compressed = "compressed", Shape;
    /// External data files
    DataFile = "datafile", Shape;
    /// Persistent bitmaps
    Bitmaps = "bitmaps", Shape;
    /// Layers that are longer and shorter than others
    Lengths = "lengths", Shape;
    /// Encrypted layers, and LUKS images beneath them, among layers that come and go
    Encrypted = "encrypted", Shape;
    /// Disks of one server that have lower layers in common
    Siblings = "siblings", Shape;
    /// Another disk in the same server, on another file system where there is one
    SecondDisk = "second-disk", Shape;
    /// SIGKILL of a server
    Kill = "kill", Event;
    /// SIGKILL of a server that just starts
    KillStart = "kill-start", Event;
    /// A plain start right after a kill, which has to succeed
    Instant = "instant", Event;
    /// Live takeover
    Takeover = "takeover", Event;
    /// SIGKILL of either server, or of both, in a takeover
    KillTakeover = "kill-takeover", Event;
    /// The same amid a command about layers, or right after it; what is frozen is read twice then
    KillAmid = "kill-amid", Event;
    /// Commands of `mica ctl` in a takeover of disks at shared addresses
    Overlap = "overlap", Event;
    /// A disk gets another length, while it is served and while it is not
    Resize = "resize", Event;
    /// SIGKILL within a resize, by `mica resize` and by `mica ctl`
    KillResize = "kill-resize", Event;
    /// A second writer joins the one beneath which the power is cut
    SecondWriter = "second-writer", Event;
    /// The index of a chain is damaged, or gone
    Index = "index", Event;
    /// Disks come and go by `mica ctl` and by configuration
    Members = "members", Event;
    /// Disks that throw away at the end what clients write; their settings change meanwhile
    Ephemeral = "ephemeral", Event;
    /// `mica ctl` saves what it did in the configuration
    Save = "save", Event;
    /// Others try to look at, to serve, and to change an image that is served
    Peek = "peek", Event;
    /// QEMU writes to the image
    Write = "qemu-write", Event;
    /// QEMU commits an overlay into the image
    Commit = "commit", Event;
    /// QEMU commits the image into the layer below
    CommitDown = "commit-down", Event;
    /// QEMU gives the image another backing file
    Rebase = "rebase", Event;
    /// The image gets an overlay, which is served from then on
    Overlay = "overlay", Event;
    /// Internal snapshots are made, gone back to, and deleted
    Snapshot = "snapshot", Event;
    /// Copies of the images are put back
    Copy = "copy", Event;
    /// Timestamps of files are moved
    Touch = "touch", Event;
    /// QEMU repairs leaks
    Repair = "repair", Event;
    /// The same where there are internal snapshots: QEMU forgets all of them if an autoclear bit is
    /// set that it does not know
    RepairSnapshots = "repair-snapshots", Event;
    /// The images' file system runs out of space
    Space = "space", Event;
    /// The log has little memory, in one chain of four
    LogMemory = "log-memory", Event;
    /// The log's file system runs out of space
    LogSpace = "log-space", Event;
    /// The log is kept elsewhere, or nowhere
    LogPlace = "log-place", Event;
    /// The log goes away while its server lives, and may come back
    LogGone = "log-gone", Event;
    /// Reads and writes of the image are slow
    Slow = "slow", Event;
    /// Reads, writes and syncs of the image fail at times
    Sick = "sick", Event;
    /// A disk's file system takes no writes for a while
    Freeze = "freeze", Event;
    /// The server gets no more threads for a while
    Threads = "threads", Event;
    /// mica reads the image while nobody serves it
    Read = "read", Event;
    /// Snapshots of chains that are served, single and in groups
    LiveSnapshot = "live-snapshot", Event;
    /// Merges of the layers of served chains, up and down, which rest and are cancelled
    Merge = "merge", Event;
    /// States of served chains that are kept for backups, exported, and dropped
    Backup = "backup", Event;
    /// Exported states are backed up into a folder, and restored
    Folder = "folder", Event;
    /// QEMU commits a disk into a state that is kept
    CommitState = "commit-state", Event;
    /// Several commands at once about the layers of one disk, and of disks of a group
    AtOnce = "at-once", Event;
    /// Block status of served chains is held against what they hold, and against QEMU's
    BlockStatus = "block-status", Event;
    /// The file system of the images is full while layers come or go
    Full = "full", Event;
    /// Clones of frozen layers
    Clone = "clone", Event;
    /// Clones in another folder, overlays made by other verbs and by QEMU; they move, and go
    CloneAnywhere = "clone-anywhere", Event;
    /// A copy of one layer of a served chain is put back once nobody serves it
    LayerCopy = "layer-copy", Event;
    /// SIGKILL of a verb of volumes
    KillVerb = "kill-verb", Event;
    /// Another host takes a volume, by force or as it was handed it
    Force = "force", Event;
    /// Verbs, and others by force, between the hand-over of a volume and its heir
    Handed = "handed", Event;
    /// What no volume needs is collected, also by two at once
    Collect = "collect", Event;
    /// Snapshots of a volume are taken by rules
    Keep = "keep", Event;
    /// Snapshots of a volume are sent to another store
    Stream = "stream", Event;
    /// Requests to the store of volumes are slow, fail, and lose their answers
    SickStore = "sick-store", Event;
    /// Clones of volumes that are served
    LiveClone = "live-clone", Event;
    /// The power is cut beneath a volume (one seed about volumes in seven)
    CutVolume = "cut-volume", Event;
    /// A copy of the log of volumes is put back, or it is gone
    LogCopy = "log-copy", Event;
    /// A copy of the store is put back
    StoreCopy = "store-copy", Event;
}

/// The kinds that a run is restricted to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kinds(Vec<Kind>);

impl Default for Kinds {
    fn default() -> Self {
        Self(Kind::ALL.to_vec())
    }
}

impl Kinds {
    /// Those that `only` names, and of the courses, the shapes or the events all where it names
    /// none of them; without those that `without` names.
    ///
    /// # Errors
    /// The unknown name.
    pub fn parse(only: &[String], without: &[String]) -> Result<Self, String> {
        let [only, without] = [only, without].map(|names| {
            let names = names.iter().map(|name| {
                let kind = Kind::ALL.iter().copied().find(|kind| kind.name() == name);
                kind.ok_or_else(|| name.clone())
            });
            names.collect::<Result<Vec<_>, _>>()
        });
        let (only, without) = (only?, without?);
        let has = |group| only.iter().any(|kind| kind.group() == group);
        let groups = Group::ALL.map(|group| (group, has(group)));
        let kept = Kind::ALL.iter().copied().filter(|kind| {
            let is_named = groups.iter().any(|(group, has)| *group == kind.group() && *has);
            (!is_named || only.contains(kind)) && !without.contains(kind)
        });
        Ok(Self(kept.collect()))
    }

    /// Whether the run may do this.
    pub fn has(&self, kind: Kind) -> bool {
        self.0.contains(&kind)
    }

    /// Those of `kinds` that the run may do.
    pub(super) fn of(&self, kinds: &[Kind]) -> Vec<Kind> {
        kinds.iter().copied().filter(|kind| self.has(*kind)).collect()
    }

    /// Options that make another run keep to them.
    pub(super) fn as_options(&self) -> String {
        let names = |group, has| {
            let kinds = Kind::ALL.iter().filter(|kind| kind.group() == group);
            let names = kinds.filter(|kind| self.has(**kind) == has).map(|kind| kind.name());
            names.collect::<Vec<_>>()
        };
        let mut options = [(" --only ", Vec::new()), (" --without ", Vec::new())];
        for group in Group::ALL {
            let (there, missing) = (names(group, true), names(group, false));
            let is_short = !there.is_empty() && there.len() < missing.len();
            let at = usize::from(!is_short);
            options[at].1.extend(if is_short { there } else { missing });
        }
        let options = options.into_iter().filter(|(_, names)| !names.is_empty());
        options.map(|(option, names)| option.to_owned() + &names.join(",")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(only: &[&str], without: &[&str]) -> Result<Kinds, String> {
        let [only, without] =
            [only, without].map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        let (only, without): (Vec<String>, Vec<String>) = (only, without);
        Kinds::parse(&only, &without)
    }

    #[test]
    fn names_keep_a_run_to_some_events_and_leave_the_shapes() {
        let kinds = parse(&["kill", "commit"], &["v2"]).expect("they are kinds");
        assert!(kinds.has(Kind::Kill) && kinds.has(Kind::Commit) && kinds.has(Kind::Lazy));
        assert!(!kinds.has(Kind::Rebase) && !kinds.has(Kind::Old));
        assert_eq!(parse(&["kil"], &[]), Err("kil".to_owned()));
        assert_eq!(parse(&[], &[]), Ok(Kinds::default()));
    }

    #[test]
    fn what_a_run_leaves_out_is_shown_as_an_option() {
        assert_eq!(Kinds::default().as_options(), "");
        let kinds = parse(&[], &["v2", "lazy"]).expect("they are kinds");
        assert_eq!(kinds.as_options(), " --without v2,lazy");
        let kinds = parse(&["kill", "commit"], &["v2"]).expect("they are kinds");
        assert_eq!(kinds.as_options(), " --only kill,commit --without v2");
    }
}
