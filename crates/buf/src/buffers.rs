//! State shared by a pool, its driver's side and its leases: the buffers, the header of each, and
//! its state. Headers and pool refer to each other, since the last lease that is dropped frees the
//! buffer.

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::ptr::{self, NonNull};
use core::task::Waker;

use crate::fallible::try_box;
use crate::region::Region;

/// Buffers that are taken from the system at once: 1 MiB at the default size, small compared with
/// the pool's limit and large enough that growing is rare.
pub const CHUNK_BUFFERS: usize = 64;

/// In [`Inner::care`]: a buffer that is freed is overwritten.
pub(crate) const POISON: u8 = 1;
/// In [`Inner::care`]: a receive waits for the next buffer that is freed.
pub(crate) const WAITED_FOR: u8 = 2;

/// A buffer's state while the kernel may write into it.
pub(crate) const WITH_KERNEL: u32 = 1 << 31;

/// The header of a pool buffer or of a heap block.
///
/// Invariant, on which the `unsafe` blocks of this crate rest: the kernel, or who holds a slice of
/// [`KernelSide::spare`](crate::KernelSide::spare), writes only while the state is `WITH_KERNEL`,
/// and no lease is left then. The range of a [`LeaseMut`](crate::LeaseMut) is disjoint from those
/// of all others, and from that of every [`Lease`](crate::Lease), so that it alone is written:
/// bytes are reported once, cutting shares none of them, and only a frozen lease is cloned. While a
/// lease is left the header stays where it is, and so do the bytes: a buffer's, since its first
/// lease holds the pool and a chunk in use is not given back; a heap block's, since its last lease
/// frees it.
#[repr(C)]
pub(crate) struct Header {
    /// `WITH_KERNEL`, or the number of leases; 0 if it is free.
    pub state: Cell<u32>,
    /// The number of bytes, from the start, that were received when the buffer was last with the
    /// kernel.
    pub filled: Cell<u32>,
    /// The pool; null for a heap block.
    pool: *const Inner,
    /// The buffer's number.
    pub id: u16,
}

/// The start of every heap block, whatever owns its bytes.
#[repr(C)]
struct HeapHead {
    /// First, so that a pointer to it is one to the block.
    header: Header,
    /// Drops the block, of which it knows the type.
    free: unsafe fn(NonNull<Header>),
    /// Bytes that the owner holds.
    pinned: usize,
}

/// Bytes on the heap, and what owns them. The owner is neither moved nor touched until it is
/// dropped.
#[repr(C)]
struct HeapBlock<T> {
    head: HeapHead,
    owner: T,
}

impl<T: 'static> HeapBlock<T> {
    /// A block with one lease. `None` if the system has no memory for it; the owner is dropped
    /// then.
    fn leak(owner: T, pinned: usize) -> Option<NonNull<HeapBlock<T>>> {
        let header = Header { state: Cell::new(1), filled: Cell::new(0), pool: ptr::null(), id: 0 };
        let head = HeapHead { header, free: free_block::<T>, pinned };
        // Made from the whole block, so that it may be cast back.
        Some(NonNull::from(Box::leak(try_box(HeapBlock { head, owner })?)))
    }
}

/// # Safety
/// The header is that of a `HeapBlock<T>` made by [`Header::of_owner`], and nothing else refers to
/// it.
unsafe fn free_block<T>(header: NonNull<Header>) {
    // SAFETY: made from a leaked box of exactly this type, as the caller says.
    drop(unsafe { Box::from_raw(header.cast::<HeapBlock<T>>().as_ptr()) });
}

impl Header {
    pub(crate) fn of_buffer(pool: *const Inner, id: u16) -> Header {
        Header { state: Cell::new(0), filled: Cell::new(0), pool, id }
    }

