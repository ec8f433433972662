//! Taking an image over from a writer that died while the machine went on: what its log says
//! ([`crate::write::handover`]) is put into the image before anybody looks at it.
//!
//! Invariants
//! - I1 A log is believed only if it is of this start of the machine and the image names it: then
//!   nobody has written the image since, and the page cache has all that the writer wrote.
//! - I2 A power cut during this leaves an image as a power cut under the writer does: data, then
//!   counts and tables that nothing names yet, then tables that got links, then links; each durable
//!   before the next begins.
//! - I3 The log is forgotten after the image stops naming it, and that after all of it is durable:
//!   if this is killed too, the next one begins anew.

use crate::format::Header;
use crate::open::{open_data_file, read_header};
use crate::write::handover::{
    EARLY, GROUP_HEAD_BYTES, HEADER_BYTES, LogHeader, RECORD_HEAD_BYTES, RECORDS_AT, group_sum,
    other_half,
};
use crate::write::header::{AUTOCLEAR_AT, LOG_NAME_SHIFT};
use mica_block::{Handover, Images, Result, Store, read_exact, write_all};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

/// Changes are put together in pages of at most this size; of a cluster, where that is smaller, so
/// that no page is of two kinds.
const PAGE_BYTES_MAX: u64 = 4096;

/// Puts into the image at `path`, open for writing as `store`, what a writer that died had
/// acknowledged. Nothing, if there was none.
///
/// # Errors
/// What a write or a sync says.
pub(crate) async fn take_over(images: &dyn Images, path: &Path, store: &dyn Store) -> Result<()> {
    let Some(name) = named_log(store).await? else { return Ok(()) };
    let handover = images.handover(path)?;
    let groups = match &handover {
        Some(handover) => read_log(&**handover, name)?,
        None => None,
    };
    if groups.is_none() {
        tracing::warn!(
            image = %path.display(),
            "its last writer did not close it, and left nothing here: writes that were not flushed \
             are lost"
        );
    }
    if let Some(groups) = groups {
        let header = read_header(store).await?;
        // Who marks an image as corrupt ends its writing, and its log.
        if !header.incompatible.corrupt {
            replay(images, path, &header, store, &groups).await?;
            tracing::info!(groups = groups.len(), "taken over from a writer that died");
        }
    }
    clear_name(store).await?;
    if let Some(handover) = handover {
        handover.remove();
    }
    Ok(())
}

/// The name of the log in the header of the image, if there is one.
async fn named_log(store: &dyn Store) -> Result<Option<u32>> {
    const START_BYTES: usize = 104;
    if store.len()? < START_BYTES as u64 {
        return Ok(None);
    }
    let start = read_exact(store, HostOffset::ZERO, START_BYTES).await?;
    // Version 2 has no such bits.
    if start[..8] != *b"QFI\xfb\0\0\0\x03" {
        return Ok(None);
    }
    let at = usize::try_from(AUTOCLEAR_AT).expect("88");
    let bits = start[at..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    Ok(u32::try_from(bits >> LOG_NAME_SHIFT).ok().filter(|name| *name != 0))
}

async fn clear_name(store: &dyn Store) -> Result<()> {
    let bits = read_exact(store, HostOffset::new(AUTOCLEAR_AT), 8).await?;
    let bits = bits.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    let kept = bits & ((1 << LOG_NAME_SHIFT) - 1);
    let at = HostOffset::new(AUTOCLEAR_AT);
    write_all(store, Buf::from_slice(&kept.to_be_bytes()), at).await?;
    store.sync().await
}

/// The groups of the log, if it is the one that is meant.
fn read_log(handover: &dyn Handover, name: u32) -> Result<Option<Vec<Vec<u8>>>> {
    let mut header = [0; HEADER_BYTES];
    handover.read_at(0, &mut header)?;
    let Some(LogHeader { name: has, boot, start, mut number }) = LogHeader::decode(&header) else {
        return Ok(None);
    };
    if has != name || boot != handover.boot() || start < RECORDS_AT {
        return Ok(None);
    }
    let mut groups = Vec::new();
    for half in [start, other_half(start, handover.capacity())] {
        let mut at = half;
        while let Some(records) = read_group(handover, name, number, at)? {
            at += (GROUP_HEAD_BYTES + records.len()) as u64;
            number += 1;
            groups.push(records);
        }
    }
    Ok(Some(groups))
}

/// The records of group `number` at `at`, if it is there.
fn read_group(handover: &dyn Handover, name: u32, number: u64, at: u64) -> Result<Option<Vec<u8>>> {
    let end = handover.capacity();
    let records_at = at.saturating_add(GROUP_HEAD_BYTES as u64);
    if records_at > end {
        return Ok(None);
    }
    let mut head = [0; GROUP_HEAD_BYTES];
    handover.read_at(at, &mut head)?;
    let word = |at: usize| u32::from_le_bytes(*head[at..].first_chunk().expect("4 bytes"));
    let found = u64::from_le_bytes(*head.first_chunk().expect("8 bytes"));
    let len = u64::from(word(8));
    if found != number || records_at + len > end {
        return Ok(None);
    }
    let mut records = vec![0; usize::try_from(len).expect("within the log")];
    handover.read_at(records_at, &mut records)?;
    Ok((group_sum(name, number, &records) == word(12)).then_some(records))
}

/// When a page is written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Step {
    /// Counts, and tables that nothing names yet.
    Early,
    /// Tables that nothing named at first, and that got links later.
    Tables,
    /// Links.
    Late,
}

