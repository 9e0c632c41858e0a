//! Spans of chosen connections, from accept to end, with events for what happens to them.
//!
//! [`Server::trace_one_in`](crate::Server::trace_one_in) and
//! [`Server::trace_peer`](crate::Server::trace_peer) choose. Others cost a look at one bit for each
//! frame and each send; a server that chooses none, a look at one flag.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use ipnet::IpNet;
use ringserve_core::{CloseReason, ConnId};
use ringserve_drivers::guarded;
use tracing::field::display;
use tracing::{Span, info, info_span};

/// Which connections have spans.
#[derive(Clone, Default)]
pub(crate) struct SpanFilter {
    /// One in `one_in` of each shard's; 0 is none.
    pub(crate) one_in: u32,
    pub(crate) networks: Vec<IpNet>,
}

impl SpanFilter {
    pub(crate) fn is_none(&self) -> bool {
        self.one_in == 0 && self.networks.is_empty()
    }

    fn includes(&self, peer: Option<SocketAddr>) -> bool {
        let Some(peer) = peer.filter(|_| !self.networks.is_empty()) else { return false };
        self.networks.iter().any(|network| network.contains(&peer.ip()))
    }
}

/// The spans of a shard's connections.
pub(crate) struct Traces {
    shard: usize,
    chosen: Arc<SpanFilter>,
    /// Connections until the next one is chosen by its turn.
    left: u32,
    /// A bit for each slot whose connection has a span.
    marks: Vec<u64>,
    spans: HashMap<ConnId, Span>,
}

impl Traces {
    /// `None` if none is chosen.
    pub(crate) fn new(shard: usize, chosen: &Arc<SpanFilter>) -> Option<Box<Traces>> {
        (!chosen.is_none()).then(|| {
            let (chosen, left) = (chosen.clone(), chosen.one_in);
            Box::new(Traces { shard, chosen, left, marks: Vec::new(), spans: HashMap::new() })
        })
    }

    /// True if the connection has a span.
    #[inline]
    pub(crate) fn has(&self, id: ConnId) -> bool {
        let word = self.marks.get(id.slot() as usize / 64);
        word.is_some_and(|word| word >> (id.slot() % 64) & 1 == 1)
    }

    fn mark(&mut self, id: ConnId, is: bool) {
        let at = id.slot() as usize / 64;
        if self.marks.len() <= at {
            self.marks.resize(at + 1, 0);
        }
        let bit = 1 << (id.slot() % 64);
        match is {
            true => self.marks[at] |= bit,
            false => self.marks[at] &= !bit,
        }
    }

    /// A connection began.
    pub(crate) fn opened(&mut self, service: &str, id: ConnId, peer: Option<SocketAddr>) {
        let mut is_its_turn = false;
        if self.chosen.one_in > 0 {
            self.left -= 1;
            is_its_turn = self.left == 0;
            if is_its_turn {
                self.left = self.chosen.one_in;
            }
        }
        if is_its_turn || self.chosen.includes(peer) {
            self.begin(service, id, peer);
        }
    }

    /// A connection is one of this peer, which came through a proxy.
    pub(crate) fn proxied(&mut self, service: &str, id: ConnId, peer: Option<SocketAddr>) {
        if !self.has(id) && self.chosen.includes(peer) {
            self.begin(service, id, peer);
        }
        let client = peer.map(display);
        self.event(id, |span| info!(target: "ringserve::trace", parent: span, client, "PROXY header read"));
    }

    #[cold]
    fn begin(&mut self, service: &str, id: ConnId, peer: Option<SocketAddr>) {
        let (shard, peer) = (self.shard, peer.map(display));
        guarded(|| {
            let span =
                info_span!(target: "ringserve::trace", parent: None, "connection", shard, service, %id, peer);
            if !span.is_disabled() {
                self.spans.insert(id, span);
                self.mark(id, true);
            }
        });
    }

    fn event(&self, id: ConnId, write: impl FnOnce(&Span)) {
        if self.has(id)
            && let Some(span) = self.spans.get(&id)
        {
            guarded(|| write(span));
        }
    }

    /// A frame goes to the service.
    #[inline]
    pub(crate) fn frame(&self, id: ConnId, bytes: usize) {
        self.event(id, |span| info!(target: "ringserve::trace", parent: span, bytes, "frame"));
    }

    /// Bytes go to the kernel.
    #[inline]
    pub(crate) fn sending(&self, id: ConnId, bytes: usize) {
        self.event(id, |span| info!(target: "ringserve::trace", parent: span, bytes, "send"));
    }

    /// Receiving is paused, or goes on.
    pub(crate) fn paused(&self, id: ConnId, paused: bool) {
        let what = if paused { "receiving paused" } else { "receiving again" };
        self.event(id, |span| info!(target: "ringserve::trace", parent: span, "{what}"));
    }

    /// A connection ended, and its span with it.
    pub(crate) fn ended(&mut self, id: ConnId, reason: CloseReason) {
        self.event(id, |span| info!(target: "ringserve::trace", parent: span, %reason, "ended"));
        if self.has(id) {
            self.mark(id, false);
            let span = self.spans.remove(&id);
            guarded(move || drop(span));
        }
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        // Of a shard that died.
        for (_, span) in self.spans.drain() {
            guarded(move || drop(span));
        }
    }
}
