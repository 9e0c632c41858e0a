//! Setting options, and looking at what became of them.
//!
//! Each option is set and read back. What the kernel refuses is an error; what it gives in another measure is a warning,
//! once, however many listeners get the same.

use std::fmt;
use std::fs;
use std::io;
use std::time::Duration;

use ringserve_ring::TcpOption;
use socket2::{Socket, TcpKeepalive};

use super::{KeepAlive, OptionError, SocketOptions};

/// A socket option that has not the effect it was set for. As text the cause and, where there is one, the fix, as
/// `send_buffer_bytes 8388608 was cut to 4194304 by net.core.wmem_max; raise that to have more`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionWarning {
    name: &'static str,
    given: Option<String>,
    text: String,
}

impl OptionWarning {
    /// The option's name in [`SocketOptions`].
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The value the kernel gave, if it gave another one than was asked for.
    pub fn given(&self) -> Option<&str> {
        self.given.as_deref()
    }
}

impl fmt::Display for OptionWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Those of one start, each once.
#[derive(Default)]
pub(crate) struct Warnings(Vec<OptionWarning>);

impl Warnings {
    pub(crate) fn all(self) -> Vec<OptionWarning> {
        self.0
    }

    fn add(&mut self, name: &'static str, given: Option<String>, text: String) {
        let warning = OptionWarning { name, given, text };
        if !self.0.contains(&warning) {
            self.0.push(warning);
        }
    }

    /// The kernel gave another value. `wanted` is what the text calls it, with its value.
    fn differs(
        &mut self,
        name: &'static str,
        wanted: impl fmt::Display,
        given: impl fmt::Display,
        cause: Cause,
    ) {
        let text = match cause {
            Cause::CutBy(sysctl) => {
                format!("{wanted} was cut to {given} by {sysctl}; raise that to have more")
            }
            Cause::Rounds(how) => format!("{wanted} became {given}: {how}"),
        };
        self.add(name, Some(given.to_string()), text);
    }

    pub(crate) fn unix_mode(&mut self, wanted: u32, given: u32) {
        if given != wanted {
            let cause = Cause::Rounds("the file system decides");
            let text = format!("unix_mode 0o{wanted:o}");
            self.differs("unix_mode", text, format_args!("0o{given:o}"), cause);
        }
    }
}

/// Why a value is another one than was asked for.
enum Cause {
    CutBy(&'static str),
    Rounds(&'static str),
}

/// One listener that gets its options.
struct Setting<'a> {
    socket: &'a Socket,
    warnings: &'a mut Warnings,
}

impl Setting<'_> {
    /// Sets an option and reads it back.
    fn set<T: PartialEq + Shown>(
        &mut self,
        name: &'static str,
        wanted: T,
        set: impl FnOnce(&Socket, &T) -> io::Result<()>,
        get: impl FnOnce(&Socket) -> io::Result<T>,
        cause: impl FnOnce(&T) -> Cause,
    ) -> Result<(), OptionError> {
        set(self.socket, &wanted).map_err(|error| OptionError::refused(name, wanted.shown(), error))?;
        // What cannot be read, as in some sandboxes, is believed.
        if let Ok(given) = get(self.socket)
            && given != wanted
        {
            let text = format!("{name} {}", wanted.shown());
            self.warnings.differs(name, text, given.shown(), cause(&given));
        }
        Ok(())
    }
}

/// How a value is written in the log.
trait Shown {
    fn shown(&self) -> String;
}

impl Shown for u32 {
    fn shown(&self) -> String {
        self.to_string()
    }
}

impl Shown for bool {
    fn shown(&self) -> String {
        self.to_string()
    }
}

impl Shown for String {
    fn shown(&self) -> String {
        self.clone()
    }
}

impl Shown for Duration {
    fn shown(&self) -> String {
        format!("{self:?}")
    }
}

