//! The activity of a thread, by the files that the kernel shows of it: without a signal, without
//! privilege, and while it is blocked.
//!
//! | file of `/proc/self/task/TID` | tells |
//! |---|---|
//! | `schedstat` | how long it ran, and how long it could have run and had no CPU |
//! | `stat` | whether it runs or sleeps |
//! | `syscall` | the number of the system call in which it sleeps |
//! | `wchan` | the function of the kernel in which it sleeps |

use std::fs::File;
use std::os::unix::fs::FileExt;

use ringserve_base::thread_times::ThreadTimes;

use crate::stats::StallCause;

/// Longer than any of these files, but for `stat` with a long name: of that the beginning is
/// enough.
const BYTES: usize = 512;

/// The activity of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ThreadFacts {
    /// The times for which it ran, and could have run without a CPU, since it started.
    pub(crate) times: ThreadTimes,
    /// `None` if it runs, or could.
    pub(crate) sleeps: Option<Sleeps>,
}

/// The call and the function in which a thread sleeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sleeps {
    pub(crate) cause: StallCause,
    /// The function of the kernel.
    pub(crate) place: Option<KernelFunction>,
    /// It waits for events of descriptors, as a runtime does that has nothing to do.
    pub(crate) polls: bool,
}

/// The name of a function of the kernel, or its beginning. Threads are looked at each few
/// milliseconds, so it takes no allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelFunction {
    bytes: [u8; 47],
    len: u8,
}

impl KernelFunction {
    pub(crate) fn new(name: &str) -> KernelFunction {
        let mut place = KernelFunction { bytes: [0; 47], len: name.len().min(47) as u8 };
        place.bytes[..usize::from(place.len)].copy_from_slice(&name.as_bytes()[..usize::from(place.len)]);
        place
    }

    /// The kernel's names are in ASCII.
    pub(crate) fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

/// The files of a thread, opened once: so a process that has no descriptor left is reported, too.
pub(crate) struct ThreadFiles {
    schedstat: Option<File>,
    stat: Option<File>,
    syscall: Option<File>,
    wchan: Option<File>,
}

impl ThreadFiles {
    /// Those of a thread of this process. What the kernel does not show is left out.
    pub(crate) fn open(thread: u32) -> ThreadFiles {
        let open = |name| file_of(thread, name);
        ThreadFiles {
            schedstat: ThreadTimes::file(thread),
            stat: open("stat"),
            syscall: open("syscall"),
            wchan: open("wchan"),
        }
    }

    /// `None` if the thread ended, or the kernel does not count (`CONFIG_SCHED_INFO`).
    pub(crate) fn times(&self) -> Option<ThreadTimes> {
        ThreadTimes::read(self.schedstat.as_ref()?)
    }

    /// `None` if the thread ended, or the kernel does not show whether it runs.
    pub(crate) fn facts(&self) -> Option<ThreadFacts> {
        let mut bytes = [0; BYTES];
        let runs = runs(text_of(self.stat.as_ref(), &mut bytes)?)?;
        let sleeps = (!runs).then(|| {
            let (mut call, mut place) = ([0; BYTES], [0; BYTES]);
            let call = text_of(self.syscall.as_ref(), &mut call).and_then(call_of);
            let place = text_of(self.wchan.as_ref(), &mut place).filter(|place| *place != "0");
            let cause = cause_of(call, place.unwrap_or_default());
            let polls = cause == StallCause::Read && call.is_none_or(|call| !READS.contains(&call));
            Sleeps { cause, place: place.map(KernelFunction::new), polls }
        });
        Some(ThreadFacts { times: self.times().unwrap_or_default(), sleeps })
    }
}

fn file_of(thread: u32, name: &str) -> Option<File> {
    File::open(format!("/proc/self/task/{thread}/{name}")).ok()
}

/// The text of a file from its beginning, which the kernel makes at each read.
fn text_of<'a>(file: Option<&File>, bytes: &'a mut [u8; BYTES]) -> Option<&'a str> {
    let read = file?.read_at(bytes, 0).ok()?;
    // The kernel cuts the name of a thread within a letter.
    bytes[..read].iter_mut().filter(|byte| !byte.is_ascii()).for_each(|byte| *byte = b'?');
    str::from_utf8(&bytes[..read]).ok().map(str::trim_end)
}

/// True if `stat` says that the thread runs, or could. Its name, in parentheses, may have any
/// characters.
fn runs(stat: &str) -> Option<bool> {
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(rest.starts_with('R'))
}

/// The number of the system call that `syscall` names. `None` where the thread is in none, as in a
/// page fault.
fn call_of(text: &str) -> Option<i64> {
    let number = text.split_ascii_whitespace().next()?.parse().ok()?;
    (number >= 0).then_some(number)
}

