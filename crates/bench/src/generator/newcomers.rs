//! Additional connections at fixed times: each shakes hands, makes one round trip and is closed.

use std::io;
use std::time::{Duration, Instant};

use mio::{Poll, Token};

use super::Plan;
use super::churn::Trip;
use crate::steps::Messages;

/// The token of the first, above any number of a measured connection.
const FIRST: usize = usize::MAX / 2;

/// The most in progress. A server that is slower than the rate gets the next one when one ends.
const AT_ONCE_MAX: usize = 256;

/// The most that begin together, if the generator was delayed.
const LATE_MAX: u32 = 4;

pub(super) struct Newcomers {
    plan: Plan,
    /// Time from one to the next.
    interval: Duration,
    due: Instant,
    made: u32,
    trips: Vec<Option<Trip>>,
    message: Messages,
    scratch: Vec<u8>,
}

impl Newcomers {
    /// Plans `rate` of them per second.
    pub(super) fn new(plan: &Plan, rate: f64) -> Newcomers {
        Newcomers {
            plan: plan.clone(),
            interval: Duration::from_secs_f64(1.0 / rate),
            due: Instant::now(),
            made: 0,
            trips: Vec::new(),
            message: plan.shape.messages(),
            scratch: vec![0; plan.shape.reply_bytes()],
        }
    }

    /// True if an event with this token belongs to one of them.
    pub(super) fn has(&self, token: usize) -> bool {
        token.checked_sub(FIRST).is_some_and(|slot| slot < self.trips.len())
    }

    /// Begins those that are due. Returns the time until the next one is.
    pub(super) fn begin_due(&mut self, poll: &Poll) -> io::Result<Duration> {
        let now = Instant::now();
        // Longer delays are not made up for: many at once are other work.
        self.due = self.due.max(now.checked_sub(self.interval * LATE_MAX).unwrap_or(now));
        while self.due <= now {
            let Some(slot) = self.free_slot() else {
                self.trips.iter().flatten().try_for_each(Trip::check_silence)?;
                self.due = now + self.interval;
                break;
            };
            self.trips[slot] = Some(Trip::begin(&self.plan, self.made, poll, Token(FIRST + slot))?);
            self.made = self.made.wrapping_add(1);
            self.due += self.interval;
        }
        Ok(self.due.saturating_duration_since(now))
    }

    /// The place of one that may begin, if not too many are in progress.
    fn free_slot(&mut self) -> Option<usize> {
        if let Some(slot) = self.trips.iter().position(Option::is_none) {
            return Some(slot);
        }
        let slot = self.trips.len();
        (slot < AT_ONCE_MAX).then(|| {
            self.trips.push(None);
            slot
        })
    }

    /// Continues the one of a token. Returns the nanoseconds that it took, if it ended.
    pub(super) fn go_on(&mut self, token: usize) -> io::Result<Option<u64>> {
        let Some(place) = self.trips.get_mut(token - FIRST) else { return Ok(None) };
        let Some(trip) = place else { return Ok(None) };
        let took = trip.go_on(&self.message, &mut self.scratch)?;
        if took.is_some() {
            // Closing removes it from the poll.
            *place = None;
        }
        Ok(took)
    }
}
