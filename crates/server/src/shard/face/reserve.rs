//! Memory that a handler reserves before it builds a large answer.

use std::fmt;
use std::future::poll_fn;
use std::time::Duration;

use ringserve_core::{ConnHead, NoMemoryLeft, Reservation};

use super::handle::Shard;

/// The longest wait of a handler for memory: a peer that reads takes a large answer in less, and
/// one that asks is still there.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(5);

/// No machine has as much: sums of it do not overflow.
const BYTES_MAX: usize = 1 << 44;

/// Memory that is [reserved](crate::Cx::reserve) for a connection. Its drop gives it back.
#[must_use = "it is given back when it is dropped"]
pub struct Reserved(Reservation);

impl Reserved {
    /// Of what is there already, whether it fits or not.
    pub(crate) fn held(head: &ConnHead, bytes: usize) -> Reserved {
        let mut reservation = Reservation::new(head);
        reservation.hold(bytes.min(BYTES_MAX));
        Reserved(reservation)
    }

    pub(crate) async fn wait(head: &ConnHead, shard: &Shard, bytes: usize) -> Result<Reserved, NoMemoryLeft> {
        let mut reservation = Reservation::new(head);
        let granted = poll_fn(|task| reservation.poll(bytes, task.waker()));
        match shard.timeout(WAIT_MAX, granted).await {
            Ok(granted) => granted.map(|()| Reserved(reservation)),
            Err(_) => Err(NoMemoryLeft::UsedUp),
        }
    }

    /// The number of reserved bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl fmt::Debug for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reserved").field(&self.0).finish()
    }
}
