//! Counts of single connections, for services that ask for them.

use core::cell::RefCell;
use core::time::Duration;

use crate::Time;
use crate::tables::Chunked;

/// The counts of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Account {
    /// Time from the accept to the end.
    pub duration: Duration,
    /// Bytes received.
    pub bytes_received: u64,
    /// Bytes that the kernel accepted.
    pub bytes_sent: u64,
    /// Frames that were handed to the service.
    pub frames_received: u64,
    /// Frames that were queued: replies and pushes. Bytes written without a frame count only in
    /// `bytes_sent`.
    pub frames_sent: u64,
}

#[derive(Debug, Default)]
struct Entry {
    opened: Time,
    account: Account,
}

/// The accounts of a lane, by slot. Holds no memory until there is one.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    entries: RefCell<Chunked<Entry>>,
}

impl Accounts {
    /// Opens an account. False if the system has no memory for it.
    pub(crate) fn open(&self, slot: u32, now: Time) -> bool {
        let mut entries = self.entries.borrow_mut();
        let Some(entry) = entries.entry(slot) else { return false };
        *entry = Entry { opened: now, account: Account::default() };
        true
    }

    pub(crate) fn change(&self, slot: u32, change: impl FnOnce(&mut Account)) {
        if let Some(entry) = self.entries.borrow_mut().get_mut(slot) {
            change(&mut entry.account);
        }
    }

    /// The counts until `now`.
    pub(crate) fn at(&self, slot: u32, now: Time) -> Option<Account> {
        let entries = self.entries.borrow();
        let entry = entries.get(slot)?;
        Some(Account { duration: now - entry.opened, ..entry.account })
    }
}
