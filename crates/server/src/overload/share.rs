//! The share of frames for which a service is asked to shed as memory fills, however long turns
//! are.

/// Grows by a twentieth of one while connections hold much: calls are what fills memory, and fewer
/// of them let it fall. While they hold less it falls by a hundredth where the shard is busy all
/// the time, and half of the way to what would keep it busy where it is not.
///
/// The other one is of what the share itself tells: a shard that is busy for `b` of the time with a
/// part `1 - s` of its frames is asked for `b / (1 - s)` of what it can do. Memory answers within
/// seconds, so steps of 100 ms are small enough. Turns answer at once, and have a law that does:
/// [`Pace`](super::pace::Pace).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Share(f64);

/// Shedding goes on while the share is above this: it takes away the sign that it acts on.
pub(crate) const NEGLIGIBLE: f64 = 0.01;

/// A shard is busy all the time if it is for this part of it: the system tells its time to 10 ms.
const BUSY_AIM: f64 = 0.9;

impl Share {
    pub(crate) fn get(self) -> f64 {
        self.0
    }

    /// Each 100 ms while the shard sheds: whether its connections held much, and which part of the
    /// time it was busy.
    pub(crate) fn step(&mut self, over: bool, busy: f64) {
        let next = if over {
            self.0 + 0.05
        } else if busy >= BUSY_AIM {
            self.0 - 0.01
        } else {
            let asked_for = busy / (1.0 - self.0).max(NEGLIGIBLE);
            let needed = (1.0 - BUSY_AIM / asked_for.max(NEGLIGIBLE)).clamp(0.0, self.0);
            (self.0 + needed) / 2.0
        };
        self.0 = next.clamp(0.0, 1.0);
    }

    /// The shard sheds no more.
    pub(crate) fn end(&mut self) {
        self.0 = 0.0;
    }
}
