//! Alarms that wake a shard's thread: by an eventfd in real time, by a flag in virtual time.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{self, Wake};

use ringserve_drivers::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// An alarm that others raise, and the shard takes. Clones are the same alarm.
#[derive(Clone)]
pub(crate) enum Alarm {
    Thread(Waker),
    Stepped(Arc<Flag>),
}

/// The counterpart of an eventfd, and a flag that keeps further wakes from writing to it.
#[derive(Default)]
pub(crate) struct Flag {
    raised: AtomicBool,
    /// True from a wake until the shard saw it.
    pending: AtomicBool,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            self.raised.store(true, Ordering::Release);
        }
    }
}

impl Alarm {
    pub(crate) fn new(stepped: bool) -> io::Result<Alarm> {
        Ok(if stepped { Alarm::Stepped(Arc::default()) } else { Alarm::Thread(Waker::new()?) })
    }

    pub(crate) fn raise(&self) {
        match self {
            Alarm::Thread(waker) => waker.wake(),
            Alarm::Stepped(flag) => flag.wake_by_ref(),
        }
    }

    pub(crate) fn is_raised(&self) -> bool {
        match self {
            Alarm::Thread(waker) => {
                let now = Timespec { tv_sec: 0, tv_nsec: 0 };
                poll(&mut [PollFd::new(waker, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
            }
            Alarm::Stepped(flag) => flag.raised.load(Ordering::Acquire),
        }
    }

    /// Lowers it. It stays lowered until it was [`seen`](Alarm::seen) and is raised afterwards.
    pub(crate) fn take(&self) {
        match self {
            Alarm::Thread(waker) => drop(rustix::io::read(waker, &mut [0u8; 8])),
            Alarm::Stepped(flag) => flag.raised.store(false, Ordering::Release),
        }
    }

    pub(crate) fn seen(&self) {
        match self {
            Alarm::Thread(waker) => waker.seen(),
            Alarm::Stepped(flag) => drop(flag.pending.swap(false, Ordering::AcqRel)),
        }
    }

    pub(crate) fn to_task(&self) -> task::Waker {
        match self {
            Alarm::Thread(waker) => waker.to_task(),
            Alarm::Stepped(flag) => task::Waker::from(flag.clone()),
        }
    }
}

/// Sleeps until one of them is raised, at most for this time.
pub(crate) fn wait(alarms: &[&Alarm], timeout: Option<&Timespec>) {
    let wakers = alarms.iter().filter_map(|alarm| match alarm {
        Alarm::Thread(waker) => Some(PollFd::new(waker, PollFlags::IN)),
        Alarm::Stepped(_) => None,
    });
    // Interrupted or not: the shard checks.
    let _ = poll(&mut wakers.collect::<Vec<_>>(), timeout);
}
