//! The memory of a buffer ring, from which the kernel learns of buffers it may write into.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::BufRingEntry;
use ringserve_buf::KernelSide;

/// A page-aligned mapping of `entries` entries, the first of which also holds the tail.
///
/// The kernel pins its pages when it is registered and reads entries between its own head and the
/// tail. Invariants: `base` is a live mapping of `entries` entries for as long as this lives;
/// `entries` is a power of two; this is the only thing in the process that writes to it.
pub(super) struct BufferRing {
    base: NonNull<BufRingEntry>,
    entries: u16,
    tail: u16,
    buffer_bytes: u32,
}

impl BufferRing {
    pub(super) fn new(entries: u16, buffer_bytes: usize) -> io::Result<BufferRing> {
        debug_assert!(entries.is_power_of_two());
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping touches no memory that is in use.
        let base = unsafe { libc::mmap(ptr::null_mut(), Self::bytes(entries), protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(BufferRing { base, entries, tail: 0, buffer_bytes: buffer_bytes as u32 })
    }

    fn bytes(entries: u16) -> usize {
        usize::from(entries) * size_of::<BufRingEntry>()
    }

    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    pub(super) fn entries(&self) -> u16 {
        self.entries
    }

    pub(super) fn buffer_bytes(&self) -> usize {
        self.buffer_bytes as usize
    }

    /// Adds a lent buffer at the tail. The caller keeps no more than `entries` of them in the ring.
    #[inline]
    pub(super) fn provide(&mut self, side: &KernelSide, buffer: u16) {
        let address = side.address(buffer);
        let index = usize::from(self.tail & (self.entries - 1));
        // SAFETY: index is below entries, so this is inside the mapping (invariant); the mapping is
        // zeroed or holds what was written here, both valid entries; the kernel reads only entries
        // before the tail, and this one is at it, since at most `entries` are in the ring.
        let entry = unsafe { self.base.add(index).as_mut() };
        entry.set_addr(address as u64);
        entry.set_len(self.buffer_bytes);
        entry.set_bid(buffer);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the base is valid and its first entry initialised (zeroed by mmap).
        let tail = unsafe { BufRingEntry::tail(self.base.as_ptr()) };
        // SAFETY: the tail is two aligned bytes inside the mapping that both sides access
        // atomically: setting the first entry writes its address, length and id only, which lie
        // before it.
        let tail = unsafe { AtomicU16::from_ptr(tail.cast_mut()) };
        tail.store(self.tail, Ordering::Release);
    }
}

impl Drop for BufferRing {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length. The kernel's own pin on the pages keeps them
        // from being used otherwise while it still reads them, so it can never take other memory
        // for entries.
        unsafe { libc::munmap(self.base.as_ptr().cast(), Self::bytes(self.entries)) };
    }
}
