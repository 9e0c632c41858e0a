//! A stall, as it is reported: which shard, since when, what it works on, and what it waits for.

use std::fmt;
use std::time::Duration;

use ringserve_core::{Address, ConnId};

/// A time in which a shard did not get on: for longer than
/// [`StallOptions`](crate::limits::StallOptions) allows it was in one turn of its loop, so no other
/// connection of the shard was served.
///
/// [`ServerControl::stalls`](crate::ServerControl::stalls) has the last ones, those that still last
/// among them. Its text is the line of the log:
///
/// ```text
/// shard 0 stalled for 740 ms: a call for 10.1.2.3:5511 (connection 17.3, frame of 212 bytes) waits for a lock (futex_do_wait);
/// 311 connections wait in its accept queue, 0 packets lost there
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stall {
    /// Which shard.
    pub shard: usize,
    /// The time since its turn began.
    pub ago: Duration,
    /// The duration of the stall, or so far if it lasts. Time for which the whole process was
    /// stopped is not in it.
    pub lasted: Duration,
    /// It is not over.
    pub ongoing: bool,
    /// The work of the shard when it was looked at last.
    pub work: StalledWork,
    /// The peer of the connection, if the work is one's and the peer has an address.
    pub peer: Option<Address>,
    /// The connection, if the work is one's.
    pub connection: Option<ConnId>,
    /// Bytes of the frame that the call is for, header and end included. `None` if no frame is
    /// known: before the first one of a batch is cut, and for a call that went on after it had
    /// waited.
    pub frame_bytes: Option<usize>,
    /// The work changed while it lasted: many short pieces in one turn, of which `work` and what is
    /// with it are the last.
    pub several: bool,
    /// The cause that took most of the time.
    pub cause: StallCause,
    /// The function of the kernel in which the thread sleeps, by name (`futex_do_wait`). `None` if
    /// it runs, or the kernel does not show it.
    pub waits_in: Option<String>,
    /// Connections that wait in the shard's accept queues; `None` if the shard has none on TCP.
    pub queue_waiting: Option<u32>,
    /// Packets that those queues lost while the stall lasted; `None` as for `queue_waiting`, and
    /// before Linux 4.12.
    pub queue_lost: Option<u64>,
}

/// The activity on which a stalled shard spends its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StallCause {
    /// It computes.
    Cpu,
    /// It waits for a lock, a condition or a channel of threads.
    Lock,
    /// It is in a blocking call that reads from a descriptor or polls one: a pipe, a socket, a
    /// file.
    Read,
    /// It sleeps for a time.
    Sleep,
    /// It could run, and has no CPU: others have it, or a quota is used up.
    Starved,
    /// Something else, or `/proc` does not tell.
    Other,
}

impl StallCause {
    /// All of them.
    pub const ALL: [StallCause; 6] = [
        StallCause::Cpu,
        StallCause::Lock,
        StallCause::Read,
        StallCause::Sleep,
        StallCause::Starved,
        StallCause::Other,
    ];

    /// One lower-case word, as metrics have it.
    pub fn as_str(self) -> &'static str {
        match self {
            StallCause::Cpu => "cpu",
            StallCause::Lock => "lock",
            StallCause::Read => "read",
            StallCause::Sleep => "sleep",
            StallCause::Starved => "starved",
            StallCause::Other => "other",
        }
    }

    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

/// The shard's activity, as a sentence has it.
impl fmt::Display for StallCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StallCause::Cpu => "computes",
            StallCause::Lock => "waits for a lock, a condition or a channel",
            StallCause::Read => "waits in a blocking read of a pipe, socket or file",
            StallCause::Sleep => "sleeps",
            StallCause::Starved => "could run, and has no CPU",
            StallCause::Other => "waits",
        })
    }
}

/// The work of a stalled shard: which code of the program runs, if it is the program's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StalledWork {
    /// [`Service::call`](crate::Service::call), and the framing that cuts its frames.
    Call,
    /// The shard itself.
    Framework,
    /// [`Service::open`](crate::Service::open).
    Open,
    /// [`Service::close`](crate::Service::close), and the drop of the session.
    Close,
    /// The program's [`admit`](crate::Server::admit).
    Admit,
    /// [`Service::heartbeat`](crate::Service::heartbeat).
    Heartbeat,
    /// Another method of the service: `draining`, `input_ended`, `failed`.
    Hook,
    /// The handler of a message of another shard or thread, or a frame that one pushed.
    Message,
    /// A task of the shard, or the reader of an upstream.
    Task,
    /// A waker that is no task's of the shard.
    Waker,
    /// The transport of a connection: a handshake of TLS, or the encryption of what is sent and
    /// received.
    Transport,
    /// A task of the runtime inside which the shard runs
    /// ([`Server::runtime`](crate::Server::runtime)).
    Runtime,
}

impl StalledWork {
    /// All of them, by the number with which a shard notes them: four bits. The first is zero, so
    /// that the word of a call is the connection's id.
    const ALL: [StalledWork; 12] = [
        StalledWork::Call,
        StalledWork::Framework,
        StalledWork::Open,
        StalledWork::Close,
        StalledWork::Admit,
        StalledWork::Heartbeat,
        StalledWork::Hook,
        StalledWork::Message,
        StalledWork::Task,
        StalledWork::Waker,
        StalledWork::Transport,
        StalledWork::Runtime,
    ];

    pub(crate) const fn number(self) -> u64 {
        self as u64
    }

