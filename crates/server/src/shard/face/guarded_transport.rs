//! Transports, as the state machine holds them: a panic where one is dropped ends no shard.
//!
//! ```text
//!   plan, Connecting ──▶ GuardedTransport ── begin ──▶ TransportConn, whose calls LogObserver guards
//!                              └ drop, guarded               a panic: a log line, TransportError(HandlerPanicked)
//! ```
//!
//! [`Transport::begin`] is guarded by who has the state machine call it, who can tell the
//! connection: in [`ServiceLane`](super::service_lane) and [`UpstreamLane`](super::upstreams). The
//! calls of a channel are guarded by [`LogObserver`](crate::log::LogObserver), so that no
//! connection holds memory for its guard.

use std::rc::Rc;

use ringserve_base::guard::{Panicked, guard};
use ringserve_core::{Transport, TransportConn};

use super::handle::Shard;

/// Writes to the log that a transport of the shard panicked.
pub(crate) fn reports_panics(shard: &Shard) -> Box<dyn Fn(&Panicked)> {
    let shard = shard.clone();
    Box::new(move |panicked| shard.tasks().transport_panicked(panicked))
}

/// A transport whose drop is guarded.
pub(crate) struct GuardedTransport {
    /// Until it is dropped.
    transport: Option<Rc<dyn Transport>>,
    shard: Shard,
}

impl GuardedTransport {
    pub(crate) fn new(transport: Rc<dyn Transport>, shard: &Shard) -> GuardedTransport {
        GuardedTransport { transport: Some(transport), shard: shard.clone() }
    }
}

impl Transport for GuardedTransport {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        self.transport.as_ref()?.begin(out)
    }
}

impl Drop for GuardedTransport {
    fn drop(&mut self) {
        let transport = self.transport.take();
        if let Err(panicked) = guard(move || drop(transport)) {
            self.shard.tasks().transport_panicked(&panicked);
        }
    }
}
