//! Memory for calls that wait for it before they build a large answer.

use core::time::Duration;

use super::held::{AT_ONCE, SETTLES};
use crate::shard::Shard;
use crate::shard::turn::Event;
use crate::{ConnId, Observer, Op, Time};

/// The interval at which a shard looks at its line without other news: as long as memory takes to
/// count as held.
const LOOK: Duration = Duration::from_millis(50);

/// Steps after which a peer that took nothing of a send has to make room: 2 s. A slow reader takes
/// some of it within that.
pub(in crate::shard) const UNREAD: u32 = 119;

impl<O: Observer> Shard<O> {
    /// Grants requests that fit, in the order of the line, at the end of a turn.
    pub(in crate::shard) fn serve_line(&mut self) {
        while let Some(first) = self.shared.line().first() {
            // A call whose connection ended, or for which the bound is too low by now, is woken
            // too, and finds that.
            let may_fit = first.bytes <= self.shared.reservable_bytes();
            if let Some(outlet) = self.shared(first.id).filter(|outlet| may_fit && !outlet.is_gone()) {
                if !self.shared.fits(first.bytes) {
                    return self.look_for_room();
                }
                outlet.reserve(first.bytes);
                first.is_granted.set(true);
            }
            self.shared.line().pop();
            if let Some(waker) = first.waker.take() {
                self.events.push_back(Event::Wake(first.id, waker));
            }
        }
        let line = self.shared.line();
        line.since.set(None);
        line.looked_for.set(0);
    }

    /// Looks at the sends of those that hold most, if their peers may have read nothing: they must
    /// not keep memory from others. The first in the line may be one of them. The part of a send
    /// that was taken is only known once it was stopped.
    fn look_for_room(&mut self) {
        let line = self.shared.line();
        let since = line.since.get().unwrap_or(self.stamp);
        line.since.set(Some(since));
        if since.left(SETTLES, self.stamp) > 0 {
            return;
        }
        let most = self.shared.reservable_bytes();
        line.since.set(Some(self.stamp));
        line.looked_for.set(line.wanted_bytes(most));
        // Bytes on their way back make room by themselves.
        let mut missing = self.shared.missing_bytes();
        let mut next = self.holders.heaviest();
        while let Some(index) = next.filter(|_| missing > 0) {
            let class = self.holders.class(index);
            next = self.holders.behind(index).or_else(|| self.holders.heaviest_below(class));
            if let Some(id) = self.conns.id_at(index)
                && self.stop_unread(id)
            {
                missing = missing.saturating_sub(self.held_bytes_of(id, AT_ONCE));
            }
        }
    }

    /// Stops a send that has been in flight for [`UNREAD`] steps: its peer may have read nothing.
    /// False if there is none.
    fn stop_unread(&mut self, id: ConnId) -> bool {
        let Some(conn) = self.conns.get_mut(id) else { return false };
        let is_old = conn.shared.is_some() && conn.send.is_on() && conn.send_at.left(UNREAD, self.stamp) <= 0;
        if is_old && conn.send.stop() {
            self.send_awaited = true;
            self.ops.push(Op::SendStop { id });
        }
        is_old
    }

    /// The time at which the line is looked at again if nothing else happens.
    pub(in crate::shard) fn line_look(&self) -> Option<Time> {
        (!self.shared.line().is_empty()).then(|| self.now + LOOK)
    }
}
