//! Guest memory that disappears while it is mapped.
//!
//! A front end can truncate a file that it shares with us, or run out of the memory that backs it.
//! An access to what is gone raises SIGBUS, which ends the process, and with it the disks of all
//! other guests. So every mapping of a front end's file is **watched**: a fault in one puts pages
//! of zeros there, marks the memory as **lost**, and returns; only the device that has it is broken
//! from then on ([`super::common::Common::note_lost`]). The kernel gets no signal where it touches
//! such memory for us: it fails the operation with EFAULT.
//!
//! The handler may interrupt any instruction, so it only reads atomics and makes system calls.
//!
//! Invariants
//! - I1 An entry names a mapping from before it is touched until after it was touched for the last
//!   time, and gives it up before it is unmapped: what the handler replaces is a guest's.
//! - I2 Entries are never freed, only used again, so that the handler may walk them at any time. It
//!   skips those that change concurrently: they do not belong to memory that its thread touches.
//! - I3 A fault anywhere else, and a SIGBUS that was sent, end the process as usual.
//! - I4 No write is answered as done whose data may be zeros that were never there. Where we copy,
//!   we look before the disk gets the copy (`transfer.rs`). A disk that copies (a volume, LUKS) may
//!   have the zeros by then: whoever copied, memory that is lost when the write ends makes it an
//!   I/O error (`queue/end.rs`), which says nothing of what the disk has there. A request of which
//!   the header may be zeros is not begun (`queue/begin.rs`).
//!
//! A file that its front end makes shorter and then longer again, before anybody touches what was
//! cut off, faults nowhere: the zeros there are what the front end shares now, and they are written
//! as if the guest had put them there.

use std::ffi::c_void;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, compiler_fence, fence};
use std::sync::{Arc, Once};

/// Whether memory of a session is gone. One for all of its mappings.
#[derive(Default)]
pub(super) struct Lost(AtomicBool);

impl Lost {
    /// Also of a fault just now, on this thread.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        // The read before may have been the one that faulted.
        compiler_fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed)
    }

    /// Marks the memory as lost, for code that notices in another way.
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A mapping, and the watch over it, which ends first (I1).
pub(super) struct Watched<M> {
    _watch: Watch,
    map: M,
}

impl<M> Watched<M> {
    /// `map` owns the `len` bytes at `start`, whose pages have `page_bytes`.
    pub(super) fn new(map: M, (start, len): (*const u8, usize), file: &Pages) -> Self {
        Self { _watch: Watch::new(start.addr(), len, file), map }
    }
}

impl<M> Deref for Watched<M> {
    type Target = M;

    #[inline]
    fn deref(&self) -> &M {
        &self.map
    }
}

/// What has to be known about a file to watch a mapping of it.
#[derive(Clone)]
pub(super) struct Pages {
    lost: Arc<Lost>,
    page_bytes: usize,
}

/// A part of a file that is mapped.
#[derive(Clone, Copy)]
pub(super) struct FilePart {
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Pages {
    /// The facts about `file`. If its mapping faults, `lost` is notified.
    pub(super) fn of(file: &std::fs::File, lost: &Arc<Lost>) -> Self {
        let normal = rustix::param::page_size();
        // A huge page is replaced as a whole, or not at all.
        let page_bytes = match rustix::fs::fstatfs(file) {
            Ok(system) if system.f_type == libc::HUGETLBFS_MAGIC => {
                usize::try_from(system.f_bsize).unwrap_or(normal)
            }
            _ => normal,
        };
        Self { lost: Arc::clone(lost), page_bytes: page_bytes.max(normal) }
    }
}

/// Pages of one mapping that are replaced one by one. Each may divide the mapping, of which a
/// process has only so many; after this many faults all of it is replaced.
const PAGES_MAX: usize = 64;

/// A mapping that is watched, or room for one.
struct Entry {
    is_taken: AtomicBool,
    /// Odd while the rest changes.
    version: AtomicUsize,
    start: AtomicUsize,
    /// Zero if there is none.
    end: AtomicUsize,
    page_bytes: AtomicUsize,
    faults: AtomicUsize,
    /// Kept alive by the [`Watch`].
    lost: AtomicPtr<Lost>,
    next: Option<&'static Entry>,
}

/// The first of all entries; new ones are put before it.
static ENTRIES: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());

fn first() -> Option<&'static Entry> {
    // SAFETY: what is put there is leaked (I2).
    unsafe { ENTRIES.load(Ordering::Acquire).as_ref() }
}

