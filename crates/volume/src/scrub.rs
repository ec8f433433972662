//! Reads everything that is kept, and says what of it is damaged: of a whole store, or of one
//! volume with its snapshots.
//!
//! Nodes are read as a collector does it ([`Mark`]), which checks the sum of each. Then each extent
//! is read whole, once, whoever names something in it: the sums of all its blocks that are named
//! are compared with those that the places have, together. Where they differ, or something is
//! missing, `lost` finds out which volumes and snapshots have lost what.
//!
//! Invariants
//! - I1 Nothing is changed, and no key is needed: sums are those of what is stored.
//! - I2 Damage does not end it: what is beneath a damaged node is unknown, and all the rest is
//!   read.
//! - I3 What others deleted meanwhile is no damage: only what is lost to the heads that there are
//!   at the end is.

mod lost;

use crate::check::Findings;
use crate::collect::client::{Client, InFlight};
use crate::collect::extents::{Listed, list_extents};
use crate::collect::mark::{Mark, Marked, digest_of, digest_of_frame};
use crate::collect::names::{Named, stable_names};
use crate::collect::{Progress, Speed, Step};
use crate::format::Id;
use crate::format::extent::{self, HEADER_BYTES, Kind};
use crate::frames;
use crate::names::VolumeName;
use crate::place::{BLOCK_BYTES, ExtentId};
use crate::put::{decode_header, elsewhere};
use crate::volumes::Volumes;
use mica_block::{Error, ErrorKind, Result};
use mica_map::crc32c;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Extents that are read at a time, each whole.
const EXTENTS_AT_ONCE: usize = 4;

