//! The right to write received bytes.

use alloc::vec::Vec;
use core::fmt;
use core::ops::{Deref, DerefMut};

use crate::buffers::Header;
use crate::lease::Lease;

/// An owned window on bytes that no other lease covers, so that they may be changed in place:
/// decrypted, unmasked.
///
/// Cutting copies no byte. It pins the same memory as a [`Lease`], and
/// [`freeze`](LeaseMut::freeze), which costs nothing, makes it one. It cannot be cloned.
///
/// ```
/// use ringserve_buf::LeaseMut;
///
/// let mut bytes = LeaseMut::try_copy_of(b"uryyb").unwrap();
/// bytes.iter_mut().for_each(|byte| *byte = b'a' + (*byte - b'a' + 13) % 26);
/// assert_eq!(&*bytes.freeze(), b"hello");
/// ```
#[derive(Default)]
pub struct LeaseMut {
    /// Its range is in no other lease.
    lease: Lease,
}

impl LeaseMut {
    /// A lease of no bytes, which pins nothing.
    #[inline]
    pub const fn empty() -> LeaseMut {
        LeaseMut { lease: Lease::empty() }
    }

    /// Creates a lease from one whose range is in no other lease, and whose pointer may be written
    /// through.
    #[inline]
    pub(crate) fn new(lease: Lease) -> LeaseMut {
        LeaseMut { lease }
    }

    /// Creates a lease on `bytes`, or returns `None` if the system has no memory for the 64 bytes
    /// that it adds.
    ///
    /// # Panics
    /// If there are 4 GiB or more.
    pub fn try_from_vec(bytes: Vec<u8>) -> Option<LeaseMut> {
        if bytes.is_empty() {
            return Some(LeaseMut::empty());
        }
        let (header, data, len) = Header::of_vec(bytes)?;
        let lease = Lease::new(header, data, len.min(u32::MAX as usize));
        assert!(lease.len() == len, "a lease is smaller than 4 GiB");
        Some(LeaseMut::new(lease))
    }

    /// Creates a lease on a copy of `bytes` on the heap, or returns `None` if the system has no
    /// memory for it.
    pub fn try_copy_of(bytes: &[u8]) -> Option<LeaseMut> {
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes.len()).ok()?;
        copy.extend_from_slice(bytes);
        LeaseMut::try_from_vec(copy)
    }

    /// Makes it a lease on the same bytes, which no longer change.
    #[inline]
    pub fn freeze(self) -> Lease {
        self.lease
    }

    /// Bytes of memory this lease keeps from being used otherwise: the size of its buffer or heap
    /// block, shared with the other leases on it.
    #[inline]
    pub fn pinned_bytes(&self) -> usize {
        self.lease.pinned_bytes()
    }

    /// True if this lease pins a pool buffer.
    #[inline]
    pub fn is_pooled(&self) -> bool {
        self.lease.is_pooled()
    }

    /// Takes the first `count` bytes off, as a lease on them.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn split_to(&mut self, count: usize) -> LeaseMut {
        // The front ends where the rest begins.
        LeaseMut { lease: self.lease.split_to(count) }
    }

    /// Drops the first `count` bytes from view.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn advance(&mut self, count: usize) {
        self.lease.advance(count);
    }

    /// Drops all but the first `len` bytes from view.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.lease.truncate(len);
    }
}

impl Deref for LeaseMut {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.lease
    }
}

impl DerefMut for LeaseMut {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let (data, len) = self.lease.raw_parts();
        // SAFETY: the range lies within the block of the header, which is initialised and stays
        // while the lease lives, or len is 0 and data dangles. No other lease has a byte of it, and
        // the kernel side writes only while the buffer is the kernel's, when no lease is left
        // (invariants of `Header`), so `&mut self` is the only way to it. Both ways in,
        // `KernelSide::received` and `Header::of_vec`, made the pointer from one that may be
        // written through: that of the chunk's allocation, and a mutable borrow.
        unsafe { core::slice::from_raw_parts_mut(data.as_ptr(), len) }
    }
}

impl AsRef<[u8]> for LeaseMut {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<LeaseMut> for Lease {
    #[inline]
    fn from(lease: LeaseMut) -> Lease {
        lease.freeze()
    }
}

impl fmt::Debug for LeaseMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseMut({} bytes", self.len())?;
        f.write_str(if self.is_pooled() { " of a buffer)" } else { ")" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pool, PoolConfig};

    #[test]
    fn parts_of_a_buffer_are_written_beside_each_other() {
        let config = PoolConfig { buffer_bytes: 64, buffers_max: 1, poison: true };
        let (pool, mut side) = Pool::new(config).unwrap();
        let id = side.lend().unwrap();
        let bytes = b"hello world frozen later";
        side.spare(id)[..bytes.len()].copy_from_slice(bytes);
        let mut later = side.received(id, bytes.len());
        let mut front = later.split_to(5);
        later.advance(1);
        let mut rest = later.split_to(5);
        later.advance(1);
        let frozen = later.split_to(6).freeze();
        later.advance(1);
        let shown = &*frozen;
        front.make_ascii_uppercase();
        later[0] = b'L';
        rest.reverse();
        assert_eq!(
            (&*front, &*rest, shown, &*later),
            (&b"HELLO"[..], &b"dlrow"[..], &b"frozen"[..], &b"Later"[..])
        );
        assert_eq!((front.pinned_bytes(), front.is_pooled()), (64, true));
        drop((rest, later, side));
        let front = front.freeze();
        let second = front.clone();
        assert_eq!((&front[1..], pool.counts().leased), (&b"ELLO"[..], 1));
        drop((front, pool, frozen));
        assert_eq!(&*second, b"HELLO");
    }

    #[test]
    fn heap_bytes_are_written_cut_and_frozen() {
        let mut bytes = Vec::with_capacity(100);
        bytes.extend_from_slice(b"abcdef");
        let mut rest = LeaseMut::try_from_vec(bytes).unwrap();
        let mut front = rest.split_to(2);
        (front[0], rest[3]) = (b'A', b'F');
        rest.truncate(4);
        let frozen = rest.freeze();
        front[1] = b'B';
        assert_eq!((&*front, &*frozen, front.is_pooled()), (&b"AB"[..], &b"cdeF"[..], false));
        assert_eq!(front.pinned_bytes(), 100);
        drop(frozen);
        front.fill(0);
        let all = front.split_to(2);
        assert_eq!((&*all, front.len(), front.pinned_bytes()), (&[0, 0][..], 0, 0));
        assert!(LeaseMut::try_copy_of(b"").is_some_and(|none| none.pinned_bytes() == 0));
    }

    #[test]
    fn an_empty_lease_is_written_as_no_bytes() {
        let mut none = LeaseMut::empty();
        none.fill(1);
        assert_eq!((none.len(), none.freeze().len()), (0, 0));
    }

    #[test]
    fn a_lease_that_may_be_written_is_as_large_as_one_that_may_not() {
        assert_eq!(size_of::<LeaseMut>(), size_of::<Lease>());
    }
}