fn entries() -> impl Iterator<Item = &'static Entry> {
    std::iter::successors(first(), |entry| entry.next)
}

/// Watches a mapping until it is dropped.
struct Watch {
    entry: &'static Entry,
    /// What the entry names.
    _lost: Arc<Lost>,
}

impl Watch {
    fn new(start: usize, len: usize, pages: &Pages) -> Self {
        install();
        let take = |entry: &&Entry| !entry.is_taken.swap(true, Ordering::Acquire);
        let entry = entries().find(take).unwrap_or_else(Entry::add);
        let lost = Arc::clone(&pages.lost);
        entry.change(|| {
            entry.start.store(start, Ordering::Relaxed);
            entry.end.store(start + len, Ordering::Relaxed);
            entry.page_bytes.store(pages.page_bytes, Ordering::Relaxed);
            entry.faults.store(0, Ordering::Relaxed);
            entry.lost.store(Arc::as_ptr(&lost).cast_mut(), Ordering::Relaxed);
        });
        Self { entry, _lost: lost }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.entry.change(|| self.entry.end.store(0, Ordering::Relaxed));
        self.entry.is_taken.store(false, Ordering::Release);
    }
}

impl Entry {
    /// A new one, taken.
    fn add() -> &'static Self {
        let entry = Box::leak(Box::new(Self {
            is_taken: AtomicBool::new(true),
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page_bytes: AtomicUsize::new(0),
            faults: AtomicUsize::new(0),
            lost: AtomicPtr::new(ptr::null_mut()),
            next: None,
        }));
        loop {
            entry.next = first();
            let before = entry.next.map_or(ptr::null_mut(), |next| ptr::from_ref(next).cast_mut());
            let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
            if ENTRIES.compare_exchange(before, &raw mut *entry, success, failure).is_ok() {
                return entry;
            }
        }
    }

    /// Applies `change`. Only the owner of the entry calls this.
    fn change(&self, change: impl FnOnce()) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        change();
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// Puts zeros where `address` is, if it lies in the mapping. Whether they are there.
    fn replace(&self, address: usize) -> bool {
        let version = self.version.load(Ordering::Acquire);
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        let page_bytes = self.page_bytes.load(Ordering::Relaxed);
        let lost = self.lost.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let is_stable = self.version.load(Ordering::Relaxed) == version;
        if !is_stable || version % 2 == 1 || !(start..end).contains(&address) {
            return false;
        }
        // SAFETY: the entry is stable and names the mapping that this thread touches, so that its
        // watch lives, and what it keeps.
        unsafe { (*lost).set() };
        let page = start + (address - start) / page_bytes * page_bytes;
        let is_one_of_many = self.faults.fetch_add(1, Ordering::Relaxed) >= PAGES_MAX;
        let all = (end - start).next_multiple_of(page_bytes);
        !is_one_of_many && put_zeros(page, page_bytes) || put_zeros(start, all)
    }
}

/// Maps zeros over `len` bytes at `at`, which are of a mapping that is watched.
fn put_zeros(at: usize, len: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let at = ptr::with_exposed_provenance_mut(at);
    // SAFETY: whole pages of a guest's mapping (I1), which its owner unmaps in one piece, whatever
    // it consists of. Nobody holds a reference to what is there: it is another program's memory.
    unsafe { libc::mmap(at, len, protection, flags, -1, 0) != libc::MAP_FAILED }
}

/// Puts the handler in place, once.
fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let mut action = default_action();
        let handler: extern "C" fn(_, _, _) = on_bus_error;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: an action, whose handler does only what a handler may.
        if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
            let error = std::io::Error::last_os_error();
            tracing::warn!(%error, "a front end that truncates its memory will kill this process");
        }
    });
}

