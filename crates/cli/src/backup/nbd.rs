//! A state that an NBD server exports as what is copied: of a whole one what is not zeros, of
//! another what its dirty bitmap says.
//!
//! What is read of the server is bounded and checked by its client: a server may be anybody.

use super::{InFolder, Opened, Since, WriteArgs, now_ns};
use crate::failure::Failure;
use mica_backup::{Begin, Content, Folder, Run, Source, disk_name};
use mica_block::{LocalFuture, Result};
use mica_rt::{Buf, join_all};
use mica_serve::nbd::client::{BASE_ALLOCATION, Client, Greeting, Uri, ZERO};
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};

/// Bytes that a server is asked about at once.
const WINDOW_BYTES: u64 = 1 << 30;
/// The flag of a part that a dirty bitmap has.
const DIRTY: u32 = 1;
/// What contexts of states are called.
const BITMAP: &str = "qemu:dirty-bitmap:";

/// An export that is copied.
struct NbdSource {
    client: Client,
    /// Up to where it was asked about.
    at: u64,
    len: u64,
    /// Only what is dirty.
    is_incremental: bool,
}

pub(super) fn open(
    args: &WriteArgs,
    named: &str,
    since: Since<'_>,
) -> std::result::Result<Opened, Failure> {
    let uri: Uri = named.parse()?;
    let failed = |error: mica_block::Error| Failure::from(error).within(named);
    let mut greeting = Greeting::connect(&uri).map_err(failed)?;
    let offered = match since.newest_of {
        [] => Vec::new(),
        _ => greeting.list(BITMAP).map_err(failed)?,
    };
    let context = |state: &str| format!("{BITMAP}{state}");
    let newest = since.newest_of.iter().find(|state| offered.contains(&context(state)));
    let base = since.named.map(str::to_owned).or_else(|| newest.cloned());
    let bitmap = base.as_deref().map(context);
    let wanted: Vec<&str> = [BASE_ALLOCATION].into_iter().chain(bitmap.as_deref()).collect();
    let missing = greeting.select(&wanted).map_err(failed)?;
    if let Some(missing) = missing {
        let what = match missing.strip_prefix(BITMAP) {
            None => format!("the server does not report what is allocated ({missing})"),
            Some(state) => {
                let offered = greeting.list(BITMAP).map_err(failed)?;
                let there = states_of(&offered);
                format!(
                    "the server does not report what changed since {state:?}, {there}: `mica ctl \
                     backup begin DISK --since {state}` makes it do so"
                )
            }
        };
        return Err(Failure::new(what).within(named));
    }
    let client = greeting.go().map_err(failed)?;
    let export = client.export().clone();
    let told = ExportedState::by(&export.description);
    let disk = disk_name(told.kept.as_ref().map_or(&*uri.export, |kept| &*kept.disk));
    let (base, why_whole) = match base {
        Some(base) => match told.is_in(since.folder, &base) {
            InFolder::Yes => (Some(base), None),
            not if since.named.is_some() => {
                return Err(not.refusal(&base, &disk).within(named));
            }
            not => (None, Some(not.why(&base, &disk))),
        },
        None => (None, why_whole(&offered)),
    };
    let kept = told.kept;
    if !export.len.is_multiple_of(SECTOR_BYTES) {
        let what = format!("its length of {} bytes is not a multiple of 512", export.len);
        return Err(Failure::new(what).within(named));
    }
    let begin = Begin {
        disk,
        state: args.state(kept.as_ref().map(|kept| kept.state.clone())),
        base,
        len: export.len,
        time_ns: kept.as_ref().map_or_else(now_ns, |kept| kept.time_ns),
    };
    let content = kept.map(|kept| {
        kept.content().unwrap_or_else(|| Content::lasting(export.description.into_bytes()))
    });
    let is_incremental = begin.base.is_some();
    let source = NbdSource { client, at: 0, len: export.len, is_incremental };
    Ok(Opened { source: Box::new(source), begin, content, why_whole })
}

/// Why all is copied from a server that has these contexts of states, none of which is in the
/// folder; `None` if the disk may keep no such state.
fn why_whole(offered: &[String]) -> Option<String> {
    let is_told = offered.iter().any(|name| name.starts_with(BITMAP));
    let how = "`mica ctl backup begin DISK --since STATE` makes it do so";
    (!is_told).then(|| format!("the server does not report what changed since a state, {how}"))
}

/// The states that these contexts offer, for an error: names that a server sent are not printed as
/// they are.
fn states_of(offered: &[String]) -> String {
    let names = offered.iter().filter_map(|name| name.strip_prefix(BITMAP));
    let names: Vec<_> = names.map(|name| name.escape_debug().to_string()).collect();
    match &*names {
        [] => "of no state".to_owned(),
        names => format!("only of {}", names.join(", ")),
    }
}

