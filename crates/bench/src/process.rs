//! Requests of a measured process to the kernel about itself: one CPU, no wake-up preemption,
//! enough descriptors, and an end with its parent.

use std::io;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Descriptors of this process that are not connections: pipes, `/proc`, standard streams.
pub(crate) const OTHER_FILES: u64 = 64;

/// Pins the calling thread, and every thread and process it starts later, to `cpu`.
pub(crate) fn pin_to(cpu: usize) -> io::Result<()> {
    run_on(&[cpu])
}

/// Does the same with several CPUs.
pub(crate) fn run_on(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            return Err(io::Error::other(format!("--cpu {cpu}: the largest is {}", CpuSet::MAX_CPU - 1)));
        }
        set.set(cpu);
    }
    sched_setaffinity(None, &set).map_err(|error| {
        io::Error::other(format!(
            "cannot run on CPU {cpus:?} ({error}); see Cpus_allowed_list in /proc/self/status"
        ))
    })
}

/// The CPUs that the calling thread may run on, in ascending order.
pub(crate) fn allowed_cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Makes the calling thread, and every thread it starts later, a `SCHED_BATCH` one.
///
/// A batch thread does not preempt the running thread when it wakes. With generator and server on
/// one CPU that alone fixes the batches: the generator sends on every connection before the server
/// runs, and the server answers everything before the generator runs. Needs no privilege.
pub(crate) fn set_batch_policy() -> io::Result<()> {
    // SAFETY: `sched_param` is a plain C struct of integers, for which all zeroes is a value.
    let parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel only reads `parameters`, which lives until the call returns.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// True if the calling thread is a `SCHED_BATCH` one.
pub(crate) fn has_batch_policy() -> bool {
    // SAFETY: it takes a number and returns one.
    unsafe { libc::sched_getscheduler(0) == libc::SCHED_BATCH }
}

/// Raises the soft limit of open files to the hard one and returns it.
pub(crate) fn raise_open_files() -> io::Result<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    }
    Ok(limit.maximum.unwrap_or(u64::MAX))
}

/// Makes the kernel end this process when the thread that started it ends, however it ends.
pub(crate) fn die_with_parent() -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Refuses more connections than this process may have files.
pub(crate) fn enough_files(option: &str, connections: usize) -> io::Result<()> {
    let (files, needed) = (raise_open_files()?, connections as u64 + OTHER_FILES);
    if needed <= files {
        return Ok(());
    }
    let why = format!(
        "{option}: {connections} connections need {needed} open files, and the hard limit is {files}; raise it (ulimit -Hn) or ask for fewer"
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
}
