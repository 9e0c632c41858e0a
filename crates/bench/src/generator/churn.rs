//! Connections made for one round trip each: connect, send, receive, close.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use socket2::{Domain, Socket, Type};

use super::{LOOK, Outcome, Phase, Plan, REPLY_MAX, Shared, cpu_time};
use crate::process;
use crate::steps::{Messages, first_difference};
use crate::wire::Wire;

/// Loopback addresses from which connections come in turn. A port of each is not free again for a
/// minute after a connection, so there must be enough of them for all connections of a minute.
const SOURCES: u32 = 250;

/// One round trip in progress.
pub(super) struct Trip {
    stream: Wire<TcpStream>,
    began: Instant,
    sent: usize,
    received: usize,
}

impl Trip {
    /// Begins to connect, from the source whose turn it is after `made` connections.
    pub(super) fn begin(plan: &Plan, made: u32, poll: &Poll, token: Token) -> io::Result<Trip> {
        let began = Instant::now();
        let mut stream = TcpStream::from_std(connect(plan.address, made)?);
        poll.registry().register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Trip { stream: Wire::new(stream, plan.shape.layer)?, began, sent: 0, received: 0 })
    }

    /// Sends and receives as much as it can; `scratch` has the size of a reply. Returns the
    /// nanoseconds that it took once the reply has arrived.
    pub(super) fn go_on(&mut self, message: &Messages, scratch: &mut [u8]) -> io::Result<Option<u64>> {
        while self.sent < message.sent().len() {
            match self.stream.write(&message.sent()[self.sent..]) {
                Ok(count) => self.sent += count,
                // Not connected or accepted yet, or nothing more fits.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        while self.received < scratch.len() {
            let space = &mut scratch[self.received..];
            match self.stream.read(space) {
                Ok(0) => return Err(io::Error::other("the server closed a connection before its reply")),
                Ok(count) => {
                    if first_difference(&message.replies()[self.received..][..count], &space[..count])
                        .is_some()
                    {
                        return Err(io::Error::other("a reply is not what was sent"));
                    }
                    self.received += count;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let took = self.began.elapsed().as_nanos() as u64;
        self.stream.announce_end()?;
        Ok(Some(took.max(1)))
    }

    /// Returns an error if its reply is overdue.
    pub(super) fn check_silence(&self) -> io::Result<()> {
        if self.began.elapsed() <= REPLY_MAX {
            return Ok(());
        }
        let bound = REPLY_MAX.as_secs();
        Err(io::Error::other(format!("a connection has no whole reply within {bound} s")))
    }
}

struct Thread<'a> {
    plan: &'a Plan,
    poll: Poll,
    trips: Vec<Option<Trip>>,
    message: Messages,
    scratch: Vec<u8>,
    /// Connections made so far, which determine the next one's source.
    made: u32,
    outcome: Outcome,
}

pub(super) fn one_thread(
    plan: &Plan,
    number: usize,
    shared: &Shared,
    connected: &Barrier,
) -> io::Result<Outcome> {
    let threads = plan.cpus.len();
    let at_once = plan.connections * (number + 1) / threads - plan.connections * number / threads;
    let made = process::pin_to(plan.cpus[number]).and_then(|()| Poll::new());
    connected.wait();
    let mut thread = Thread {
        plan,
        poll: made?,
        trips: (0..at_once).map(|_| None).collect(),
        scratch: vec![0; plan.shape.reply_bytes()],
        message: plan.shape.messages(),
        // Threads begin at different sources.
        made: SOURCES * number as u32 / threads as u32,
        outcome: Outcome::new(),
    };
    thread.run(number, shared)?;
    Ok(thread.outcome)
}

impl Thread<'_> {
    fn run(&mut self, number: usize, shared: &Shared) -> io::Result<()> {
        for slot in 0..self.trips.len() {
            self.begin(slot)?;
        }
        let mut events = Events::with_capacity(1024);
        let (mut answered, mut measured) = (0, None);
        while shared.phase() != Phase::Over as u8 {
            if measured.is_none() && shared.phase() == Phase::Measured as u8 {
                self.outcome.latency.reset();
                measured = Some((cpu_time(), Instant::now()));
            }
            match self.poll.poll(&mut events, Some(LOOK)) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            for event in &events {
                if self.go_on(event.token().0)? {
                    answered += 1;
                }
            }
            shared.answered[number].store(answered, Ordering::Relaxed);
            if events.is_empty() {
                self.check_silence()?;
            }
        }
        if let Some((cpu, since)) = measured {
            self.outcome.busy = (cpu_time() - cpu).as_secs_f64() / since.elapsed().as_secs_f64();
        }
        Ok(())
    }

    fn begin(&mut self, slot: usize) -> io::Result<()> {
        self.trips[slot] = Some(Trip::begin(self.plan, self.made, &self.poll, Token(slot))?);
        self.made = self.made.wrapping_add(1);
        Ok(())
    }

    /// True if that was the end of a round trip; then the next one began.
    fn go_on(&mut self, slot: usize) -> io::Result<bool> {
        let Some(trip) = &mut self.trips[slot] else { return Ok(false) };
        let Some(took) = trip.go_on(&self.message, &mut self.scratch)? else { return Ok(false) };
        self.outcome.latency.saturating_record(took);
        // Closing removes it from the poll.
        self.trips[slot] = None;
        self.begin(slot)?;
        Ok(true)
    }

    fn check_silence(&self) -> io::Result<()> {
        self.trips.iter().flatten().try_for_each(Trip::check_silence)
    }
}

/// Begins to connect.
fn connect(address: SocketAddr, made: u32) -> io::Result<std::net::TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if let IpAddr::V4(ip) = address.ip()
        && ip.is_loopback()
    {
        let source = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 0, 2, 1)) + made % SOURCES);
        socket.bind(&SocketAddr::from((source, 0)).into())?;
    }
    socket.set_tcp_nodelay(true)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket.into()),
    }
}
