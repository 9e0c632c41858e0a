//! The right to read received bytes.

use alloc::vec::Vec;
use core::fmt;
use core::ops::{Deref, Range};
use core::ptr::NonNull;

use crate::buffers::Header;

/// An owned window on bytes that do not change: part of a pool buffer, or of the bytes of its owner
/// on the heap.
///
/// Cloning and cutting copy no byte. A lease on a pool buffer pins the whole buffer until it is
/// dropped, as [`pinned_bytes`](Lease::pinned_bytes) says.
pub struct Lease {
    /// `None` exactly when the lease pins nothing, and then `len` is 0.
    header: Option<NonNull<Header>>,
    /// The first byte; dangling where `header` is `None`.
    data: NonNull<u8>,
    len: u32,
}

impl Lease {
    /// A lease of no bytes, which pins nothing.
    #[inline]
    pub const fn empty() -> Lease {
        Lease { header: None, data: NonNull::dangling(), len: 0 }
    }

    /// Creates a lease that the header has already counted.
    #[inline]
    pub(crate) fn new(header: NonNull<Header>, data: NonNull<u8>, len: usize) -> Lease {
        Lease { header: Some(header), data, len: len as u32 }
    }

    /// The start of its bytes, and their number.
    #[inline]
    pub(crate) fn raw_parts(&self) -> (NonNull<u8>, usize) {
        (self.data, self.len as usize)
    }

    /// Creates a lease on a copy of `bytes` on the heap.
    pub fn copy_of(bytes: &[u8]) -> Lease {
        Lease::from(bytes.to_vec())
    }

    /// Does the same, or returns `None` if the system has no memory for it.
    pub fn try_copy_of(bytes: &[u8]) -> Option<Lease> {
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes.len()).ok()?;
        copy.extend_from_slice(bytes);
        Lease::try_from_vec(copy)
    }

    /// Creates a lease on `bytes`, or returns `None` if the system has no memory for the 64 bytes
    /// that it adds.
    ///
    /// # Panics
    /// If there are 4 GiB or more.
    pub fn try_from_vec(bytes: Vec<u8>) -> Option<Lease> {
        let pinned = bytes.capacity();
        Lease::of_owner(bytes, pinned)
    }

    /// Creates a lease on the bytes of `owner`, which are not copied. The owner is dropped with the
    /// last lease on them. `None` if the system has no memory for the 40 bytes that this adds to an
    /// owner, which is dropped then.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use ringserve_buf::Lease;
    ///
    /// let page: Arc<[u8]> = Arc::from(&b"shared by many"[..]);
    /// let lease = Lease::try_from_owner(page.clone()).unwrap();
    /// assert_eq!(lease.as_ptr(), page.as_ptr());
    /// ```
    ///
    /// # Panics
    /// If there are 4 GiB or more.
    pub fn try_from_owner<T: AsRef<[u8]> + 'static>(owner: T) -> Option<Lease> {
        let pinned = owner.as_ref().len();
        Lease::of_owner(owner, pinned)
    }

    pub(crate) fn of_owner<T: AsRef<[u8]> + 'static>(owner: T, pinned: usize) -> Option<Lease> {
        if owner.as_ref().is_empty() {
            return Some(Lease::empty());
        }
        let (header, data, len) = Header::of_owner(owner, pinned)?;
        let lease = Lease::new(header, data, len.min(u32::MAX as usize));
        assert!(lease.len() == len, "a lease is smaller than 4 GiB");
        Some(lease)
    }

    /// Bytes of memory this lease keeps from being used otherwise: the size of its buffer or heap
    /// block, shared with the other leases on it.
    #[inline]
    pub fn pinned_bytes(&self) -> usize {
        // SAFETY: this lease lives.
        self.header.map_or(0, |header| unsafe { Header::pinned_bytes(header) })
    }

    /// True if this lease pins a pool buffer.
    #[inline]
    pub fn is_pooled(&self) -> bool {
        // SAFETY: this lease keeps the header alive.
        self.header.is_some_and(|header| unsafe { header.as_ref() }.is_pooled())
    }

    /// A second lease on part of the bytes.
    ///
    /// # Panics
    /// If the range lies outside.
    #[inline]
    pub fn slice(&self, range: Range<usize>) -> Lease {
        let mut part = self.clone();
        part.truncate(range.end);
        part.advance(range.start);
        part
    }

    /// Takes the first `count` bytes off, as a lease on them.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn split_to(&mut self, count: usize) -> Lease {
        assert!(count <= self.len(), "lease of {} bytes split at {count}", self.len());
        if count == self.len() {
            return core::mem::take(self);
        }
        if let Some(header) = self.header {
            // SAFETY: this lease keeps the header alive.
            unsafe { header.as_ref() }.cloned();
        }
        // Made in one step: a clone that is then cut is copied with the gap after its length.
        let front = Lease { header: self.header, data: self.data, len: count as u32 };
        // SAFETY: count is below len, so the result is inside the same block.
        self.data = unsafe { self.data.add(count) };
        self.len -= count as u32;
        front
    }

    /// Drops the first `count` bytes from view.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn advance(&mut self, count: usize) {
        assert!(count <= self.len(), "lease of {} bytes advanced by {count}", self.len());
        // SAFETY: count is at most len, so the result is inside or one past the end of the same
        // block.
        self.data = unsafe { self.data.add(count) };
        self.len -= count as u32;
    }

    /// Drops all but the first `len` bytes from view.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        assert!(len <= self.len(), "lease of {} bytes truncated to {len}", self.len());
        self.len = len as u32;
    }
}