    /// Creates a heap block with one lease, and returns its bytes and their number. `None` if the
    /// system has no memory for the block; then the owner is dropped.
    pub(crate) fn of_owner<T: AsRef<[u8]> + 'static>(
        owner: T,
        pinned: usize,
    ) -> Option<(NonNull<Header>, NonNull<u8>, usize)> {
        let block = HeapBlock::leak(owner, pinned)?;
        // SAFETY: the block was just leaked. Its owner is only read until the last lease frees it.
        let bytes = unsafe { block.as_ref() }.owner.as_ref();
        Some((block.cast(), NonNull::from(bytes).cast(), bytes.len()))
    }

    /// Does the same for bytes that the lease may write.
    pub(crate) fn of_vec(bytes: Vec<u8>) -> Option<(NonNull<Header>, NonNull<u8>, usize)> {
        let pinned = bytes.capacity();
        let mut block = HeapBlock::leak(bytes, pinned)?;
        // SAFETY: the block was just leaked, and nothing else knows it. The pointer comes from a
        // mutable borrow, so that bytes may be written through it; the `Vec` is not touched until
        // the last lease frees it.
        let bytes = unsafe { block.as_mut() }.owner.as_mut_slice();
        let (data, len) = (NonNull::from(&mut *bytes).cast(), bytes.len());
        Some((block.cast(), data, len))
    }

    #[inline]
    pub(crate) fn is_pooled(&self) -> bool {
        !self.pool.is_null()
    }

    /// Counts a new lease.
    #[inline]
    pub(crate) fn cloned(&self) {
        let state = self.state.get();
        assert!(state < WITH_KERNEL - 1, "too many leases on one buffer");
        self.state.set(state + 1);
    }

    /// Counts a lease off.
    ///
    /// # Safety
    /// The caller gives up a lease on this header and does not use it, or the bytes, afterwards.
    #[inline]
    pub(crate) unsafe fn dropped(header: NonNull<Header>) {
        // SAFETY: the caller's lease keeps the header alive until the count below says otherwise.
        let this = unsafe { header.as_ref() };
        let left = this.state.get() - 1;
        this.state.set(left);
        if left == 0 {
            // SAFETY: that was the last lease, and it was the caller's.
            unsafe { Header::last_dropped(header) };
        }
    }

    /// # Safety
    /// The last lease is gone.
    #[inline(never)]
    unsafe fn last_dropped(header: NonNull<Header>) {
        // SAFETY: a buffer's header lives as long as its pool, which the leases' hold keeps until
        // the end of this function; a heap block lives until it is freed below.
        let this = unsafe { header.as_ref() };
        if this.pool.is_null() {
            // SAFETY: a header without a pool is the start of a `HeapBlock` (see `of_owner`), and
            // so of a `HeapHead`.
            let free = unsafe { header.cast::<HeapHead>().as_ref() }.free;
            // SAFETY: `of_owner` wrote it for the type of this block, to which nothing else refers.
            return unsafe { free(header) };
        }
        // SAFETY: `received` forgot one `Rc` of this pool when it made the first lease. Taking it
        // back drops the pool if nothing else holds it, after the last use of the header.
        let pool = unsafe { Rc::from_raw(this.pool) };
        pool.free(this);
    }

    /// Bytes of memory that the leases pin.
    ///
    /// # Safety
    /// A lease on the header lives.
    pub(crate) unsafe fn pinned_bytes(header: NonNull<Header>) -> usize {
        // SAFETY: a lease keeps the header alive.
        let this = unsafe { header.as_ref() };
        if this.pool.is_null() {
            // SAFETY: a header without a pool is the start of a `HeapBlock` (see `of_owner`), and
            // so of a `HeapHead`.
            return unsafe { header.cast::<HeapHead>().as_ref() }.pinned;
        }
        // SAFETY: the leases hold the pool.
        unsafe { &*this.pool }.buffer_bytes()
    }
}

/// Size and bounds of a [`Pool`](crate::Pool).
#[derive(Clone, Copy, Debug)]
pub struct PoolConfig {
    /// Bytes in one buffer, 64 to 16 MiB. 16 KiB by default: a 16 KiB echo through 2 KiB buffers
    /// costs four to five times the CPU.
    pub buffer_bytes: usize,
    /// The most buffers the pool ever holds, 1 to 32768. Memory is taken in chunks on demand.
    pub buffers_max: usize,
    /// Whether to overwrite a buffer with `0xDD` when it is freed, so that a test sees bytes that
    /// are read too late.
    pub poison: bool,
}

impl Default for PoolConfig {
    fn default() -> PoolConfig {
        PoolConfig { buffer_bytes: 16 * 1024, buffers_max: 4096, poison: false }
    }
}

/// Buffers that were taken from the system together.
pub(crate) struct Chunk {
    memory: Region,
    pub headers: Box<[Header]>,
}

