//! What a block of bytes and its leases share.

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::Cell;
use core::ptr::{self, NonNull};

use crate::fallible::try_box;
use crate::pool::Inner;

/// Set in a buffer's state while the kernel may write into it.
pub(crate) const WITH_KERNEL: u32 = 1 << 31;

/// The header of a pool buffer or of a heap block.
///
/// Invariant, on which the `unsafe` blocks of this crate rest: while `WITH_KERNEL` is set the kernel (or a
/// [`KernelSide::spare`](crate::KernelSide::spare) slice) writes only to bytes at `filled` and above; leases cover
/// only bytes below `filled`; `filled` goes back to zero only when no lease is left. While a lease is left the
/// header stays where it is, and so do the bytes: a buffer's, since its first lease holds the pool and a chunk in
/// use is not given back; a heap block's, since its last lease frees it.
#[repr(C)]
pub(crate) struct Header {
    /// `WITH_KERNEL`, plus the number of leases.
    pub state: Cell<u32>,
    /// How many bytes from the start were received since the buffer was lent.
    pub filled: Cell<u32>,
    /// The pool; null for a heap block.
    pool: *const Inner,
    /// The buffer's number.
    pub id: u16,
}

/// Bytes on the heap.
#[repr(C)]
struct HeapBlock {
    /// First, so that a pointer to it is one to the block.
    header: Header,
    bytes: Vec<u8>,
}

impl Header {
    pub(crate) fn of_buffer(pool: *const Inner, id: u16) -> Header {
        Header { state: Cell::new(0), filled: Cell::new(0), pool, id }
    }

    /// A heap block with one lease, and its bytes. `None` if the system has no memory for the block.
    pub(crate) fn of_heap(bytes: Vec<u8>) -> Option<(NonNull<Header>, NonNull<u8>)> {
        let header = Header { state: Cell::new(1), filled: Cell::new(0), pool: ptr::null(), id: 0 };
        let block = Box::leak(try_box(HeapBlock { header, bytes })?);
        // Made from the whole block and the whole slice, so that they may be moved along and cast back.
        let data = NonNull::from(block.bytes.as_mut_slice()).cast();
        Some((NonNull::from(block).cast(), data))
    }

    #[inline]
    pub(crate) fn is_pooled(&self) -> bool {
        !self.pool.is_null()
    }

    /// One more lease.
    #[inline]
    pub(crate) fn cloned(&self) {
        let state = self.state.get();
        assert!(state & !WITH_KERNEL < WITH_KERNEL - 1, "too many leases on one buffer");
        self.state.set(state + 1);
    }

    /// One lease less.
    ///
    /// # Safety
    /// The caller gives up a lease on this header and does not use it, or the bytes, afterwards.
    #[inline]
    pub(crate) unsafe fn dropped(header: NonNull<Header>) {
        // SAFETY: the caller's lease keeps the header alive until the count below says otherwise.
        let this = unsafe { header.as_ref() };
        let left = this.state.get() - 1;
        this.state.set(left);
        if left & !WITH_KERNEL == 0 {
            // SAFETY: that was the last lease, and it was the caller's.
            unsafe { Header::last_dropped(header, left) };
        }
    }

    /// # Safety
    /// The last lease is gone; `left` is the state.
    #[cold]
    #[inline(never)]
    unsafe fn last_dropped(header: NonNull<Header>, left: u32) {
        // SAFETY: a buffer's header lives as long as its pool, which the leases' hold keeps until the end of this
        // function; a heap block lives until it is freed below.
        let this = unsafe { header.as_ref() };
        if this.pool.is_null() {
            // SAFETY: made by `of_heap` from a leaked box of exactly this type, and nobody else knows it any more.
            drop(unsafe { Box::from_raw(header.cast::<HeapBlock>().as_ptr()) });
            return;
        }
        // SAFETY: `received` forgot one `Rc` of this pool when the first lease was made. Taking it back drops the
        // pool if nothing else holds it, after the last use of the header.
        let pool = unsafe { Rc::from_raw(this.pool) };
        if left == 0 {
            pool.free(this);
        }
    }

    /// Bytes of memory that the leases pin.
    ///
    /// # Safety
    /// A lease on the header lives.
    pub(crate) unsafe fn pinned_bytes(header: NonNull<Header>) -> usize {
        // SAFETY: a lease keeps the header alive.
        let this = unsafe { header.as_ref() };
        if this.pool.is_null() {
            // SAFETY: a header without a pool is the start of a `HeapBlock` (see `of_heap`).
            return unsafe { header.cast::<HeapBlock>().as_ref() }.bytes.capacity();
        }
        // SAFETY: the leases hold the pool.
        unsafe { &*this.pool }.buffer_bytes()
    }
}
