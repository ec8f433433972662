//! Making a log in a file or on a device, and finding out whether there is one.
//!
//! Nothing is overwritten that is not zeros: a name that was mistyped must not cost a disk.

use super::format::{BLOCK, BLOCK_LEN, DeviceHeader, MAGIC, SegmentHeader};
use crate::format::Id;
use crate::format::frame::Malformed;
use mica_block::{Error, ErrorKind, Result, RunKind, Space, Store, read_exact, write_all};
use mica_rt::Buf;
use mica_units::HostOffset;

/// What is looked at before a device is used: what others write begins or ends within that.
const DEVICE_ENDS_LEN: u64 = 4 << 20;
const LOOK_LEN: u64 = 1 << 20;
/// Bytes of a new log that are written at most: what takes seconds.
const FILLED_MAX: u64 = 4 << 30;

/// What is at the beginning of `file`.
pub(super) enum Beginning {
    Log(DeviceHeader),
    Zeros,
}

/// # Errors
/// If it is neither a log nor zeros: then it is said what it is, and what to do.
pub(super) async fn beginning(file: &dyn Store) -> Result<Beginning> {
    let bytes = read_exact(file, HostOffset::ZERO, BLOCK).await?;
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(Beginning::Zeros);
    }
    match DeviceHeader::decode(&bytes) {
        Ok(header) => Ok(Beginning::Log(header)),
        Err(Malformed::Magic) if is_but_for_its_magic(&bytes) => {
            Err(explain(file, Malformed::Checksum))
        }
        Err(Malformed::Magic | Malformed::Empty) => {
            Err(other_content(file, "is not empty".to_owned()).await)
        }
        Err(malformed) => Err(explain(file, malformed)),
    }
}

/// That a file without a header has something in it: `there`. Emptying what is a log all the same,
/// by its segments, would cost what volumes have acknowledged.
async fn other_content(file: &dyn Store, there: String) -> Error {
    match has_segments(file).await {
        Ok(false) => {
            let what = format!(
                "{} is not a log, and {there}: name another file, or empty it first if nobody \
                 needs what is in it",
                file.name()
            );
            Error::new(ErrorKind::Invalid, what)
        }
        Ok(true) => explain(file, Malformed::Checksum),
        Err(error) => error.wrap(file.name()),
    }
}

