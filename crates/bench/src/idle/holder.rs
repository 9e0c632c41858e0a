//! A process that holds connections for `idle`, as the child of the one that measures.
//!
//! It reads a command from each line of its input, and answers with numbers, one per line:
//!
//! * `hold N`: open connections until there are N. The numbers are the connections so far, the last
//!   one is N.
//! * `check`: one more round trip on each. The numbers are the answers so far, the last one is all.
//!
//! The first number, 0, reports that it runs. `failed WHY` ends it, and so does the end of its
//! input.

use std::io::{self, BufRead, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::split::Sources;
use crate::steps::{REPLY_MAX, Shape, expect_reply};
use crate::wire::{Layer, Wire};

/// Connections on which bytes are sent before the first of them is read. Enough to wake both sides
/// rarely, and few enough that the server receives them into the memory that it has anyway.
const BATCH: usize = 32;

/// Batches between two numbers.
const BATCHES_TOLD: usize = 16;

/// The most bytes of a line of `check`.
const CHECK_BYTES: usize = 64;

/// The plan of a holder.
pub(crate) struct Plan {
    pub(crate) server: SocketAddr,
    pub(crate) sources: Sources,
    /// Bytes of the line that each connection exchanges after it was opened.
    pub(crate) bytes: usize,
    pub(crate) layer: Layer,
    /// Number of the first connection among those of all holders.
    pub(crate) first: usize,
}

struct Holder {
    plan: Plan,
    streams: Vec<Wire<TcpStream>>,
    reply: Vec<u8>,
}

/// Holds until the input ends. Failures are reported on the output.
pub(crate) fn run(plan: Plan) -> io::Result<()> {
    let mut holder = Holder { plan, streams: Vec::new(), reply: Vec::new() };
    match holder.apply_orders() {
        Ok(()) => Ok(()),
        Err(error) => tell(&format!("failed {error}")),
    }
}

impl Holder {
    fn apply_orders(&mut self) -> io::Result<()> {
        tell("0")?;
        for line in io::stdin().lock().lines() {
            let line = line?;
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("hold", count) => self.hold(count.parse().map_err(io::Error::other)?)?,
                ("check", "") => self.check()?,
                _ => return Err(io::Error::other(format!("{line:?} is no command"))),
            }
        }
        Ok(())
    }

    /// Opens connections until there are `count`, and exchanges a line on each.
    fn hold(&mut self, count: usize) -> io::Result<()> {
        let shape = Shape { bytes: self.plan.bytes, pipeline: 1, lines: true, layer: self.plan.layer };
        self.streams.reserve_exact(count.saturating_sub(self.streams.len()));
        self.in_batches(self.streams.len(), count, |holder, from, to| {
            for number in from..to {
                let stream = Wire::new(holder.connect(number)?, shape.layer)?;
                holder.streams.push(stream);
            }
            holder.exchange(shape, from, to)
        })
    }

    fn check(&mut self) -> io::Result<()> {
        let bytes = self.plan.bytes.min(CHECK_BYTES);
        let shape = Shape { bytes, pipeline: 1, lines: true, layer: self.plan.layer };
        self.in_batches(0, self.streams.len(), |holder, from, to| holder.exchange(shape, from, to))
    }

    /// Does `work` for all connections from `from` on and reports its progress.
    fn in_batches(
        &mut self,
        from: usize,
        to: usize,
        mut work: impl FnMut(&mut Holder, usize, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        for (batches, from) in (from..to).step_by(BATCH).enumerate() {
            if batches % BATCHES_TOLD == 0 && batches > 0 {
                tell(&from.to_string())?;
            }
            work(self, from, to.min(from + BATCH))?;
        }
        tell(&to.to_string())
    }

    /// Sends a line on each connection, then waits for them.
    fn exchange(&mut self, shape: Shape, from: usize, to: usize) -> io::Result<()> {
        let mut line = shape.messages();
        for number in from..to {
            line.sign(self.plan.first + number);
            self.streams[number]
                .write_all(line.sent())
                .map_err(|error| self.named(number, "send", &error))?;
        }
        for number in from..to {
            line.sign(self.plan.first + number);
            expect_reply(&mut self.streams[number], line.replies(), &mut self.reply)
                .map_err(|error| self.named(number, "reply", &error))?;
        }
        Ok(())
    }

    fn connect(&self, number: usize) -> io::Result<TcpStream> {
        let source = self.plan.sources.address(number);
        let connect = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
            choose_port_late(&socket)?;
            socket.bind(&SocketAddr::from((source, 0)).into())?;
            socket.set_tcp_nodelay(true)?;
            socket.set_read_timeout(Some(REPLY_MAX))?;
            // It also limits the connect.
            socket.set_write_timeout(Some(REPLY_MAX))?;
            // However this process ends, its ports are free at once.
            socket.set_linger(Some(Duration::ZERO))?;
            socket.connect(&self.plan.server.into())?;
            Ok(TcpStream::from(socket))
        };
        connect().map_err(|error: io::Error| {
            let (number, server) = (self.plan.first + number, self.plan.server);
            io::Error::new(
                error.kind(),
                format!("connection {number}, {source} to {server}: {}", explained(&error)),
            )
        })
    }

    /// Adds connection `number` to `error`.
    fn named(&self, number: usize, what: &str, error: &io::Error) -> io::Error {
        let source = self.streams[number]
            .socket()
            .local_addr()
            .map_or_else(|_| "?".to_owned(), |addr| addr.to_string());
        let (number, server) = (self.plan.first + number, self.plan.server);
        io::Error::other(format!("connection {number}, {source} to {server}: {what}: {error}"))
    }
}

/// Writes a line at once.
fn tell(line: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

/// Explains a failed connect.
fn explained(error: &io::Error) -> String {
    let cause = match error.raw_os_error() {
        Some(libc::EADDRNOTAVAIL) => "no port of this address is free; widen net.ipv4.ip_local_port_range",
        Some(libc::EMFILE) => "no descriptor is left in the process that holds it; lower --per-process",
        Some(libc::ENFILE) => "fs.file-max is reached, which counts both ends of each connection; raise it",
        Some(libc::EINPROGRESS | libc::ETIMEDOUT) => "the server does not accept; its backlog is full",
        Some(libc::ENOMEM | libc::ENOBUFS) => {
            "the kernel has no memory left, or none that net.ipv4.tcp_mem allows"
        }
        _ => return error.to_string(),
    };
    format!("{error}: {cause}")
}

/// Leaves the choice of the port to the connect, which knows the whole pair of addresses: then a
/// port serves many sources, and other programs find theirs free.
fn choose_port_late(socket: &Socket) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the kernel only reads the four bytes of `on`, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_BIND_ADDRESS_NO_PORT,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
