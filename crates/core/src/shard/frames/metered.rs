//! Connections with a limit on the rate at which their peers send: [`crate::limits::ReadRates`]
//! counts.
//!
//! ```text
//!   next frame ─▶ pace: Fine ─▶ cut, pay ─▶ handed out, or closed
//!                   │ Wait
//!                   ▼
//!              hold_reads ──▶ its bytes in the inbox, no frame ──▶ Due::Resume ──▶ resume_reads ──▶ next frame
//! ```
//!
//! Frames of other connections do not pass here: a metered connection is
//! [aside](crate::connection::SlowPathFlags), so that its bytes take the checked path.

use ringserve_buf::Lease;

use crate::connection::SlowPathFlags;
use crate::limits::{Meter, ReadRates};
use crate::shard::Shard;
use crate::time::steps_for;
use crate::{ConnId, Observer, ReadRateAction};

/// Whether a peer sends too fast.
pub(super) enum Pace {
    /// Its next frame may come now.
    Fine,
    /// Its next frame has to wait for this many steps.
    Wait(u32),
    /// The system has no memory to count it.
    NoMemory,
}

impl<O: Observer> Shard<O> {
    /// Limits the rate at which the peer of a connection sends, from now on.
    #[cold]
    pub(in crate::shard) fn meter(&mut self, id: ConnId, rates: ReadRates) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let goes_on = conn.is_metered();
        conn.aside.note(SlowPathFlags::METERED, true);
        // Without memory for a meter the next frame ends the connection.
        let Some(meter) = self.meters.entry(id.slot()) else { return };
        match goes_on {
            true => meter.rates = rates,
            false => *meter = Meter::new(rates),
        }
    }

    /// Limits the rate by the connection's own limits.
    pub(in crate::shard) fn meter_by_own_limits(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Some(own) = conn.outlet().and_then(|outlet| outlet.own_limits()) else { return };
        let goes_on = conn.is_metered();
        match own.read_rates {
            // Each flush comes here once the connection has its own limits.
            Some(rates)
                if goes_on && self.meters.get(id.slot()).is_some_and(|meter| meter.rates == rates) =>
            {
                return;
            }
            Some(rates) => self.meter(id, rates),
            None => conn.aside.note(SlowPathFlags::METERED, false),
        }
        self.resume_reads(id);
    }

    /// Decides whether the next frame may be handed out. Always [`Pace::Fine`] once the connection
    /// is cut.
    pub(super) fn pace(&mut self, id: ConnId) -> Pace {
        if self.is_cut(id) {
            return Pace::Fine;
        }
        let Some(meter) = self.meters.get(id.slot()) else { return Pace::NoMemory };
        match meter.wait(self.now) {
            None => Pace::Fine,
            // Judged once the frame is complete: its first bytes may come early.
            Some(_) if meter.rates.when_too_fast == ReadRateAction::Close => Pace::Fine,
            Some(wait) => Pace::Wait(steps_for(wait)),
        }
    }

    /// Pays for a frame of `bytes` bytes, or a piece of one. False if it came too early, and its
    /// connection is to be closed for that.
    #[inline]
    pub(super) fn pay(&mut self, id: ConnId, bytes: usize) -> bool {
        let closes = !self.is_cut(id);
        let Some(meter) = self.meters.get_mut(id.slot()) else { return true };
        let is_early = meter.rates.when_too_fast == ReadRateAction::Close && meter.wait(self.now).is_some();
        meter.pay(bytes, self.now);
        !(is_early && closes)
    }

    /// Hands out no frame of a connection for this many steps. `lease` is the rest of the bytes at
    /// hand.
    #[cold]
    pub(super) fn hold_reads(&mut self, id: ConnId, lease: Lease, steps: u32) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.aside.note(SlowPathFlags::TOO_FAST, true);
        let lane = conn.lane;
        self.requeue(id, lease);
        // The system may have had no memory for the rest.
        let Some(inbox) = self.conns.get_mut(id).and_then(|conn| conn.inbox.as_mut()) else { return };
        inbox.resumes = Some((self.stamp, steps));
        self.lanes[lane].counters.reads_held += 1;
        self.arm(id);
    }

    /// Hands out frames again, in a batch of a later turn.
    #[cold]
    pub(in crate::shard) fn resume_reads(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.is_too_fast()) else { return };
        conn.aside.note(SlowPathFlags::TOO_FAST, false);
        conn.active_at = self.stamp;
        if let Some(inbox) = &mut conn.inbox {
            inbox.resumes = None;
            // Time in which the server did not look is not the peer's fault.
            inbox.begin_window(self.stamp);
        }
        self.requeue(id, Lease::empty());
        self.arm(id);
    }
}
