//! CPU times of this process's threads, as the kernel counts them in
//! `/proc/self/task/TID/schedstat`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Longer than the file.
const BYTES: usize = 512;

/// The time that a thread ran, and the time that it could have run and waited for a CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    pub ran: Duration,
    pub waited: Duration,
}

impl ThreadTimes {
    /// The file in which the kernel counts them for a thread of this process. `None` where it does
    /// not.
    pub fn file(thread: u32) -> Option<File> {
        File::open(format!("/proc/self/task/{thread}/schedstat")).ok()
    }

    /// The present values of such a file. `None` if the thread ended.
    pub fn read(schedstat: &File) -> Option<ThreadTimes> {
        // Each few milliseconds while a shard works, so nothing is allocated for it.
        let mut bytes = [0; BYTES];
        let read = schedstat.read_at(&mut bytes, 0).ok()?;
        ThreadTimes::parsed(str::from_utf8(&bytes[..read]).ok()?)
    }

    /// As `schedstat` has them: nanoseconds run, nanoseconds waited, slices.
    fn parsed(text: &str) -> Option<ThreadTimes> {
        let mut nanos = text.split_ascii_whitespace().map(|field| field.parse().map(Duration::from_nanos));
        Some(ThreadTimes { ran: nanos.next()?.ok()?, waited: nanos.next()?.ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_the_first_two_fields() {
        let times = ThreadTimes { ran: Duration::from_nanos(1234), waited: Duration::from_nanos(56) };
        assert_eq!(ThreadTimes::parsed("1234 56 7"), Some(times));
        assert_eq!((ThreadTimes::parsed(""), ThreadTimes::parsed("1 x 2")), (None, None));
    }
}