    pub(crate) fn of_number(number: u64) -> StalledWork {
        StalledWork::ALL.get(number as usize).copied().unwrap_or(StalledWork::Framework)
    }

    /// One lower-case word.
    pub fn as_str(self) -> &'static str {
        match self {
            StalledWork::Framework => "framework",
            StalledWork::Call => "call",
            StalledWork::Open => "open",
            StalledWork::Close => "close",
            StalledWork::Admit => "admit",
            StalledWork::Heartbeat => "heartbeat",
            StalledWork::Hook => "hook",
            StalledWork::Message => "message",
            StalledWork::Task => "task",
            StalledWork::Waker => "waker",
            StalledWork::Transport => "transport",
            StalledWork::Runtime => "runtime",
        }
    }
}

/// The same as the subject of a sentence.
impl fmt::Display for StalledWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StalledWork::Framework => "the shard itself",
            StalledWork::Call => "a call",
            StalledWork::Open => "open",
            StalledWork::Close => "close",
            StalledWork::Admit => "admit",
            StalledWork::Heartbeat => "heartbeat",
            StalledWork::Hook => "a hook of the service",
            StalledWork::Message => "the handler of a message",
            StalledWork::Task => "a task",
            StalledWork::Waker => "a waker",
            StalledWork::Transport => "the transport",
            StalledWork::Runtime => "a task of its runtime",
        })
    }
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stall { shard, lasted, ongoing, work, cause, .. } = self;
        write!(
            f,
            "shard {shard} {} for {}: ",
            if *ongoing { "stalled" } else { "was stalled" },
            Rounded(*lasted)
        )?;
        if self.several {
            f.write_str("much work in one turn, last ")?;
        }
        write!(f, "{work}")?;
        if let Some(peer) = &self.peer {
            write!(f, " for {peer}")?;
        }
        let connection = self.connection.map(|id| format!("connection {id}"));
        let frame = self.frame_bytes.map(|bytes| format!("frame of {bytes} bytes"));
        let details: Vec<String> = connection.into_iter().chain(frame).collect();
        if !details.is_empty() {
            write!(f, " ({})", details.join(", "))?;
        }
        write!(f, " {cause}")?;
        if let Some(waits_in) = &self.waits_in {
            write!(f, " ({waits_in})")?;
        }
        if let Some(waiting) = self.queue_waiting {
            write!(f, "; {waiting} connections wait in its accept queue")?;
            if let Some(lost) = self.queue_lost {
                write!(f, ", {lost} packets lost there")?;
            }
        }
        Ok(())
    }
}

/// A time as a line of the log has it: milliseconds below ten seconds, then tenths of a second.
struct Rounded(Duration);

impl fmt::Display for Rounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 < Duration::from_secs(10) {
            true => write!(f, "{} ms", self.0.as_millis()),
            false => write!(f, "{:.1} s", self.0.as_secs_f64()),
        }
    }
}

/// The time that a shard's thread spent in each state.
///
/// A shard waits in its driver alone, so the time for which its thread runs is the time for which
/// it is busy. The kernel counts that at its ticks, up to 10 ms apart, for a thread that keeps its
/// CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ShardTimes {
    /// Which shard.
    pub shard: usize,
    /// Time for which the thread ran, since it started.
    pub cpu: Duration,
    /// Time for which it could have run, and others had the CPU.
    pub cpu_wait: Duration,
    /// The share of the last second for which it ran: 0 to 1. Of the time since the last look, if
    /// that is longer ago.
    pub busy: f64,
    /// The share for which it could have run, and others had the CPU.
    pub starved: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stall() -> Stall {
        Stall {
            shard: 3,
            ago: Duration::from_millis(800),
            lasted: Duration::from_millis(740),
            ongoing: true,
            work: StalledWork::Call,
            peer: Some(Address::Ip("10.1.2.3:5511".parse().unwrap())),
            connection: Some(ConnId::new(17, 3)),
            frame_bytes: Some(212),
            several: false,
            cause: StallCause::Lock,
            waits_in: Some("futex_do_wait".to_owned()),
            queue_waiting: Some(311),
            queue_lost: Some(0),
        }
    }

    #[test]
    fn line_names_shard_work_peer_cause_and_queue() {
        assert_eq!(
            stall().to_string(),
            "shard 3 stalled for 740 ms: a call for 10.1.2.3:5511 (connection 17.3, frame of 212 bytes) waits for a lock, \
             a condition or a channel (futex_do_wait); 311 connections wait in its accept queue, 0 packets lost there"
        );
    }

    #[test]
    fn line_leaves_out_what_is_not_known() {
        let stall = Stall {
            lasted: Duration::from_millis(61_540),
            ongoing: false,
            work: StalledWork::Waker,
            peer: None,
            connection: None,
            frame_bytes: None,
            several: true,
            cause: StallCause::Cpu,
            waits_in: None,
            queue_waiting: None,
            queue_lost: None,
            ..stall()
        };
        assert_eq!(
            stall.to_string(),
            "shard 3 was stalled for 61.5 s: much work in one turn, last a waker computes"
        );
    }

    #[test]
    fn each_work_and_cause_is_found_by_its_number() {
        for work in StalledWork::ALL {
            assert_eq!(StalledWork::of_number(work.number()), work);
        }
        assert_eq!(StalledWork::of_number(15), StalledWork::Framework);
        for (index, cause) in StallCause::ALL.into_iter().enumerate() {
            assert_eq!(cause.index(), index);
        }
    }
}
