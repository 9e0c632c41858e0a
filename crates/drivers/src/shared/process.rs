//! Limits of the process, also in sandboxes that refuse `prlimit64`, and the free memory of its
//! allocator.

use std::fs;
use std::io;
use std::mem::MaybeUninit;

/// A limited resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// `RLIMIT_NOFILE`: descriptors.
    Descriptors,
    /// `RLIMIT_MEMLOCK`: bytes of locked memory.
    LockedMemory,
    /// `RLIMIT_AS`: bytes of address space.
    AddressSpace,
}

/// The limits on a [`Resource`]; `None` where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceLimit {
    /// The limit that the kernel enforces.
    pub soft: Option<u64>,
    /// The highest value to which the process may raise the soft limit.
    pub hard: Option<u64>,
}

impl ResourceLimit {
    /// Reads the limits of this process. Where the kernel does not answer, they are read from
    /// `/proc/self/limits`.
    ///
    /// # Errors
    /// The kernel's error, if they are not there either.
    pub fn of(resource: Resource) -> io::Result<ResourceLimit> {
        ask(resource).or_else(|error| {
            let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
            parse(&limits, resource).ok_or(error)
        })
    }
}

/// Gives the system the free memory that the C library's allocator keeps, for the whole process.
/// Takes about a millisecond for each 4 MiB, during which an arena is locked. Does nothing where
/// the allocator is not glibc's, and does not affect another allocator of the program.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes a number, may be called by any thread at any time, and touches free memory
    // only.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Registers `call` to run when the process exits: `main` returned, or a thread called `exit`. It
/// does not run where the process aborts or is killed. Other threads may hold locks meanwhile, and
/// never release them.
pub fn at_exit(call: extern "C" fn()) {
    // SAFETY: a function without arguments, which lives as long as the process. Where the list is
    // full it is not called.
    unsafe {
        libc::atexit(call);
    }
}

fn ask(resource: Resource) -> io::Result<ResourceLimit> {
    let number = match resource {
        Resource::Descriptors => libc::RLIMIT_NOFILE,
        Resource::LockedMemory => libc::RLIMIT_MEMLOCK,
        Resource::AddressSpace => libc::RLIMIT_AS,
    };
    let mut limit = MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: it writes one `rlimit` there, or fails.
    if unsafe { libc::getrlimit(number, limit.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it did not fail, so it was written.
    let limit = unsafe { limit.assume_init() };
    // It has 32 bits on some architectures.
    #[allow(clippy::unnecessary_cast)]
    let finite = |value| (value != libc::RLIM_INFINITY).then_some(value as u64);
    Ok(ResourceLimit { soft: finite(limit.rlim_cur), hard: finite(limit.rlim_max) })
}

/// Finds a limit in the text of `/proc/self/limits`.
fn parse(limits: &str, resource: Resource) -> Option<ResourceLimit> {
    let name = match resource {
        Resource::Descriptors => "Max open files",
        Resource::LockedMemory => "Max locked memory",
        Resource::AddressSpace => "Max address space",
    };
    let mut values = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let mut value = || match values.next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some(ResourceLimit { soft: value()?, hard: value()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     \n\
Max cpu time              unlimited            unlimited            seconds   \n\
Max open files            1024                 524288               files     \n\
Max locked memory         8388608              unlimited            bytes     \n\
Max address space         unlimited            unlimited            bytes     \n";

    #[test]
    fn limits_are_found_in_their_text() {
        let of = |resource| parse(LIMITS, resource).map(|limit| (limit.soft, limit.hard));
        assert_eq!(of(Resource::Descriptors), Some((Some(1024), Some(524_288))));
        assert_eq!(of(Resource::LockedMemory), Some((Some(8 << 20), None)));
        assert_eq!(of(Resource::AddressSpace), Some((None, None)));
        for garbage in ["", "Max open files", "Max open files 12", "Max open files many 7 files"] {
            assert_eq!(parse(garbage, Resource::Descriptors), None, "{garbage}");
        }
    }

    #[test]
    fn the_kernel_and_the_text_say_the_same() {
        let text = fs::read_to_string("/proc/self/limits").unwrap();
        for resource in [Resource::Descriptors, Resource::LockedMemory, Resource::AddressSpace] {
            assert_eq!(ask(resource).ok(), parse(&text, resource), "{resource:?}");
        }
    }
}
