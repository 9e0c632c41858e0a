//! Limits of one connection.

use core::time::Duration;

use super::error::times_in_range;
use super::{IdleActivity, LimitError, Limits};

/// Limits of one connection that differ from those of its service, until it ends or others are set.
/// A limit that is not set here keeps the value of the service's [`Limits`].
///
/// ```
/// use std::time::Duration;
///
/// use ringserve_core::{ConnLimits, IdleActivity};
///
/// // A client that promised a sign of life every minute.
/// let keeps_alive = ConnLimits::default().idle_timeout(Duration::from_secs(90)).idle_counts(IdleActivity::Received);
/// // A peer that did not log in yet, which may take several frames, and 10 s for all of them.
/// let stranger = ConnLimits::default().frame_bytes_max(4096).deadline(Duration::from_secs(10));
/// let member = ConnLimits::default().deadline(None);
/// // A call that waits for as long as its peer does.
/// let patient = ConnLimits::default().handler_timeout(None);
/// # let _ = (keeps_alive, stranger, member, patient);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnLimits {
    frame_bytes_max: Option<usize>,
    idle_timeout: Option<Option<Duration>>,
    idle_counts: Option<IdleActivity>,
    handler_timeout: Option<Option<Duration>>,
    heartbeat_interval: Option<Option<Duration>>,
    read_frames_per_second_max: Option<u32>,
    read_bytes_per_second_max: Option<usize>,
    pub(crate) deadline: Option<Option<Duration>>,
}

impl ConnLimits {
    /// As [`Limits::frame_bytes_max`], from the next frame on, even if it was received already. An
    /// unfinished frame that already exceeds it is too large.
    #[must_use]
    pub fn frame_bytes_max(self, bytes: usize) -> ConnLimits {
        ConnLimits { frame_bytes_max: Some(bytes), ..self }
    }

    /// As [`Limits::idle_timeout`]; `None` is off.
    #[must_use]
    pub fn idle_timeout(self, time: impl Into<Option<Duration>>) -> ConnLimits {
        ConnLimits { idle_timeout: Some(time.into()), ..self }
    }

    /// As [`Limits::idle_counts`].
    #[must_use]
    pub fn idle_counts(self, counts: IdleActivity) -> ConnLimits {
        ConnLimits { idle_counts: Some(counts), ..self }
    }

    /// As [`Limits::handler_timeout`], also for calls that are pending already; `None` is off.
    #[must_use]
    pub fn handler_timeout(self, time: impl Into<Option<Duration>>) -> ConnLimits {
        ConnLimits { handler_timeout: Some(time.into()), ..self }
    }

    /// As [`Limits::heartbeat_interval`]; `None` is off.
    #[must_use]
    pub fn heartbeat_interval(self, time: impl Into<Option<Duration>>) -> ConnLimits {
        ConnLimits { heartbeat_interval: Some(time.into()), ..self }
    }

    /// As [`Limits::read_frames_per_second_max`], from the next turn of the shard on; 0 is off.
    /// Frames sent before the first such limit of the connection do not count.
    #[must_use]
    pub fn read_frames_per_second_max(self, frames: u32) -> ConnLimits {
        ConnLimits { read_frames_per_second_max: Some(frames), ..self }
    }

    /// As [`Limits::read_bytes_per_second_max`], from the next turn of the shard on; 0 is off.
    #[must_use]
    pub fn read_bytes_per_second_max(self, bytes: usize) -> ConnLimits {
        ConnLimits { read_bytes_per_second_max: Some(bytes), ..self }
    }

    /// Closes the connection this long after the limits were set, whatever it does until then: a
    /// login over several frames, a session that ends with its token. 17 ms to a year; `None` takes
    /// it away. Queued replies are then sent, a pending call is dropped, and the reason is
    /// [`DeadlinePassed`](crate::CloseReason::DeadlinePassed).
    ///
    /// Limits that are set later and do not name a deadline leave it as it is; those that do
    /// restart it. A deadline takes about 24 bytes from the moment at which it is set until it is
    /// taken away or the connection ends, and costs nothing for each frame.
    ///
    /// ```
    /// use std::cell::Cell;
    /// use std::time::Duration;
    ///
    /// use ringserve::limits::ConnLimits;
    /// use ringserve::{Cx, Frame, Service, service::{OpenCx, Refusal}};
    ///
    /// struct Gate;
    ///
    /// impl Service for Gate {
    ///     type Session = Cell<bool>;
    ///     type Error = &'static str;
    ///
    ///     async fn open(&self, opening: &OpenCx<'_>) -> Result<Cell<bool>, Refusal> {
    ///         let login = ConnLimits::default().deadline(Duration::from_secs(10));
    ///         opening.set_limits(&login).map_err(|error| Refusal::new(error.to_string()))?;
    ///         Ok(Cell::new(false))
    ///     }
    ///
    ///     async fn call(&self, cx: &Cx<'_, Cell<bool>>, frame: Frame) -> Result<(), &'static str> {
    ///         if !cx.session().get() && frame.starts_with(b"TOKEN ") {
    ///             cx.session().set(true);
    ///             cx.set_limits(&ConnLimits::default().deadline(None)).map_err(|_| "no limits")?;
    ///         }
    ///         cx.reply(if cx.session().get() { "welcome" } else { "who are you?" });
    ///         Ok(())
    ///     }
    /// }
    /// ```
    #[must_use]
    pub fn deadline(self, time: impl Into<Option<Duration>>) -> ConnLimits {
        ConnLimits { deadline: Some(time.into()), ..self }
    }

    /// True if it names a limit in addition to the deadline.
    pub(crate) fn names_others(&self) -> bool {
        *self != ConnLimits { deadline: self.deadline, ..ConnLimits::default() }
    }

    /// Refuses a deadline out of its range.
    ///
    /// # Errors
    /// With its name and value.
    pub(crate) fn check_deadline(&self) -> Result<(), LimitError> {
        times_in_range([("ConnLimits::deadline", self.deadline.flatten())])
    }

    /// The limits that apply to a connection of a service with the limits `service`.
    pub(crate) fn over(&self, service: &Limits) -> Limits {
        Limits {
            frame_bytes_max: self.frame_bytes_max.unwrap_or(service.frame_bytes_max),
            idle_timeout: self.idle_timeout.unwrap_or(service.idle_timeout),
            idle_counts: self.idle_counts.unwrap_or(service.idle_counts),
            handler_timeout: self.handler_timeout.unwrap_or(service.handler_timeout),
            heartbeat_interval: self.heartbeat_interval.unwrap_or(service.heartbeat_interval),
            read_frames_per_second_max: self
                .read_frames_per_second_max
                .unwrap_or(service.read_frames_per_second_max),
            read_bytes_per_second_max: self
                .read_bytes_per_second_max
                .unwrap_or(service.read_bytes_per_second_max),
            ..service.clone()
        }
    }
}
