//! Conditions that hold after every turn.

use super::Shard;
use super::receive::{KEPT_FOR_A_MOMENT, KEPT_FOR_LONG};
use crate::connection::{Conn, Flight, Inbox, OpenState, Outlet, Own, QueueFlags, State, Write, describe};
use crate::tables::class_of;
use crate::{ConnId, Observer};

/// Sums over all connections, each with the sum that is kept elsewhere.
#[derive(Default)]
struct Sums {
    held_bytes: usize,
    returning_bytes: usize,
    /// Bytes in receive buffers, and those of them that wait for readers.
    kept: usize,
    kept_for_long: usize,
    /// Connections in the lists of holders.
    listed: usize,
    starting: usize,
    channels: usize,
    working: u64,
    deadlines: usize,
}

impl<O: Observer> Shard<O> {
    /// Panics if anything contradicts itself. Linear in the number of connections, so debug builds
    /// call it only while there are few; tests call it as they like.
    pub(super) fn invariants(&self) {
        if self.conns.used() <= 64 {
            self.check();
        }
    }

    /// Panics if a turn would skip rare work.
    fn check_marks(&self) {
        let has_more = self.had_more || self.has_pages;
        let is_calm = self.drain.is_none() && !self.accepting.has_starts() && !has_more;
        assert!(self.begins_aside || is_calm, "a turn would not see what it begins with");
        assert!(self.accepting.is_timed() || self.accepting.is_settled(), "accepting would rest for ever");
        assert!(self.shared.has_asked() || !self.shared.asks(), "what is asked would not be looked at");
    }

    /// Panics if anything contradicts itself.
    pub fn check(&self) {
        self.conns.invariants();
        self.wheel.invariants();
        let mut sums = Sums::default();
        for id in (0..self.conns.used()).filter_map(|index| self.conns.id_at(index)) {
            if let Some(conn) = self.conns.get(id) {
                self.check_stage(id, conn);
                self.check_input(id, conn, &mut sums);
                self.check_memory(id, conn, &mut sums);
                sums.starting += usize::from(conn.is_starting() && !self.lanes[conn.lane].is_outbound);
                sums.working += u64::from(conn.queued.is_in(QueueFlags::WORKING));
                sums.deadlines += usize::from(conn.own.has(Own::DEADLINE));
            }
        }
        self.check_sums(&sums);
        self.check_marks();
    }

    /// Panics if a connection is in an impossible stage.
    fn check_stage(&self, id: ConnId, conn: &Conn) {
        let text = || describe(id, conn);
        assert_eq!(conn.shared.is_none(), conn.state == State::Closing, "{}", text());
        assert_eq!(conn.reason.is_some(), conn.state == State::Draining, "{}", text());
        let connecting = conn.connect.is_on();
        if connecting {
            let is_new = conn.write == Write::Open && conn.opened == OpenState::No;
            assert!(!conn.receive.is_on() && !conn.send.is_on() && is_new, "{}", text());
            let stopping = conn.connect == Flight::Stopping;
            assert_eq!(stopping, conn.state == State::Closing, "{}", text());
        }
        if conn.is_opening() && conn.state != State::Closing {
            assert!(conn.calls == 1 && !conn.frame_seen && conn.connect == Flight::None, "{}", text());
        }
        let in_flight =
            connecting || conn.receive.is_on() || conn.send.is_on() || conn.write == Write::ShuttingDown;
        if conn.close_sent {
            assert!(!in_flight && conn.state == State::Closing, "{}", text());
        }
        if conn.state == State::Closing && !conn.close_sent {
            assert!(in_flight || conn.lingering, "stuck: {}", text());
        }
        if conn.state == State::Draining {
            assert!(conn.send.is_on(), "stuck: {}", text());
        }
        if conn.wants_receive() {
            assert!(conn.receive.is_on(), "not receiving: {}", text());
        }
    }

