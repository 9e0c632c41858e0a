//! Conditions that each connection must meet, judged by the state of the kernel and the peers.

use ringserve_core::{CloseHow, CloseReason, IdleActivity, ReadRateAction};

use super::State;
use crate::bytes::AnyFraming;
use crate::clocks::{LATE_MAX, STEP};
use crate::faults::Fault;
use crate::plan::NEVER;
use crate::sock::{Place, Sock, excuse};

/// The most by which the end of calls that wait too long may be late if the process is never
/// stopped: two other limits may be applied first, each in a step.
const HANDLER_LATE: u64 = LATE_MAX + 2 * STEP;

/// True if all replies are sent before such a connection is closed, with FIN.
fn is_orderly(reason: CloseReason) -> bool {
    use CloseReason::*;
    match reason {
        PeerClosed | PeerClosedMidFrame | BadFrame(_) | FirstFrameTimeout | IdleTimeout | ReadTooSlow
        | ReadTooFast | HeartbeatLost | HandlerTimeout | OpenTimeout | DeadlinePassed | Closed | Refused
        | HandlerError | ReplyNotFramed | Shutdown | UpstreamFailed => true,
        // There is no peer to which anything could be sent.
        ConnectFailed(_) | ConnectTimeout => false,
        PeerReset | WriteStallTimeout | WriteTooSlow | Aborted | HandlerPanicked | OutboxFull
        | MemoryLimit | DrainTimeout | ServerAborted | System(_) => false,
        other => panic!("unknown reason {other}"),
    }
}

impl State {
    /// Checks that the server has done everything possible before it blocks until `deadline`.
    pub(super) fn check_blocked(&mut self, deadline: u64) {
        for (_, tag) in self.ring.files.iter() {
            self.check_served(tag);
            if deadline == NEVER {
                self.check_timed(tag);
            }
        }
        let has_room = self.drain_deadline.is_none() && self.has_room;
        for (listener, accept) in self.listeners.iter_mut().zip(&self.ring.accepts) {
            assert!(
                listener.closing.is_none() || listener.gone || accept.is_some() || deadline != NEVER,
                "a listener that is to be closed is left with its queue, all sleep"
            );
            if accept.is_some() || listener.backlog.is_empty() || !has_room {
                listener.neglected = None;
                continue;
            }
            let (since, times) = listener.neglected.unwrap_or((self.now, 0));
            listener.neglected = Some((since, times + 1));
            let too_long = times > 3 && self.now - since > 250_000_000;
            assert!(!too_long, "connections wait in a backlog, there is room, and nothing is accepted");
        }
    }

    /// Checks that received and owed bytes wait only for the peer or a handler.
    fn check_served(&self, tag: usize) {
        let sock = &self.socks[tag];
        if !sock.opened || sock.ended.is_some() || sock.may(excuse::SILENT) {
            return;
        }
        // It ends as soon as that is judged, and is not checked otherwise before.
        if sock.deadline.is_some_and(|at| self.now + STEP >= at) {
            return;
        }
        if self.is_sending(tag) {
            return;
        }
        if sock.untold {
            let comes = self.ring.completions.quiet.iter().any(|sent| self.is_at(sent.id, tag));
            assert!(comes, "connection {tag}: a send is over and the shard was not told, all sleep");
            let ends = sock.may(excuse::CLOSED | excuse::FAILED | excuse::REFUSED | excuse::UNFRAMED);
            let paced = self.is_paced(tag, self.now);
            let ends = ends || (sock.fin_read && sock.waiting.is_empty() && !sock.held && !paced);
            let held_back = !self.calls_are_full(sock) && !paced && self.has_frame(sock);
            let depends = ends
                || sock.writing_ended
                || sock.wants_room > 0
                || held_back
                || self.drain_deadline.is_some();
            // A send that a full queue delayed was not waited for when it was made.
            let depends = depends && sock.sent_turn == self.turn;
            assert!(
                !depends,
                "connection {tag}: what depends on the end of a send waits, all sleep: {:#x}, wants room {}, fin {}",
                sock.excuses, sock.wants_room, sock.fin_read
            );
            return;
        }
        assert!(
            sock.owed.len() == sock.taken,
            "connection {tag}: replies are owed, nothing is sent, all sleep"
        );
        assert!(
            !sock.writing_ended || sock.fin_asked,
            "connection {tag}: everything left, and no FIN follows"
        );
        assert!(sock.wants_room == 0, "connection {tag}: a handler waits for room, and nothing is sent");
        if self.calls_are_full(sock) || self.is_paced(tag, self.now) {
            return;
        }
        let receiving = self.is_receiving(tag);
        let dry = self.ring.buffers.is_empty() && self.pool.available() == 0;
        // A peer that has sent FIN may still reset.
        assert!(
            receiving || sock.fin_read || !sock.is_readable() || dry || self.rests,
            "connection {tag}: bytes wait, nothing receives them, all sleep"
        );
        if dry || self.rests {
            return;
        }
        assert!(
            receiving || sock.fin_read,
            "connection {tag}: nothing is received, all sleep: seen {} of {}, {} arrived, {:?} at {}, {:?}",
            sock.seen,
            sock.frames.len(),
            sock.arrived,
            sock.pace,
            self.now,
            self.plan.limits
        );
        assert!(
            !self.has_frame(sock),
            "connection {tag}: a whole frame was received and not handed out, all sleep"
        );
        let answered = sock.waiting.is_empty();
        let stays = !answered || (sock.held && sock.input_end_notified);
        assert!(
            !sock.fin_read || stays,
            "connection {tag}: the peer closed, all is answered, and it stays open, held open {}",
            sock.held
        );
    }

