//! What the kernel is told about listening and accepted sockets.

use std::fmt;
use std::fs;
use std::io;
use std::time::Duration;

use socket2::{Socket, TcpKeepalive};
use tracing::warn;

/// Options of the server's sockets. They are set on the listeners, and Linux hands them on to each accepted socket, so
/// they cost nothing for a connection.
///
/// ```
/// use ringserve_server::SocketOptions;
///
/// let options = SocketOptions { keep_alive: None, ..SocketOptions::default() };
/// assert!(options.no_delay);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// Connections that may wait to be accepted, for each shard and address, 1 to 2^31 - 1. The kernel cuts it to
    /// `net.core.somaxconn` (4096 by default), which is logged. Default 4096.
    pub backlog: u32,
    /// `TCP_NODELAY`: small replies leave at once. Replies leave in batches already, so waiting for more would only add
    /// delay. Default on.
    pub no_delay: bool,
    /// `SO_KEEPALIVE`: the kernel asks silent peers for a sign of life, so that one that vanished without a FIN is
    /// noticed even where the idle limit is off. Default as [`KeepAlive::default`].
    pub keep_alive: Option<KeepAlive>,
    /// `TCP_USER_TIMEOUT`: how long sent bytes, or probes, may stay without acknowledgement before the kernel gives the
    /// connection up; in milliseconds, at least 1 ms. Without it that takes about 15 minutes. Default 180 s: longer than
    /// an outage a user sits through, and the time that all probes of [`KeepAlive::default`] take.
    ///
    /// It decides for silent connections too: once a peer was silent for so long, the first probe without an answer ends
    /// the connection, whatever [`KeepAlive::probes`] says. Where that leaves fewer probes, a warning at start says so.
    pub user_timeout: Option<Duration>,
    /// `TCP_NOTSENT_LOWAT`: bytes that the kernel takes for a connection beyond what is on the wire. It bounds what a
    /// slow reader costs in kernel memory, where the send buffer may grow to megabytes (`net.ipv4.tcp_wmem`); what is
    /// beyond stays in the outbox, where it counts against its marks. Default 128 KiB.
    pub not_sent_bytes_max: Option<u32>,
}

/// When the kernel asks a silent peer for a sign of life. Each time is set in whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    /// Silence before the first probe (`TCP_KEEPIDLE`), 1 s to 32767 s. Default 120 s: below the 350 s at which the
    /// load balancers of large clouds forget a connection.
    pub idle: Duration,
    /// Time between probes (`TCP_KEEPINTVL`), 1 s to 32767 s. Default 15 s.
    pub interval: Duration,
    /// Probes without an answer until the connection is given up (`TCP_KEEPCNT`), 1 to 127. Default 4. There are fewer
    /// where [`SocketOptions::user_timeout`] is over before.
    pub probes: u32,
}

impl Default for SocketOptions {
    fn default() -> SocketOptions {
        SocketOptions {
            backlog: 4096,
            no_delay: true,
            keep_alive: Some(KeepAlive::default()),
            user_timeout: Some(Duration::from_secs(180)),
            not_sent_bytes_max: Some(128 << 10),
        }
    }
}

impl Default for KeepAlive {
    fn default() -> KeepAlive {
        KeepAlive { idle: Duration::from_secs(120), interval: Duration::from_secs(15), probes: 4 }
    }
}

/// Which option is wrong, or was refused by the kernel.
#[derive(Debug)]
pub struct OptionError {
    name: &'static str,
    value: String,
    why: Why,
}

#[derive(Debug)]
enum Why {
    Range(&'static str),
    Refused(io::Error),
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OptionError { name, value, why } = self;
        match why {
            Why::Range(range) => write!(f, "{name} is {value}; it must be {range}"),
            Why::Refused(error) => write!(f, "the kernel refused {name} = {value}: {error}"),
        }
    }
}

impl std::error::Error for OptionError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.why {
            Why::Range(_) => None,
            Why::Refused(error) => Some(error),
        }
    }
}

/// The kernel's error, if it was the kernel.
impl From<OptionError> for io::Error {
    fn from(error: OptionError) -> io::Error {
        match error.why {
            Why::Refused(error) => error,
            Why::Range(_) => io::Error::new(io::ErrorKind::InvalidInput, error),
        }
    }
}

impl SocketOptions {
    /// Refuses values out of range.
    ///
    /// # Errors
    /// The first one found.
    pub fn check(&self) -> Result<(), OptionError> {
        let fits = |name, ok: bool, value: String, range| {
            if ok { Ok(()) } else { Err(OptionError { name, value, why: Why::Range(range) }) }
        };
        let backlog_fits = (1..=i32::MAX as u32).contains(&self.backlog);
        fits("backlog", backlog_fits, self.backlog.to_string(), "1 to 2147483647")?;
        if let Some(KeepAlive { idle, interval, probes }) = self.keep_alive {
            let seconds = 1..=32767;
            let range = "1 s to 32767 s";
            fits("keep_alive.idle", seconds.contains(&idle.as_secs()), format!("{idle:?}"), range)?;
            fits(
                "keep_alive.interval",
                seconds.contains(&interval.as_secs()),
                format!("{interval:?}"),
                range,
            )?;
            fits("keep_alive.probes", (1..=127).contains(&probes), probes.to_string(), "1 to 127")?;
        }
        if let Some(time) = self.user_timeout {
            let ok = (1..=u128::from(u32::MAX >> 1)).contains(&time.as_millis());
            fits("user_timeout", ok, format!("{time:?}"), "1 ms to 24 days")?;
        }
        if let Some(bytes) = self.not_sent_bytes_max {
            let ok = (1..=i32::MAX as u32).contains(&bytes);
            fits("not_sent_bytes_max", ok, bytes.to_string(), "1 to 2147483647")?;
        }
        Ok(())
    }

