//! The pool: which buffer is free, with the kernel, or leased.

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::fmt;
use core::ptr::NonNull;
use core::task::Waker;

use crate::buffers::{CHUNK_BUFFERS, Chunk, Header, Inner, POISON, PoolConfig, WAITED_FOR, WITH_KERNEL};
use crate::lease::Lease;
use crate::lease_mut::LeaseMut;

/// Buffer ids are 16 bits wide in the kernel's interface, and a buffer ring has at most 2^15
/// entries.
const BUFFERS_LIMIT: usize = 1 << 15;

/// The reason why a pool cannot be created.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PoolError {
    /// `buffer_bytes` is outside 64 to 16 MiB.
    BufferBytes(usize),
    /// `buffers_max` is outside 1 to 32768.
    BuffersMax(usize),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolError::BufferBytes(n) => write!(f, "buffer_bytes is {n}; it must be 64 to 16777216"),
            PoolError::BuffersMax(n) => write!(f, "buffers_max is {n}; it must be 1 to {BUFFERS_LIMIT}"),
        }
    }
}

crate::debug_is_display!(PoolError);

impl core::error::Error for PoolError {}

/// The states of a pool's buffers. `total == free + with_kernel + leased` always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BufferStats {
    /// Buffers taken from the system so far.
    pub total: usize,
    /// Buffers that are not used.
    pub free: usize,
    /// Buffers the kernel may write into.
    pub with_kernel: usize,
    /// Buffers pinned by a lease.
    pub leased: usize,
}

impl BufferStats {
    /// Calls `visit` with each count, always in the same order, for callers that keep them as
    /// numbers.
    #[doc(hidden)]
    pub fn each_count(&mut self, visit: impl FnMut(&mut usize)) {
        let BufferStats { total, free, with_kernel, leased } = self;
        [total, free, with_kernel, leased].into_iter().for_each(visit);
    }
}

/// One core's receive memory. Clones are handles on the same pool.
#[derive(Clone)]
pub struct Pool {
    inner: Rc<Inner>,
}

impl Pool {
    /// Creates a pool and its only [`KernelSide`]. No buffer memory is taken yet.
    pub fn new(config: PoolConfig) -> Result<(Pool, KernelSide), PoolError> {
        if !(64..=16 << 20).contains(&config.buffer_bytes) {
            return Err(PoolError::BufferBytes(config.buffer_bytes));
        }
        if !(1..=BUFFERS_LIMIT).contains(&config.buffers_max) {
            return Err(PoolError::BuffersMax(config.buffers_max));
        }
        let inner = Rc::new(Inner {
            config,
            most: Cell::new(config.buffers_max),
            chunks: RefCell::default(),
            free: RefCell::default(),
            total: Cell::new(0),
            with_kernel: Cell::new(0),
            care: Cell::new(if config.poison { POISON } else { 0 }),
            waker: RefCell::default(),
        });
        Ok((Pool { inner: inner.clone() }, KernelSide { inner }))
    }

