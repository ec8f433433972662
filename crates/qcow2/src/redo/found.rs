//! A log that was found, and whether it is the one that the image refers to.

use super::baseline::{HeaderState, Run, SpaceState};
use super::expected::{EXPECTED, Expected, decode_expected};
use super::format::{
    EARLY_ZEROS, GROUP_HEAD_BYTES, GroupHead, HEADER, LATE, LATE_ZEROS, LogHeader,
    RECORD_HEAD_BYTES, RECORDS_AT, SPACE, WITNESSES, decode_witnesses, other_half, read_header,
    time_of,
};
use mica_block::{RedoMemory, Result, Store, Witness};
use mica_qcow2_format::Header;

const COPY: &str = "its redo log is a copy, which may lack what it acknowledged last";
const CHANGED: &str = "its redo log was changed later, and may lack what it acknowledged last";

/// Maximum time from the moment at which a write to a log gets its time to its end.
const WRITE_NS_MAX: u128 = 1_000_000_000;

/// The contents of a log.
pub(super) struct Found {
    log: LogHeader,
    /// The records of each group, in the order of the groups.
    pub(super) groups: Vec<Vec<u8>>,
    /// The header's fields after all groups.
    header: Option<HeaderState>,
    /// What is known of the file's clusters after all groups.
    space: Option<SpaceState>,
    /// Evidence that the data that the groups link is still there.
    witnesses: Vec<Witness>,
    /// Why its last groups may be missing, if they may.
    pub(super) doubt: Option<&'static str>,
}

/// One record of a group.
pub(super) struct Record<'a> {
    pub(super) at: u64,
    pub(super) kind: u32,
    /// For a record without content: the number of bytes that become zeros.
    pub(super) zeros: u64,
    pub(super) content: &'a [u8],
}

/// The records of a group.
pub(super) fn records(group: &[u8]) -> impl Iterator<Item = Record<'_>> {
    let mut rest = group;
    std::iter::from_fn(move || {
        let (head, after) = rest.split_at_checked(RECORD_HEAD_BYTES)?;
        let word = |at: usize| Some(u32::from_le_bytes(*head[at..].first_chunk()?));
        let at = u64::from_le_bytes(*head.first_chunk()?);
        let (len, kind) = (word(8)?, word(12)?);
        let is_zeros = matches!(kind, EARLY_ZEROS | LATE_ZEROS);
        let (content, after) = after.split_at_checked(if is_zeros { 0 } else { len as usize })?;
        rest = after;
        Some(Record { at, kind, zeros: if is_zeros { len.into() } else { 0 }, content })
    })
}

impl Found {
    /// Reads the log, if it answers to `name`.
    pub(super) fn read(memory: &dyn RedoMemory, name: u32) -> Result<Option<Self>> {
        let header = read_header(memory)?.filter(|header| header.names.contains(&name));
        Self::read_groups(memory, header)
    }

    /// Reads the log, whatever it answers to.
    pub(super) fn read_any(memory: &dyn RedoMemory) -> Result<Option<Self>> {
        Self::read_groups(memory, read_header(memory)?)
    }

    fn read_groups(memory: &dyn RedoMemory, log: Option<LogHeader>) -> Result<Option<Self>> {
        let Some(log) = log else { return Ok(None) };
        let LogHeader { salt, origin, start, mut number, .. } = log;
        let here = memory.origin()?;
        if origin.boot != here.boot || start < RECORDS_AT {
            return Ok(None);
        }
        let changed_ns = memory.changed_ns()?;
        let is_last = |time_ns: i64| changed_ns.abs_diff(time_ns.into()) <= WRITE_NS_MAX;
        let (mut groups, mut is_untouched) = (Vec::new(), is_last(log.time_ns));
        for half in [start, other_half(start, memory.capacity())] {
            let mut at = half;
            while let Some(head) = read_head(memory, at)?.filter(|head| head.number == number) {
                // Also of one that its writer did not complete.
                is_untouched |= is_last(head.time_ns);
                let Some(records) = read_records(memory, salt, head, at)? else { break };
                at += (GROUP_HEAD_BYTES + records.len()) as u64;
                number += 1;
                groups.push(records);
            }
        }
        let doubt = match () {
            () if origin.memory != here.memory => Some(COPY),
            () if number < log.next || !is_untouched => Some(CHANGED),
            () => None,
        };
        let (header, space, witnesses) = (None, None, Vec::new());
        let mut found = Self { log, groups, header, space, witnesses, doubt };
        for record in found.groups.iter().flat_map(|group| records(group)) {
            match record.kind {
                HEADER => found.header = HeaderState::decode(record.content),
                SPACE => found.space = SpaceState::decode(record.at, record.content),
                WITNESSES => {
                    found.witnesses = decode_witnesses(record.content).unwrap_or_default();
                }
                _ => {}
            }
        }
        Ok(Some(found))
    }

