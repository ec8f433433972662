//! Aligned I/O buffers that an operation owns until it completes.
//!
//! A kernel that was handed a buffer writes into it until it reports completion, even if the future
//! that asked is gone. So a buffer is moved into an operation and returned with the result; nobody
//! else can hold it in the meantime.
//!
//! Invariants
//! - I1 Two [`Buf`]s that share a block cover disjoint ranges of it: the only way to get a second
//!   one is [`Buf::split_to`], which divides a range; [`Buf::join`] puts two ranges together.
//! - I2 Every byte of a block was initialised (zeroed when the block was made).
//! - I3 A block's memory is freed when the last `Buf` is gone, never before.
//! - I4 Bytes are changed through their address, without a reference ([`Buf::put`], [`Buf::fill`],
//!   the kernel). Only [`Buf::own_bytes`] gives out a `&mut [u8]`, and never to foreign memory.
//!
//! Memory that is shared with another program ([`SharedMemory`]) is **foreign**. I1 cannot hold
//! there: the other program changes the bytes whenever it likes, and may name the same bytes twice.
//! Such a `Buf` is handed to the kernel, filled, or copied; no decision may rest on reading its
//! bytes twice.
//!
//! Freed blocks go to a small list of the thread, so that the data path does not allocate. Large
//! ones are mapped, and go to a list of the process: they are filled by one thread and freed by
//! another.

use crate::system;
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of every buffer: a page, which satisfies O_DIRECT on every device.
pub const BUF_ALIGN: usize = 4096;

/// An aligned buffer; a range of a block that no other `Buf` covers.
pub struct Buf {
    block: Option<Arc<Block>>,
    start: usize,
    len: usize,
}

struct Block {
    memory: NonNull<u8>,
    /// Its capacity and alignment; of foreign memory, its length.
    layout: Layout,
    /// Keeps foreign memory mapped; `None` for memory of our own.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: a block is plain memory; I1 gives each byte exactly one owner.
unsafe impl Send for Block {}
// SAFETY: shared access to a block never touches its memory except through a `Buf` (I1).
unsafe impl Sync for Block {}

/// Gives memory that was freed back to the system: the heap that blocks are taken from would keep
/// it. That takes milliseconds in which other threads may wait for memory: not for the data path.
pub fn release_freed_memory() {
    system::trim_heap();
}

impl Block {
    fn new(capacity: usize) -> Self {
        let layout = Layout::from_size_align(capacity, BUF_ALIGN).expect("less than all memory");
        let memory = match is_large(capacity) {
            true => map(capacity),
            // SAFETY: `layout` has a non-zero size: `class_of` is at least a page.
            false => NonNull::new(unsafe { alloc_zeroed(layout) }),
        };
        let Some(memory) = memory else { handle_alloc_error(layout) };
        Self { memory, layout, owner: None }
    }
}

/// Maps `len` bytes of zeros: the system makes pages of them, large ones if it can, as they are
/// used.
fn map(len: usize) -> Option<NonNull<u8>> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
    // SAFETY: a new mapping of nothing, wherever there is room.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
    if memory == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping that was just made. If it is refused, pages are small.
    let _ = unsafe { libc::madvise(memory, len, libc::MADV_HUGEPAGE) };
    NonNull::new(memory.cast())
}

impl Drop for Block {
    fn drop(&mut self) {
        let (memory, len) = (self.memory.as_ptr(), self.layout.size());
        match (&self.owner, is_large(len)) {
            (Some(_), _) => {}
            // SAFETY: mapped in `new` with this length, unmapped once (I3).
            (None, true) => drop(unsafe { libc::munmap(memory.cast(), len) }),
            // SAFETY: allocated in `new` with this layout, freed once (I3).
            (None, false) => unsafe { dealloc(memory, self.layout) },
        }
    }
}

