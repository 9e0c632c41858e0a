//! What is counted of single connections, for services that ask for it.

use core::cell::RefCell;
use core::time::Duration;

use crate::Time;
use crate::chunked::Chunked;

/// What was counted of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Account {
    /// From being accepted to the end.
    pub duration: Duration,
    /// Bytes that were received of it.
    pub bytes_received: u64,
    /// Bytes that the kernel took for it.
    pub bytes_sent: u64,
    /// Frames that were handed to the service.
    pub frames_received: u64,
    /// Frames that were queued: replies and pushes. What was written as it is counts in `bytes_sent` alone.
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
    /// A new account. False if the system has no memory for it.
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

    /// What was counted until `now`.
    pub(crate) fn at(&self, slot: u32, now: Time) -> Option<Account> {
        let entries = self.entries.borrow();
        let entry = entries.get(slot)?;
        Some(Account { duration: now - entry.opened, ..entry.account })
    }
}