    /// True if as many calls of a connection wait as may, also because memory is tight.
    pub fn calls_are_full(&self, sock: &Sock) -> bool {
        sock.calls_full
    }

    /// True if a whole frame reached the core and not the service.
    pub fn has_frame(&self, sock: &Sock) -> bool {
        match self.plan.framing {
            AnyFraming::Raw => sock.handed < sock.arrived,
            _ => sock.frames.get(sock.seen).is_some_and(|frame| frame.end <= sock.arrived),
        }
    }

    /// Checks the reason with which the shard reports the end of a connection.
    pub fn check_reason(&self, tag: usize, reason: CloseReason, now: u64) {
        use CloseReason::*;
        let (sock, limits) = (&self.socks[tag], self.plan.limits_of(self.socks[tag].upstream));
        // The stamps of a connection are rounded down by up to a step.
        let over = |from: u64, limit: Option<std::time::Duration>| {
            limit.is_some_and(|limit| now + STEP >= from + limit.as_nanos() as u64)
        };
        let whole = |sock: &Sock| sock.frames.iter().filter(|frame| frame.end <= sock.arrived).count();
        let all_seen = match self.plan.framing {
            AnyFraming::Raw => sock.handed == sock.arrived,
            _ => sock.seen == whole(sock),
        };
        let on_frame = match self.plan.framing {
            AnyFraming::Raw => true,
            _ => sock.arrived == sock.seen.checked_sub(1).map_or(0, |last| sock.frames[last].end),
        };
        let idle = sock.waiting.is_empty();
        // The state when the shard decided, which may be long ago: its last replies had to be sent
        // first.
        let framed = !matches!(self.plan.framing, AnyFraming::Raw);
        let half = framed && all_seen && !on_frame;
        let then = sock.clocks.sealed.unwrap_or_else(|| sock.sealed(now, half));
        let fine = match reason {
            // The service closed, and the peer before the end of the same turn.
            PeerClosed if sock.may(excuse::CLOSED | excuse::ABORTED | excuse::UNFRAMED) => sock.fin_read,
            PeerClosed => sock.fin_read && sock.arrived == sock.read && all_seen && on_frame && idle,
            PeerClosedMidFrame => {
                sock.fin_read && sock.arrived == sock.read && all_seen && !on_frame && idle && !sock.held
            }
            PeerReset => sock.may(excuse::RESET | excuse::SYSTEM) || sock.reset,
            BadFrame(_) => sock.may(excuse::GARBAGE) && sock.seen == sock.frames.len(),
            FirstFrameTimeout => sock.handed == 0 && over(sock.opened_at, limits.first_frame_timeout),
            // Every frame that had arrived was answered, and every reply had been sent if sent
            // bytes count.
            IdleTimeout => {
                let ends = limits.idle_timeout.map(|limit| then.used_at + limit.as_nanos() as u64);
                let over = ends.is_some_and(|ends| then.at + STEP >= ends);
                let owed = then.owed && limits.idle_counts != IdleActivity::Received;
                over && idle && !then.unseen && !owed && sock.taken == sock.owed.len()
            }
            WriteStallTimeout => {
                let since = sock.rate.untaken_since(sock.taken);
                let stalled = since.is_some_and(|since| over(since, limits.write_stall_timeout));
                stalled && over(sock.taken_at, limits.write_stall_timeout) && sock.taken < sock.owed.len()
            }
            WriteTooSlow => sock.rate.is_too_slow(limits, sock.taken, now) && sock.taken < sock.owed.len(),
            // A peer that has sent FIN cannot answer, and owes no bytes.
            HeartbeatLost => sock.clocks.heartbeat_is_lost(limits, now) && !then.ended,
            // Its time counters are rounded up by a nanosecond per frame.
            ReadTooFast => {
                let at = then.at.saturating_sub(1000);
                limits.when_read_too_fast == ReadRateAction::Close && then.pace.is_early(limits, at)
            }
            ReadTooSlow => then.half && sock.clocks.read_is_too_slow(limits, now) && !then.ended,
            OpenTimeout => over(sock.accepted_at, limits.open_timeout),
            DeadlinePassed => sock.deadline.is_some_and(|at| then.at + STEP >= at),
            HandlerTimeout => {
                let ends = self.handler_ends(then.waiting_since);
                let due = ends.max(sock.clocks.stopping_at);
                let late =
                    self.plan.rates.of(Fault::Stall) == 0 && then.at > due.saturating_add(HANDLER_LATE);
                then.waiting > 0 && limits.handler_timeout.is_some() && then.at + STEP >= ends && !late
            }
            Closed => sock.may(excuse::CLOSED) && !sock.input_end_notified,
            UpstreamFailed => sock.may(excuse::UPSTREAM),
            Aborted => sock.may(excuse::ABORTED),
            Refused => sock.may(excuse::REFUSED),
            HandlerError => sock.may(excuse::FAILED),
            HandlerPanicked => sock.may(excuse::PANICKED),
            ReplyNotFramed => sock.may(excuse::UNFRAMED),
            OutboxFull => sock.may(excuse::FULL),
            MemoryLimit => self.plan.tight_memory,
            ConnectFailed(errno) => sock.upstream && !sock.opened && errno != libc::ECANCELED,
            ConnectTimeout => sock.upstream && !sock.opened && self.connect_is_over(tag, now, STEP),
            // An outgoing connection closes when every accepted one has closed. Another shard may
            // pass one over after that.
            Shutdown if sock.upstream => {
                let stays = |other: &Sock| {
                    !other.upstream && other.opened && other.ended.is_none() && other.opened_at < then.at
                };
                self.drain_deadline.is_some() && !self.socks.iter().any(stays)
            }
            Shutdown => self.drain_deadline.is_some() && idle && !sock.held,
            DrainTimeout => self.drain_deadline.is_some_and(|deadline| now >= deadline),
            ServerAborted => self.aborted,
            System(_) => sock.may(excuse::SYSTEM),
            other => panic!("unknown reason {other}"),
        };
        assert!(
            fine,
            "connection {tag} ended as {reason}, which is not so: seen {} of {} frames, sent {} read {} arrived \
             {} handed {}, fin {} read {}, parked {:?} since {}, held {}, owed {} taken {}, active {} opened {} taken {} now {now}, \
             excuses {:#x}, {:?}",
            sock.seen,
            sock.frames.len(),
            sock.sent,
            sock.read,
            sock.arrived,
            sock.handed,
            sock.peer_fin,
            sock.fin_read,
            sock.waiting,
            sock.waiting_since,
            sock.held,
            sock.owed.len(),
            sock.taken,
            sock.active_at,
            sock.opened_at,
            sock.taken_at,
            sock.excuses,
            sock.clocks,
        );
    }