/// Whether some segment begins where one does in a log as long as `file`.
async fn has_segments(file: &dyn Store) -> Result<bool> {
    let Some(header) = DeviceHeader::for_len(Id::default(), file.len()?) else { return Ok(false) };
    for slot in 0..usize::try_from(header.segments).expect("few segments") {
        let bytes = read_exact(file, HostOffset::new(header.at(slot)), BLOCK).await?;
        // A newer version may have written it.
        let found = SegmentHeader::decode(&bytes);
        if matches!(found, Ok(_) | Err(Malformed::Version(_) | Malformed::Checksum)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether these bytes are a log but for the first of them.
fn is_but_for_its_magic(bytes: &[u8]) -> bool {
    let mut whole = bytes.to_vec();
    whole[..MAGIC.len()].copy_from_slice(&MAGIC);
    DeviceHeader::decode(&whole).is_ok()
}

pub(super) fn explain(file: &dyn Store, malformed: Malformed) -> Error {
    let name = file.name();
    match malformed {
        Malformed::Version(_) => {
            Error::new(ErrorKind::Unsupported, format!("the log {name}: {malformed}"))
        }
        _ => {
            let what = format!(
                "the log {name}: its header is damaged ({malformed}): restore the file from a \
                 copy; or move it away, and serve its volumes by --force with another log, \
                 without what only this one had"
            );
            Error::new(ErrorKind::Corrupt, what)
        }
    }
}

/// Makes a log in `file`, which has its length and only zeros. The header comes last: a power cut
/// leaves zeros or a log.
pub(super) async fn make(file: &dyn Store, id: Id) -> Result<DeviceHeader> {
    let len = file.len()?;
    let header = DeviceHeader::for_len(id, len).ok_or_else(|| too_short(file, len))?;
    expect_zeros(file, len).await?;
    allocate(file, &header).await?;
    fill(file, &header).await?;
    file.sync().await.map_err(|error| error.wrap(file.name()))?;
    write_all(file, Buf::from_slice(&header.encode()), HostOffset::ZERO).await?;
    file.sync().await.map_err(|error| error.wrap(file.name()))?;
    Ok(header)
}

/// Checks that a log may have `len` bytes.
pub(super) fn check_len(file: &dyn Store, len: u64) -> Result<()> {
    if len < DeviceHeader::LEN_MIN { Err(too_short(file, len)) } else { Ok(()) }
}

fn too_short(file: &dyn Store, len: u64) -> Error {
    let (name, shortest) = (file.name(), DeviceHeader::LEN_MIN);
    let what = format!("{name} has {len} bytes, a log at least {shortest}: make it longer");
    Error::new(ErrorKind::Invalid, what)
}

/// Gives the log all its space, so that a lack of it shows now and not when a guest writes.
pub(super) async fn allocate(file: &dyn Store, header: &DeviceHeader) -> Result<()> {
    if is_device(file) {
        return Ok(());
    }
    match file.space(Space::Allocate, HostOffset::ZERO, header.len()).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            let file = file.name();
            tracing::warn!(file, "the file system cannot allocate: writes to the log may fail");
            Ok(())
        }
        Err(error) if error.kind() == ErrorKind::NoSpace => {
            let (name, len) = (file.name(), header.len());
            let what = format!(
                "{name}: no space for {len} bytes: free some, or choose a smaller --log-size and \
                 remove the file"
            );
            Err(Error::new(ErrorKind::NoSpace, what))
        }
        other => other.map_err(|error| error.wrap(format!("allocating the log {}", file.name()))),
    }
}

/// Writes zeros over the log: space that was only allocated takes twice as long to be synced when
/// it is written for the first time, as the file system has to note that it was. The headers of
/// long segments are written by themselves: what the page cache has of a write is synced as a
/// whole, and of a segment the header alone is, again and again.
async fn fill(file: &dyn Store, header: &DeviceHeader) -> Result<()> {
    if is_device(file) {
        return Ok(());
    }
    let len = header.len().min(FILLED_MAX);
    let mut zeros = Buf::zeroed(usize::try_from(LOOK_LEN).expect("a small piece"));
    let mut at = 0;
    while at < len {
        let written = (len - at).min(fill_len(header, at));
        let rest = zeros.split_to(usize::try_from(written).expect("a small piece"));
        let (result, mut back) = file.write_at(rest, HostOffset::new(at)).await;
        result.map_err(|error| error.wrap(format!("making the log {}", file.name())))?;
        back.join(zeros);
        (zeros, at) = (back, at + written);
    }
    Ok(())
}

/// Bytes that are filled at once from `at` on, at most.
fn fill_len(header: &DeviceHeader, at: u64) -> u64 {
    if header.segment_bytes < LOOK_LEN {
        return LOOK_LEN;
    }
    let Some(behind) = at.checked_sub(BLOCK_LEN) else { return BLOCK_LEN };
    match behind % header.segment_bytes {
        0 => BLOCK_LEN,
        within => LOOK_LEN.min(header.segment_bytes - within),
    }
}

pub(super) fn is_device(file: &dyn Store) -> bool {
    file.identity().is_device()
}

/// Checks that there is nothing in `file`: of a file, that it is zeros; of a device, that its ends
/// are.
async fn expect_zeros(file: &dyn Store, len: u64) -> Result<()> {
    if is_device(file) {
        expect_zeros_in(file, 0, len.min(DEVICE_ENDS_LEN)).await?;
        return expect_zeros_in(file, len.saturating_sub(DEVICE_ENDS_LEN), len).await;
    }
    let mut at = 0;
    while at < len {
        let run = file.run_at(HostOffset::new(at), len - at)?;
        if run.kind == RunKind::Data {
            expect_zeros_in(file, at, at + run.len).await?;
        }
        at += run.len.max(1);
    }
    Ok(())
}

async fn expect_zeros_in(file: &dyn Store, start: u64, end: u64) -> Result<()> {
    let mut at = start;
    while at < end {
        let len = usize::try_from(LOOK_LEN.min(end - at)).expect("a small piece");
        let bytes = read_exact(file, HostOffset::new(at), len).await?;
        if bytes.iter().any(|byte| *byte != 0) {
            let there = format!("there are data between {at} and {}", at + len as u64);
            return Err(other_content(file, there).await);
        }
        at += len as u64;
    }
    Ok(())
}

impl DeviceHeader {
    /// Shortest file that a log can be in.
    pub(super) const LEN_MIN: u64 = BLOCK_LEN + 3 * super::format::SEGMENT_BYTES_MIN;
}

#[cfg(test)]
mod tests {
    use super::super::format::SEGMENT_FRAME;
    use super::super::{LogDevice, Record};
    use super::*;
    use crate::place::Writer;
    use crate::testing::run;
    use mica_store::MemoryStore;
    use std::sync::Arc;

    /// The story: the first block of a log was damaged, and the advice was to empty the file, with
    /// all that volumes had acknowledged.
    #[test]
    fn log_that_has_lost_its_first_block_is_not_to_be_emptied() {
        run(1, async {
            for byte in [0, 7] {
                let file = Arc::new(MemoryStore::new_writable("log", vec![0; 1 << 20]));
                let device = LogDevice::open(Arc::clone(&file) as _, [1; 16]).await.expect("made");
                let log = device.start([3; 16], [4; 16], Writer::FIRST, 0).await.expect("begun");
                let ticket = log.push(Record::Drop { number: 1 }).expect("there is room");
                log.written(ticket).await.expect("written");
                drop((log, device));
                let damage = Buf::from_slice(&[byte; BLOCK]);
                write_all(&*file, damage, HostOffset::ZERO).await.expect("written");
                let refused = LogDevice::open(file, [2; 16]).await.map(drop).expect_err("damaged");
                assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
                assert!(!refused.to_string().contains("empty it"), "{refused}");
            }
        });
    }

    /// The story: a log was made on a device that had been that of a newer version of mica, and did
    /// not open, because of a segment that the other one had left.
    #[test]
    fn segment_of_a_newer_version_counts_only_in_its_own_log() {
        run(1, async {
            for (device, wanted) in [([1; 16], Some(ErrorKind::Unsupported)), ([9; 16], None)] {
                let file = Arc::new(MemoryStore::new_writable("log", vec![0; 1 << 20]));
                let log = LogDevice::open(Arc::clone(&file) as _, [1; 16]).await.expect("made");
                drop(log.start([3; 16], [4; 16], Writer::FIRST, 0).await.expect("begun"));
                drop(log);
                let header = DeviceHeader::for_len([1; 16], 1 << 20).expect("long enough");
                let first = read_exact(&*file, HostOffset::new(header.at(0)), BLOCK).await;
                let left = SegmentHeader::decode(&first.expect("read")).expect("a segment");
                let mut left = SegmentHeader { device, ..left }.encode();
                left[8] += 1;
                SEGMENT_FRAME.seal(&mut left);
                let last = usize::try_from(header.segments - 1).expect("few");
                let at = HostOffset::new(header.at(last));
                write_all(&*file, Buf::from_slice(&left), at).await.expect("written");
                let opened = LogDevice::open(file, [2; 16]).await.map(drop);
                assert_eq!(opened.err().map(|error| error.kind()), wanted, "{device:?}");
            }
        });
    }

    #[test]
    fn file_that_never_was_a_log_is_refused_as_that() {
        run(1, async {
            let file = Arc::new(MemoryStore::new_writable("disk", vec![7; 1 << 20]));
            let refused = LogDevice::open(file, [2; 16]).await.map(drop).expect_err("a disk");
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
            assert!(refused.to_string().contains("is not a log"), "{refused}");
        });
    }
}
