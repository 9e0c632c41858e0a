//! Reasons why a server does not start, or ended by itself.

use std::fmt;
use std::fs;
use std::io;
use std::time::Duration;

use ringserve_admission::AdmissionError;
use ringserve_base::memory::UsableMemory;
use ringserve_core::{Address, LimitError};
use ringserve_drivers::SetupError;
use rustix::io::Errno;

use crate::socket_options::check::SocketOptionError;

/// The reason why a server does not start, or ended by itself. The text names the cause and, where
/// there is one, the fix; `Debug` prints the same text, so that `fn main() -> Result<(),
/// ringserve::Error>` reads well.
#[non_exhaustive]
pub enum Error {
    /// An address given to [`Server::bind`](crate::Server::bind) or
    /// [`Server::listen`](crate::Server::listen) is not valid, an [adopted](crate::listen::adopt)
    /// descriptor is not a listening socket, or an address is given twice.
    Address(io::Error),
    /// The services contradict each other: none or too many, two with one name, or one without an
    /// endpoint.
    Services(String),
    /// One of several services cannot be started.
    Service {
        /// Its name.
        name: String,
        /// The reason.
        error: Box<Error>,
    },
    /// The TLS of the server cannot be set up ([`Server::tls`](crate::Server::tls)).
    #[cfg(feature = "tls")]
    Tls(ringserve_tls::TlsError),
    /// The limits on who is let in cannot hold ([`Server::admission`](crate::Server::admission)).
    Admission(AdmissionError),
    /// A limit is out of range, or two contradict each other.
    Limits(LimitError),
    /// A socket option is out of range, or the kernel refused it.
    SocketOption(SocketOptionError),
    /// A text given to [`Server::trace_peer`](crate::Server::trace_peer) is no network.
    Trace(String),
    /// The number of shards is 0 or above 1024.
    Shards(usize),
    /// The time given to [`Server::coalesce`](crate::Server::coalesce) is neither zero nor 1 µs to
    /// 1 ms.
    Coalesce(Duration),
    /// Another process, or another listener of this one, listens there already.
    AddressInUse {
        /// The address.
        addr: Address,
        /// The process, if it could be found out.
        holder: Option<String>,
    },
    /// A listener cannot be made.
    Listen {
        /// The address.
        addr: Address,
        /// The kernel's error.
        error: io::Error,
    },
    /// `RLIMIT_NOFILE` is too low for this many shards.
    Descriptors {
        /// The soft limit, after it was raised to the hard one.
        limit: u64,
        /// Descriptors needed at least.
        needed: u64,
    },
    /// The control group or `RLIMIT_AS` leaves less memory than the least limits of this many
    /// shards need.
    Memory {
        /// The shards.
        shards: usize,
        /// Bytes needed at least.
        needed: u64,
        /// The memory that the process may use.
        usable: UsableMemory,
    },
    /// The driver that was asked for cannot be used.
    Driver(SetupError),
    /// Neither driver can be used.
    NoDriver {
        /// Why io_uring cannot be used.
        uring: SetupError,
        /// Why epoll cannot be used.
        epoll: SetupError,
    },
    /// `RINGSERVE_DRIVER` names no driver.
    NoSuchDriver(String),
    /// The factory did not make a service.
    Factory {
        /// The shard of the factory.
        shard: usize,
        /// The error of the factory.
        error: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The factory panicked, or the closure that makes a [transport](crate::transport).
    FactoryPanicked {
        /// The shard of the factory.
        shard: usize,
        /// The message of the panic.
        message: String,
    },
    /// The factory was not done within
    /// [`ServerLimits::start_timeout`](crate::limits::ServerLimits::start_timeout).
    StartTimeout {
        /// The first shard whose factory was not done.
        shard: usize,
        /// The limit.
        time: Duration,
    },
    /// The runtime of a shard cannot be made ([`Server::runtime`](crate::Server::runtime)).
    Runtime {
        /// The shard of the runtime.
        shard: usize,
        /// The runtime's error.
        error: io::Error,
    },
    /// The [admin endpoint](crate::Server::admin) cannot be started.
    Admin(String),
    /// The log cannot be set up ([`log::init`](crate::subscriber::init)).
    Log(String),
    /// A thread cannot be started.
    Thread(io::Error),
    /// Signals cannot be handled.
    Signals(io::Error),
    /// A shard ended by itself: its driver broke.
    Broken {
        /// The shard.
        shard: usize,
        /// The driver's error.
        error: io::Error,
    },
    /// A shard panicked, which is a bug in this framework.
    ShardPanicked {
        /// The shard.
        shard: usize,
        /// The message of the panic.
        message: String,
    },
    /// A shard did not end in time after the order to stop, since a call blocks it. Its thread is
    /// left alone.
    Blocked {
        /// The shard.
        shard: usize,
    },
    /// The order to stop came before every shard was ready: by SIGINT or SIGTERM, a
    /// [`ServerControl`](crate::ServerControl), or the future of `run_until`.
    /// [`Server::serve`](crate::Server::serve) and [`Server::run_until`](crate::Server::run_until)
    /// return `Ok` then.
    Interrupted,
}

impl Error {
    /// The same error, of the service with this name if there are several.
    pub(crate) fn of_service(self, name: Option<&String>) -> Error {
        match name {
            Some(name) => Error::Service { name: name.clone(), error: Box::new(self) },
            None => self,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Address(error) => write!(f, "the address to listen on cannot be used: {error}"),
            Error::Services(text) => write!(f, "the services cannot be served: {text}"),
            Error::Service { name, error } => write!(f, "service {name}: {error}"),
            #[cfg(feature = "tls")]
            Error::Tls(error) => write!(f, "TLS: {error}"),
            Error::Admission(error) => write!(f, "admission: {error}"),
            Error::Limits(error) => write!(f, "limits: {error}"),
            Error::SocketOption(error) => write!(f, "socket options: {error}"),
            Error::Trace(text) => write!(
                f,
                "Server::trace_peer: {text:?} is no network whose connections could be traced; write ADDRESS or ADDRESS/BITS"
            ),
            Error::Shards(count) => write!(
                f,
                "Server::shards is {count}; it must be 1 to 1024, or None, which is the number of CPUs"
            ),
            Error::Coalesce(time) => write!(
                f,
                "Server::coalesce is {time:?}; it must be 0, which is off, or 1 µs to 1 ms, by which requests are late"
            ),
            Error::AddressInUse { addr, holder } => write_in_use(f, addr, holder.as_deref()),
            Error::Listen { addr, error } => write_no_listener(f, addr, error),
            Error::Descriptors { limit, needed } => write!(
                f,
                "RLIMIT_NOFILE is {limit} and at least {needed} descriptors are needed: raise it (ulimit -n, \
                 LimitNOFILE= in systemd, --ulimit nofile= in docker) or set fewer shards"
            ),
            Error::Memory { shards, needed, usable } => write!(
                f,
                "{shards} shards need {} MiB at least, and the process may use {usable}: set fewer shards, or give it more",
                needed >> 20
            ),
            Error::Driver(error) => write!(f, "{error}"),
            Error::NoDriver { uring, epoll } => {
                write!(f, "no driver can be used. io_uring: {uring}. epoll: {epoll}")
            }
            Error::NoSuchDriver(name) => {
                write!(f, "RINGSERVE_DRIVER is {name}; it must be auto, io_uring or epoll")
            }
            Error::Factory { shard, error } => write!(f, "no service for shard {shard}: {error}"),
            Error::FactoryPanicked { shard, message } => {
                write!(f, "the factory panicked for shard {shard}: {message}")
            }
            Error::StartTimeout { shard, time } => write!(
                f,
                "the factory for shard {shard} was not done within {time:?}, which is ServerLimits::start_timeout; \
                 raise it, or set None to wait without a limit"
            ),
            Error::Runtime { shard, error } => write!(f, "no runtime for shard {shard}: {error}"),
            Error::Log(reason) => write!(f, "the log cannot be set up: {reason}"),
            Error::Admin(reason) => write!(f, "the admin endpoint cannot be started: {reason}"),
            Error::Thread(error) => write!(f, "cannot start a thread for a shard: {error}"),
            Error::Signals(error) => write!(f, "cannot handle SIGINT and SIGTERM: {error}"),
            Error::Broken { shard, error } => write!(f, "the driver of shard {shard} broke: {error}"),
            Error::ShardPanicked { shard, message } => {
                write!(
                    f,
                    "shard {shard} panicked outside of user code: {message}; this is a bug, please report it"
                )
            }
            Error::Blocked { shard } => {
                write!(f, "shard {shard} did not end after the order to stop: a call blocks it")
            }
            Error::Interrupted => f.write_str("the server was told to stop before it was ready"),
        }
    }
}

fn write_in_use(f: &mut fmt::Formatter<'_>, addr: &Address, holder: Option<&str>) -> fmt::Result {
    write!(f, "{addr} is in use")?;
    if let Some(holder) = holder {
        write!(f, " by {holder}")?;
    }
    f.write_str(match addr {
        Address::Ip(_) => ": stop that, choose another address, or set share_port(true) on both to share it",
        _ => ": stop that, or choose another path; one cannot be shared",
    })
}

fn write_no_listener(f: &mut fmt::Formatter<'_>, addr: &Address, error: &io::Error) -> fmt::Result {
    write!(f, "cannot listen on {addr}: {error}")?;
    // Errors of other refused calls, as in a sandbox, carry their own text.
    let is = |errno: Errno| error.raw_os_error() == Some(errno.raw_os_error());
    if is(Errno::ADDRNOTAVAIL) {
        f.write_str("; this machine has no such address: 0.0.0.0 and [::] stand for all that it has")?;
    }
    if is(Errno::ACCESS) && addr.as_ip().is_some_and(|addr| is_privileged(addr.port())) {
        f.write_str("; ports below net.ipv4.ip_unprivileged_port_start need CAP_NET_BIND_SERVICE")?;
    }
    Ok(())
}

/// True if a port is below `net.ipv4.ip_unprivileged_port_start`.
fn is_privileged(port: u16) -> bool {
    let start = fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start").unwrap_or_default();
    port < start.trim().parse().unwrap_or(1024)
}

ringserve_buf::debug_is_display!(Error);

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Address(error) | Error::Listen { error, .. } | Error::Thread(error) => Some(error),
            Error::Signals(error) | Error::Broken { error, .. } | Error::Runtime { error, .. } => Some(error),
            Error::Service { error, .. } => Some(&**error),
            #[cfg(feature = "tls")]
            Error::Tls(error) => Some(error),
            Error::Admission(error) => Some(error),
            Error::Limits(error) => Some(error),
            Error::SocketOption(error) => Some(error),
            Error::Driver(error) | Error::NoDriver { epoll: error, .. } => Some(error),
            Error::Factory { error, .. } => Some(&**error),
            _ => None,
        }
    }
}
