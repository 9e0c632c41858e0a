//! Cores, quotas and descriptors.

use ringserve_drivers::{Resource, ResourceLimit};
use rustix::process::{self, Rlimit, setrlimit};
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};

use crate::machine::cpu_quota;
use crate::machine::files::MachineFiles;
use crate::thread_times::ThreadTimes;

/// CPUs this thread may run on, in ascending order.
pub fn cpus() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// The system's number of this thread.
pub fn this_thread() -> u32 {
    gettid().as_raw_nonzero().get().unsigned_abs()
}

/// The times of a thread of this process. `None` if it ended, or the kernel does not count
/// (`CONFIG_SCHED_INFO`).
pub fn time_of(thread: u32) -> Option<ThreadTimes> {
    ThreadTimes::read(&ThreadTimes::file(thread)?)
}

/// Keeps this thread on one CPU.
pub fn pin_to(cpu: usize) -> std::io::Result<()> {
    run_on(&[cpu])
}

/// Keeps this thread on these CPUs.
pub fn run_on(cpus: &[usize]) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// True if a control group bounds the CPU time of this process. Then pinning would be wrong: twenty
/// containers with a quota of one CPU each would all sit on the first ones.
pub fn has_quota() -> bool {
    cpu_quota(&MachineFiles::here()).is_some()
}

/// The CPU of each shard, or none.
pub fn cpus_to_pin(pin: Option<bool>, shards: usize) -> Vec<usize> {
    let cpus = cpus();
    let fits = cpus.len() == shards && !has_quota();
    if pin.unwrap_or(fits) { cpus.into_iter().cycle().take(shards).collect() } else { Vec::new() }
}

/// Raises the soft limit on descriptors to the hard one. Returns the limit before and now.
///
/// # Errors
/// It cannot be found out.
pub fn raise_descriptor_limit() -> std::io::Result<(u64, u64)> {
    let ResourceLimit { soft, hard } = ResourceLimit::of(Resource::Descriptors)?;
    let before = soft.unwrap_or(u64::MAX);
    match setrlimit(process::Resource::Nofile, Rlimit { current: hard, maximum: hard }) {
        Ok(()) => Ok((before, hard.unwrap_or(u64::MAX))),
        Err(_) => Ok((before, before)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_runs_on_its_cpu_alone() {
        let all = cpus();
        std::thread::spawn(move || {
            pin_to(all[0]).unwrap();
            assert_eq!(cpus(), [all[0]]);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_soft_limit_is_the_hard_one_after_raising() {
        let (_, now) = raise_descriptor_limit().unwrap();
        assert_eq!(Some(now), ResourceLimit::of(Resource::Descriptors).unwrap().hard);
    }
}
