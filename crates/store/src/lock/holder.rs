//! Who holds a lock: a search through what the system tells of processes.

use mica_rt::File;
use rustix::fd::{AsFd, AsRawFd};
use rustix::fs::fstat;
use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Lets a thread of its own search for who holds a lock, as long as it lives: for threads in a
/// sandbox, to which the system tells nothing of other processes. It is made before they are.
pub struct HolderSearch(Option<JoinHandle<()>>);

struct Question {
    inode: u64,
    /// The descriptor of who asks.
    own: String,
    byte: u64,
}

type Asked = (Question, mpsc::Sender<Option<String>>);

/// The thread that searches, if not the one that asks.
static SEARCHER: Mutex<Option<mpsc::Sender<Asked>>> = Mutex::new(None);
/// How long an error waits for the name of a culprit.
const SEARCH_LIMIT: Duration = Duration::from_secs(5);

fn searcher() -> MutexGuard<'static, Option<mpsc::Sender<Asked>>> {
    SEARCHER.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HolderSearch {
    /// Starts the thread. Where it cannot be, whoever asks searches.
    pub fn start() -> Self {
        let (sender, asked) = mpsc::channel::<Asked>();
        let answer = move || {
            for (question, answer) in asked {
                // Who does not wait any more does not want to know.
                let _ = answer.send(search(&question));
            }
        };
        let thread = std::thread::Builder::new().name("mica-holder".to_owned()).spawn(answer);
        *searcher() = thread.is_ok().then_some(sender);
        Self(thread.ok())
    }
}

impl Drop for HolderSearch {
    fn drop(&mut self) {
        *searcher() = None;
        // Nothing is outside of the sandbox any more once this is gone.
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for HolderSearch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HolderSearch")
    }
}

/// Program and number of a process that locks `byte` of `file`, if it can be found out.
pub(super) fn holder(file: &File, byte: u64) -> Option<String> {
    let inode = fstat(file).ok()?.st_ino;
    let own = format!("/proc/{}/fdinfo/{}", std::process::id(), file.as_fd().as_raw_fd());
    let question = Question { inode, own, byte };
    let Some(searcher) = searcher().clone() else { return search(&question) };
    let (sender, answer) = mpsc::channel();
    searcher.send((question, sender)).ok()?;
    answer.recv_timeout(SEARCH_LIMIT).ok()?
}

/// Most descriptors of other processes that are looked at to name who holds a lock.
const DESCRIPTORS_MAX: usize = 1 << 16;

/// Program and number of a process that locks `byte`. A lock of an open file description names no
/// process, but each process tells the locks behind its descriptors.
fn search(question: &Question) -> Option<String> {
    let Question { inode, own, byte } = question;
    let is_process = |name: &str| name.bytes().all(|digit| digit.is_ascii_digit());
    let names = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok())
    };
    let processes = names(Path::new("/proc")).filter(|name| is_process(name));
    let descriptors = processes.flat_map(|process| {
        let folder = format!("/proc/{process}/fdinfo");
        let numbers = names(Path::new(&folder)).collect::<Vec<_>>();
        numbers.into_iter().map(move |number| (process.clone(), format!("{folder}/{number}")))
    });
    for (process, descriptor) in descriptors.take(DESCRIPTORS_MAX) {
        let Ok(told) = fs::read_to_string(&descriptor) else { continue };
        if descriptor != *own && told.lines().any(|line| locks_byte(line, *inode, *byte)) {
            let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
            let name: String = name.chars().filter(|letter| !letter.is_control()).collect();
            return Some(format!("{name}, process {process}"));
        }
    }
    None
}

/// Whether a line of a descriptor's information tells a lock of `byte` of this inode:
/// `lock: 1: OFDLCK ADVISORY READ -1 fe:00:1234 100 101`. Not compared is the device: some file
/// systems show another number there than to those who ask for it.
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

#[cfg(test)]
mod tests {
    use super::locks_byte;

    #[test]
    fn locks_are_read_as_the_kernel_tells_them() {
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
