//! Waiting for the server's shutdown.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::shard::wakes::flag::{Flag, FlagWait};

/// When connections end that end by themselves in a drain.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "connections of HTTP ask for it"))]
pub(crate) struct Moment {
    /// Time over which they do, each at a random moment.
    pub(crate) spread: Duration,
    /// Time that a request which is on its way may take.
    pub(crate) first: Duration,
}

#[cfg(feature = "http")]
impl Moment {
    /// The time until the moment of one of them, by a random number.
    pub(crate) fn of(self, random: u64) -> Duration {
        self.spread.mul_f64(random as f64 / u64::MAX as f64)
    }

    /// The same for one that may be asked meanwhile.
    pub(crate) fn behind_first(self, random: u64) -> Duration {
        let spread = self.spread.saturating_sub(self.first);
        self.first + Moment { spread, ..self }.of(random)
    }
}

/// Waits until the server shuts down. See [`Shard::draining`](crate::Shard::draining).
#[must_use = "a future does nothing until it is awaited"]
pub struct Draining(FlagWait);

impl Draining {
    pub(crate) fn of(flag: &Flag) -> Draining {
        Draining(flag.wait())
    }
}

impl Future for Draining {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(task)
    }
}

impl fmt::Debug for Draining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Draining({})", self.0.is_over())
    }
}
