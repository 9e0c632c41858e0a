//! Memory for calls that wait for it before they build a large answer.

use core::time::Duration;

use super::Shard;
use super::held::SETTLES;
use super::turn::Event;
use crate::line::Wanted;
use crate::{CloseReason, Observer, Time};

/// How often a shard looks at its line without other news: as long as memory takes to count as held.
const LOOK: Duration = Duration::from_millis(50);

/// Steps after which a peer that left what it asked for has to make room: 2 s. One that reads slowly takes some of it within that.
const UNREAD: u32 = 119;

impl<O: Observer> Shard<O> {
    /// Grants what fits, in the order of the line, at the end of a turn.
    #[cold]
    #[inline(never)]
    pub(super) fn serve_line(&mut self) {
        while let Some(first) = self.shared.line().first() {
            // One whose connection ended is woken too, and finds that.
            if let Some(outlet) = self.shared(first.id).filter(|outlet| !outlet.is_gone()) {
                if !self.shared.fits(first.bytes) {
                    return self.close_unread(&first);
                }
                outlet.reserve(first.bytes);
                first.is_granted.set(true);
            }
            self.shared.line().pop();
            if let Some(waker) = first.waker.take() {
                self.events.push_back(Event::Wake(first.id, waker));
            }
        }
    }

    /// Closes those that hold most for one that waited as long as memory takes to settle: those that read nothing must not keep it
    /// from others. None goes that reads, or holds less than half of what is wanted.
    fn close_unread(&mut self, first: &Wanted) {
        let since = first.since.get().unwrap_or(self.stamp);
        first.since.set(Some(since));
        if since.left(SETTLES, self.stamp) > 0 {
            return;
        }
        // What is on its way back makes room by itself.
        while self.held_bytes() + first.bytes > self.shared.reservable_bytes() {
            let Some(victim) = self.heaviest(SETTLES) else { return };
            let (bytes, held) = (self.held_bytes_of(victim, UNREAD), self.held_bytes());
            if victim == first.id || bytes < first.bytes / 2 {
                return;
            }
            if let Some(lane) = self.lane_of(victim) {
                self.observer.over_held_bytes_max(self.now, lane, victim, bytes, held);
            }
            self.abort(victim, CloseReason::MemoryLimit);
        }
    }

    /// When the line is looked at again if nothing else happens.
    pub(super) fn line_look(&self) -> Option<Time> {
        (!self.shared.line().is_empty()).then(|| self.now + LOOK)
    }
}
