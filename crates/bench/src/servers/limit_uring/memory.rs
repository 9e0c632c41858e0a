//! Receive memory: buffers mapped once, and the buffer ring that lends them to the kernel.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::Submitter;
use io_uring::types::BufRingEntry;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Bytes of one receive buffer, the size at which large transfers stop gaining.
pub(super) const BUFFER_BYTES: usize = 16 * 1024;

/// Buffers in all: 64 MiB of address space, touched only as far as slow readers hold buffers.
const BUFFERS: u16 = 4096;

/// Entries of the buffer ring, the most that the kernel may hold at a time. 4 KiB of memory.
const RING_ENTRIES: u16 = 256;

/// Buffers that the ring holds at first. Few, so that the same warm ones are reused: 64 measured
/// the best (32 runs dry and 256 is colder, each 4 % at 16 KiB; no difference at 64 bytes).
const LEVEL: u16 = 64;

/// The one buffer group.
pub(super) const GROUP: u16 = 0;

/// The buffers, in the hands of the kernel (`lent`), of connections, or `free`.
pub(super) struct Memory {
    base: NonNull<u8>,
    ring: NonNull<BufRingEntry>,
    /// Tail of the ring as last published to the kernel.
    tail: u16,
    /// Buffers in the ring now.
    lent: u16,
    /// Buffers to keep in the ring; grows when it runs dry.
    level: u16,
    /// Last in, first out, for the same reason.
    free: Vec<u16>,
}

impl Memory {
    /// Maps the buffers, registers the ring and fills it. The memory is never unmapped.
    pub(super) fn new(submitter: &Submitter<'_>) -> io::Result<Self> {
        let base = map(usize::from(BUFFERS) * BUFFER_BYTES)?;
        let ring = map(usize::from(RING_ENTRIES) * size_of::<BufRingEntry>())?.cast();
        // SAFETY: the ring is a page-aligned, zeroed mapping of RING_ENTRIES entries that is never
        // unmapped, so it is valid for as long as the kernel may look at it.
        unsafe {
            submitter.register_buf_ring_with_flags(ring.as_ptr() as u64, RING_ENTRIES, GROUP, 0)?;
        }
        let free = (0..BUFFERS).rev().collect();
        let mut memory = Self { base, ring, tail: 0, lent: 0, level: LEVEL, free };
        memory.lend();
        Ok(memory)
    }

    /// The address of buffer `id`.
    pub(super) fn address(&self, id: u16) -> *mut u8 {
        debug_assert!(id < BUFFERS);
        // SAFETY: `id` is below BUFFERS (the kernel only answers ids that `lend` gave it), so the
        // offset stays inside the mapping that `new` made.
        unsafe { self.base.as_ptr().add(usize::from(id) * BUFFER_BYTES) }
    }

    /// Notes that the kernel took a buffer out of the ring.
    pub(super) fn taken(&mut self) {
        self.lent -= 1;
    }

    /// Takes back a buffer that no operation uses.
    pub(super) fn recycle(&mut self, id: u16) {
        self.free.push(id);
    }

    /// Buffers that the ring holds.
    pub(super) fn lent(&self) -> u16 {
        self.lent
    }

    /// Notes that the ring ran dry: from now on it holds twice as many buffers.
    pub(super) fn ran_dry(&mut self) {
        self.level = (self.level * 2).min(RING_ENTRIES);
    }

    /// Puts free buffers into the ring, up to its level.
    pub(super) fn lend(&mut self) {
        let before = self.tail;
        while self.lent < self.level
            && let Some(id) = self.free.pop()
        {
            let address = self.address(id);
            let index = usize::from(self.tail % RING_ENTRIES);
            // SAFETY: `index` is below RING_ENTRIES. The entry is not in the kernel's hands: at
            // most `level <= RING_ENTRIES` entries before the tail are. Writing through the three
            // setters leaves the ring's tail, which overlays the first entry's last field, alone.
            unsafe {
                let entry = &mut *self.ring.as_ptr().add(index);
                entry.set_addr(address as u64);
                entry.set_len(BUFFER_BYTES as u32);
                entry.set_bid(id);
            }
            self.tail = self.tail.wrapping_add(1);
            self.lent += 1;
        }
        if self.tail != before {
            // SAFETY: the tail lies inside the ring's mapping and is aligned for a u16; kernel and
            // this thread only touch it atomically.
            let tail = unsafe { &*BufRingEntry::tail(self.ring.as_ptr()).cast::<AtomicU16>() };
            tail.store(self.tail, Ordering::Release);
        }
    }
}

/// A private zeroed mapping of at least `bytes`.
fn map(bytes: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: a new anonymous mapping at an address that the kernel chooses touches no other
    // memory.
    let address: *mut c_void = unsafe {
        mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
    };
    NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mmap returned null"))
}