/// The cause for which a thread sleeps in this system call, at this place. The numbers stay the
/// same, and places are renamed now and then; but a call that goes on after a stop of the process
/// is `restart_syscall`, and then the place decides.
fn cause_of(call: Option<i64>, place: &str) -> StallCause {
    let is = |calls: &[i64]| call.is_some_and(|call| calls.contains(&call));
    let at = |places: &[&str]| places.iter().any(|part| place.contains(part));
    if is(&[libc::SYS_futex]) || at(&["futex"]) {
        StallCause::Lock
    } else if is(&[libc::SYS_nanosleep, libc::SYS_clock_nanosleep]) || at(&["nanosleep"]) {
        StallCause::Sleep
    } else if is(READS)
        || is(POLLS)
        || (call.is_none() && at(&["read", "folio_wait", "io_schedule", "page"]))
        || at(&["poll", "select"])
    {
        StallCause::Read
    } else {
        StallCause::Other
    }
}

const READS: &[i64] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_accept,
    libc::SYS_accept4,
];

#[cfg(not(target_arch = "x86_64"))]
const POLLS: &[i64] = &[libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_pwait];
#[cfg(target_arch = "x86_64")]
const POLLS: &[i64] = &[
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_pwait,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
];

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::mpsc::channel;
    use std::sync::{Condvar, Mutex};
    use std::thread;
    use std::time::Duration;

    use rustix::thread::gettid;

    use super::*;

    #[test]
    fn calls_and_places_tell_the_cause() {
        use StallCause::{Lock, Other, Read, Sleep};
        for (call, place, cause) in [
            (Some(libc::SYS_futex), "futex_do_wait", Lock),
            (Some(libc::SYS_futex), "", Lock),
            (Some(libc::SYS_restart_syscall), "futex_wait_queue", Lock),
            (Some(libc::SYS_clock_nanosleep), "hrtimer_nanosleep", Sleep),
            (Some(libc::SYS_restart_syscall), "hrtimer_nanosleep", Sleep),
            (Some(libc::SYS_read), "anon_pipe_read", Read),
            (Some(libc::SYS_recvfrom), "wait_woken", Read),
            (Some(libc::SYS_restart_syscall), "do_poll.constprop.0", Read),
            (None, "folio_wait_bit_common", Read),
            (Some(libc::SYS_fsync), "folio_wait_bit_common", Other),
            (Some(libc::SYS_write), "anon_pipe_write", Other),
            (None, "", Other),
        ] {
            assert_eq!(cause_of(call, place), cause, "{call:?} in {place}");
        }
    }

    #[test]
    fn files_are_read_whatever_the_name_of_the_thread() {
        assert_eq!(runs("17 (a) S (b) R 1 2 3"), Some(true));
        assert_eq!(runs("17 (ringserve-0) D 1 2 3"), Some(false));
        assert_eq!(runs("17"), None);
        assert_eq!(call_of("202 0x7f00 0x80 0x0"), Some(202));
        assert_eq!((call_of("running"), call_of("-1 0x7ffe 0x55"), call_of("")), (None, None, None));
    }

    /// Facts of a thread that blocks, once it does.
    fn facts_of(blocks: impl FnOnce() + Send + 'static) -> Sleeps {
        let (tell, hear) = channel();
        thread::spawn(move || {
            tell.send(gettid().as_raw_nonzero().get().unsigned_abs()).unwrap();
            blocks();
        });
        let files = ThreadFiles::open(hear.recv().unwrap());
        let mut seen = Vec::new();
        for _ in 0..20_000 {
            // It may sleep for a page of memory first.
            match files.facts().and_then(|facts| facts.sleeps) {
                Some(sleeps) if sleeps.cause != StallCause::Other => return sleeps,
                other => seen.push(other),
            }
            thread::yield_now();
        }
        panic!("the thread does not sleep: {:?}", seen.last());
    }

    #[test]
    fn threads_that_sleep_lock_and_read_are_told_apart() {
        #[expect(clippy::disallowed_methods, reason = "it is what is looked at")]
        let sleeps = facts_of(|| thread::sleep(Duration::from_secs(20)));
        assert_eq!(sleeps.cause, StallCause::Sleep, "{sleeps:?}");
        let locks = facts_of(|| {
            let (lock, never) = (Mutex::new(()), Condvar::new());
            let _ended = never.wait(lock.lock().unwrap());
        });
        assert_eq!(locks.cause, StallCause::Lock, "{locks:?}");
        let (mut reader, _writer) = std::io::pipe().unwrap();
        let reads = facts_of(move || _ = reader.read(&mut [0]));
        assert_eq!(reads.cause, StallCause::Read, "{reads:?}");
        assert!(reads.place.is_none_or(|place| place.as_str().contains("pipe")));
    }

    #[test]
    fn thread_that_is_not_there_has_no_facts() {
        let files = ThreadFiles::open(u32::MAX);
        assert_eq!((files.facts(), files.times()), (None, None));
    }
}
