//! Reports of faults: why a driver cannot be used, and lines for the log.
//!
//! A subscriber may panic (`tracing_subscriber` does when stdout and stderr are closed). Catch it:
//! a driver logs in the middle of its bookkeeping, and logging must never kill a shard.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ringserve_buf::PoolError;

use crate::shared::process::{Resource, ResourceLimit};

/// The reason why a ring could not be set up, or does not work.
#[non_exhaustive]
pub enum SetupError {
    /// A value of the configuration is out of its range.
    OutOfRange {
        /// The field.
        name: &'static str,
        /// Its value.
        value: u32,
        /// The smallest one allowed.
        min: u32,
        /// The largest one allowed.
        max: u32,
    },
    /// The receive memory cannot be set up like this.
    Pool(PoolError),
    /// `kernel.io_uring_disabled` is 1 (for users without privileges) or 2 (for all).
    Disabled(u8),
    /// A system call or operation is filtered: seccomp, or a kernel without io_uring.
    Blocked {
        /// The refused call or operation.
        what: &'static str,
        /// The error of the call.
        error: io::Error,
    },
    /// A system call that epoll needs is filtered, or not in the kernel.
    Epoll {
        /// The call.
        call: &'static str,
        /// The error of the call.
        error: io::Error,
    },
    /// The kernel lacks something.
    TooOld {
        /// The missing call or operation.
        missing: &'static str,
        /// The first kernel that has it.
        since: &'static str,
        /// The error it answered with.
        error: io::Error,
    },
    /// No memory, most likely `RLIMIT_MEMLOCK`.
    Memory {
        /// The refused call or operation.
        what: &'static str,
        /// The soft limit in bytes; `None` if there is none.
        limit: Option<u64>,
    },
    /// The file table is larger than the soft `RLIMIT_NOFILE`.
    Table {
        /// Connections asked for.
        connections: u32,
        /// The soft limit.
        limit: Option<u64>,
    },
    /// The process or the system has no descriptor left.
    Descriptors {
        /// The refused call or operation.
        what: &'static str,
        /// The error.
        error: io::Error,
    },
    /// Anything else.
    Failed {
        /// The failed call or operation.
        what: &'static str,
        /// The error.
        error: io::Error,
    },
    /// The set-up worked, but a trial of the driver did not do what it must.
    Trial {
        /// The step.
        step: &'static str,
        /// The result that was seen instead.
        seen: String,
    },
}

impl SetupError {
    pub(crate) fn failed(what: &'static str) -> impl FnOnce(io::Error) -> SetupError {
        move |error| SetupError::Failed { what, error }
    }

    /// Names the cause of an error of a call that epoll needs.
    pub(crate) fn from_epoll(call: &'static str, error: io::Error) -> SetupError {
        match error.raw_os_error() {
            _ if is_refused(&error) => SetupError::Epoll { call, error },
            Some(libc::EMFILE | libc::ENFILE) => SetupError::Descriptors { what: call, error },
            _ => SetupError::Failed { what: call, error },
        }
    }

    /// Names the cause of an error of `io_uring_setup`, `io_uring_register` or `io_uring_enter`.
    pub(crate) fn from_call(what: &'static str, error: io::Error) -> SetupError {
        match error.raw_os_error() {
            Some(libc::EPERM) if disabled_by_sysctl() > 0 => SetupError::Disabled(disabled_by_sysctl()),
            Some(libc::EPERM | libc::ENOSYS | libc::EACCES) => SetupError::Blocked { what, error },
            Some(libc::ENOMEM) => SetupError::Memory { what, limit: soft_limit(Resource::LockedMemory) },
            Some(libc::EMFILE | libc::ENFILE) => SetupError::Descriptors { what, error },
            _ => SetupError::Failed { what, error },
        }
    }
}

