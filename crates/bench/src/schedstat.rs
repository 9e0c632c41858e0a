//! CPU time of a process, to the nanosecond, from `/proc/PID/task/*/schedstat`.

use std::ffi::OsString;
use std::{fs, io};

/// The scheduler's counts for the threads of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedstat {
    /// Nanoseconds on a CPU, in user code and in the kernel.
    pub(crate) cpu_ns: u64,
    /// Times that a thread was put on a CPU.
    pub(crate) runs: u64,
}

impl Schedstat {
    /// The sum over the current threads of `pid`. The time of threads that have ended is not in it,
    /// so differences are right only while no thread ends.
    pub(crate) fn of_process(pid: u32) -> io::Result<Self> {
        Self::of_threads(pid, |_| true)
    }

    /// The sum over those threads whose name `counts`: the first 15 bytes of the name that the
    /// program gave them.
    pub(crate) fn of_threads(pid: u32, counts: impl Fn(&str) -> bool) -> io::Result<Self> {
        let mut sum = Self::default();
        for (_, name, thread) in Self::of_each_thread(pid)? {
            if counts(&name) {
                sum.cpu_ns += thread.cpu_ns;
                sum.runs += thread.runs;
            }
        }
        Ok(sum)
    }

    /// The counts of each current thread of `pid`, with its number and its name.
    pub(crate) fn of_each_thread(pid: u32) -> io::Result<Vec<(OsString, String, Self)>> {
        let mut threads = Vec::new();
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?;
            let (number, task) = (task.file_name(), task.path());
            // `None` if the thread ended since the directory was read.
            let read = |file| match fs::read_to_string(task.join(file)) {
                Ok(text) => Ok(Some(text)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            };
            let (Some(name), Some(text)) = (read("comm")?, read("schedstat")?) else { continue };
            let thread = Self::parse(&text).ok_or_else(|| {
                io::Error::other(format!(
                    "{} reads {text:?}, not three numbers; is CONFIG_SCHED_INFO on?",
                    task.join("schedstat").display()
                ))
            })?;
            threads.push((number, name.trim_end().to_owned(), thread));
        }
        Ok(threads)
    }

    /// The counts since `earlier`.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            cpu_ns: self.cpu_ns.saturating_sub(earlier.cpu_ns),
            runs: self.runs.saturating_sub(earlier.runs),
        }
    }

    /// Reads one thread's line: ns on a CPU, ns waiting for one, times put on one.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_ascii_whitespace().map(str::parse);
        let cpu_ns = numbers.next()?.ok()?;
        let _waiting_ns: u64 = numbers.next()?.ok()?;
        let runs = numbers.next()?.ok()?;
        numbers.next().is_none().then_some(Self { cpu_ns, runs })
    }
}

#[cfg(test)]
mod tests {
    use super::Schedstat;

    #[test]
    fn a_line_has_cpu_time_first_and_runs_last() {
        let expected = Some(Schedstat { cpu_ns: 1_234_567, runs: 42 });
        assert_eq!(Schedstat::parse("1234567 89 42\n"), expected);
    }

    #[test]
    fn anything_but_three_numbers_is_refused() {
        for text in ["", "1 2", "1 2 3 4", "1 x 3", "-1 2 3"] {
            assert_eq!(Schedstat::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_thread_that_works_spends_cpu_time() {
        // This thread alone: other tests' threads end meanwhile, and their time with them.
        let own = || {
            let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
            Schedstat::parse(&text).unwrap()
        };
        let (before, start) = (own(), std::time::Instant::now());
        // Counted at the scheduler's ticks, at most 10 ms apart, for a thread that stays on its
        // CPU.
        while own().since(before).cpu_ns == 0 {
            assert!(start.elapsed().as_secs() < 10, "no CPU time after 10 s of work");
        }
    }
}