impl SocketOptions {
    /// Sets all but the backlog on a listener of TCP. `cpu` is that of its shard.
    pub(crate) fn set_on_tcp(
        &self,
        listener: &Socket,
        cpu: Option<usize>,
        warnings: &mut Warnings,
    ) -> Result<(), OptionError> {
        let mut to = Setting { socket: listener, warnings };
        let kernel = |_: &bool| Cause::Rounds("the kernel says so");
        to.set("no_delay", self.no_delay, |s, on| s.set_tcp_nodelay(*on), Socket::tcp_nodelay, kernel)?;
        if let Some(keep_alive) = self.keep_alive {
            set_keep_alive(&mut to, keep_alive)?;
        }
        if let Some(time) = self.user_timeout {
            let get = |socket: &Socket| socket.tcp_user_timeout().map(Option::unwrap_or_default);
            let set = |socket: &Socket, time: &Duration| socket.set_tcp_user_timeout(Some(*time));
            to.set("user_timeout", time, set, get, |_| Cause::Rounds("the kernel counts milliseconds"))?;
        }
        if let Some(bytes) = self.not_sent_bytes_max {
            let set = |socket: &Socket, bytes: &u32| socket.set_tcp_notsent_lowat(*bytes);
            let cause = |_: &u32| Cause::Rounds("the kernel says so");
            to.set("not_sent_bytes_max", bytes, set, Socket::tcp_notsent_lowat, cause)?;
        }
        self.set_buffers(&mut to)?;
        self.set_handshake(&mut to)?;
        self.set_congestion(&mut to)?;
        if let Some(cpu) = cpu.filter(|_| self.incoming_cpu) {
            let set = |socket: &Socket, cpu: &u32| socket.set_cpu_affinity(*cpu as usize);
            let get = |socket: &Socket| socket.cpu_affinity().map(|cpu| cpu as u32);
            to.set("incoming_cpu", cpu as u32, set, get, |_| Cause::Rounds("the kernel says so"))?;
        }
        Ok(())
    }

    fn set_buffers(&self, to: &mut Setting<'_>) -> Result<(), OptionError> {
        let cause = |wanted: u32, sysctl| {
            move |given: &u32| match *given < wanted {
                true => Cause::CutBy(sysctl),
                false => Cause::Rounds("the kernel takes no less"),
            }
        };
        // The kernel doubles the number and tells the double.
        let halved =
            |bytes: io::Result<usize>| bytes.map(|bytes| u32::try_from(bytes / 2).unwrap_or(u32::MAX));
        if let Some(bytes) = self.send_buffer_bytes {
            let set = |socket: &Socket, bytes: &u32| socket.set_send_buffer_size(*bytes as usize);
            let get = |socket: &Socket| halved(socket.send_buffer_size());
            to.set("send_buffer_bytes", bytes, set, get, cause(bytes, "net.core.wmem_max"))?;
        }
        if let Some(bytes) = self.receive_buffer_bytes {
            let set = |socket: &Socket, bytes: &u32| socket.set_recv_buffer_size(*bytes as usize);
            let get = |socket: &Socket| halved(socket.recv_buffer_size());
            to.set("receive_buffer_bytes", bytes, set, get, cause(bytes, "net.core.rmem_max"))?;
        }
        Ok(())
    }

    fn set_handshake(&self, to: &mut Setting<'_>) -> Result<(), OptionError> {
        if let Some(queue) = self.fast_open {
            let set = |socket: &Socket, queue: &u32| TcpOption::FastOpen.set(socket, *queue);
            let get = |socket: &Socket| TcpOption::FastOpen.get(socket);
            to.set("fast_open", queue, set, get, |_| Cause::CutBy("net.core.somaxconn"))?;
            let allowed = sysctl("net.ipv4.tcp_fastopen").and_then(|text| text.parse::<u32>().ok());
            if let Some(allowed) = allowed.filter(|bits| bits & 2 == 0) {
                let text = format!(
                    "fast_open {queue} has no effect: net.ipv4.tcp_fastopen is {allowed} and lacks bit 2, which allows it \
                     for listeners; set it to {}",
                    allowed | 2
                );
                to.warnings.add("fast_open", None, text);
            }
        }
        if let Some(time) = self.defer_accept {
            let set = |socket: &Socket, time: &Duration| {
                // Never less than was asked for.
                let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
                TcpOption::DeferAccept.set(socket, u32::try_from(seconds).unwrap_or(u32::MAX))
            };
            let get = |socket: &Socket| {
                TcpOption::DeferAccept.get(socket).map(|seconds| Duration::from_secs(seconds.into()))
            };
            let cause = |_: &Duration| {
                Cause::Rounds("the kernel counts repetitions of its answer, after 1 s, 3 s, 7 s and so on")
            };
            to.set("defer_accept", time, set, get, cause)?;
        }
        Ok(())
    }