    /// Checks the close of a connection's place in the file table.
    pub(super) fn check_close(&self, tag: usize, how: CloseHow) {
        let sock = &self.socks[tag];
        let Some((ended, reason)) = sock.ended else {
            panic!("connection {tag} is closed before the service knows");
        };
        let cut_off = self.aborted || self.drain_deadline.is_some_and(|deadline| self.now >= deadline);
        let lingered = self.now + STEP >= ended + self.plan.limits.linger_timeout.as_nanos() as u64;
        match how {
            CloseHow::Orderly => {
                assert!(is_orderly(reason), "connection {tag} is closed with FIN after {reason}");
                assert!(
                    sock.fin_read || sock.reset || lingered || sock.may(excuse::SYSTEM),
                    "connection {tag} is closed while its peer may still send, after {reason}"
                );
            }
            CloseHow::Abort => {
                // A peer that still sends when its time to close is over is reset.
                let excused = sock.may(excuse::SYSTEM | excuse::RESET) || lingered;
                assert!(
                    !is_orderly(reason) || cut_off || !sock.opened || excused,
                    "connection {tag} is reset after {reason}"
                );
            }
        }
    }

    /// Checks the end of the stream, which a peer read after everything before it.
    pub(crate) fn saw_eof(&mut self, tag: usize) {
        self.log(|| format!("peer {tag} reads the end"));
        let sock = &self.socks[tag];
        if sock.may(excuse::NOT_INSTALLED) {
            return;
        }
        assert_eq!(
            sock.delivered,
            sock.owed.len(),
            "connection {tag} ended in an orderly way ({:?}) and its peer did not get all replies",
            sock.ended
        );
        match sock.ended {
            Some((_, reason)) => {
                let orderly = is_orderly(reason) || sock.writing_ended;
                assert!(orderly, "connection {tag} ended in order after {reason}")
            }
            None => assert!(
                !sock.opened || sock.writing_ended,
                "connection {tag} ended for its peer and not for the service"
            ),
        }
    }

    /// Checks a reset of a peer that did not reset itself.
    pub(crate) fn saw_reset(&mut self, tag: usize) {
        self.log(|| format!("peer {tag} is reset"));
        let sock = &self.socks[tag];
        let known = sock.ended.is_some() || sock.place != Place::Table;
        assert!(known, "connection {tag} was reset for no reason");
        // A peer whose connection a drain ended in order also has its time to read everything and
        // to close.
        if let Some((ended, CloseReason::Shutdown)) = sock.ended {
            let lingers = ended + self.plan.limits.linger_timeout.as_nanos() as u64;
            let cut_off = self.aborted || self.drain_deadline.is_some_and(|deadline| self.now >= deadline);
            let excuses = excuse::RESET | excuse::SYSTEM | excuse::SILENT;
            let excused = !sock.opened || sock.may(excuses) || cut_off;
            assert!(excused || self.now + STEP >= lingers, "connection {tag} was reset by the drain");
        }
    }
}
