//! Checks of a backend.

use std::time::Duration;

/// A check of each backend: whether it can be connected to, and where wanted whether it answers.
///
/// The shards share the backends, so that each is checked once for the process. A time in which
/// this process stood still, and a check for which it lacked a port, a descriptor or memory, say
/// nothing of a backend.
#[derive(Clone, Debug)]
pub struct Check {
    pub(crate) send: Box<[u8]>,
    pub(crate) expect: Option<Box<[u8]>>,
    pub(crate) interval: Duration,
    pub(crate) rise: u32,
    pub(crate) fall: u32,
}

impl Check {
    /// A backend works if it can be connected to, with its transport. A process that hangs still
    /// is: its kernel answers.
    pub fn connect() -> Check {
        let interval = Duration::from_secs(2);
        Check { send: Box::default(), expect: None, interval, rise: 2, fall: 3 }
    }

    /// A backend works if it answers `send` with bytes that contain `expect`, which is not empty,
    /// within its first 16 KiB.
    pub fn exchange(send: impl Into<Vec<u8>>, expect: impl Into<Vec<u8>>) -> Check {
        Check { send: send.into().into(), expect: Some(expect.into().into()), ..Check::connect() }
    }

    /// The time between two checks of a backend, and for one, at least 1 ms. 2 s by default.
    pub fn interval(self, time: Duration) -> Check {
        Check { interval: time.max(Duration::from_millis(1)), ..self }
    }

    /// Checks in a row that have to succeed until a backend is up again; at least 1. 2 by default.
    pub fn rise(self, checks: u32) -> Check {
        Check { rise: checks.max(1), ..self }
    }

    /// Checks in a row that have to fail until a backend is down; at least 1. 3 by default.
    pub fn fall(self, checks: u32) -> Check {
        Check { fall: checks.max(1), ..self }
    }
}