/// What mica says of an export that is a kept state: "the state STATE of DISK, kept at TIME in file
/// FILE on file FILE; since STATE of DISK, kept at TIME in file FILE on file FILE", the latter that
/// of the layer beneath, or nothing. An older mica says less, and the files are left out where
/// nobody knows when they were made.
#[derive(Default)]
struct ExportedState {
    kept: Option<KeptState>,
    /// The state of which the export tells what changed since.
    since: Option<KeptState>,
}

/// What is said of one state.
struct KeptState {
    state: String,
    disk: String,
    time_ns: u64,
    /// Which file has it, if that is known for certain: another if the state was dropped, and one
    /// of its name was kept again.
    file: Option<String>,
    /// What it stands on, if that is known: "on file FILE", or "on nothing".
    beneath: Option<String>,
}

impl ExportedState {
    fn by(description: &str) -> Self {
        let both = || {
            let (kept, since) = description.rsplit_once("; since ")?;
            let kept = KeptState::told_by(kept)?;
            let since = KeptState::told_by(&format!("the state {since}"))?;
            Some(Self { kept: Some(kept), since: Some(since) })
        };
        both().unwrap_or_else(|| Self { kept: KeptState::told_by(description), since: None })
    }

    /// Whether the state called `base` that the export stands on is the one that the `folder` has:
    /// its file was changed last at the same time, or is the same, and nobody but a merge has
    /// changed it. Servers that do not say are trusted, and so is, with a warning, what an older
    /// mica wrote. What is not there at all is found later.
    fn is_in(&self, folder: Option<&Folder>, base: &str) -> InFolder {
        let Some(since) = self.since.as_ref().filter(|since| since.state == base) else {
            return InFolder::Yes;
        };
        let Some(Ok(stored)) = folder.map(|folder| folder.find(base)) else {
            return InFolder::Yes;
        };
        if stored.begin().time_ns == since.time_ns {
            return InFolder::Yes;
        }
        let Some(content) = since.content() else { return InFolder::Another };
        if stored.was_changed(&content, since.time_ns) {
            return InFolder::Changed;
        }
        if stored.is_of(&content) {
            return InFolder::Yes;
        }
        let is_unproved = stored.is_unproved();
        if is_unproved {
            tracing::warn!(
                "nothing proves that {base:?} in the folder is the state of this name that the \
                 server has, as an older mica wrote it: a full backup into another folder is safer"
            );
        }
        if is_unproved { InFolder::Yes } else { InFolder::Another }
    }
}

impl KeptState {
    fn told_by(description: &str) -> Option<Self> {
        let (what, kept) = description.rsplit_once(", kept at ")?;
        let (state, disk) = what.strip_prefix("the state ")?.rsplit_once(" of ")?;
        let (time, place) = kept.split_once(" in file ").unzip();
        let time = time.unwrap_or(kept);
        let (file, beneath) = place.and_then(|place| place.split_once(" on ")).unzip();
        let file = file.or(place).map(str::to_owned);
        let beneath = beneath.map(|beneath| format!("on {beneath}"));
        let (seconds, part) = time.split_once('.')?;
        let [seconds, part]: [u64; 2] = [seconds.parse().ok()?, part.parse().ok()?];
        let time_ns = seconds.checked_mul(1_000_000_000)?.checked_add(part)?;
        Some(Self { state: state.to_owned(), disk: disk.to_owned(), time_ns, file, beneath })
    }

    /// Which content it has, if it is known in which file it is.
    fn content(&self) -> Option<Content> {
        let Self { state, disk, file, beneath, .. } = self;
        let lasting = format!("the state {state} of {disk} in file {}", file.as_ref()?);
        let beneath = beneath.clone().unwrap_or_default().into_bytes();
        Some(Content { lasting: lasting.into_bytes(), beneath })
    }
}

