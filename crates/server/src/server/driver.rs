//! The driver of a server.

use std::env;
use std::fmt;
use std::str::FromStr;

/// The environment variable by which an operator chooses, where the program says [`Driver::Auto`].
pub(super) const VARIABLE: &str = "RINGSERVE_DRIVER";

/// The driver of a server. Services behave the same on each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Driver {
    /// io_uring where it works, which is tried at the start, else epoll. The environment variable
    /// `RINGSERVE_DRIVER`, set to `io_uring` or `epoll`, decides instead.
    #[default]
    Auto,
    /// io_uring. If it cannot be used the server does not start, and the error says why.
    IoUring,
    /// epoll, for hosts that block io_uring. Each connection costs a descriptor there, so
    /// `RLIMIT_NOFILE` bounds them.
    Epoll,
}

impl Driver {
    /// True if program or operator choose epoll.
    pub(crate) fn is_epoll(self) -> bool {
        self == Driver::Epoll || self == Driver::Auto && env::var(VARIABLE).is_ok_and(|name| name == "epoll")
    }
}

impl FromStr for Driver {
    type Err = String;

    fn from_str(name: &str) -> Result<Driver, String> {
        match name {
            "auto" => Ok(Driver::Auto),
            "io_uring" => Ok(Driver::IoUring),
            "epoll" => Ok(Driver::Epoll),
            other => Err(format!("{other} is no driver; choose auto, io_uring or epoll")),
        }
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Driver::Auto => "auto",
            Driver::IoUring => "io_uring",
            Driver::Epoll => "epoll",
        })
    }
}
