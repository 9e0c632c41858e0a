//! Resources used by a process: CPU time, context switches, system calls.

use std::process::{Command, Stdio};
use std::time::Duration;
use std::{fs, io};

use crate::schedstat::Schedstat;

/// Resources that the threads of a process used since they started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// CPU time, user and system, in nanoseconds.
    pub(crate) cpu_ns: u64,
    /// Context switches, voluntary and not.
    pub(crate) switches: u64,
}

impl Usage {
    /// The usage of the current threads of `pid`: differences are right while no thread ends.
    pub(crate) fn of_process(pid: u32) -> io::Result<Usage> {
        let cpu_ns = Schedstat::of_process(pid)?.cpu_ns;
        let mut switches = 0;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            match fs::read_to_string(task?.path().join("status")) {
                Ok(status) => switches += switches_in(&status),
                // The thread ended since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Usage { cpu_ns, switches })
    }

    /// The usage since `earlier`.
    pub(crate) fn since(self, earlier: Usage) -> Usage {
        Usage {
            cpu_ns: self.cpu_ns.saturating_sub(earlier.cpu_ns),
            switches: self.switches.saturating_sub(earlier.switches),
        }
    }
}

/// The sum of `voluntary_ctxt_switches` and `nonvoluntary_ctxt_switches`.
fn switches_in(status: &str) -> u64 {
    let switches = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
    switches.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum()
}

/// Counts the system calls of a process for `time`, with `perf`; `None` if that is missing or not
/// allowed.
pub(crate) fn count_calls(pid: u32, time: Duration) -> Option<u64> {
    let perf = Command::new("perf")
        .args(["stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p", &pid.to_string(), "--", "sleep"])
        .arg(time.as_secs_f64().to_string())
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(perf.stderr).ok()?;
    calls_in(&text)
}

/// The count in a line such as `29,,raw_syscalls:sys_enter,751713,100.00,,`.
fn calls_in(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("raw_syscalls:sys_enter"))?;
    line.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_switches_count() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\n";
        assert_eq!(switches_in(status), 695);
    }

    #[test]
    fn a_count_is_read_and_its_absence_too() {
        assert_eq!(calls_in("29,,raw_syscalls:sys_enter,751713,100.00,,\n"), Some(29));
        assert_eq!(calls_in("<not supported>,,raw_syscalls:sys_enter,0,100.00,,\n"), None);
        assert_eq!(calls_in("Error: Access to performance monitoring is limited\n"), None);
    }
}