impl Source for NbdSource {
    fn next(&mut self) -> LocalFuture<'_, Result<Option<Vec<Run>>>> {
        Box::pin(async move {
            if self.at >= self.len {
                return Ok(None);
            }
            let window = WINDOW_BYTES.min(self.len - self.at);
            let asked = GuestRange::new(GuestOffset::new(self.at), window);
            let parts = self.client.status(asked.expect("within the export")).await?;
            let mut runs = Vec::new();
            for part in parts {
                let range = GuestRange::new(GuestOffset::new(self.at), part.len);
                let range = range.expect("within the export");
                self.at += part.len;
                let is_zeros = part.allocation & ZERO != 0;
                let is_wanted = match self.is_incremental {
                    true => part.bitmap & DIRTY != 0,
                    false => !is_zeros,
                };
                if is_wanted {
                    runs.push(Run { range, is_zeros });
                }
            }
            Ok(Some(runs))
        })
    }

    fn read<'a>(&'a mut self, ranges: &'a [GuestRange]) -> LocalFuture<'a, Result<Vec<Buf>>> {
        Box::pin(async move {
            let client = &self.client;
            let reads = ranges.iter().map(|range| {
                let len = usize::try_from(range.len()).expect("a piece");
                client.read(range.start().bytes(), Buf::new(len))
            });
            let read = join_all(reads.collect::<Vec<_>>()).await;
            read.into_iter().map(|(result, buf)| result.map(|()| buf)).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use InFolder::{Another, Changed, Yes};
    use mica_backup::Begun;

    #[test]
    fn what_a_server_says_of_states_is_understood() {
        let told = KeptState::told_by("the state a of b of web, kept at 12.000000034");
        let told = told.expect("as mica says it");
        assert_eq!((&*told.state, &*told.disk), ("a of b", "web"));
        assert_eq!((told.time_ns, told.content()), (12_000_000_034, None));
        let said = "the state tue of web, kept at 12.5 in file 7 1; since a of b of web, kept at \
                    11.5 in file 6 2";
        let ExportedState { kept, since } = ExportedState::by(said);
        let (kept, since) = (kept.expect("told"), since.expect("told"));
        assert_eq!((&*kept.state, &*kept.disk, kept.time_ns), ("tue", "web", 12_000_000_005));
        assert_eq!((&*since.state, &*since.disk), ("a of b", "web"));
        let lasting = b"the state a of b of web in file 6 2".as_slice();
        assert_eq!(since.content(), Some(Content::lasting(lasting)));
        // By a newer one.
        let said = "the state tue of web, kept at 12.5 in file 7 1 on file 6 2; since a of b of web, \
                    kept at 11.5 in file 6 2 on nothing";
        let ExportedState { kept, since } = ExportedState::by(said);
        let [kept, since] = [kept, since].map(|state| state.and_then(|state| state.content()));
        assert_eq!(kept.expect("told").beneath, b"on file 6 2");
        let (lasting, beneath) = (lasting.to_vec(), b"on nothing".to_vec());
        assert_eq!(since, Some(Content { lasting, beneath }));
        // Where nobody knows when files were made.
        let said = "the state tue of web, kept at 12.5; since mon of web, kept at 11.5";
        let ExportedState { kept, since } = ExportedState::by(said);
        let (kept, since) = (kept.expect("told"), since.expect("told"));
        assert_eq!((&*kept.state, kept.content()), ("tue", None));
        assert_eq!((&*since.state, since.time_ns, since.content()), ("mon", 11_000_000_005, None));
        for other in ["", "a disk", "the state mon of web", "the state mon of web, kept at x"] {
            assert!(KeptState::told_by(other).is_none(), "{other}");
        }
        let offered = [BASE_ALLOCATION, "qemu:dirty-bitmap:mon", "qemu:dirty-bitmap:\u{1b}[2J\n"];
        let there = states_of(&offered.map(str::to_owned));
        assert_eq!(there, "only of mon, \\u{1b}[2J\\n");
    }

    /// The story: a state that had got the inode of a dropped one of its name passed as that one
    /// where files have no birth time.
    #[test]
    fn state_is_the_one_in_the_folder_by_its_file_or_else_by_its_time() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = Folder::make(&dir.path().join("web")).expect("made");
        let lasting = b"the state mon of web in file 7 1".to_vec();
        let content = Content { lasting, beneath: b"on file 5 3".to_vec() };
        let [disk, state] = ["web", "mon"].map(str::to_owned);
        let begin = Begin { disk, state, base: None, len: 0, time_ns: 11_000_000_005 };
        let begun = folder.begin(begin, Some(&content)).expect("begun");
        let Begun::Pending(pending) = begun else { panic!("a new one") };
        pending.complete().expect("completed");
        let is_in = |since: &str| {
            let said = format!("the state tue of web, kept at 12.5; since mon of web, {since}");
            ExportedState::by(&said).is_in(Some(&folder), "mon")
        };
        assert_eq!(is_in("kept at 11.5 in file 7 1"), Yes);
        assert_eq!(is_in("kept at 13.5 in file 7 1"), Yes, "an older mica knows no more");
        assert_eq!(is_in("kept at 13.5 in file 7 1 on file 4 2"), Yes, "an older one went into it");
        assert_eq!(is_in("kept at 13.5 in file 7 1 on nothing"), Yes, "and that was the lowest");
        assert_eq!(is_in("kept at 11.5 in file 7 1 on file 5 3"), Yes);
        assert_eq!(is_in("kept at 13.5 in file 7 1 on file 5 3"), Changed);
        assert_eq!(is_in("kept at 13.5 in file 7 2 on file 5 3"), Another, "of its name");
        assert_eq!(is_in("kept at 11.5"), Yes);
        assert_eq!(is_in("kept at 13.5"), Another, "nobody knows");
    }
}
