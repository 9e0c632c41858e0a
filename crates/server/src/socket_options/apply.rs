//! Setting options and reading them back.
//!
//! A refusal of the kernel is an error; a value in another measure is a warning, once, however many
//! listeners get the same.

use std::fmt;
use std::fs;
use std::io;
use std::time::Duration;

use ringserve_base::doctor;
use ringserve_base::machine::files::MachineFiles;
use ringserve_core::Address;
use ringserve_drivers::TcpOption;
use socket2::{Socket, TcpKeepalive};

use super::check::SocketOptionError;
use super::options::{KeepAlive, SocketOptions};

/// A socket option without the effect it was set for. Its text has the cause and, where there is
/// one, the fix, such as `send_buffer_bytes 8388608 was cut to 4194304 by net.core.wmem_max; raise
/// that to have more`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptionWarning {
    name: &'static str,
    given: Option<String>,
    text: String,
}

impl SocketOptionWarning {
    /// The option's name in [`SocketOptions`].
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The value that the kernel gave, if it differs from the one asked for.
    pub fn given(&self) -> Option<&str> {
        self.given.as_deref()
    }
}

impl fmt::Display for SocketOptionWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The warnings of one start, each once.
#[derive(Default)]
pub(crate) struct Warnings(Vec<SocketOptionWarning>);

impl Warnings {
    pub(crate) fn all(self) -> Vec<SocketOptionWarning> {
        self.0
    }

    fn add(&mut self, name: &'static str, given: Option<String>, text: String) {
        let warning = SocketOptionWarning { name, given, text };
        if !self.0.contains(&warning) {
            self.0.push(warning);
        }
    }

    /// Warns of another value. `wanted` is the name in the text, with its value.
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

    /// Warns of connections that are being made while one of two servers on a port closes its
    /// listeners.
    pub(crate) fn shared_port(&mut self) {
        if !doctor::migrates(&MachineFiles::here()) {
            let text = "share_port: net.ipv4.tcp_migrate_req is off, so a connection whose handshake takes longer than a \
                        shutdown of this server waits for it is reset; with net.ipv4.tcp_migrate_req=1 the kernel hands it \
                        to the other server on this port";
            self.add("share_port", None, text.to_owned());
        }
    }

    pub(crate) fn unix_mode(&mut self, wanted: u32, given: u32) {
        if given != wanted {
            let cause = Cause::Rounds("the file system decides");
            let text = format!("unix_mode 0o{wanted:o}");
            self.differs("unix_mode", text, format_args!("0o{given:o}"), cause);
        }
    }
}

/// The reason why a value differs from the one asked for.
enum Cause {
    CutBy(&'static str),
    Rounds(&'static str),
}

/// A listener that gets its options.
struct Setting<'a> {
    socket: &'a Socket,
    /// Differences, if the caller collects them.
    warnings: Option<&'a mut Warnings>,
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
    ) -> Result<(), SocketOptionError> {
        set(self.socket, &wanted).map_err(|error| SocketOptionError::refused(name, wanted.shown(), error))?;
        let Some(warnings) = &mut self.warnings else { return Ok(()) };
        // A value that cannot be read, as in some sandboxes, is believed.
        if let Ok(given) = get(self.socket)
            && given != wanted
        {
            let text = format!("{name} {}", wanted.shown());
            warnings.differs(name, text, given.shown(), cause(&given));
        }
        Ok(())
    }
}