impl Buf {
    /// A buffer of `len` bytes with unspecified, initialised content, aligned to [`BUF_ALIGN`].
    pub fn new(len: usize) -> Self {
        if len == 0 {
            return Self { block: None, start: 0, len: 0 };
        }
        Self { block: Some(take_block(len)), start: 0, len }
    }

    /// A buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let mut buf = Self::new(len);
        buf.fill(0);
        buf
    }

    /// A buffer that holds a copy of `bytes`.
    pub fn from_slice(bytes: &[u8]) -> Self {
        let mut buf = Self::new(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// Splits off the first `at` bytes into a buffer of their own.
    ///
    /// # Panics
    /// If `at` is beyond the end.
    #[must_use]
    pub fn split_to(&mut self, at: usize) -> Self {
        assert!(at <= self.len, "split at {at} of {}", self.len);
        let head = Self { block: self.block.clone(), start: self.start, len: at };
        self.start += at;
        self.len -= at;
        head
    }

    /// Rejoins `tail`, which directly follows this buffer because [`Buf::split_to`] separated them.
    ///
    /// # Panics
    /// If it lies anywhere else.
    pub fn join(&mut self, tail: Self) {
        if tail.is_empty() {
            return;
        }
        let same_block = match (&self.block, &tail.block) {
            (Some(mine), Some(other)) => Arc::ptr_eq(mine, other),
            _ => false,
        };
        assert!(same_block, "joined with a part of another buffer");
        assert_eq!(self.start + self.len, tail.start, "joined with a part that does not follow it");
        // `tail` gives up its range here: it is dropped without being used again (I1).
        self.len += tail.len;
    }

    /// Keeps the first `len` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn truncate(&mut self, len: usize) {
        assert!(len <= self.len, "truncate to {len} of {}", self.len);
        self.len = len;
    }

    /// Drops the first `count` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn advance(&mut self, count: usize) {
        assert!(count <= self.len, "advance by {count} of {}", self.len);
        self.start += count;
        self.len -= count;
    }

    /// Its length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether its length is zero.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether another program may change its bytes at any time ([`SharedMemory`]).
    #[inline]
    pub fn is_foreign(&self) -> bool {
        self.block.as_ref().is_some_and(|block| block.owner.is_some())
    }

    /// The same bytes, but treated as foreign from here on. Tests show with it that a path can be
    /// given a guest's memory.
    #[must_use]
    pub fn into_foreign(self) -> Self {
        let Some(block) = &self.block else { return self };
        let (start, len) = (self.start, self.len);
        // The same range of the same memory; the owner never uses what it keeps (I1).
        let (memory, layout) = (block.memory, block.layout);
        let block = Block { memory, layout, owner: Some(Box::new(self)) };
        Self { block: Some(Arc::new(block)), start, len }
    }

    /// Fills all of it with `byte`.
    #[inline]
    pub fn fill(&mut self, byte: u8) {
        self.fill_part(0..self.len, byte);
    }

    /// Fills the bytes of `part` with `byte`.
    ///
    /// # Panics
    /// If it reaches beyond the end.
    #[inline]
    pub fn fill_part(&mut self, part: Range<usize>, byte: u8) {
        let (memory, len) = self.place(part);
        // SAFETY: the place lies in the block, and no reference to it is made (I4).
        unsafe { memory.write_bytes(byte, len) }
    }

    /// Copies `bytes` over all of it.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn copy_from_slice(&mut self, bytes: &[u8]) {
        assert_eq!(self.len, bytes.len(), "a copy is as long as the buffer");
        self.put(0, bytes);
    }

    /// Copies `bytes` over those from `at` on.
    ///
    /// # Panics
    /// If they reach beyond the end.
    #[inline]
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        let (memory, len) = self.place(at..at + bytes.len());
        // SAFETY: the place lies in the block, and no reference to it is made (I4). `bytes` may
        // overlap it where both are foreign, which `copy_from` allows.
        unsafe { memory.copy_from(bytes.as_ptr(), len) }
    }

    /// Its bytes, to be changed in place. Only for memory of our own: a buffer that may come from
    /// a caller's caller is changed with [`Buf::put`] and [`Buf::fill_part`].
    ///
    /// # Panics
    /// If they are foreign.
    #[inline]
    pub fn own_bytes(&mut self) -> &mut [u8] {
        assert!(!self.is_foreign(), "no `&mut` is made to foreign memory");
        let (memory, len) = self.place(0..self.len);
        // SAFETY: the range lies in the block, is initialised (I2), and `&mut self` borrows the
        // only `Buf` that covers it (I1), because it is not foreign.
        unsafe { std::slice::from_raw_parts_mut(memory, len) }
    }

    /// Where the kernel writes what it reads into the bytes from `at` on, and how many there are.
    /// Whoever passes this to the kernel keeps the buffer until the kernel is done.
    ///
    /// # Panics
    /// If `at` is beyond the end.
    #[inline]
    pub(crate) fn target(&mut self, at: usize) -> (*mut u8, usize) {
        self.place(at..self.len)
    }

    /// Reads from `offset` of `file` into the bytes from `at` on.
    pub(crate) fn read_from(
        &mut self,
        file: impl AsFd,
        at: usize,
        offset: u64,
    ) -> Result<usize, Errno> {
        self.read_by(at, offset, |memory, len, offset| {
            // SAFETY: the kernel writes within the buffer, to which no reference exists (I4).
            unsafe { libc::pread(file.as_fd().as_raw_fd(), memory, len, offset) }
        })
    }

    /// As [`Buf::read_from`]; fails with `AGAIN` rather than wait for a device.
    pub(crate) fn read_now(
        &mut self,
        file: impl AsFd,
        at: usize,
        offset: u64,
    ) -> Result<usize, Errno> {
        self.read_by(at, offset, |iov_base, iov_len, offset| {
            let (file, part) = (file.as_fd().as_raw_fd(), libc::iovec { iov_base, iov_len });
            // SAFETY: the kernel writes within the buffer, to which no reference exists (I4).
            unsafe { libc::preadv2(file, &raw const part, 1, offset, libc::RWF_NOWAIT) }
        })
    }

    /// Reads into the bytes from `at` on by a system call, which is passed their address and number
    /// and the `offset`.
    fn read_by(
        &mut self,
        at: usize,
        offset: u64,
        call: impl FnOnce(*mut libc::c_void, usize, i64) -> isize,
    ) -> Result<usize, Errno> {
        let (memory, len) = self.target(at);
        let offset = i64::try_from(offset).map_err(|_| Errno::INVAL)?;
        usize::try_from(call(memory.cast(), len, offset)).map_err(|_| last_errno())
    }

    /// Address and length of `part`.
    #[inline]
    fn place(&mut self, part: Range<usize>) -> (*mut u8, usize) {
        let Range { start, end } = part;
        assert!(start <= end && end <= self.len, "{start}..{end} of {} bytes", self.len);
        let memory = match &self.block {
            None => NonNull::dangling().as_ptr(),
            // SAFETY: the part lies in the buffer, and the buffer in the block.
            Some(block) => unsafe { block.memory.as_ptr().add(self.start + start) },
        };
        (memory, end - start)
    }

    /// Whether address and length are multiples of `align`.
    pub fn is_aligned(&self, align: usize) -> bool {
        (self.as_ptr().addr() | self.len) & (align - 1) == 0
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

impl Deref for Buf {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.block {
            None => &[],
            // SAFETY: the range lies in the block, is initialised (I2), and `&self` borrows the
            // only `Buf` that covers it (I1).
            Some(block) => unsafe {
                std::slice::from_raw_parts(block.memory.as_ptr().add(self.start), self.len)
            },
        }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if let Some(mut block) = self.block.take()
            && block.owner.is_none()
            && Arc::get_mut(&mut block).is_some()
        {
            keep_block(block);
        }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

/// Memory that is mapped here and that another program may change at any time: a guest's.
#[derive(Clone)]
pub struct SharedMemory {
    block: Arc<Block>,
}

impl SharedMemory {
    /// The `len` bytes at `memory`.
    ///
    /// # Safety
    /// They can be read and written for as long as `owner` lives, and within this process only
    /// through what this gives, or by volatile accesses.
    ///
    /// # Panics
    /// If `len` is more than half of the address space.
    pub unsafe fn new(memory: NonNull<u8>, len: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        let layout = Layout::from_size_align(len, 1).expect("within the address space");
        Self { block: Arc::new(Block { memory, layout, owner: Some(owner) }) }
    }

    /// Memory of this process with `len` zeros, used as if it were shared. Tests show with it that
    /// a path can be given the same memory of a guest twice.
    pub fn zeroed(len: usize) -> Self {
        let mut own = Buf::zeroed(len);
        let (memory, len) = own.place(0..len);
        let memory = NonNull::new(memory).expect("memory");
        // SAFETY: `own` has the bytes, and nobody uses them through it: it is only kept.
        unsafe { Self::new(memory, len, Box::new(own)) }
    }

    /// The `len` bytes from `start` on as a buffer, without a copy; `None` beyond the end.
    pub fn buf(&self, start: usize, len: usize) -> Option<Buf> {
        let end = start.checked_add(len)?;
        (end <= self.block.layout.size()).then(|| Buf {
            block: Some(Arc::clone(&self.block)),
            start,
            len,
        })
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedMemory({} bytes)", self.block.layout.size())
    }
}

/// Smallest and largest block that is kept for reuse, as powers of two.
const CLASS_BITS_MIN: u32 = 12;
const CLASS_BITS_MAX: u32 = 19;
const CLASS_COUNT: usize = (CLASS_BITS_MAX - CLASS_BITS_MIN + 1) as usize;
/// Maximum number of bytes that one thread keeps for reuse.
const KEPT_BYTES_MAX: usize = 4 << 20;
/// The same of large blocks, of the process; a block has a multiple of the unit.
const LARGE_KEPT_BYTES_MAX: usize = 64 << 20;
const LARGE_UNIT_BYTES: usize = 1 << 18;

/// Large blocks that are kept for reuse: few.
static LARGE: Mutex<Vec<Arc<Block>>> = Mutex::new(Vec::new());

fn large() -> MutexGuard<'static, Vec<Arc<Block>>> {
    // A list that a panic interrupted is a list still.
    LARGE.lock()
}

/// Whether a block of this capacity is mapped on its own.
fn is_large(capacity: usize) -> bool {
    capacity > 1 << CLASS_BITS_MAX
}

/// The smallest that is kept and is not much too large.
fn take_large(len: usize) -> Arc<Block> {
    let capacity = len.next_multiple_of(LARGE_UNIT_BYTES);
    let mut free = large();
    let fitting = free.iter().enumerate().map(|(index, block)| (block.layout.size(), index));
    let fitting = fitting.filter(|(size, _)| (capacity..=2 * capacity).contains(size)).min();
    let kept = fitting.map(|(_, index)| free.swap_remove(index));
    drop(free);
    kept.unwrap_or_else(|| Arc::new(Block::new(capacity)))
}

fn keep_large(block: Arc<Block>) {
    let mut free = large();
    let kept: usize = free.iter().map(|block| block.layout.size()).sum();
    if kept + block.layout.size() <= LARGE_KEPT_BYTES_MAX {
        free.push(block);
        return;
    }
    // Unmapped without the lock.
    drop(free);
}

#[derive(Default)]
struct FreeBlocks {
    classes: [Vec<Arc<Block>>; CLASS_COUNT],
    kept_bytes: usize,
}

thread_local! {
    static FREE: RefCell<FreeBlocks> = RefCell::default();
}

fn class_of(len: usize) -> (usize, usize) {
    let capacity = len.next_power_of_two().max(1 << CLASS_BITS_MIN);
    ((capacity.trailing_zeros() - CLASS_BITS_MIN) as usize, capacity)
}

fn take_block(len: usize) -> Arc<Block> {
    if is_large(len) {
        return take_large(len);
    }
    let (class, capacity) = class_of(len);
    let kept = FREE
        .try_with(|free| {
            let mut free = free.borrow_mut();
            let block = free.classes.get_mut(class)?.pop()?;
            free.kept_bytes -= capacity;
            Some(block)
        })
        .ok()
        .flatten();
    kept.unwrap_or_else(|| Arc::new(Block::new(capacity)))
}

fn keep_block(block: Arc<Block>) {
    let capacity = block.layout.size();
    if is_large(capacity) {
        return keep_large(block);
    }
    let (class, _) = class_of(capacity);
    // After the thread's locals are gone the block is simply freed.
    let _ = FREE.try_with(|free| {
        let mut free = free.borrow_mut();
        if free.kept_bytes + capacity <= KEPT_BYTES_MAX
            && let Some(list) = free.classes.get_mut(class)
        {
            list.push(block);
            free.kept_bytes += capacity;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_a_split_are_disjoint_and_complete() {
        let mut tail = Buf::from_slice(b"abcdef");
        let mut head = tail.split_to(2);
        head.fill(b'x');
        assert_eq!(&*head, b"xx");
        assert_eq!(&*tail, b"cdef");
    }

    #[test]
    fn buffers_of_shared_memory_lie_in_it_and_keep_it() {
        struct Freed(Arc<std::sync::atomic::AtomicBool>, Box<[u8; 8192]>);
        impl Drop for Freed {
            fn drop(&mut self) {
                self.0.store(true, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let freed = Arc::default();
        let mut owner = Box::new(Freed(Arc::clone(&freed), Box::new([7; 8192])));
        let memory = NonNull::from(&mut owner.1[0]);
        // SAFETY: the array lives in `owner`, and nobody else names it from here on.
        let shared = unsafe { SharedMemory::new(memory, 8192, owner) };
        let mut buf = shared.buf(8191, 1).unwrap();
        buf.fill(9);
        assert_eq!(&*shared.buf(8190, 2).unwrap(), [7, 9]);
        assert!(shared.buf(8191, 2).is_none());
        assert!(shared.buf(usize::MAX, 2).is_none());
        drop(shared);
        assert!(!freed.load(std::sync::atomic::Ordering::Relaxed));
        drop(buf);
        assert!(freed.load(std::sync::atomic::Ordering::Relaxed));
    }

    #[test]
    fn bytes_are_put_and_filled_in_memory_of_either_kind() {
        let own = Buf::from_slice(b"abcdef");
        let foreign = Buf::from_slice(b"abcdef").into_foreign();
        assert_eq!((own.is_foreign(), foreign.is_foreign()), (false, true));
        for mut buf in [own, foreign] {
            let is_foreign = buf.is_foreign();
            buf.put(1, b"xy");
            buf.fill_part(4..5, b'z');
            assert_eq!(&*buf, b"axydzf");
            let mut tail = buf.split_to(2);
            std::mem::swap(&mut buf, &mut tail);
            tail.copy_from_slice(b"1234");
            buf.join(tail);
            assert_eq!(&*buf, b"ax1234");
            assert_eq!(buf.is_foreign(), is_foreign);
            buf.put(6, b"");
            buf.fill_part(6..6, 0);
            buf.fill(0);
            assert_eq!(&*buf, [0; 6]);
        }
    }

    #[test]
    fn memory_treated_as_foreign_is_reused_when_it_is_gone() {
        let buf = Buf::zeroed(8192);
        let address = buf.as_ptr();
        let foreign = buf.into_foreign();
        assert_eq!(foreign.as_ptr(), address);
        assert_ne!(Buf::new(8192).as_ptr(), address);
        drop(foreign);
        assert_eq!(Buf::new(8192).as_ptr(), address);
        assert!(Buf::new(0).into_foreign().is_empty());
    }

    #[test]
    #[should_panic(expected = "foreign memory")]
    fn no_reference_is_made_to_change_foreign_memory() {
        Buf::new(2).into_foreign().own_bytes().fill(0);
    }

    #[test]
    #[should_panic(expected = "3..5 of 4 bytes")]
    fn bytes_beyond_the_end_are_not_put() {
        Buf::new(4).put(3, b"xy");
    }

    #[test]
    fn file_is_read_into_foreign_memory() {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, b"abcdef").unwrap();
        let mut buf = Buf::zeroed(4).into_foreign();
        assert_eq!(buf.read_from(&file, 1, 2), Ok(3));
        assert_eq!(&*buf, b"\0cde");
        assert_eq!(buf.read_from(&file, 0, 4), Ok(2));
        assert_eq!(&*buf, b"efde");
        assert_eq!(buf.read_from(&file, 0, u64::MAX), Err(Errno::INVAL));
        match buf.read_now(&file, 2, 0) {
            Ok(count) => assert_eq!((count, &*buf), (2, &b"efab"[..])),
            // A file system that cannot say whether it would wait.
            Err(error) => assert!(matches!(error, Errno::AGAIN | Errno::OPNOTSUPP), "{error}"),
        }
    }

    #[test]
    fn parts_of_a_split_can_be_rejoined() {
        let mut tail = Buf::from_slice(b"abcdef");
        let mut head = tail.split_to(2);
        let mut end = tail.split_to(4);
        end.fill(b'x');
        head.join(end);
        assert_eq!(&*head, b"abxxxx");
        head.join(Buf::new(0));
        let mut whole = Buf::from_slice(b"ab");
        let mut nothing = whole.split_to(0);
        nothing.join(whole);
        assert_eq!(&*nothing, b"ab");
    }

    #[test]
    #[should_panic(expected = "another buffer")]
    fn parts_of_different_buffers_cannot_be_joined() {
        Buf::new(2).join(Buf::new(2));
    }

    #[test]
    fn block_is_reused_only_after_every_part_is_gone() {
        let mut tail = Buf::zeroed(8192);
        let head = tail.split_to(4096);
        let address = head.as_ptr();
        drop(head);
        assert_ne!(Buf::new(8192).as_ptr(), address);
        drop(tail);
        assert_eq!(Buf::new(8192).as_ptr(), address);
    }

    #[test]
    fn large_block_is_reused_by_another_thread_for_as_many_bytes_or_somewhat_fewer() {
        let sizes = [23 << 20, (23 << 20) - 5, 12 << 20];
        let mut buf = Buf::new(sizes[0]);
        buf.fill(7);
        let address = buf.as_ptr().addr();
        drop(buf);
        for len in sizes {
            let found = std::thread::spawn(move || {
                let buf = Buf::new(len);
                (buf.as_ptr().addr(), buf.len())
            });
            assert_eq!(found.join().unwrap(), (address, len));
        }
        assert_ne!(Buf::new(11 << 20).as_ptr().addr(), address, "twice as much is too much");
        let more: Vec<_> = (0..3).map(|_| Buf::zeroed(20 << 20)).collect();
        assert!(more.iter().all(|buf| buf.iter().all(|byte| *byte == 0)));
        drop(more);
        let kept: usize = large().iter().map(|block| block.layout.size()).sum();
        assert!(kept <= LARGE_KEPT_BYTES_MAX, "{kept} bytes are kept");
    }

    #[test]
    fn empty_buffer_needs_no_memory() {
        assert!(Buf::new(0).is_empty());
        assert!(Buf::from_slice(&[]).is_empty());
    }

    #[test]
    fn buffers_are_page_aligned() {
        for len in [1, 511, 4096, 4097, 3 << 20] {
            assert!(Buf::new(len).as_ptr().addr().is_multiple_of(BUF_ALIGN));
        }
    }
}
