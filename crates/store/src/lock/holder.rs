//! Who holds a lock: a search through what the system reports about processes.
//!
//! A lock outlives its process for a moment: operations in its rings hold the file until they are
//! cancelled. The next process to open the image waits then instead of being refused, but only if
//! the holder is known to be dead, or nothing shows that it is alive.

use mica_block::may_be_released_within;
use mica_rt::File;
use parking_lot::Mutex;
use rustix::fd::{AsFd, AsRawFd};
use rustix::fs::{fstat, fstatfs};
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The question which process, other than the one that asks, locks a byte of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LockQuestion {
    /// The device of the file.
    pub device: u64,
    /// The file.
    pub inode: u64,
    /// The byte.
    pub byte: u64,
    /// The process that asks.
    pub process: u32,
    /// Its own descriptor of the file, which holds locks too.
    pub descriptor: i32,
}

/// The holder of a lock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Holder {
    /// A living process, by name and number.
    Living(String),
    /// A process that is about to die.
    Dying(String),
    /// No process of this system.
    Nobody,
    /// Not every process could be inspected.
    Unknown,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Living(name) => f.write_str(name),
            Self::Dying(name) => write!(f, "{name}, which is dying"),
            Self::Nobody => f.write_str("a process that has died"),
            Self::Unknown => f.write_str("perhaps a running QEMU"),
        }
    }
}

/// Time for the system to release what a dead process held: its rings end after it.
const DEAD_LIMIT: Duration = Duration::from_secs(10);
/// The same for a holder that may be alive out of our sight.
const UNSEEN_LIMIT: Duration = Duration::from_secs(1);

impl Holder {
    /// The cause of a conflict on `file`, if it may resolve itself.
    pub(super) fn cause(&self, file: &File) -> Option<io::Error> {
        let limit = match self {
            Self::Living(_) => return None,
            Self::Dying(_) => DEAD_LIMIT,
            Self::Nobody if !is_shared_by_hosts(file) => DEAD_LIMIT,
            Self::Nobody | Self::Unknown => UNSEEN_LIMIT,
        };
        Some(may_be_released_within(limit))
    }
}

/// Whether other hosts may hold locks on it.
fn is_shared_by_hosts(file: &File) -> bool {
    /// NFS, SMB (three numbers), Ceph, GFS2, OCFS2, 9P, FUSE.
    const KINDS: [u64; 9] = [
        0x6969,
        0x517b,
        0xff53_4d42,
        0xfe53_4d42,
        0x00c3_6400,
        0x0116_1970,
        0x7461_636f,
        0x0102_1997,
        0x6573_5546,
    ];
    fstatfs(file).map_or(true, |found| {
        // All these numbers have 32 bits, whatever the width of the field.
        KINDS.contains(&(u64::from_ne_bytes(found.f_type.to_ne_bytes()) & 0xffff_ffff))
    })
}

type Search = dyn Fn(&LockQuestion) -> Holder + Send + Sync;

/// The function that searches, if not on the thread that asks.
static SEARCH: Mutex<Option<Arc<Search>>> = Mutex::new(None);

/// From now on uses `search` to find lock holders: for a process in a sandbox, which cannot see
/// other processes.
pub fn search_holders_with(search: impl Fn(&LockQuestion) -> Holder + Send + Sync + 'static) {
    *SEARCH.lock() = Some(Arc::new(search));
}

/// The process that locks `byte` of `file`, other than through this descriptor.
pub(super) fn holder(file: &File, byte: u64) -> Holder {
    let Ok(found) = fstat(file) else { return Holder::Unknown };
    let question = LockQuestion {
        device: found.st_dev,
        inode: found.st_ino,
        byte,
        process: std::process::id(),
        descriptor: file.as_fd().as_raw_fd(),
    };
    let search = SEARCH.lock().clone();
    match search {
        Some(search) => search(&question),
        None => find_holder(&question),
    }
}

/// Maximum number of descriptors of other processes that are inspected.
const DESCRIPTORS_MAX: usize = 1 << 16;

/// Answers `question` from `/proc`. A lock of an open file description names no process, but each
/// process lists the locks behind its descriptors.
pub fn find_holder(question: &LockQuestion) -> Holder {
    let own = format!("/proc/{}/fdinfo/{}", question.process, question.descriptor);
    let is_process = |name: &String| name.bytes().all(|digit| digit.is_ascii_digit());
    let Ok(processes) = names(Path::new("/proc")) else { return Holder::Unknown };
    let mut is_complete = sees_all_processes();
    let mut left = DESCRIPTORS_MAX;
    for process in processes.into_iter().filter(is_process) {
        let folder = format!("/proc/{process}/fdinfo");
        let descriptors = match names(Path::new(&folder)) {
            Ok(descriptors) => descriptors,
            // It has ended in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => {
                is_complete = false;
                continue;
            }
        };
        if descriptors.len() > left {
            return Holder::Unknown;
        }
        left -= descriptors.len();
        for number in descriptors {
            let descriptor = format!("{folder}/{number}");
            let Ok(text) = fs::read_to_string(&descriptor) else { continue };
            let LockQuestion { device, inode, byte, .. } = *question;
            if descriptor != own
                && text.lines().any(|line| locks_byte(line, inode, byte))
                && may_be_on(device, &format!("/proc/{process}/fd/{number}"))
            {
                return named(&process);
            }
        }
    }
    if is_complete { Holder::Nobody } else { Holder::Unknown }
}

fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(folder)?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Whether `/proc` shows all processes of this system.
fn sees_all_processes() -> bool {
    /// The number of the kernel's initial namespace.
    const FIRST: &str = "pid:[4026531836]";
    fs::read_link("/proc/self/ns/pid").is_ok_and(|space| space.as_os_str() == FIRST)
}

fn named(process: &str) -> Holder {
    let read = |what: &str| fs::read_to_string(format!("/proc/{process}/{what}"));
    let name: String = read("comm").unwrap_or_default();
    let name: String = name.chars().filter(|letter| !letter.is_control()).collect();
    let name = format!("{name}, process {process}");
    match process.parse().is_ok_and(mica_rt::is_dying) {
        true => Holder::Dying(name),
        false => Holder::Living(name),
    }
}

/// Whether a line of a descriptor's information shows a lock on `byte` of this inode:
/// `lock: 1: OFDLCK ADVISORY READ -1 fe:00:1234 100 101`. The device is not compared here: some
/// file systems show a different number there than `stat` does ([`may_be_on`]).
fn locks_byte(line: &str, inode: u64, byte: u64) -> bool {
    let Some(lock) = line.strip_prefix("lock:") else { return false };
    let mut words = lock.split_ascii_whitespace().rev();
    let (Some(end), Some(start), Some(file)) = (words.next(), words.next(), words.next()) else {
        return false;
    };
    let end = if end == "EOF" { Ok(u64::MAX) } else { end.parse::<u64>() };
    let (Ok(start), Ok(end)) = (start.parse::<u64>(), end) else { return false };
    let is_file = file.rsplit(':').next().and_then(|number| number.parse().ok()) == Some(inode);
    is_file && (start..=end).contains(&byte)
}

/// Whether the file behind a `descriptor` in `/proc` is on this device, or nobody knows.
fn may_be_on(device: u64, descriptor: &str) -> bool {
    fs::metadata(descriptor).map_or(true, |found| found.dev() == device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_rt::Access;
    use rustix::process::{Signal, kill_process};
    use std::io::Read;
    use std::process::{Command, Stdio};

    /// A process that locks a byte of `path`.
    fn locking(path: &Path) -> std::process::Child {
        // Python's lockf takes locks of a process, which are listed in the same way.
        let script = "import fcntl,sys\nf=open(sys.argv[1],'r+')\n\
                      fcntl.lockf(f,fcntl.LOCK_EX,1,201)\nprint('x',flush=True)\n\
                      sys.stdin.read()";
        let mut python = Command::new("python3");
        python.args(["-c", script]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = python.spawn().expect("python");
        let said = child.stdout.as_mut().expect("piped");
        said.read_exact(&mut [0]).expect("it has the lock");
        child
    }

    #[test]
    fn holder_is_living_dying_or_nobody() {
        if Command::new("python3").arg("--version").output().is_err() {
            assert!(std::env::var_os("CI").is_none(), "needs python3");
            return eprintln!("SKIPPED: needs python3");
        }
        let made = tempfile::NamedTempFile::new().expect("a file");
        let file = File::new(made.reopen().expect("opened").into(), Access::Buffered);
        assert!(matches!(holder(&file, 201), Holder::Nobody | Holder::Unknown));
        let mut child = locking(made.path());
        let number = child.id();
        assert_eq!(holder(&file, 201), Holder::Living(format!("python3, process {number}")));
        let there = made.as_file().metadata().expect("it is there");
        let (device, inode) = (there.dev() + 1, there.ino());
        let elsewhere = LockQuestion { device, inode, byte: 201, process: 0, descriptor: 0 };
        assert!(!matches!(find_holder(&elsewhere), Holder::Living(_)), "another's inode");
        kill_process(rustix::process::Pid::from_child(&child), Signal::KILL).expect("it runs");
        assert!(!matches!(holder(&file, 201), Holder::Living(_)));
        child.wait().expect("ended");
        assert!(matches!(holder(&file, 201), Holder::Nobody | Holder::Unknown));
    }

    #[test]
    fn locks_are_parsed_as_the_kernel_lists_them() {
        let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 101";
        assert!(locks_byte(line, 1234, 100) && locks_byte(line, 1234, 101));
        assert!(!locks_byte(line, 1234, 102) && !locks_byte(line, 1234, 99));
        assert!(!locks_byte(line, 234, 100));
        let whole = "lock:\t2: POSIX  ADVISORY  WRITE 77 00:2b:1234 0 EOF";
        assert!(locks_byte(whole, 1234, 203));
        for nonsense in ["", "pos:\t0", "lock:", "lock:\tEOF EOF EOF", "lock: 1 2"] {
            assert!(!locks_byte(nonsense, 1234, 100), "{nonsense}");
        }
    }
}