    /// Bytes in one buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.inner.config.buffer_bytes
    }

    /// The most buffers this pool may hold.
    pub fn buffers_max(&self) -> usize {
        self.inner.config.buffers_max
    }

    /// The states of the buffers, in constant time.
    #[inline]
    pub fn counts(&self) -> BufferStats {
        let (total, free) = (self.inner.total.get(), self.inner.free.borrow().len());
        let with_kernel = self.inner.with_kernel.get();
        BufferStats { total, free, with_kernel, leased: total - free - with_kernel }
    }

    /// Buffers pinned by a lease.
    #[inline]
    pub fn leased(&self) -> usize {
        self.counts().leased
    }

    /// Buffers taken from the system so far.
    #[inline]
    pub fn total(&self) -> usize {
        self.inner.total.get()
    }

    /// The number of buffers that could be lent now: free ones and those not yet taken from the
    /// system.
    pub fn available(&self) -> usize {
        let counts = self.counts();
        counts.free + self.inner.most.get().saturating_sub(counts.total)
    }

    /// Limits the pool to this many buffers from now on, but not beyond `buffers_max`; one chunk of
    /// 64 always stays. Chunks in which every buffer is free are returned to the system at once, as
    /// many as exceed the limit.
    pub fn bound(&self, buffers: usize) {
        self.inner.most.set(buffers.min(self.inner.config.buffers_max));
        let too_many = self.total().saturating_sub(buffers.max(CHUNK_BUFFERS));
        self.trim(0, too_many.div_ceil(CHUNK_BUFFERS));
    }

    /// Sets the waker that is called when a buffer is freed that a receive waits for: leases may be
    /// dropped outside the shard's turns, while the shard sleeps.
    pub fn wake_when_freed(&self, waker: Waker) {
        *self.inner.waker.borrow_mut() = Some(waker);
    }

    /// Returns chunks in which every buffer is free to the system, except the first `keep` chunks,
    /// and at most `most` of them: each takes the system some 60 µs. Returns how many.
    pub fn trim(&self, keep: usize, most: usize) -> usize {
        let inner = &self.inner;
        let mut chunks = inner.chunks.borrow_mut();
        let mut given_back = 0;
        for (n, slot) in chunks.iter_mut().enumerate().skip(keep) {
            if given_back == most {
                break;
            }
            let all_free = |chunk: &mut Chunk| chunk.headers.iter().all(|header| header.state.get() == 0);
            if let Some(chunk) = slot.take_if(all_free) {
                let first = n * CHUNK_BUFFERS;
                let gone = first..first + chunk.headers.len();
                inner.total.set(inner.total.get() - gone.len());
                inner.free.borrow_mut().retain(|id| !gone.contains(&usize::from(*id)));
                given_back += 1;
            }
        }
        given_back
    }

    /// Recounts every buffer and panics if one is in two states or in none. Linear in the number of
    /// buffers.
    pub fn invariants(&self) {
        let inner = &self.inner;
        let mut free: Vec<u16> = inner.free.borrow().clone();
        free.sort_unstable();
        let freed = free.len();
        free.dedup();
        assert_eq!(free.len(), freed, "a buffer is on the free list twice");
        let (mut in_use, mut with_kernel) = (0, 0);
        for header in inner.chunks.borrow().iter().flatten().flat_map(|chunk| &chunk.headers) {
            let used = header.state.get() != 0;
            assert_eq!(
                used,
                free.binary_search(&header.id).is_err(),
                "buffer {} is free and in use",
                header.id
            );
            in_use += usize::from(used);
            with_kernel += usize::from(header.state.get() == WITH_KERNEL);
        }
        assert_eq!(with_kernel, inner.with_kernel.get(), "buffers with the kernel");
        assert_eq!(in_use + freed, inner.total.get(), "a buffer is lost");
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("config", &self.inner.config).field("counts", &self.counts()).finish()
    }
}

/// The driver's side of a [`Pool`]: lends buffers to a kernel and takes the bytes that arrived.
///
/// There is one for each pool. A driver that passes an [`address`](KernelSide::address) to
/// something that writes there promises that it writes only while the buffer is lent, and that
/// bytes are reported through [`received`](KernelSide::received) only once they are written.
pub struct KernelSide {
    inner: Rc<Inner>,
}

impl KernelSide {
    /// A handle on the pool.
    pub fn pool(&self) -> Pool {
        Pool { inner: self.inner.clone() }
    }

    /// Lends the buffer that was freed last, growing the pool if none is free. `None` at
    /// `buffers_max`, or when the system has no memory.
    #[inline]
    pub fn lend(&mut self) -> Option<u16> {
        let inner = &self.inner;
        let popped = inner.free.borrow_mut().pop();
        let id = match popped {
            Some(id) => id,
            None => inner.grow_and_take()?,
        };
        let (header, _) = inner.buffer(id)?;
        // SAFETY: the header lives in a chunk of this pool, which `buffer` just found.
        unsafe { header.as_ref() }.state.set(WITH_KERNEL);
        inner.with_kernel.set(inner.with_kernel.get() + 1);
        Some(id)
    }

    /// Lends up to `most` buffers that are free, without growing the pool, and calls `each` with
    /// the number and the memory of each: for drivers that fill several at once. Returns how many
    /// there were.
    #[inline]
    pub fn lend_several<'a>(&'a mut self, most: usize, mut each: impl FnMut(u16, &'a mut [u8])) -> usize {
        for count in 0..most {
            if self.inner.free.borrow().is_empty() {
                return count;
            }
            let Some(id) = self.lend() else { return count };
            let (_, data) = self.lent(id);
            let len = self.inner.config.buffer_bytes;
            // SAFETY: the range is the buffer's, initialised (zeroed at allocation) and free until
            // it was lent just now, so that no lease covers any of it. A lent buffer is not lent
            // again, so the slices of this call are disjoint; and as long as one of them lives
            // `self` is borrowed, so that no other slice is made, none of it is reported, and none
            // taken back.
            each(id, unsafe { core::slice::from_raw_parts_mut(data.as_ptr(), len) });
        }
        most
    }

    /// Notes that a receive waits for a buffer, and that the driver is about to sleep: the next
    /// buffer that is freed calls the waker of [`wake_when_freed`](Pool::wake_when_freed), once.
    pub fn wait_for_buffer(&mut self) {
        self.inner.care.set(self.inner.care.get() | WAITED_FOR);
    }

    /// The start of a lent buffer, which is [`Pool::buffer_bytes`] long. It stays valid while the
    /// buffer is lent and the pool, this side of it or a lease lives.
    pub fn address(&self, id: u16) -> *mut u8 {
        self.lent(id).1.as_ptr()
    }