    /// Whether the image in `store` with this `header` is the one that the log builds on. A log
    /// that lacks a part of its baseline belongs to no image.
    pub(super) fn fits(&self, store: &dyn Store, header: &Header) -> Result<bool> {
        let (Some(state), Some(space)) = (&self.header, &self.space) else { return Ok(false) };
        Ok(store.len()? >= space.min_file_len && state.allows(header))
    }

    /// Whether it has no effect: no change was recorded since the last flush.
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Whether acknowledged writes are lost without it: a link, which is in a late page. A table
    /// that is new is linked by one.
    pub(super) fn has_links(&self) -> bool {
        let kinds = self.groups.iter().flat_map(|group| records(group)).map(|record| record.kind);
        kinds.into_iter().any(|kind| matches!(kind, LATE | LATE_ZEROS))
    }

    /// Clusters that are counted and not linked, after all groups.
    pub(super) fn unused(&self) -> &[Run] {
        self.space.as_ref().map_or(&[], |space| &space.unused)
    }

    /// Records in the log in `memory` that its changes are about to be written to the image.
    pub(super) fn begin_replay(&self, memory: &dyn RedoMemory) -> Result<()> {
        let (sequence, time_ns) = (self.log.sequence + 1, time_of(memory.now_ns()));
        let next = self.log.number + self.groups.len() as u64;
        LogHeader { sequence, time_ns, next, replay_began: true, ..self.log }.write(memory)
    }

    /// Whether a process began to replay it, so that the file may have some of its changes.
    pub(super) fn replay_began(&self) -> bool {
        self.log.replay_began
    }

    /// What the file may hold in pages that the log changes.
    pub(super) fn expected(&self) -> impl Iterator<Item = Expected> {
        let records = self.groups.iter().flat_map(|group| records(group));
        let records = records.filter(|record| record.kind == EXPECTED);
        records.filter_map(|record| decode_expected(record.at, record.content))
    }

    /// Whether the system lost anything that was written to the image in `stores`.
    pub(super) fn tells_loss(&self, stores: &[&dyn Store]) -> bool {
        self.witnesses.len() != stores.len()
            || self
                .witnesses
                .iter()
                .zip(stores)
                .any(|(recorded, store)| recorded.tells_loss(store.witness()))
    }
}

/// The head of the group at `at`, if there is room for one.
fn read_head(memory: &dyn RedoMemory, at: u64) -> Result<Option<GroupHead>> {
    if at.saturating_add(GROUP_HEAD_BYTES as u64) > memory.capacity() {
        return Ok(None);
    }
    let mut head = [0; GROUP_HEAD_BYTES];
    memory.read_at(at, &mut head)?;
    Ok(Some(GroupHead::decode(&head)))
}

/// The records of the group at `at`, which has this head, if they are all there.
fn read_records(
    memory: &dyn RedoMemory,
    salt: u32,
    head: GroupHead,
    at: u64,
) -> Result<Option<Vec<u8>>> {
    let records_at = at + GROUP_HEAD_BYTES as u64;
    if records_at + u64::from(head.len) > memory.capacity() {
        return Ok(None);
    }
    let mut records = vec![0; usize::try_from(head.len).expect("within the log")];
    memory.read_at(records_at, &mut records)?;
    let is_right = GroupHead::of(salt, head.number, head.time_ns, &records).sum == head.sum;
    Ok(is_right.then_some(records))
}