pub(crate) struct Inner {
    pub config: PoolConfig,
    /// The most buffers, within the bound of the configuration.
    pub most: Cell<usize>,
    /// Chunk `n` holds buffers `n * CHUNK_BUFFERS` and up; `None` where memory was returned. A
    /// chunk goes only while all its buffers are free, so the header of a buffer in use stays in
    /// place.
    pub chunks: RefCell<Vec<Option<Chunk>>>,
    /// Used last in, first out.
    pub free: RefCell<Vec<u16>>,
    pub total: Cell<usize>,
    pub with_kernel: Cell<usize>,
    /// Work to be done when a buffer is freed, apart from freeing it: one test for all of it.
    pub care: Cell<u8>,
    pub waker: RefCell<Option<Waker>>,
}

impl Inner {
    /// Header and memory of a buffer, if its chunk is there.
    #[inline]
    pub(crate) fn buffer(&self, id: u16) -> Option<(NonNull<Header>, NonNull<u8>)> {
        let (chunk, index) = (usize::from(id) / CHUNK_BUFFERS, usize::from(id) % CHUNK_BUFFERS);
        // SAFETY: the list is borrowed until the end of this function, and nothing that is called
        // here changes it. An ordinary borrow would count itself up and down for each buffer.
        let chunks = unsafe { self.chunks.try_borrow_unguarded() }.ok()?;
        let chunk = chunks.get(chunk)?.as_ref()?;
        let header = chunk.headers.get(index)?;
        // SAFETY: the memory of a chunk has `buffer_bytes` for each of its headers (see `grow`),
        // and `index` is that of one.
        let data = unsafe { chunk.memory.start().add(index * self.config.buffer_bytes) };
        Some((NonNull::from(header), data))
    }

    /// The number of buffers of chunk `n`: `buffers_max` may cut the last one short.
    fn chunk_buffers(&self, chunk: usize) -> usize {
        (self.config.buffers_max - chunk * CHUNK_BUFFERS).min(CHUNK_BUFFERS)
    }

    /// Takes one more chunk from the system; false at the limit or when the system refuses.
    fn grow(self: &Rc<Inner>) -> bool {
        let mut chunks = self.chunks.borrow_mut();
        let chunks_max = self.config.buffers_max.div_ceil(CHUNK_BUFFERS);
        let chunk = chunks.iter().position(Option::is_none).unwrap_or(chunks.len());
        if chunk >= chunks_max {
            return false;
        }
        let count = self.chunk_buffers(chunk);
        // The first chunk is there whatever the bound, or nothing could be received.
        if self.total.get() > 0 && self.total.get() + count > self.most.get() {
            return false;
        }
        let Some(memory) = Region::new(count * self.config.buffer_bytes) else { return false };
        let first = chunk * CHUNK_BUFFERS;
        let headers =
            (first..first + count).map(|id| Header::of_buffer(Rc::as_ptr(self), id as u16)).collect();
        let grown = Some(Chunk { memory, headers });
        if chunk == chunks.len() {
            chunks.push(grown);
        } else {
            chunks[chunk] = grown;
        }
        self.free.borrow_mut().extend((first..first + count).rev().map(|id| id as u16));
        self.total.set(self.total.get() + count);
        true
    }

    /// Takes one more chunk, and returns a buffer of it, where none is free.
    #[cold]
    pub(crate) fn grow_and_take(self: &Rc<Inner>) -> Option<u16> {
        if self.grow() { self.free.borrow_mut().pop() } else { None }
    }

    /// Puts a buffer that is no longer used on top of the free list.
    pub(crate) fn free(&self, header: &Header) {
        debug_assert_eq!(header.state.get(), 0);
        if self.care.get() != 0 {
            return self.free_with_care(header);
        }
        header.filled.set(0);
        self.free.borrow_mut().push(header.id);
    }

    #[cold]
    fn free_with_care(&self, header: &Header) {
        let care = self.care.replace(self.care.get() & POISON);
        if care & POISON != 0
            && let Some((_, data)) = self.buffer(header.id)
        {
            // SAFETY: the buffer is neither with the kernel nor leased (its state is 0), so nothing
            // else reads or writes it, and `filled` never exceeds the buffer's size.
            unsafe { data.write_bytes(0xDD, header.filled.get() as usize) };
        }
        header.filled.set(0);
        self.free.borrow_mut().push(header.id);
        if care & WAITED_FOR != 0 {
            // Cloned, so that nothing is borrowed while the waker runs.
            let waker = self.waker.borrow().clone();
            waker.iter().for_each(Waker::wake_by_ref);
        }
    }

    pub(crate) fn buffer_bytes(&self) -> usize {
        self.config.buffer_bytes
    }
}
