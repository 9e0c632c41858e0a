//! Transports and their channels, as the state machine calls them: a panic of theirs ends one connection.
//!
//! ```text
//!   plan, Connecting ──▶ GuardedTransport ── begin ──▶ GuardedChannel ── guard ──▶ the transport's Channel
//!                                                            │
//!                                 a panic: a log line, the channel is dropped, Fault(HandlerPanicked)
//! ```
//!
//! [`Transport::begin`] is guarded by who has the state machine call it, who can tell the connection: in
//! [`ServiceLane`](super::service_lane) and [`UpstreamLane`](super::upstreams).

use std::any::Any;
use std::cell::Cell;
use std::rc::Rc;

use ringserve_buf::{LeaseMut, try_box};
use ringserve_core::{Batch, Channel, CloseReason, Fault, Transport, Unsealed};

use super::handle::Shard;
use crate::guard::guard;

/// The answer of a channel that panicked.
const PANICKED: Fault = Fault(CloseReason::HandlerPanicked);

/// A transport whose channels are guarded.
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
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn Channel>> {
        let channel = self.transport.as_ref()?.begin(out)?;
        let channel = GuardedChannel { channel: Cell::new(Some(channel)), shard: self.shard.clone() };
        try_box(channel).map(|channel| channel as Box<dyn Channel>)
    }
}

impl Drop for GuardedTransport {
    fn drop(&mut self) {
        discard(self.transport.take(), &self.shard);
    }
}

/// A channel until it panics, and none from there on.
struct GuardedChannel {
    channel: Cell<Option<Box<dyn Channel>>>,
    shard: Shard,
}

impl GuardedChannel {
    /// The channel's answer, unless it panicked.
    #[inline]
    fn ask<T>(&self, call: impl FnOnce(&mut dyn Channel) -> T) -> Option<T> {
        let mut channel = self.channel.take()?;
        match guard(|| call(&mut *channel)) {
            Ok(answer) => {
                self.channel.set(Some(channel));
                Some(answer)
            }
            Err(panicked) => {
                self.shard.tasks().transport_panicked(&panicked);
                discard(Some(channel), &self.shard);
                None
            }
        }
    }

    /// The same of a call that appends to `out`, of which half a record does not leave.
    #[inline]
    fn ask_out<T>(
        &self,
        out: &mut Vec<u8>,
        call: impl FnOnce(&mut dyn Channel, &mut Vec<u8>) -> T,
    ) -> Option<T> {
        let len = out.len();
        let answer = self.ask(|channel| call(channel, out));
        if answer.is_none() {
            out.truncate(len);
        }
        answer
    }
}

impl Channel for GuardedChannel {
    fn open(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> Unsealed {
        self.ask_out(out, |channel, out| channel.open(wire, out)).unwrap_or(Unsealed::Fault(PANICKED))
    }

    fn work(&mut self, out: &mut Vec<u8>) -> Unsealed {
        self.ask_out(out, |channel, out| channel.work(out)).unwrap_or(Unsealed::Fault(PANICKED))
    }

    fn rested(&mut self) {
        self.ask(|channel| channel.rested());
    }

    fn seal(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), Fault> {
        self.ask_out(out, |channel, out| channel.seal(plain, out)).unwrap_or(Err(PANICKED))
    }

    fn wrap(&mut self, plain: &mut Batch) -> bool {
        // One that panicked seals nothing, which says so.
        self.ask(|channel| channel.wrap(plain)).unwrap_or(false)
    }

    fn speak(&mut self, out: &mut Vec<u8>) {
        self.ask_out(out, |channel, out| channel.speak(out));
    }

    fn asks(&mut self) -> bool {
        self.ask(|channel| channel.asks()).unwrap_or(false)
    }

    fn ends(&mut self, reason: CloseReason) {
        self.ask(|channel| channel.ends(reason));
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        self.ask_out(out, |channel, out| channel.finish(out));
    }

    fn held_bytes(&self) -> usize {
        self.ask(|channel| channel.held_bytes()).unwrap_or(0)
    }

    fn is_mid_record(&self) -> bool {
        self.ask(|channel| channel.is_mid_record()).unwrap_or(false)
    }

    fn cut_off(&self) -> Option<CloseReason> {
        self.ask(|channel| channel.cut_off()).flatten()
    }

    fn facts(&self) -> Option<Rc<dyn Any>> {
        self.ask(|channel| channel.facts()).flatten()
    }
}

impl Drop for GuardedChannel {
    fn drop(&mut self) {
        discard(self.channel.take(), &self.shard);
    }
}

/// Drops what is a transport's.
fn discard<T>(of: Option<T>, shard: &Shard) {
    if let Err(panicked) = guard(move || drop(of)) {
        shard.tasks().transport_panicked(&panicked);
    }
}
