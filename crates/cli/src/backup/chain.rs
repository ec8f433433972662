//! States of images as what is copied: of a whole one what is not zeros, of another what the layers
//! own that its base has not.

use super::subject::Subject;
use super::{InFolder, Opened, Since, WriteArgs};
use crate::create::is_any_encrypted;
use crate::failure::Failure;
use mica_backup::{Begin, Folder, Run, Source, disk_name, has_state};
use mica_block::{Disk, LocalFuture, Manage, Result, Survey, read_whole, wait_for_dead};
use mica_qcow2::ChainDiff;
use mica_rt::{Buf, join_all};
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;

/// A state that is open.
struct ChainSource {
    disk: Arc<dyn Manage>,
    changes: Changes,
}

/// Where there is something to copy.
enum Changes {
    /// Everywhere from here on.
    From(GuestOffset),
    Since(Box<ChainDiff>),
}

pub(super) async fn open(
    args: &WriteArgs,
    subject: Subject,
    since: Since<'_>,
) -> std::result::Result<Opened, Failure> {
    let state = subject.state_name(args);
    let disk = subject.open().await?;
    let found = changes_since(&subject, &state, since).await?;
    let (base, changes) = match found {
        Some((base, diff)) => (Some(base), Changes::Since(Box::new(diff))),
        None => (None, Changes::From(GuestOffset::ZERO)),
    };
    let begin = Begin {
        disk: disk_name(&subject.disk()),
        state,
        base,
        len: disk.geometry().len,
        time_ns: subject.time_ns(),
    };
    if is_any_encrypted(&*disk) {
        warn_of_plain_backup(args);
    }
    let content = Some(subject.content(&*disk)?);
    let source = Box::new(ChainSource { disk, changes });
    Ok(Opened { source, begin, content, why_whole: None })
}

fn warn_of_plain_backup(args: &WriteArgs) {
    let target = args.target.as_deref().map(|target| target.display().to_string());
    let target = target.filter(|target| target != "-");
    let (target, cure) = match &target {
        Some(folder) => (&**folder, "keep it on a file system that is"),
        None => ("the stream", "encrypt it on its way"),
    };
    tracing::warn!("{target} is not encrypted, and the disk is: {cure}");
}

/// What the state goes on from, and what differs; `None` if it is whole.
async fn changes_since(
    subject: &Subject,
    state: &str,
    since: Since<'_>,
) -> std::result::Result<Option<(String, ChainDiff)>, Failure> {
    if let Some(named) = since.named {
        let found = difference(subject, named).await.map_err(|failure| {
            let kept = subject.kept();
            failure.within(format!("no state {named:?} of {:?} ({kept})", subject.disk()))
        });
        let disk = subject.disk();
        let Some(diff) = found? else {
            let what = format!(
                "{named:?} and {state:?} of {disk:?} have no layer in common: make a full backup"
            );
            return Err(Failure::new(what));
        };
        if !is_in_folder(subject, named, since.folder).await? {
            return Err(InFolder::Another.refusal(named, &disk));
        }
        return Ok(Some((named.to_owned(), diff)));
    }
    for known in since.newest_of.iter().filter(|known| *known != state) {
        if let Ok(Some(diff)) = difference(subject, known).await
            && is_in_folder(subject, known, since.folder).await?
        {
            return Ok(Some((known.clone(), diff)));
        }
    }
    Ok(None)
}

/// What differs between the state called `base` and `subject`; `None` if they are not related.
async fn difference(
    subject: &Subject,
    base: &str,
) -> std::result::Result<Option<ChainDiff>, Failure> {
    let base = subject.other(base)?;
    let images = [base.files()?, subject.files()?];
    let states = [base.as_diffed(&images[0]), subject.as_diffed(&images[1])];
    let diff = wait_for_dead(async || ChainDiff::open(states[0], states[1]).await).await?;
    Ok(diff.are_related().then_some(diff))
}

/// Whether the state called `base` of the disk is the one that the folder has under this name: it
/// was written of these files as they are, or what they have is what it has, which takes reading
/// them. What is not there at all is found later.
async fn is_in_folder(
    subject: &Subject,
    base: &str,
    folder: Option<&Folder>,
) -> std::result::Result<bool, Failure> {
    let Some(folder) = folder else { return Ok(true) };
    let Ok(stored) = folder.find(base) else { return Ok(true) };
    let subject = subject.other(base)?;
    let disk = subject.open().await?;
    if stored.is_of(&subject.content(&*disk)?) {
        return Ok(true);
    }
    tracing::info!("{base:?} is compared with the folder's, as its files are not as they were");
    Ok(has_state(&*disk, &folder.line(base)?).await?)
}

impl Source for ChainSource {
    fn next(&mut self) -> LocalFuture<'_, Result<Option<Vec<Run>>>> {
        Box::pin(async move {
            let end = GuestOffset::new(self.disk.geometry().len);
            let mut runs = Vec::new();
            match &mut self.changes {
                Changes::From(at) => {
                    let left = GuestRange::between(*at, end).filter(|left| !left.is_empty());
                    let Some(left) = left else { return Ok(None) };
                    let found = Survey::new(&*self.disk, left).next().await?;
                    for extent in found.iter().flatten() {
                        *at = extent.range().end();
                        if !extent.kind.reads_as_zero() {
                            runs.push(Run { range: extent.range(), is_zeros: false });
                        }
                    }
                }
                Changes::Since(diff) => {
                    let Some(ranges) = diff.next().await? else { return Ok(None) };
                    for range in ranges {
                        let within = GuestRange::between(range.start(), range.end().min(end));
                        let Some(range) = within.filter(|it| !it.is_empty()) else { continue };
                        let mut survey = Survey::new(&*self.disk, range);
                        while let Some(extents) = survey.next().await? {
                            runs.extend(extents.iter().map(|extent| {
                                let is_zeros = extent.kind.reads_as_zero();
                                Run { range: extent.range(), is_zeros }
                            }));
                        }
                    }
                }
            }
            Ok(Some(runs))
        })
    }

    fn read<'a>(&'a mut self, ranges: &'a [GuestRange]) -> LocalFuture<'a, Result<Vec<Buf>>> {
        let disk: &dyn Disk = &*self.disk;
        Box::pin(async move {
            let reads = ranges.iter().map(|range| read(disk, *range)).collect::<Vec<_>>();
            join_all(reads).await.into_iter().collect()
        })
    }
}

async fn read(disk: &dyn Disk, range: GuestRange) -> Result<Buf> {
    let plan = disk.plan(range, Vec::new()).finish().await?;
    read_whole(disk, &plan).await
}