struct Page {
    step: Step,
    bytes: Buf,
}

async fn replay(
    images: &dyn Images,
    path: &Path,
    header: &Header,
    store: &dyn Store,
    groups: &[Vec<u8>],
) -> Result<()> {
    let page_bytes = header.cluster_bits.bytes().min(PAGE_BYTES_MAX);
    let mut pages: BTreeMap<u64, Page> = BTreeMap::new();
    for records in groups {
        let mut rest = &records[..];
        while let Some((head, after)) = rest.split_at_checked(RECORD_HEAD_BYTES) {
            let at = u64::from_le_bytes(*head.first_chunk().expect("8 bytes"));
            let word = |at: usize| u32::from_le_bytes(*head[at..].first_chunk().expect("4 bytes"));
            let Some((content, after)) = after.split_at_checked(word(8) as usize) else { break };
            rest = after;
            let is_early = word(12) == EARLY;
            put(&mut pages, page_bytes, store, (at, content), is_early).await?;
        }
    }
    if header.incompatible.external_data_file {
        open_data_file(images, path, header, true)?.1.store.sync().await?;
    }
    for step in [Step::Early, Step::Tables, Step::Late] {
        // Data first, and each step before the next (I2).
        store.sync().await?;
        for (at, page) in &pages {
            if page.step == step {
                write_all(store, Buf::from_slice(&page.bytes), HostOffset::new(*at)).await?;
            }
        }
    }
    store.sync().await
}

/// Puts one record into its pages, which are read first.
async fn put(
    pages: &mut BTreeMap<u64, Page>,
    page_bytes: u64,
    store: &dyn Store,
    (at, content): (u64, &[u8]),
    is_early: bool,
) -> Result<()> {
    let mut done = 0;
    while done < content.len() {
        let here = at + done as u64;
        let start = here / page_bytes * page_bytes;
        let within = usize::try_from(here - start).expect("within a page");
        let page_len = usize::try_from(page_bytes).expect("4 KiB");
        let count = (page_len - within).min(content.len() - done);
        let page = match pages.entry(start) {
            Entry::Occupied(page) => page.into_mut(),
            Entry::Vacant(place) => {
                let bytes = read_exact(store, HostOffset::new(start), page_len).await?;
                let step = if is_early { Step::Early } else { Step::Late };
                place.insert(Page { step, bytes })
            }
        };
        page.step = match (page.step, is_early) {
            (Step::Early, true) => Step::Early,
            (Step::Late, false) => Step::Late,
            _ => Step::Tables,
        };
        page.bytes[within..within + count].copy_from_slice(&content[done..done + count]);
        done += count;
    }
    Ok(())
}
