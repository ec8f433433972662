//! What the header of one file says.

use mica_block::{Error, Identity, Result};
use mica_crypt::luks::{HEADER_BYTES, LuksHeader};
use mica_qcow2_format::{BackingName, Encryption, HEADER_READ_BYTES, Header, MAGIC, Version};
use mica_store::nanoseconds;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxFlags, StatxTimestamp, makedev, open, statx,
};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What the header of a qcow2 image says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Qcow2Facts {
    /// 2 or 3.
    pub version: u32,
    /// Bytes in a cluster.
    pub cluster_bytes: u64,
    /// Whether it has subclusters.
    pub extended_l2: bool,
    /// How many internal snapshots it has.
    pub snapshots: u32,
    /// Whether it is encrypted.
    pub is_encrypted: bool,
    /// What it stands on, as it names it.
    pub backing: Option<BackingName>,
    /// Its external data file, as it names it.
    pub data_file: Option<OsString>,
}

/// A file that was looked at.
pub(super) struct Record {
    pub(super) stat: FileStat,
    pub(super) content: Content,
}

/// What a file is.
pub(super) enum Content {
    /// A qcow2 image, and the length of its disk in bytes.
    Qcow2(Qcow2Facts, u64),
    /// A qcow2 image with a header that cannot be used, and why.
    Bad(String),
    /// Anything else.
    Other,
}

/// What the system says of a file.
#[derive(Clone, Copy)]
pub(super) struct FileStat {
    pub(super) file: (u64, u64),
    pub(super) len: u64,
    pub(super) disk_bytes: u64,
    pub(super) mtime_ns: i128,
    pub(super) ctime_ns: i128,
    pub(super) created_ns: Option<i128>,
    pub(super) is_regular: bool,
}

impl FileStat {
    /// Of what `path` names, through links.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&statx(CWD, path, AtFlags::empty(), WANTED)?))
    }

    pub(super) fn identity(&self) -> Identity {
        Identity {
            device: self.file.0,
            inode: self.file.1,
            len: self.len,
            mtime_ns: self.mtime_ns,
            ctime_ns: self.ctime_ns,
        }
    }
}

const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

impl From<&Statx> for FileStat {
    fn from(found: &Statx) -> Self {
        let time = |at: &StatxTimestamp| nanoseconds(at.tv_sec, u64::from(at.tv_nsec));
        let has_birth = found.stx_mask & StatxFlags::BTIME.bits() != 0;
        let kind = FileType::from_raw_mode(u32::from(found.stx_mode));
        Self {
            file: (makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino),
            len: found.stx_size,
            disk_bytes: found.stx_blocks.saturating_mul(512),
            mtime_ns: time(&found.stx_mtime),
            ctime_ns: time(&found.stx_ctime),
            created_ns: has_birth.then(|| time(&found.stx_btime)),
            is_regular: kind == FileType::RegularFile,
        }
    }
}

/// The device and the inode of what `path` names, through links.
///
/// # Errors
/// What the system reports.
pub(super) fn file_of(path: &Path) -> Result<(u64, u64)> {
    let found = FileStat::of(path);
    let found = found.map_err(|error| Error::from_io(path.display().to_string(), error))?;
    Ok(found.file)
}

/// Bytes of the disk in the LUKS image at `path`; `None` if its header cannot be used.
pub(super) fn luks_disk_bytes(path: &Path) -> Option<u64> {
    let opened = Opened::open(path).ok()??;
    let header = LuksHeader::decode(&opened.start(HEADER_BYTES).ok()?).ok()?;
    opened.stat.len.checked_sub(header.payload_offset())
}

/// A file that is open, and what the system says of it.
pub(super) struct Opened {
    file: File,
    pub(super) stat: FileStat,
}

impl Opened {
    /// Opens what `path` names for reading; `None` if it is not a regular file.
    pub(super) fn open(path: &Path) -> io::Result<Option<Self>> {
        // A FIFO that takes the file's place must not hang us.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(open(path, flags, Mode::empty())?);
        let stat = FileStat::from(&statx(&file, c"", AtFlags::EMPTY_PATH, WANTED)?);
        Ok(stat.is_regular.then_some(Self { file, stat }))
    }

    /// Reads its header, with `room` for what is read.
    pub(super) fn read(self, room: &mut Vec<u8>) -> io::Result<Record> {
        room.resize(HEADER_READ_BYTES, 0);
        let mut len = read_start(&self.file, room)?;
        let stat = self.stat;
        let record = |content| Ok(Record { stat, content });
        if !room[..len].starts_with(&MAGIC) {
            return record(Content::Other);
        }
        loop {
            let needed = match Header::bytes_needed(&room[..len]) {
                Ok(needed) => needed,
                Err(error) => return record(Content::Bad(error.to_string())),
            };
            if needed <= len || len as u64 >= stat.len {
                break;
            }
            room.resize(needed, 0);
            let before = std::mem::replace(&mut len, read_start(&self.file, room)?);
            if len <= before {
                break;
            }
        }
        // Encrypted images are images, too.
        record(match Header::decode_for_check(&room[..len], stat.len) {
            Ok(header) => {
                let virtual_bytes = header.disk_bytes();
                Content::Qcow2(Qcow2Facts::from(header), virtual_bytes)
            }
            Err(error) => Content::Bad(error.to_string()),
        })
    }

    /// Reads up to `len` bytes from its start.
    pub(super) fn start(&self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let there = read_start(&self.file, &mut bytes)?;
        bytes.truncate(there);
        Ok(bytes)
    }
}

impl From<Header> for Qcow2Facts {
    fn from(header: Header) -> Self {
        Self {
            version: if header.version == Version::V2 { 2 } else { 3 },
            cluster_bytes: header.cluster_bits.bytes(),
            extended_l2: header.incompatible.extended_l2,
            snapshots: header.snapshot_count,
            is_encrypted: header.encryption != Encryption::None,
            backing: header.backing,
            data_file: header.data_file_name,
        }
    }
}

/// Fills `room` from the start of the file; returns how much of it.
fn read_start(file: &File, room: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < room.len() {
        match file.read_at(&mut room[done..], done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
