//! One zeroed, page-aligned allocation that holds the buffers of a chunk.

use alloc::alloc::{Layout, alloc_zeroed, dealloc};
use core::ptr::NonNull;

/// Buffers start on a page of this size, so that a 16 KiB buffer touches four pages and not five.
const PAGE: usize = 4096;

/// A page-aligned stretch of zeroed memory, given back when dropped.
pub(crate) struct Region {
    /// The pointer that the allocator returned.
    allocation: NonNull<u8>,
    layout: Layout,
    /// The first page boundary in it.
    start: NonNull<u8>,
}

impl Region {
    /// Allocates `bytes` of zeroed memory, or `None` if the system refuses.
    ///
    /// It asks for one page more than needed at natural alignment and aligns by hand:
    /// `alloc_zeroed` with a large alignment clears the memory itself, which would make every page
    /// resident at once.
    pub(crate) fn new(bytes: usize) -> Option<Region> {
        let layout = Layout::from_size_align(bytes.checked_add(PAGE)?, 16).ok()?;
        // SAFETY: the layout's size is at least PAGE, so it is not zero.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let skip = allocation.as_ptr().align_offset(PAGE).min(PAGE);
        // SAFETY: the allocation has at least PAGE bytes.
        let start = unsafe { allocation.add(skip) };
        Some(Region { allocation, layout, start })
    }

    /// The first byte, on a page boundary; as many follow as [`new`](Region::new) was asked for.
    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout and not freed since; `Region` is not `Clone`.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}