impl Volumes {
    /// Reads every extent of the store whole, and says what is damaged: which volumes and snapshots
    /// have lost what.
    ///
    /// # Errors
    /// What the store reports, but damage. Of volumes that only a newer version of mica can read
    /// nothing is known but their names, which [`Findings::newer`] has.
    pub async fn scrub(
        &self,
        speed: Speed,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Findings> {
        let client = Client::new(Arc::clone(&self.objects), speed);
        let listed = list_extents(&client, |extents| {
            progress(Progress { extents, ..Progress::default() });
        });
        let listed = listed.await?;
        let unread = self.list_with_damaged().await?;
        let (damaged, newer) = (unread.damaged, unread.newer);
        let without = damaged.iter().chain(&newer).map(|(name, _)| name.clone()).collect();
        let names = stable_names(&client, self.store, &without).await?;
        let which = Whose::All { without };
        let mut findings = self.read_all(&client, &names, &listed, which, progress).await?;
        for (name, error) in damaged {
            findings.add(|| damaged_head(&name, &error));
        }
        findings.newer = newer;
        Ok(findings)
    }

    /// As [`Self::scrub`], of one volume with its snapshots.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume; `Unsupported` if only a newer version of mica can
    /// read it; as [`Self::scrub`].
    pub async fn check(
        &self,
        name: &VolumeName,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Findings> {
        let mut findings = Findings::default();
        let info = findings.note(self.info(name).await, |error| damaged_head(name, error))?;
        if info.is_none() {
            return Ok(findings);
        }
        let client = Client::new(Arc::clone(&self.objects), Speed::default());
        let which = Whose::Of(name);
        let names = self.names(&client, &which).await?;
        self.read_all(&client, &names, &[], which, progress).await
    }

    /// The highest heads of these names.
    async fn names(&self, client: &Client, which: &Whose<'_>) -> Result<Vec<Arc<Named>>> {
        match which {
            Whose::All { without } => stable_names(client, self.store, without).await,
            Whose::Of(name) => {
                let found = crate::collect::names::read_name(client, self.store, name);
                Ok(found.await?.into_iter().collect())
            }
        }
    }

    async fn read_all(
        &self,
        client: &Client,
        names: &[Arc<Named>],
        listed: &[Listed],
        which: Whose<'_>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Findings> {
        let mut scrub = Scrub {
            client: client.clone(),
            store: self.store,
            reading: InFlight::with_max(EXTENTS_AT_ONCE),
            findings: Findings::default(),
            bad: BTreeSet::new(),
            at: Progress {
                step: Step::Mark,
                names: names.len() as u64,
                of_extents: listed.len() as u64,
                ..Progress::default()
            },
        };
        let mut mark = Mark::new(client, names);
        let mut rest = listed.iter().rev().peekable();
        while let Some(marked) = mark.next().await? {
            while let Some(unnamed) = rest.next_if(|listed| listed.id > marked.id) {
                scrub.read(unnamed.id, None).await?;
            }
            rest.next_if(|listed| listed.id == marked.id);
            scrub.read(marked.id, Some(marked)).await?;
            scrub.at.nodes = mark.nodes;
            progress(scrub.at);
        }
        for unnamed in rest {
            scrub.read(unnamed.id, None).await?;
            progress(scrub.at);
        }
        scrub.end().await?;
        scrub.findings.nodes = mark.nodes;
        scrub.findings.snapshots = mark.snapshots;
        scrub.bad.extend(mark.damage.iter().map(|damage| damage.at.extent()));
        if !scrub.bad.is_empty() {
            let names = self.names(client, &which).await?;
            lost::find(&self.tree, &names, &scrub.bad, &mut scrub.findings).await?;
        }
        Ok(scrub.findings)
    }
}

/// Whose extents are read.
enum Whose<'a> {
    /// Those of all volumes but these, whose heads cannot be read.
    All { without: BTreeSet<VolumeName> },
    /// Those of this one.
    Of(&'a VolumeName),
}

fn damaged_head(name: &VolumeName, error: &Error) -> String {
    format!("the newest head of volume {}: {}", name.as_str(), error.in_one_line())
}

/// See the module.
struct Scrub {
    client: Client,
    store: Id,
    reading: InFlight<Result<Whole>>,
    findings: Findings,
    /// Extents that have not all that is named in them.
    bad: BTreeSet<ExtentId>,
    at: Progress,
}

/// What was found of an extent that was read whole.
struct Whole {
    id: ExtentId,
    is_named: bool,
    blocks: u64,
    /// Whether it has all blocks that are named.
    is_complete: bool,
    /// What is wrong with its header or its table, which recovery needs.
    frame: Result<()>,
}

impl Scrub {
    async fn read(&mut self, id: ExtentId, marked: Option<Marked>) -> Result<()> {
        let (client, store) = (self.client.clone(), self.store);
        let read = async move { read_whole(&client, store, id, marked.as_ref()).await };
        match self.reading.push(read).await {
            Some(whole) => self.note(whole?),
            None => Ok(()),
        }
    }

    async fn end(&mut self) -> Result<()> {
        while let Some(whole) = self.reading.next().await {
            self.note(whole?)?;
        }
        Ok(())
    }

    fn note(&mut self, whole: Whole) -> Result<()> {
        self.at.extents += 1;
        self.findings.blocks += whole.blocks;
        self.findings.extents += u64::from(whole.is_named);
        if !whole.is_complete {
            self.bad.insert(whole.id);
        }
        self.findings.note(whole.frame, |error| format!("an extent: {}", error.in_one_line()))?;
        Ok(())
    }
}

async fn read_whole(
    client: &Client,
    store: Id,
    id: ExtentId,
    marked: Option<&Marked>,
) -> Result<Whole> {
    let mut whole =
        Whole { id, is_named: marked.is_some(), blocks: 0, is_complete: true, frame: Ok(()) };
    let name = id.name();
    let missing = |error: &Error| error.kind() == ErrorKind::NotFound;
    let bytes = match client.read(&name, 0, HEADER_BYTES).await {
        Ok(bytes) => bytes,
        // If something needs it, that is found to be lost. Otherwise it was collected.
        Err(error) if missing(&error) => {
            whole.is_complete = marked.is_none();
            return Ok(whole);
        }
        Err(error) => return Err(error),
    };
    let header = match decode_header(&*client.objects, id, &bytes) {
        Ok(header) if header.store == store && header.kind == Kind::Extent => header,
        // A volume of that version may have put it.
        Err(error) if error.kind() == ErrorKind::Unsupported && marked.is_none() => {
            return Ok(whole);
        }
        other => {
            whole.is_complete = marked.is_none();
            whole.frame = other.and(Err(elsewhere(&name, &*client.objects)));
            return Ok(whole);
        }
    };
    let (start, len) = match marked {
        Some(_) => (HEADER_BYTES, header.len() - HEADER_BYTES),
        None => (header.table_at(), header.len() - header.table_at()),
    };
    let bytes = match client.read(&name, start as u64, len).await {
        Ok(bytes) => bytes,
        Err(error) if missing(&error) => {
            whole.is_complete = marked.is_none();
            return Ok(whole);
        }
        Err(error) => return Err(error),
    };
    let table = &bytes[header.table_at() - start..];
    let table = extent::decode_table(&header, table);
    whole.frame =
        table.map(drop).map_err(|why| why.explain(&name, &*client.objects).wrap("its table"));
    if let Some(marked) = marked {
        let blocks = bytes.chunks_exact(BLOCK_BYTES).take(header.blocks).enumerate();
        let named = blocks.filter(|(index, _)| marked.parts.has_block(*index));
        let mut digest = 0;
        for (index, block) in named {
            digest ^= digest_of(index, crc32c(block));
            whole.blocks += 1;
        }
        whole.is_complete = whole.blocks == marked.parts.blocks();
        for offset in marked.parts.frames() {
            let start = usize::try_from(offset).expect("an extent is small") - HEADER_BYTES;
            match frames::found(bytes.get(start..).unwrap_or_default(), offset) {
                Some((part, sum, blocks)) => {
                    digest ^= digest_of_frame(part, sum);
                    whole.blocks += blocks;
                }
                None => whole.is_complete = false,
            }
        }
        whole.is_complete &= digest == marked.digest;
    }
    Ok(whole)
}

#[cfg(test)]
mod tests;