    /// Panics if received bytes of a connection wait for nothing. Adds what is kept of it.
    fn check_input(&self, id: ConnId, conn: &Conn, sums: &mut Sums) {
        let text = || describe(id, conn);
        let resumes = conn.inbox.as_ref().is_some_and(|inbox| inbox.resumes.is_some());
        assert!(!conn.is_too_fast() || !conn.is_open() || resumes, "held back for ever: {}", text());
        let Some(inbox) = &conn.inbox else { return };
        assert!(conn.is_open(), "input is kept: {}", text());
        sums.held_bytes += inbox.held_bytes();
        let bytes = inbox.kept_bytes();
        sums.kept += bytes;
        // The others may have been held back when it came.
        sums.kept_for_long += if conn.outlet().is_some_and(Outlet::reads_on) { bytes } else { 0 };
        let moves = conn.has_handler()
            || conn.is_starting()
            || conn.is_held_back()
            || conn.is_too_fast()
            || conn.queued.is_in(QueueFlags::RUNNABLE)
            || inbox.waiting_bytes() == 0;
        assert!(moves, "frames wait for nothing: {}", text());
    }

    /// Panics if a connection holds memory for nothing, or is not in the list for what it holds.
    /// Adds what it holds.
    fn check_memory(&self, id: ConnId, conn: &Conn, sums: &mut Sums) {
        let (text, index) = (|| describe(id, conn), id.slot());
        if conn.has_channel() && conn.state != State::Closing {
            // A channel that panicked is gone.
            sums.channels += usize::from(self.shared.channels().has(id));
            sums.held_bytes += self.check_channel(id, conn);
        }
        sums.held_bytes +=
            conn.outlet().map_or(0, |outlet| outlet.outbox_bytes()) + self.holders.room_of(index);
        let returning = self.holders.returning(index);
        let comes_back = returning == 0 || conn.send.is_on() || conn.receive.is_on();
        assert!(comes_back, "never comes back: {}", text());
        sums.returning_bytes += returning;
        let calls = self.holders.call_bytes_of(index);
        assert!(calls == 0 || conn.has_handler(), "calls that are done hold memory: {}", text());
        sums.held_bytes += calls;
        let class = self.holders.class(index);
        sums.listed += usize::from(class > 0);
        assert!(class == 0 || conn.shared.is_some(), "listed, and holds nothing: {}", text());
        let is_old = |inbox: &&Inbox| !inbox.is_mid_frame() || self.is_old(inbox.partial_began);
        let old = conn.inbox.as_deref().filter(is_old);
        let keeps = calls + old.map_or(0, Inbox::held_bytes);
        assert!(class_of(keeps) <= class, "holds {keeps} bytes and is in list {class}: {}", text());
        sums.held_bytes += conn.outlet().map_or(0, |outlet| outlet.service_bytes());
    }

    /// Panics if the sums over all connections differ from those that are kept.
    fn check_sums(&self, sums: &Sums) {
        // Bytes received before the bound was lowered stay as long as they are needed.
        let before = self.pool.buffers_max() * self.limits.receive_buffer_bytes;
        let most = self.limits.receive_bytes_max.max(before);
        let (kept, kept_for_long) = (sums.kept, sums.kept_for_long);
        assert!(kept * KEPT_FOR_A_MOMENT <= most, "{kept} of {most} bytes wait in receive buffers");
        let is_within = kept_for_long * KEPT_FOR_LONG <= most;
        assert!(is_within, "{kept_for_long} of {most} bytes wait there for readers");
        self.check_newcomers(sums.starting);
        self.check_channels(sums.channels, sums.working);
        let queued = self.runnable.len() + self.served.len() + self.channels.queue_len();
        assert_eq!(self.later, queued, "what is left for later");
        assert_eq!(sums.deadlines, self.shared.deadlines().len(), "deadlines of connections that are there");
        self.lanes.invariants(self.conns.len());
        assert_eq!(sums.held_bytes, self.held_bytes(), "bytes held");
        assert_eq!(sums.returning_bytes, self.shared.returning_bytes(), "bytes on their way back");
        assert_eq!(sums.listed, self.holders.invariants(), "slots that are free are listed");
    }
}