/// The value of `kernel.io_uring_disabled`; 0 where the kernel does not know it (before 6.6).
fn disabled_by_sysctl() -> u8 {
    let text = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// The soft limit. `None` if there is none, or it cannot be read.
pub(crate) fn soft_limit(resource: Resource) -> Option<u64> {
    ResourceLimit::of(resource).ok()?.soft
}

struct Limit(Option<u64>);

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(limit) => limit.fmt(f),
            None => f.write_str("unlimited"),
        }
    }
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::OutOfRange { name, value, min, max } => {
                write!(f, "{name} is {value}; it must be {min} to {max}")
            }
            SetupError::Pool(error) => error.fmt(f),
            SetupError::Disabled(1) => write!(
                f,
                "io_uring is off for users without privileges: kernel.io_uring_disabled is 1; set it to 0, or \
                 run as a member of kernel.io_uring_group"
            ),
            SetupError::Disabled(level) => {
                write!(
                    f,
                    "io_uring is off: kernel.io_uring_disabled is {level}; `sysctl kernel.io_uring_disabled=0`"
                )
            }
            SetupError::Blocked { what, error } if error.raw_os_error() == Some(libc::ENOSYS) => {
                write!(
                    f,
                    "{what} is not there ({error}): a seccomp profile hides it; allow io_uring_setup, \
                     io_uring_enter and io_uring_register in it; or the kernel has no io_uring"
                )
            }
            SetupError::Blocked { what, error } => write!(
                f,
                "{what} is blocked ({error}), most likely by a seccomp profile, as Docker's default one does; \
                 allow io_uring_setup, io_uring_enter and io_uring_register in it"
            ),
            SetupError::Epoll { call, error } => write!(
                f,
                "epoll cannot be used: {call} is refused ({error}), most likely by a seccomp profile or another \
                 sandbox; allow epoll_create1, epoll_ctl, epoll_pwait, eventfd2, timerfd_create, accept4, recvfrom and \
                 sendto in it"
            ),
            SetupError::TooOld { missing, since, error } => {
                write!(f, "the kernel has no {missing} ({error}); Linux {since} or later is needed")
            }
            SetupError::Memory { what, limit } => write!(
                f,
                "no memory for {what}: RLIMIT_MEMLOCK is {} bytes; raise it (`ulimit -l`, LimitMEMLOCK=), or use \
                 fewer shards or smaller queues",
                Limit(*limit)
            ),
            SetupError::Table { connections, limit } => write!(
                f,
                "a file table for {connections} connections is larger than RLIMIT_NOFILE, which is {}; raise it \
                 (`ulimit -n`, LimitNOFILE=), or lower the number of connections for each shard",
                Limit(*limit)
            ),
            SetupError::Descriptors { what, error } => {
                write!(f, "{what}: {error}; raise RLIMIT_NOFILE (`ulimit -n`, LimitNOFILE=) or fs.file-max")
            }
            SetupError::Failed { what, error } => write!(f, "{what} failed: {error}"),
            SetupError::Trial { step, seen } => {
                write!(f, "it is there but does not work: {step}: {seen}")
            }
        }
    }
}

ringserve_buf::debug_is_display!(SetupError);

impl std::error::Error for SetupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            SetupError::Pool(error) => Some(error),
            SetupError::Blocked { error, .. }
            | SetupError::Epoll { error, .. }
            | SetupError::TooOld { error, .. }
            | SetupError::Descriptors { error, .. }
            | SetupError::Failed { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl From<PoolError> for SetupError {
    fn from(error: PoolError) -> SetupError {
        SetupError::Pool(error)
    }
}

/// Writes a line to the log, and catches a panic of the subscriber.
///
/// ```
/// ringserve_drivers::guarded(|| tracing::info!("a shard goes on whatever becomes of this line"));
/// ```
pub fn guarded(write: impl FnOnce()) {
    // The line is lost, and the panic is not reported either.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(write)) {
        // The value of a panic may panic when it is dropped.
        std::mem::forget(panic);
    }
}

/// The macros of `tracing`, each [`guarded`].
pub(crate) mod log {
    // Named apart from the levels, since `warn` is an attribute too.
    macro_rules! lines {
        ($dollar:tt $($name:ident $level:ident)*) => {$(
            macro_rules! $name {
                ($dollar($dollar line:tt)*) => { $crate::guarded(|| tracing::$level!($dollar($dollar line)*)) };
            }
            pub(crate) use $name as $level;
        )*};
    }

    lines!($ error_line error warn_line warn debug_line debug trace_line trace);
}

/// True if an error is that of a system call that is filtered, or not there.
pub(crate) fn is_refused(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EACCES))
}
