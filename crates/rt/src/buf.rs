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
//!
//! Memory that is shared with another program ([`SharedMemory`]) is a block of its own kind. I1
//! cannot hold there: the other program changes the bytes whenever it likes, and may name the same
//! bytes twice. Such a `Buf` is handed to the kernel, filled, or copied; no decision may rest on
//! reading its bytes twice.
//!
//! Freed blocks go to a small list of the thread, so that the data path does not allocate.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
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
    /// Its capacity and alignment; of shared memory, its length.
    layout: Layout,
    /// Keeps shared memory mapped; `None` for memory of our own.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: a block is plain memory; I1 gives each byte exactly one owner.
unsafe impl Send for Block {}
// SAFETY: shared access to a block never touches its memory except through a `Buf` (I1).
unsafe impl Sync for Block {}

impl Block {
    fn new(capacity: usize) -> Self {
        let layout = Layout::from_size_align(capacity, BUF_ALIGN).expect("a power-of-two capacity");
        // SAFETY: `layout` has a non-zero size: `class_of` is at least a page.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(memory) = NonNull::new(memory) else { handle_alloc_error(layout) };
        Self { memory, layout, owner: None }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.owner.is_none() {
            // SAFETY: allocated in `new` with this layout, freed once (I3).
            unsafe { dealloc(self.memory.as_ptr(), self.layout) }
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

    /// Whether address and length are multiples of `align`.
    pub fn is_aligned(&self, align: usize) -> bool {
        (self.as_ptr().addr() | self.len) & (align - 1) == 0
    }
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

impl DerefMut for Buf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        match &self.block {
            None => &mut [],
            // SAFETY: as in `deref`; `&mut self` makes the access unique.
            Some(block) => unsafe {
                std::slice::from_raw_parts_mut(block.memory.as_ptr().add(self.start), self.len)
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
const CLASS_BITS_MAX: u32 = 21;
const CLASS_COUNT: usize = (CLASS_BITS_MAX - CLASS_BITS_MIN + 1) as usize;
/// Most bytes that one thread keeps for reuse.
const KEPT_BYTES_MAX: usize = 4 << 20;

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
