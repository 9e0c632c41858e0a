//! Descriptors the ring accepted that are not connections yet.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

/// A set of open descriptors that belong to the owner of the set. One bit for each number, since
/// numbers are small and dense.
pub(super) struct DescriptorSet {
    words: Vec<u64>,
}

impl DescriptorSet {
    pub(super) fn new() -> DescriptorSet {
        DescriptorSet { words: Vec::new() }
    }

    /// Inserts an open descriptor that no other code will close.
    pub(super) fn insert(&mut self, fd: i32) {
        let Ok(number) = usize::try_from(fd) else { return };
        if self.words.len() <= number / 64 {
            self.words.resize(number / 64 + 1, 0);
        }
        self.words[number / 64] |= 1 << (number % 64);
    }

    fn has(&self, fd: i32) -> bool {
        let Ok(number) = usize::try_from(fd) else { return false };
        self.words.get(number / 64).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    /// Removes a descriptor, which passes to the caller; false if it was not in the set.
    pub(super) fn remove(&mut self, fd: i32) -> bool {
        let had = self.has(fd);
        if had {
            self.words[fd as usize / 64] &= !(1 << (fd % 64));
        }
        had
    }

    /// Does [`remove`](Owned::remove), and returns the descriptor as an owner that closes it.
    pub(super) fn take(&mut self, fd: i32) -> Option<OwnedFd> {
        // SAFETY: members of the set are open and belong to its holder alone (invariant); it is no
        // longer a member.
        self.remove(fd).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Calls `look` with the descriptor, if it is in the set.
    pub(super) fn borrow<T>(&self, fd: i32, look: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        if !self.has(fd) {
            return None;
        }
        // SAFETY: members of the set are open (invariant), and stay so while the set is borrowed.
        Some(look(unsafe { BorrowedFd::borrow_raw(fd) }))
    }

    /// Closes every descriptor of the set.
    pub(super) fn close_all(&mut self) {
        for (index, word) in std::mem::take(&mut self.words).into_iter().enumerate() {
            for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                // SAFETY: it was a member of the set, so it is open and this side's alone; the set
                // is empty now.
                drop(unsafe { OwnedFd::from_raw_fd((index * 64 + bit) as i32) });
            }
        }
    }
}

impl Drop for DescriptorSet {
    fn drop(&mut self) {
        self.close_all();
    }
}