    fn set_congestion(&self, to: &mut Setting<'_>) -> Result<(), OptionError> {
        let Some(name) = self.congestion.clone() else { return Ok(()) };
        let set = |socket: &Socket, name: &String| socket.set_tcp_congestion(name.as_bytes());
        let get = |socket: &Socket| {
            // It comes with the zeroes behind it.
            let bytes = socket.tcp_congestion()?;
            let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
            Ok(String::from_utf8_lossy(name).into_owned())
        };
        let done = to.set("congestion", name, set, get, |_| Cause::Rounds("the kernel says so"));
        done.map_err(|error| {
            let file = match error.io_kind() {
                Some(io::ErrorKind::PermissionDenied) => "net.ipv4.tcp_allowed_congestion_control",
                _ => "net.ipv4.tcp_available_congestion_control",
            };
            error.with_hint(sysctl(file).map(|known| format!("{file} has {known}")))
        })
    }

    /// For `listen(2)`.
    pub(crate) fn backlog(&self) -> i32 {
        i32::try_from(self.backlog).unwrap_or(i32::MAX)
    }

    /// What can be told before there is a listener. `pinned` is true if the shards are.
    pub(crate) fn warn_beforehand(&self, pinned: bool, warnings: &mut Warnings) {
        let somaxconn = sysctl("net.core.somaxconn").and_then(|max| max.parse::<u32>().ok());
        if let Some(max) = somaxconn.filter(|max| *max < self.backlog) {
            let wanted = format!("listen backlog {}", self.backlog);
            warnings.differs("backlog", wanted, max, Cause::CutBy("net.core.somaxconn"));
        }
        if let (Some(keep_alive), Some(probes)) = (self.keep_alive, self.probes_in_time())
            && probes < keep_alive.probes
        {
            let text = format!(
                "user_timeout {:?} gives silent peers up after {probes} lost probes, fewer than keep_alive.probes, which is \
                 {}; it should be at least idle + interval * probes",
                self.user_timeout.unwrap_or_default(),
                keep_alive.probes
            );
            warnings.add("user_timeout", None, text);
        }
        if self.incoming_cpu && !pinned {
            let text = "incoming_cpu has no effect: the shards are not pinned to CPUs (Server::pin)";
            warnings.add("incoming_cpu", None, text.to_owned());
        }
    }

    /// Options that a Unix socket has, but does not hand on.
    pub(crate) fn warn_of_unix(&self, warnings: &mut Warnings) {
        let options = [
            ("send_buffer_bytes", self.send_buffer_bytes, "net.core.wmem_default"),
            ("receive_buffer_bytes", self.receive_buffer_bytes, "net.core.rmem_default"),
        ];
        for (name, bytes, sysctl) in options {
            if let Some(bytes) = bytes {
                let text = format!("{name} {bytes} has no effect on Unix sockets, which have {sysctl}");
                warnings.add(name, None, text);
            }
        }
    }

    /// Unanswered probes after which `user_timeout` gives a silent peer up, if both are set. The kernel looks when the
    /// next probe is due.
    fn probes_in_time(&self) -> Option<u32> {
        let KeepAlive { idle, interval, .. } = self.keep_alive?;
        let left = self.user_timeout?.saturating_sub(idle).as_secs_f64();
        Some((left / interval.as_secs_f64()).ceil().max(1.0) as u32)
    }
}

fn set_keep_alive(to: &mut Setting<'_>, keep_alive: KeepAlive) -> Result<(), OptionError> {
    let KeepAlive { idle, interval, probes } = keep_alive;
    let one = TcpKeepalive::new;
    let seconds = |_: &Duration| Cause::Rounds("the kernel counts whole seconds");
    let set = |socket: &Socket, time: &Duration| socket.set_tcp_keepalive(&one().with_time(*time));
    to.set("keep_alive.idle", idle, set, Socket::tcp_keepalive_time, seconds)?;
    let set = |socket: &Socket, time: &Duration| socket.set_tcp_keepalive(&one().with_interval(*time));
    to.set("keep_alive.interval", interval, set, Socket::tcp_keepalive_interval, seconds)?;
    let set = |socket: &Socket, probes: &u32| socket.set_tcp_keepalive(&one().with_retries(*probes));
    let kernel = |_: &u32| Cause::Rounds("the kernel says so");
    to.set("keep_alive.probes", probes, set, Socket::tcp_keepalive_retries, kernel)
}

/// A setting of the kernel by its name, as `net.core.somaxconn`.
fn sysctl(name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/sys/{}", name.replace('.', "/"))).ok()?;
    Some(text.trim().to_owned())
}