    /// True if the buffer is with the kernel.
    pub fn is_lent(&self, id: u16) -> bool {
        self.find_lent(id).is_some()
    }

    #[inline]
    fn find_lent(&self, id: u16) -> Option<(&Header, NonNull<u8>)> {
        let (header, data) = self.inner.buffer(id)?;
        // SAFETY: the header lives in a chunk of this pool; it goes only in `trim` while the buffer
        // is free, which it is not as long as it is lent, and taking it back needs `&mut self`.
        let header = unsafe { header.as_ref() };
        (header.state.get() == WITH_KERNEL).then_some((header, data))
    }

    #[inline]
    fn lent(&self, id: u16) -> (&Header, NonNull<u8>) {
        match self.find_lent(id) {
            Some(found) => found,
            None => panic!("buffer {id} is not lent"),
        }
    }

    /// Ends the loan of a buffer, to whose start the kernel wrote `len` bytes.
    ///
    /// # Panics
    /// If the buffer is not lent, or `len` exceeds its size: then the memory can no longer be
    /// trusted.
    #[inline]
    pub fn received(&mut self, id: u16, len: usize) -> LeaseMut {
        let (header, data) = self.lent(id);
        assert!(len <= self.inner.config.buffer_bytes, "buffer {id} received more than it holds");
        header.filled.set(len as u32);
        // The first lease on this buffer holds the pool for those cut from it; the last one
        // releases it.
        core::mem::forget(self.inner.clone());
        header.state.set(1);
        self.inner.with_kernel.set(self.inner.with_kernel.get() - 1);
        // A lent buffer has no lease, so this one is the only one.
        LeaseMut::new(Lease::new(NonNull::from(header), data, len))
    }

    /// Ends the loan of a buffer into which the kernel wrote nothing.
    ///
    /// # Panics
    /// If the buffer is not lent.
    pub fn take_back(&mut self, id: u16) {
        let (header, _) = self.lent(id);
        header.state.set(0);
        self.inner.with_kernel.set(self.inner.with_kernel.get() - 1);
        self.inner.free(header);
    }

    /// The memory of a lent buffer, for drivers that write it themselves (epoll, a simulated
    /// kernel).
    #[inline]
    pub fn spare(&mut self, id: u16) -> &mut [u8] {
        let (_, data) = self.lent(id);
        let len = self.inner.config.buffer_bytes;
        // SAFETY: the range is the buffer's and initialised (zeroed at allocation); a lent buffer
        // has no lease; `&mut self` on the pool's only `KernelSide` keeps a second slice away; and
        // a caller that gave the address to a kernel promised to let only that one write.
        unsafe { core::slice::from_raw_parts_mut(data.as_ptr(), len) }
    }
}