impl From<Vec<u8>> for Lease {
    /// # Panics
    /// If there are 4 GiB or more, or the system has no memory for the 64 bytes that a lease on the
    /// heap adds.
    fn from(bytes: Vec<u8>) -> Lease {
        Lease::try_from_vec(bytes).expect("memory for a lease")
    }
}

impl Default for Lease {
    fn default() -> Lease {
        Lease::empty()
    }
}

impl Clone for Lease {
    #[inline]
    fn clone(&self) -> Lease {
        if let Some(header) = self.header {
            // SAFETY: this lease keeps the header alive.
            unsafe { header.as_ref() }.cloned();
        }
        Lease { header: self.header, data: self.data, len: self.len }
    }
}

impl Drop for Lease {
    #[inline]
    fn drop(&mut self) {
        if let Some(header) = self.header {
            // SAFETY: this lease is given up, here and once.
            unsafe { Header::dropped(header) };
        }
    }
}

impl Deref for Lease {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `data` and `len` lie within the block of the header (checked by advance and
        // truncate), or len is 0 and data dangles, which is allowed. The block is initialised and
        // stays while a lease lives. It is not written: the kernel side writes only while the
        // buffer is the kernel's, and no lease is left then; and no `LeaseMut` has any of these
        // bytes (invariants of `Header`).
        unsafe { core::slice::from_raw_parts(self.data.as_ptr(), self.len as usize) }
    }
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({} bytes", self.len)?;
        f.write_str(if self.is_pooled() { " of a buffer)" } else { ")" })
    }
}

#[cfg(test)]
mod tests {
    use alloc::rc::Rc;
    use core::cell::Cell;

    use super::*;
    use crate::{Pool, PoolConfig};

    #[test]
    fn a_lease_is_cut_without_copying_and_outlives_its_pool_handle() {
        let config = PoolConfig { buffer_bytes: 64, buffers_max: 1, poison: true };
        let (pool, mut side) = Pool::new(config).unwrap();
        let id = side.lend().unwrap();
        side.spare(id)[..11].copy_from_slice(b"hello world");
        let whole = side.received(id, 11).freeze();
        let world = whole.slice(6..11);
        assert_eq!(world.as_ptr(), whole[6..].as_ptr());
        assert_eq!((world.pinned_bytes(), world.is_pooled()), (64, true));
        drop((whole, pool, side));
        assert_eq!(&*world, b"world");
    }

    #[test]
    fn freed_buffer_is_poisoned_and_a_new_one_is_zeroed() {
        let config = PoolConfig { buffer_bytes: 64, buffers_max: 1, poison: true };
        let (_pool, mut side) = Pool::new(config).unwrap();
        let id = side.lend().unwrap();
        assert!(side.spare(id).iter().all(|byte| *byte == 0));
        drop(side.received(id, 3));
        assert_eq!(side.lend(), Some(id));
        assert_eq!(&side.spare(id)[..4], &[0xDD, 0xDD, 0xDD, 0]);
    }

    #[test]
    fn heap_and_empty_leases_behave_alike() {
        let mut heap = Lease::copy_of(b"abcdef");
        heap.advance(2);
        let part = heap.slice(1..3);
        drop(heap);
        assert_eq!((&*part, part.is_pooled()), (&b"de"[..], false));
        assert_eq!((Lease::from(Vec::new()).len(), Lease::empty().pinned_bytes()), (0, 0));
    }

    /// Owns its bytes inline, so that they move with it, and counts its drops.
    struct Inline([u8; 9], Rc<Cell<u32>>);

    impl AsRef<[u8]> for Inline {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl Drop for Inline {
        fn drop(&mut self) {
            self.1.set(self.1.get() + 1);
        }
    }

    #[test]
    fn owner_of_any_type_is_dropped_once_with_its_last_lease() {
        let dropped = Rc::new(Cell::new(0));
        let mut whole = Lease::try_from_owner(Inline(*b"some text", dropped.clone())).unwrap();
        let some = whole.split_to(4);
        assert_eq!((whole.pinned_bytes(), some.pinned_bytes(), whole.is_pooled()), (9, 9, false));
        drop(whole);
        assert_eq!((&*some, dropped.get()), (&b"some"[..], 0));
        drop(some);
        assert_eq!(dropped.get(), 1);
    }

    #[test]
    fn pool_lives_as_long_as_any_lease_in_any_order() {
        let (pool, mut side) =
            Pool::new(PoolConfig { buffer_bytes: 64, buffers_max: 2, poison: true }).unwrap();
        let (a, b) = (side.lend().unwrap(), side.lend().unwrap());
        let (first, mut second) = (side.received(a, 3), side.received(b, 6));
        let third = second.split_to(3);
        drop(second);
        drop(first);
        assert_eq!(pool.counts().leased, 1);
        pool.invariants();
        drop((pool, side));
        assert_eq!(&*third, &[0; 3]);
    }

    #[test]
    fn a_split_leaves_the_rest_and_takes_all_without_a_second_lease() {
        let mut lease = Lease::copy_of(b"abcdef");
        let front = lease.split_to(2);
        assert_eq!((&*front, &*lease), (&b"ab"[..], &b"cdef"[..]));
        let all = lease.split_to(4);
        assert_eq!((&*all, lease.pinned_bytes()), (&b"cdef"[..], 0));
    }

    #[test]
    #[should_panic(expected = "advanced by 4")]
    fn a_cut_outside_of_a_lease_panics() {
        Lease::copy_of(b"abc").advance(4);
    }

    #[test]
    fn a_lease_is_three_words() {
        assert_eq!(size_of::<Lease>(), 3 * size_of::<usize>());
    }
}
