//! Conditions that hold after every turn.

use super::Shard;
use super::receive::{KEPT_FOR_A_MOMENT, KEPT_FOR_LONG};
use crate::Observer;
use crate::connection::{Flight, Opened, Outlet, Own, Queued, State, Write, describe};
use crate::tables::class_of;

impl<O: Observer> Shard<O> {
    /// Panics if anything contradicts itself. Linear in the number of connections, so debug builds call it only
    /// while there are few; tests call it as they like.
    pub(super) fn invariants(&self) {
        if self.conns.used() <= 64 {
            self.check();
        }
    }

    /// Panics if a turn would pass by what it has to do seldom.
    fn check_marks(&self) {
        let is_calm = self.drain.is_none() && !self.accepting.has_starts() && !self.had_more;
        assert!(self.begins_aside || is_calm, "a turn would not see what it begins with");
        assert!(self.accepting.is_timed() || self.accepting.is_settled(), "accepting would rest for ever");
        assert!(self.shared.has_asked() || !self.shared.asks(), "what is asked would not be looked at");
    }

    /// Panics if anything contradicts itself.
    pub fn check(&self) {
        self.conns.invariants();
        self.wheel.invariants();
        let (mut held_bytes, mut listed, mut starting) = (0, 0, 0);
        let (mut channels, mut working, mut deadlines) = (0, 0, 0);
        let (mut kept, mut kept_for_long, mut returning_bytes) = (0, 0, 0);
        for index in 0..self.conns.used() {
            let Some(id) = self.conns.id_at(index) else { continue };
            let Some(conn) = self.conns.get(id) else { continue };
            let text = || describe(id, conn);
            assert_eq!(conn.shared.is_none(), conn.state == State::Closing, "{}", text());
            assert_eq!(conn.reason.is_some(), conn.state == State::Draining, "{}", text());
            starting += usize::from(conn.is_starting() && !self.lanes[conn.lane].is_outbound);
            working += u64::from(conn.queued.is_in(Queued::WORKING));
            deadlines += usize::from(conn.own.has(Own::DEADLINE));
            if conn.has_channel() && conn.state != State::Closing {
                // One that panicked is gone.
                channels += usize::from(self.shared.channels().has(id));
                held_bytes += self.check_channel(id, conn);
            }
            let connecting = conn.connect.is_on();
            if connecting {
                assert!(
                    !conn.receive.is_on()
                        && !conn.send.is_on()
                        && conn.write == Write::Open
                        && conn.opened == Opened::No,
                    "{}",
                    text()
                );
                let stopping = conn.connect == Flight::Stopping;
                assert_eq!(stopping, conn.state == State::Closing, "{}", text());
            }
            if conn.is_opening() && conn.state != State::Closing {
                assert!(conn.calls == 1 && !conn.frame_seen && conn.connect == Flight::None, "{}", text());
            }
            if conn.close_sent {
                let in_flight = connecting
                    || conn.receive.is_on()
                    || conn.send.is_on()
                    || conn.write == Write::ShuttingDown;
                assert!(!in_flight && conn.state == State::Closing, "{}", text());
            }
            if conn.state == State::Closing && !conn.close_sent {
                let in_flight = connecting
                    || conn.receive.is_on()
                    || conn.send.is_on()
                    || conn.write == Write::ShuttingDown;
                assert!(in_flight || conn.lingering, "stuck: {}", text());
            }
            if conn.state == State::Draining {
                assert!(conn.send.is_on(), "stuck: {}", text());
            }
            if conn.wants_receive() {
                assert!(conn.receive.is_on(), "not receiving: {}", text());
            }
            let resumes = conn.inbox.as_ref().is_some_and(|inbox| inbox.resumes.is_some());
            assert!(!conn.is_too_fast() || !conn.is_open() || resumes, "held back for ever: {}", text());
            if let Some(inbox) = &conn.inbox {
                assert!(conn.is_open(), "input is kept: {}", text());
                held_bytes += inbox.held_bytes();
                let bytes = inbox.kept_bytes();
                kept += bytes;
                // The others may have been held back when it came.
                kept_for_long += if conn.outlet().is_some_and(Outlet::reads_on) { bytes } else { 0 };
                let moves = conn.has_handler()
                    || conn.is_starting()
                    || conn.is_held_back()
                    || conn.is_too_fast()
                    || conn.queued.is_in(Queued::RUNNABLE)
                    || inbox.waiting_bytes() == 0;
                assert!(moves, "frames wait for nothing: {}", text());
            }
            held_bytes +=
                conn.outlet().map_or(0, |outlet| outlet.outbox_bytes()) + self.holders.room_of(index);
            let returning = self.holders.returning(index);
            assert!(
                returning == 0 || conn.send.is_on() || conn.receive.is_on(),
                "never comes back: {}",
                text()
            );
            returning_bytes += returning;
            let calls = self.holders.call_bytes_of(index);
            assert!(calls == 0 || conn.has_handler(), "calls that are done hold memory: {}", text());
            held_bytes += calls;
            let class = self.holders.class(index);
            listed += usize::from(class > 0);
            assert!(class == 0 || conn.shared.is_some(), "listed, and holds nothing: {}", text());
            let old =
                conn.inbox.as_ref().filter(|inbox| !inbox.is_mid_frame() || self.is_old(inbox.partial_began));
            let keeps = calls + old.map_or(0, |inbox| inbox.held_bytes());
            assert!(class_of(keeps) <= class, "holds {keeps} bytes and is in list {class}: {}", text());
            held_bytes += conn.outlet().map_or(0, |outlet| outlet.service_bytes());
        }
        // The buffer that the kernel still fills, where it fills one for many receives, is not leased yet.
        // What was received before the bound was lowered stays as long as it is needed.
        let before = self.pool.buffers_max() * self.limits.receive_buffer_bytes;
        let most = self.limits.receive_bytes_max.max(before);
        let beyond = |bytes: usize| bytes.saturating_sub(self.limits.receive_buffer_bytes);
        let (kept, kept_for_long) = (beyond(kept), beyond(kept_for_long));
        assert!(kept * KEPT_FOR_A_MOMENT <= most, "{kept} of {most} bytes wait in receive buffers");
        assert!(
            kept_for_long * KEPT_FOR_LONG <= most,
            "{kept_for_long} of {most} bytes wait there for readers"
        );
        self.check_newcomers(starting);
        self.check_marks();
        self.check_channels(channels, working);
        let queued = self.runnable.len() + self.served.len() + self.channels.queue_len();
        assert_eq!(self.later, queued, "what is left for later");
        assert_eq!(deadlines, self.shared.deadlines().len(), "deadlines of connections that are there");
        self.lanes.invariants(self.conns.len());
        assert_eq!(held_bytes, self.held_bytes(), "bytes held");
        assert_eq!(returning_bytes, self.shared.returning_bytes(), "bytes on their way back");
        assert_eq!(listed, self.holders.invariants(), "slots that are free are listed");
    }
}