impl fmt::Debug for KernelSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KernelSide").field(&self.pool()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn small(buffers_max: usize) -> (Pool, KernelSide) {
        Pool::new(PoolConfig { buffer_bytes: 64, buffers_max, poison: true }).unwrap()
    }

    #[test]
    fn the_buffer_freed_last_is_lent_next() {
        let (pool, mut side) = small(8);
        let (a, b) = (side.lend().unwrap(), side.lend().unwrap());
        side.take_back(a);
        side.take_back(b);
        assert_eq!(side.lend(), Some(b));
        assert_eq!(side.lend(), Some(a));
        pool.invariants();
    }

    #[test]
    fn several_are_lent_at_once_as_far_as_they_are_free() {
        let (pool, mut side) = small(2 * CHUNK_BUFFERS);
        assert_eq!(side.lend_several(4, |_, _| panic!("none is free")), 0, "the pool does not grow for it");
        let first = side.lend().unwrap();
        side.take_back(first);
        let mut lent = Vec::new();
        let count = side.lend_several(3, |id, memory| lent.push((id, memory)));
        for (n, (id, memory)) in lent.iter_mut().enumerate() {
            assert!(*id != first || n == 0, "the one freed last comes first");
            memory.fill(n as u8 + 1);
        }
        assert!(lent.iter().enumerate().all(|(n, (_, memory))| **memory == [n as u8 + 1; 64]), "disjoint");
        let ids: Vec<u16> = lent.iter().map(|(id, _)| *id).collect();
        assert_eq!((count, ids.len(), pool.counts().with_kernel), (3, 3, 3));
        let (filled, part) = (side.received(ids[0], 64), side.received(ids[1], 10));
        assert_eq!((&*filled, &*part), (&[1; 64][..], &[2; 10][..]));
        side.take_back(ids[2]);
        assert_eq!(side.lend_several(CHUNK_BUFFERS, |_, _| ()), CHUNK_BUFFERS - 2);
        assert_eq!(side.lend_several(1, |_, _| ()), 0);
        drop((filled, part));
        pool.invariants();
    }

    #[test]
    fn a_pool_ends_at_its_limit_and_goes_on_when_a_lease_is_dropped() {
        let (pool, mut side) = small(2);
        let a = side.lend().unwrap();
        side.lend().unwrap();
        assert_eq!((side.lend(), pool.available()), (None, 0));
        let lease = side.received(a, 10);
        assert_eq!(pool.counts(), BufferStats { total: 2, free: 0, with_kernel: 1, leased: 1 });
        drop(lease);
        assert_eq!(side.lend(), Some(a));
    }

    #[test]
    fn buffer_is_free_after_the_last_of_its_leases() {
        let (pool, mut side) = small(1);
        let id = side.lend().unwrap();
        side.spare(id)[..11].copy_from_slice(b"firstsecond");
        let mut second = side.received(id, 11);
        let first = second.split_to(5);
        assert_eq!((&*first, &*second), (&b"first"[..], &b"second"[..]));
        drop(first);
        assert_eq!(side.lend(), None);
        drop(second);
        assert_eq!(side.lend(), Some(id));
        assert_eq!(side.spare(id).len(), 64);
        pool.invariants();
    }

    /// Counts its wakes.
    #[derive(Default)]
    struct Wakes(core::sync::atomic::AtomicUsize);

    impl alloc::task::Wake for Wakes {
        fn wake(self: alloc::sync::Arc<Self>) {
            self.0.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
        }
    }

    #[test]
    fn the_next_buffer_that_is_freed_wakes_a_driver_that_waits_once() {
        for poison in [false, true] {
            let config = PoolConfig { buffer_bytes: 64, buffers_max: 3, poison };
            let (pool, mut side) = Pool::new(config).unwrap();
            let wakes = alloc::sync::Arc::new(Wakes::default());
            let count = || wakes.0.load(core::sync::atomic::Ordering::Relaxed);
            let mut leases: Vec<Lease> = (0..3)
                .map(|_| {
                    let id = side.lend().unwrap();
                    side.received(id, 1).freeze()
                })
                .collect();
            side.wait_for_buffer();
            let shared = leases[0].clone();
            leases.remove(0);
            assert_eq!(count(), 0, "a buffer that is still leased is not free");
            // Without a waker there is nothing to wake.
            drop(shared);
            pool.wake_when_freed(Waker::from(wakes.clone()));
            leases.remove(0);
            assert_eq!(count(), 0, "no driver waits");
            side.wait_for_buffer();
            leases.clear();
            assert_eq!((count(), pool.counts().free), (1, 3));
            let id = side.lend().unwrap();
            side.take_back(id);
            assert_eq!(count(), 1, "once");
            pool.invariants();
        }
    }

    #[test]
    #[should_panic(expected = "not lent")]
    fn a_buffer_that_arrives_twice_is_noticed() {
        let (_pool, mut side) = small(1);
        let id = side.lend().unwrap();
        drop(side.received(id, 1));
        drop(side.received(id, 1));
    }

    #[test]
    #[should_panic(expected = "more than it holds")]
    fn a_length_beyond_the_buffer_is_noticed() {
        let (_pool, mut side) = small(1);
        let id = side.lend().unwrap();
        drop(side.received(id, 65));
    }

    #[test]
    fn trimming_gives_back_unused_chunks_only() {
        let (pool, mut side) = small(4 * CHUNK_BUFFERS);
        let lent: Vec<u16> = std::iter::from_fn(|| side.lend()).collect();
        assert_eq!(lent.len(), 4 * CHUNK_BUFFERS);
        let mut kept = None;
        for id in lent {
            if usize::from(id) == 2 * CHUNK_BUFFERS + 3 {
                kept = Some(side.received(id, 4));
            } else {
                side.take_back(id);
            }
        }
        assert_eq!(pool.trim(1, 1), 1, "no more than asked for");
        assert_eq!((pool.trim(1, 9), pool.trim(1, 9)), (1, 0));
        assert_eq!(pool.counts().total, 2 * CHUNK_BUFFERS);
        pool.invariants();
        drop(kept);
        assert_eq!(pool.trim(0, 9), 2);
        assert_eq!(pool.counts(), BufferStats::default());
        assert!(side.lend().is_some(), "a trimmed pool grows again");
        pool.invariants();
    }

    #[test]
    fn sizes_out_of_range_are_refused_with_the_value() {
        let tiny = PoolConfig { buffer_bytes: 63, ..PoolConfig::default() };
        assert_eq!(Pool::new(tiny).unwrap_err(), PoolError::BufferBytes(63));
        let none = PoolConfig { buffers_max: 0, ..PoolConfig::default() };
        assert_eq!(Pool::new(none).unwrap_err().to_string(), "buffers_max is 0; it must be 1 to 32768");
    }
}