    /// Sets all but the backlog on a listener.
    pub(crate) fn set_on(&self, listener: &Socket) -> Result<(), OptionError> {
        let refused =
            |name, value: String| move |error| OptionError { name, value, why: Why::Refused(error) };
        listener.set_tcp_nodelay(self.no_delay).map_err(refused("no_delay", self.no_delay.to_string()))?;
        if let Some(keep_alive) = self.keep_alive {
            let KeepAlive { idle, interval, probes } = keep_alive;
            let values = TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(probes);
            let set = listener.set_tcp_keepalive(&values);
            set.map_err(refused("keep_alive", format!("{keep_alive:?}")))?;
        }
        if self.user_timeout.is_some() {
            let set = listener.set_tcp_user_timeout(self.user_timeout);
            set.map_err(refused("user_timeout", format!("{:?}", self.user_timeout)))?;
        }
        if let Some(bytes) = self.not_sent_bytes_max {
            let set = listener.set_tcp_notsent_lowat(bytes);
            set.map_err(refused("not_sent_bytes_max", bytes.to_string()))?;
        }
        Ok(())
    }

    /// Sets what makes sense on a socket that is to connect; `tcp` unless it is a Unix domain socket.
    pub(crate) fn set_before_connect(&self, socket: &Socket, tcp: bool) -> Result<(), OptionError> {
        if tcp { self.set_on(socket) } else { Ok(()) }
    }

    /// Says so if silent peers are given up after fewer lost probes than `keep_alive` says.
    pub(crate) fn warn_of_lost_probes(&self) {
        let (Some(keep_alive), Some(probes)) = (self.keep_alive, self.probes_in_time()) else { return };
        if probes < keep_alive.probes {
            let (wanted, user_timeout) = (keep_alive.probes, self.user_timeout);
            warn!(
                probes,
                wanted,
                ?user_timeout,
                "user_timeout gives silent peers up after fewer lost probes than keep_alive says; it should be at least \
                 idle + interval * probes"
            );
        }
    }

    /// Unanswered probes after which `user_timeout` gives a silent peer up, if both are set. The kernel looks when the
    /// next probe is due.
    fn probes_in_time(&self) -> Option<u32> {
        let KeepAlive { idle, interval, .. } = self.keep_alive?;
        let left = self.user_timeout?.saturating_sub(idle).as_secs_f64();
        Some((left / interval.as_secs_f64()).ceil().max(1.0) as u32)
    }

    /// Says so if the kernel cuts the backlog.
    pub(crate) fn warn_of_cut_backlog(&self) {
        let file = "/proc/sys/net/core/somaxconn";
        let max = fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<u32>().ok());
        if let Some(max) = max.filter(|max| *max < self.backlog) {
            let backlog = self.backlog;
            warn!("listen backlog {backlog} was cut to {max} by net.core.somaxconn; raise that to have more");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Type};

    #[test]
    fn every_probe_has_its_time_by_default_and_fewer_are_noticed() {
        let of = |user_timeout: Option<u64>| {
            let user_timeout = user_timeout.map(Duration::from_secs);
            SocketOptions { user_timeout, ..SocketOptions::default() }.probes_in_time()
        };
        assert_eq!(SocketOptions::default().probes_in_time(), Some(KeepAlive::default().probes));
        assert_eq!([of(Some(60)), of(Some(120)), of(Some(135)), of(Some(136))], [1, 1, 1, 2].map(Some));
        assert_eq!(of(None), None);
    }

    #[test]
    fn an_accepted_socket_has_the_options_of_its_listener() {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let options = SocketOptions {
            keep_alive: Some(KeepAlive {
                idle: Duration::from_secs(77),
                interval: Duration::from_secs(7),
                probes: 5,
            }),
            user_timeout: Some(Duration::from_millis(7777)),
            not_sent_bytes_max: Some(77_777),
            ..SocketOptions::default()
        };
        options.check().unwrap();
        options.set_on(&listener).unwrap();
        listener.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        listener.listen(1).unwrap();
        let addr = listener.local_addr().unwrap().as_socket().unwrap();
        let _client = std::net::TcpStream::connect(addr).unwrap();
        let (socket, _) = listener.accept().unwrap();
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(77));
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(7));
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), 5);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_millis(7777)));
        assert_eq!(socket.tcp_notsent_lowat().unwrap(), 77_777);
    }

    #[test]
    fn a_value_out_of_range_is_named() {
        let options = SocketOptions { backlog: 0, ..SocketOptions::default() };
        assert_eq!(options.check().unwrap_err().to_string(), "backlog is 0; it must be 1 to 2147483647");
        let options = SocketOptions {
            keep_alive: Some(KeepAlive { interval: Duration::from_millis(10), ..KeepAlive::default() }),
            ..SocketOptions::default()
        };
        let text = options.check().unwrap_err().to_string();
        assert!(text.starts_with("keep_alive.interval is 10ms"), "{text}");
    }
}