/// The form of a value in the log.
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
    /// Sets all options but the backlog on a TCP listener. `cpu` is that of its shard.
    pub(crate) fn set_on_tcp(
        &self,
        listener: &Socket,
        cpu: Option<usize>,
        warnings: &mut Warnings,
    ) -> Result<(), SocketOptionError> {
        let mut to = Setting { socket: listener, warnings: Some(warnings) };
        self.set_for_connection(&mut to)?;
        self.set_handshake(&mut to)?;
        if let Some(cpu) = cpu.filter(|_| self.incoming_cpu) {
            let set = |socket: &Socket, cpu: &u32| socket.set_cpu_affinity(*cpu as usize);
            let get = |socket: &Socket| socket.cpu_affinity().map(|cpu| cpu as u32);
            to.set("incoming_cpu", cpu as u32, set, get, |_| Cause::Rounds("the kernel says so"))?;
        }
        Ok(())
    }

    /// Sets the options that a connection inherits on an adopted listener.
    pub(crate) fn set_on_adopted(
        &self,
        listener: &Socket,
        warnings: &mut Warnings,
    ) -> Result<(), SocketOptionError> {
        self.set_for_connection(&mut Setting { socket: listener, warnings: Some(warnings) })
    }

    /// Options of the listener itself, which its maker has set.
    pub(crate) fn warn_of_adopted(&self, addr: &Address, warnings: &mut Warnings) {
        let default = SocketOptions::default();
        let options = [
            ("backlog", self.backlog != default.backlog),
            ("fast_open", self.fast_open.is_some()),
            ("defer_accept", self.defer_accept.is_some()),
            ("incoming_cpu", self.incoming_cpu),
            ("unix_mode", self.unix_mode.is_some()),
        ];
        for (name, _) in options.into_iter().filter(|(_, is_set)| *is_set) {
            let text =
                format!("{name} has no effect on {addr}, which was adopted: set it where the socket is made");
            warnings.add(name, None, text);
        }
    }

    /// Sets the options that a connection inherits on a socket before it connects. The start warned
    /// of differences already.
    pub(crate) fn set_before_connect(&self, socket: &Socket) -> Result<(), SocketOptionError> {
        self.set_for_connection(&mut Setting { socket, warnings: None })
    }

    fn set_for_connection(&self, to: &mut Setting<'_>) -> Result<(), SocketOptionError> {
        let kernel = |_: &bool| Cause::Rounds("the kernel says so");
        to.set("no_delay", self.no_delay, |s, on| s.set_tcp_nodelay(*on), Socket::tcp_nodelay, kernel)?;
        if let Some(keep_alive) = self.keep_alive {
            set_keep_alive(to, keep_alive)?;
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
        self.set_buffers(to)?;
        self.set_congestion(to)
    }

    fn set_buffers(&self, to: &mut Setting<'_>) -> Result<(), SocketOptionError> {
        let cause = |wanted: u32, sysctl| {
            move |given: &u32| match *given < wanted {
                true => Cause::CutBy(sysctl),
                false => Cause::Rounds("the kernel takes no less"),
            }
        };
        // The kernel doubles the number and returns the double.
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

    fn set_handshake(&self, to: &mut Setting<'_>) -> Result<(), SocketOptionError> {
        if let Some(queue) = self.fast_open {
            let set = |socket: &Socket, queue: &u32| TcpOption::FastOpen.set(socket, *queue);
            let get = |socket: &Socket| TcpOption::FastOpen.get(socket);
            to.set("fast_open", queue, set, get, |_| Cause::CutBy("net.core.somaxconn"))?;
            let allowed = sysctl("net.ipv4.tcp_fastopen").and_then(|text| text.parse::<u32>().ok());
            if let Some(allowed) = allowed.filter(|bits| bits & 2 == 0) {
                let text = format!(
                    "fast_open {queue} has no effect: net.ipv4.tcp_fastopen is {allowed} and lacks the 2 that allows it \
                     for listeners; set it to {}",
                    allowed | 2
                );
                if let Some(warnings) = &mut to.warnings {
                    warnings.add("fast_open", None, text);
                }
            }
        }
        if let Some(time) = self.defer_accept {
            let set = |socket: &Socket, time: &Duration| {
                // Never less than the option asks for.
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

    fn set_congestion(&self, to: &mut Setting<'_>) -> Result<(), SocketOptionError> {
        let Some(name) = self.congestion.clone() else { return Ok(()) };
        let set = |socket: &Socket, name: &String| socket.set_tcp_congestion(name.as_bytes());
        let get = |socket: &Socket| {
            // The value comes with trailing zeroes.
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
    pub(crate) fn listen_backlog(&self) -> i32 {
        i32::try_from(self.backlog).unwrap_or(i32::MAX)
    }

    /// Warns of options that can be judged before there is a listener. `pinned` is true if the
    /// shards are.
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

    /// Warns of options that a Unix socket has but does not hand on.
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

    /// Unanswered probes after which `user_timeout` gives a silent peer up, if both are set. The
    /// kernel looks when the next probe is due.
    fn probes_in_time(&self) -> Option<u32> {
        let KeepAlive { idle, interval, .. } = self.keep_alive?;
        let left = self.user_timeout?.saturating_sub(idle).as_secs_f64();
        Some((left / interval.as_secs_f64()).ceil().max(1.0) as u32)
    }
}

fn set_keep_alive(to: &mut Setting<'_>, keep_alive: KeepAlive) -> Result<(), SocketOptionError> {
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

/// A setting of the kernel by its name, such as `net.core.somaxconn`.
fn sysctl(name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/sys/{}", name.replace('.', "/"))).ok()?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpStream};
    use std::os::unix::net::{UnixListener, UnixStream};

    use socket2::{Domain, SockRef, Type};

    use super::*;

    /// A listener with these options, a connection it accepted, and what was warned of.
    fn accepted(options: &SocketOptions) -> Result<(Socket, Socket, Vec<String>), SocketOptionError> {
        options.check()?;
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let mut warnings = Warnings::default();
        // Twice, as for two shards.
        options.set_on_tcp(&listener, None, &mut warnings)?;
        options.set_on_tcp(&listener, None, &mut warnings)?;
        listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        listener.listen(1).unwrap();
        let addr = listener.local_addr().unwrap().as_socket().unwrap();
        let client = TcpStream::connect(addr).unwrap();
        if options.defer_accept.is_some() {
            std::io::Write::write_all(&mut &client, b"x").unwrap();
        }
        let (socket, _) = listener.accept().unwrap();
        Ok((listener, socket, warnings.all().iter().map(ToString::to_string).collect()))
    }

    #[test]
    fn every_probe_has_its_time_by_default_and_fewer_are_noticed() {
        let of = |user_timeout: Option<u64>| {
            let user_timeout = user_timeout.map(Duration::from_secs);
            SocketOptions::default().user_timeout(user_timeout)
        };
        let probes = |user_timeout| of(user_timeout).probes_in_time();
        assert_eq!(SocketOptions::default().probes_in_time(), Some(KeepAlive::default().probes));
        assert_eq!([60, 120, 135, 136].map(|time| probes(Some(time))), [1, 1, 1, 2].map(Some));
        assert_eq!(probes(None), None);
        let mut warnings = Warnings::default();
        of(Some(60)).warn_beforehand(true, &mut warnings);
        SocketOptions::default().warn_beforehand(true, &mut warnings);
        let [warning] = &warnings.all()[..] else { panic!("one is warned of") };
        let text = "user_timeout 60s gives silent peers up after 1 lost probes, fewer than keep_alive.probes, which is 4";
        assert!(warning.to_string().starts_with(text), "{warning}");
        assert_eq!((warning.name(), warning.given()), ("user_timeout", None));
    }

    #[test]
    fn an_accepted_socket_has_the_options_of_its_listener() {
        let options = SocketOptions::default()
            .keep_alive(
                KeepAlive::default().idle(Duration::from_secs(77)).interval(Duration::from_secs(7)).probes(5),
            )
            .user_timeout(Duration::from_millis(7777))
            .not_sent_bytes_max(77_777)
            .send_buffer_bytes(33_333)
            .receive_buffer_bytes(44_444)
            .congestion("reno");
        let (_listener, socket, warnings) = accepted(&options).unwrap();
        assert_eq!(warnings, [""; 0]);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(77));
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(7));
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), 5);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_millis(7777)));
        assert_eq!(socket.tcp_notsent_lowat().unwrap(), 77_777);
        assert_eq!(socket.send_buffer_size().unwrap(), 66_666);
        assert_eq!(socket.recv_buffer_size().unwrap(), 88_888);
        assert!(socket.tcp_congestion().unwrap().starts_with(b"reno\0"));
    }

    #[test]
    fn an_accepted_unix_socket_has_the_buffers_of_the_system() {
        let path = std::env::temp_dir().join(format!("ringserve-buffers-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        SockRef::from(&listener).set_send_buffer_size(33_333).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let (socket, _) = listener.accept().unwrap();
        std::fs::remove_file(&path).unwrap();
        let bytes = SockRef::from(&socket).send_buffer_size().unwrap();
        assert_eq!(bytes, SockRef::from(&client).send_buffer_size().unwrap());
        assert_eq!(bytes.to_string(), sysctl("net.core.wmem_default").unwrap());
        let mut warnings = Warnings::default();
        SocketOptions::default().send_buffer_bytes(7).warn_of_unix(&mut warnings);
        let text = "send_buffer_bytes 7 has no effect on Unix sockets, which have net.core.wmem_default";
        assert_eq!(warnings.all()[0].to_string(), text);
    }

    #[test]
    fn options_of_the_handshake_are_the_listeners_alone() {
        let options = SocketOptions::default().fast_open(17).defer_accept(Duration::from_secs(7));
        let (listener, socket, _) = accepted(&options).unwrap();
        assert_eq!(TcpOption::FastOpen.get(&listener).unwrap(), 17);
        assert_eq!(TcpOption::DeferAccept.get(&listener).unwrap(), 7);
        let mut bytes = [0; 2];
        assert_eq!(
            std::io::Read::read(&mut &socket, &mut bytes).unwrap(),
            1,
            "its first byte was waited for"
        );
    }

    #[test]
    fn value_that_the_kernel_cuts_is_named_once_with_the_result() {
        let max = |name| sysctl(name).unwrap().parse::<u32>().unwrap();
        let (send, receive) = (max("net.core.wmem_max"), max("net.core.rmem_max"));
        let (queue, over) = (max("net.core.somaxconn"), 1 << 30);
        let keep_alive = Some(KeepAlive::default().idle(Duration::from_millis(77_500)));
        let options = SocketOptions::default()
            .keep_alive(keep_alive)
            .user_timeout(None)
            .send_buffer_bytes(over)
            .receive_buffer_bytes(over)
            .fast_open(over)
            .defer_accept(Duration::from_secs(5));
        let (_listener, socket, mut warnings) = accepted(&options).unwrap();
        assert_eq!(socket.send_buffer_size().unwrap(), 2 * send as usize);
        warnings.retain(|text| !text.contains("has no effect"));
        let more = "raise that to have more";
        let expected = [
            "keep_alive.idle 77.5s became 77s: the kernel counts whole seconds".to_owned(),
            format!("send_buffer_bytes {over} was cut to {send} by net.core.wmem_max; {more}"),
            format!("receive_buffer_bytes {over} was cut to {receive} by net.core.rmem_max; {more}"),
            format!("fast_open {over} was cut to {queue} by net.core.somaxconn; {more}"),
            "defer_accept 5s became 7s: the kernel counts repetitions of its answer, after 1 s, 3 s, 7 s and so on".into(),
        ];
        assert_eq!(warnings, expected);
        let options = SocketOptions::default().send_buffer_bytes(1);
        let (.., warnings) = accepted(&options).unwrap();
        let [text] = &warnings[..] else { panic!("{warnings:?}") };
        assert!(
            text.starts_with("send_buffer_bytes 1 became 2") && text.ends_with(": the kernel takes no less"),
            "{text}"
        );
    }

    #[test]
    fn unknown_congestion_control_is_refused_with_the_known_ones() {
        let options = SocketOptions::default().congestion("nonesuch");
        let error = accepted(&options).map(drop).unwrap_err();
        let known = sysctl("net.ipv4.tcp_available_congestion_control").unwrap();
        let text = format!(
            "the kernel refused SocketOptions::congestion = nonesuch: No such file or directory (os error 2); \
             net.ipv4.tcp_available_congestion_control has {known}"
        );
        assert_eq!((error.to_string(), error.name()), (text, "congestion"));
    }

    #[test]
    fn sockets_to_upstreams_notice_sooner_that_a_peer_vanished() {
        let seconds = Duration::from_secs;
        let read = |options: &SocketOptions| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            options.for_upstreams().set_before_connect(&socket).unwrap();
            let (idle, interval) = (socket.tcp_keepalive_time(), socket.tcp_keepalive_interval());
            let probes = socket.tcp_keepalive_retries().unwrap();
            (idle.unwrap(), interval.unwrap(), probes, socket.tcp_user_timeout().unwrap())
        };
        let default = SocketOptions::default();
        assert_eq!(read(&default), (seconds(15), seconds(5), 3, Some(seconds(30))));
        // What a program set stays.
        let own = KeepAlive::default().idle(seconds(7));
        let own = default.keep_alive(own).user_timeout(seconds(60));
        assert_eq!(read(&own), (seconds(7), seconds(15), 4, Some(seconds(60))));
    }
}