fn default_action() -> libc::sigaction {
    // SAFETY: all zeros is an action: the default, without flags.
    unsafe { std::mem::zeroed() }
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives what `SA_SIGINFO` asks for, and each thread has an errno.
    let (code, address, errno) =
        unsafe { ((*info).si_code, (*info).si_addr().addr(), libc::__errno_location()) };
    // SAFETY: it is this thread's.
    let errno_before = unsafe { *errno };
    // A signal that was sent has no address.
    let is_fault = code > 0;
    let is_replaced = is_fault && entries().any(|entry| entry.replace(address));
    // SAFETY: as above.
    unsafe { *errno = errno_before };
    if is_replaced {
        return;
    }
    // I3: the fault comes again when this returns; a signal is sent again, and comes then.
    let default = default_action();
    // SAFETY: an action, and calls that a handler may make.
    unsafe {
        if libc::sigaction(signal, &raw const default, ptr::null_mut()) != 0 {
            libc::abort();
        }
        if !is_fault {
            libc::raise(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

    fn file(pages: u64) -> File {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(pages * page()).expect("a length");
        file
    }

    fn page() -> u64 {
        rustix::param::page_size() as u64
    }

    fn watched(file: &File, lost: &Arc<Lost>) -> Watched<MmapRegion> {
        let len = usize::try_from(file.metadata().expect("a file").len()).expect("small");
        let shared = FileOffset::new(file.try_clone().expect("a file"), 0);
        let map = MmapRegion::from_file(shared, len).expect("maps");
        let place = (map.as_ptr().cast_const(), len);
        Watched::new(map, place, &Pages::of(file, lost))
    }

    fn byte(map: &MmapRegion, at: u64) -> u8 {
        let at = usize::try_from(at).expect("small");
        map.get_slice(at, 1).expect("within").read_obj(0).expect("within")
    }

    fn put(map: &MmapRegion, at: u64, byte: u8) {
        let at = usize::try_from(at).expect("small");
        map.get_slice(at, 1).expect("within").write_obj(byte, 0).expect("within");
    }

    #[test]
    fn lost_memory_reads_as_zeros_and_is_reported_to_its_session_only() {
        let (lost, other) = (Arc::default(), Arc::default());
        let (gone, there) = (file(4), file(4));
        let (map, kept) = (watched(&gone, &lost), watched(&there, &other));
        for map in [&map, &kept] {
            (0..4).for_each(|number| put(map, number * page(), 7));
        }
        gone.set_len(page()).expect("truncated");

        assert_eq!(byte(&map, 0), 7, "what is left stays as it is");
        assert!(!lost.is_lost());
        assert_eq!(byte(&map, 2 * page() + 5), 0);
        assert!(lost.is_lost());
        put(&map, 3 * page(), 9);
        assert_eq!((byte(&map, 0), byte(&map, 3 * page())), (7, 9));
        assert!((0..4).all(|number| byte(&kept, number * page()) == 7));
        assert!(!other.is_lost());
    }

    /// As many faults as a mapping has pages would divide it as often.
    #[test]
    fn mapping_that_faults_again_and_again_is_replaced_as_a_whole() {
        let lost = Arc::default();
        let pages = 4 * PAGES_MAX as u64;
        let gone = file(pages);
        let map = watched(&gone, &lost);
        gone.set_len(0).expect("truncated");
        for number in (0..pages).rev().step_by(2) {
            assert_eq!(byte(&map, number * page()), 0);
        }
        assert!(map._watch.entry.faults.load(Ordering::Relaxed) <= PAGES_MAX + 1);
    }

    #[test]
    fn entries_are_used_again() {
        let lost = Arc::default();
        let shared = file(1);
        drop(watched(&shared, &lost));
        let before = entries().count();
        for _ in 0..1000 {
            drop(watched(&shared, &lost));
        }
        // Other tests run concurrently.
        assert!(entries().count() < before + 500);
    }

    /// Run by the test below, in a process of its own.
    #[test]
    #[ignore = "ends its process"]
    fn fault_in_unwatched_memory() {
        let gone = file(1);
        let _watched = watched(&file(1), &Arc::default());
        let shared = FileOffset::new(gone.try_clone().expect("a file"), 0);
        let map: MmapRegion = MmapRegion::from_file(shared, 4096).expect("maps");
        gone.set_len(0).expect("truncated");
        byte(&map, 0);
    }

    /// Run by the test below, in a process of its own.
    #[test]
    #[ignore = "ends its process"]
    fn signal_that_was_sent() {
        let _watched = watched(&file(1), &Arc::default());
        let me = rustix::process::getpid();
        rustix::process::kill_process(me, rustix::process::Signal::BUS).expect("sends");
        loop {
            std::thread::park();
        }
    }

    #[test]
    fn bus_error_elsewhere_still_ends_the_process() {
        for name in ["fault_in_unwatched_memory", "signal_that_was_sent"] {
            let name = format!("vhost_user::lost::tests::{name}");
            let arguments = ["--exact", "--ignored", "--test-threads=1", &name];
            let program = std::env::current_exe().expect("this test");
            let output = Command::new(program).args(arguments).output().expect("runs");
            assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{name}");
        }
    }
}
