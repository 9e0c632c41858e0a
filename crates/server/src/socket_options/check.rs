//! Values out of range, and values that the kernel refuses.

use std::fmt;
use std::io;
use std::time::Duration;

use super::options::{KeepAlive, SocketOptions};

/// A socket option out of range, or refused by the kernel.
pub struct SocketOptionError {
    name: &'static str,
    value: String,
    why: Why,
}

#[derive(Debug)]
enum Why {
    Range(&'static str),
    Refused {
        error: io::Error,
        /// A value that would be accepted.
        hint: Option<String>,
    },
}

impl SocketOptionError {
    pub(super) fn refused(name: &'static str, value: String, error: io::Error) -> SocketOptionError {
        let sandboxed = matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported);
        let hint = sandboxed.then(|| {
            "most likely a seccomp profile or another sandbox refuses it: allow setsockopt in it".to_owned()
        });
        SocketOptionError { name, value, why: Why::Refused { error, hint } }
    }

    pub(super) fn with_hint(mut self, text: Option<String>) -> SocketOptionError {
        if let Why::Refused { hint, .. } = &mut self.why {
            *hint = text;
        }
        self
    }

    pub(super) fn io_kind(&self) -> Option<io::ErrorKind> {
        match &self.why {
            Why::Range(_) => None,
            Why::Refused { error, .. } => Some(error.kind()),
        }
    }

    /// The option's name in [`SocketOptions`].
    pub fn name(&self) -> &'static str {
        self.name
    }
}

/// The kernel's error, if it was the kernel that refused.
impl From<SocketOptionError> for io::Error {
    fn from(error: SocketOptionError) -> io::Error {
        match error.why {
            Why::Refused { error, .. } => error,
            Why::Range(_) => io::Error::new(io::ErrorKind::InvalidInput, error),
        }
    }
}

impl fmt::Display for SocketOptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SocketOptionError { name, value, why } = self;
        match why {
            Why::Range(range) => write!(f, "SocketOptions::{name} is {value}; it must be {range}"),
            Why::Refused { error, hint } => {
                write!(f, "the kernel refused SocketOptions::{name} = {value}: {error}")?;
                hint.iter().try_for_each(|hint| write!(f, "; {hint}"))
            }
        }
    }
}

ringserve_buf::debug_is_display!(SocketOptionError);

impl std::error::Error for SocketOptionError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.why {
            Why::Range(_) => None,
            Why::Refused { error, .. } => Some(error),
        }
    }
}

/// Refuses a value out of range.
fn fits(
    name: &'static str,
    ok: bool,
    value: impl fmt::Display,
    range: &'static str,
) -> Result<(), SocketOptionError> {
    if ok {
        Ok(())
    } else {
        Err(SocketOptionError { name, value: value.to_string(), why: Why::Range(range) })
    }
}

/// The kernel takes a signed number.
fn positive(name: &'static str, value: Option<u32>) -> Result<(), SocketOptionError> {
    let value = value.unwrap_or(1);
    fits(name, (1..=i32::MAX as u32).contains(&value), value, "1 to 2147483647")
}

/// The kernel doubles it, in a signed number.
fn buffer(name: &'static str, bytes: Option<u32>) -> Result<(), SocketOptionError> {
    let bytes = bytes.unwrap_or(1);
    fits(name, (1..=1 << 30).contains(&bytes), bytes, "1 to 1073741824")
}

fn seconds(name: &'static str, time: Duration, range: &'static str) -> Result<(), SocketOptionError> {
    fits(name, (1..=32767).contains(&time.as_secs()), format_args!("{time:?}"), range)
}

impl SocketOptions {
    /// Refuses values out of range.
    ///
    /// # Errors
    /// The first fault found.
    pub fn check(&self) -> Result<(), SocketOptionError> {
        positive("backlog", Some(self.backlog))?;
        if let Some(KeepAlive { idle, interval, probes }) = self.keep_alive {
            seconds("keep_alive.idle", idle, "1 s to 32767 s")?;
            seconds("keep_alive.interval", interval, "1 s to 32767 s")?;
            fits("keep_alive.probes", (1..=127).contains(&probes), probes, "1 to 127")?;
        }
        if let Some(time) = self.user_timeout {
            let ok = (1..=u128::from(u32::MAX >> 1)).contains(&time.as_millis());
            fits("user_timeout", ok, format_args!("{time:?}"), "1 ms to 24 days, or None, which is off")?;
        }
        positive("not_sent_bytes_max", self.not_sent_bytes_max)?;
        buffer("send_buffer_bytes", self.send_buffer_bytes)?;
        buffer("receive_buffer_bytes", self.receive_buffer_bytes)?;
        positive("fast_open", self.fast_open)?;
        if let Some(time) = self.defer_accept {
            seconds("defer_accept", time, "1 s to 32767 s, or None, which is off")?;
        }
        if let Some(name) = &self.congestion {
            // The kernel cuts longer names, and may then know them.
            let ok = (1..=15).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
            fits("congestion", ok, format_args!("{name:?}"), "1 to 15 ASCII letters")?;
        }
        let mode = self.unix_mode.unwrap_or(0);
        fits("unix_mode", mode <= 0o777, format_args!("0o{mode:o}"), "0 to 0o777")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_out_of_range_is_named() {
        let text = |options: SocketOptions| options.check().unwrap_err().to_string();
        let options = SocketOptions::default().backlog(0);
        assert_eq!(text(options), "SocketOptions::backlog is 0; it must be 1 to 2147483647");
        let keep_alive = Some(KeepAlive::default().interval(Duration::from_millis(10)));
        let options = SocketOptions::default().keep_alive(keep_alive);
        assert!(text(options).starts_with("SocketOptions::keep_alive.interval is 10ms"));
        let options = SocketOptions::default().send_buffer_bytes(u32::MAX);
        assert_eq!(
            text(options),
            "SocketOptions::send_buffer_bytes is 4294967295; it must be 1 to 1073741824"
        );
        let options = SocketOptions::default().receive_buffer_bytes(0);
        assert!(text(options).starts_with("SocketOptions::receive_buffer_bytes is 0"));
        let options = SocketOptions::default().fast_open(0);
        assert!(text(options).starts_with("SocketOptions::fast_open is 0"));
        let options = SocketOptions::default().defer_accept(Duration::ZERO);
        assert_eq!(
            text(options),
            "SocketOptions::defer_accept is 0ns; it must be 1 s to 32767 s, or None, which is off"
        );
        for name in ["", "sixteen letters!", "a b"] {
            let options = SocketOptions::default().congestion(name);
            assert_eq!(
                text(options),
                format!("SocketOptions::congestion is {name:?}; it must be 1 to 15 ASCII letters")
            );
        }
        let options = SocketOptions::default().unix_mode(0o1777);
        assert_eq!(text(options), "SocketOptions::unix_mode is 0o1777; it must be 0 to 0o777");
    }
}
