//! A service under watch: each call to it is an event of the run, and must come in order.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use ringserve_base::peer::Peer;
use ringserve_core::framing::{FrameError, TypedFraming};
use ringserve_core::{CloseReason, ConnId, Frame, Limits};

use crate::overload::{Load, Shed};
use crate::shard::face::closed::{CloseCx, Failure};
use crate::shard::face::cx::Cx;
use crate::shard::face::handle::Shard;
use crate::shard::face::opening::{OpenCx, Refusal};
use crate::shard::face::service::{FactoryError, FactoryOutput, IntoService, Service};
use crate::trace::{Trace, TracePlace};

/// A log of the calls to services.
#[derive(Clone)]
pub(crate) struct Watches {
    pub(crate) trace: Rc<Trace>,
}

impl Watches {
    /// A factory's value, under watch.
    pub(crate) fn over<M>(&self, made: M) -> WatchedFactory<M> {
        WatchedFactory { made, trace: self.trace.clone() }
    }
}

/// The value that the factory of a watched server returns.
pub(crate) struct WatchedFactory<M> {
    pub(crate) made: M,
    pub(crate) trace: Rc<Trace>,
}

impl<F: TypedFraming, M: IntoService<F>> IntoService<F> for WatchedFactory<M> {
    type Service = Watched<M::Service>;

    fn into_service(self, shard: &Shard) -> Result<FactoryOutput<Self::Service>, FactoryError> {
        let watcher = Watcher { trace: self.trace, shard: shard.index(), conns: RefCell::default() };
        self.made.into_service(shard)?.map(|made| Ok(Watched { service: made?, watcher }))
    }

    fn adjust(limits: &mut Limits) {
        M::adjust(limits);
    }

    fn protocols() -> &'static [&'static str] {
        M::protocols()
    }
}

/// A service that calls another one for everything.
pub(crate) struct Watched<S> {
    service: S,
    watcher: Watcher,
}

struct Watcher {
    trace: Rc<Trace>,
    shard: usize,
    /// Connections that are open, or being opened, by their names.
    conns: RefCell<BTreeMap<u64, Open>>,
}

struct Open {
    peer: Option<SocketAddr>,
    /// `open` is not done.
    is_opening: bool,
    /// The service was informed that the server shuts down.
    is_told: bool,
    calls: u32,
}

/// By which the network knows it: behind a proxy that of the proxy.
fn socket_of(peer: &Peer) -> Option<SocketAddr> {
    peer.via().or(peer.addr())
}

impl Watcher {
    fn event<S: 'static>(&self, cx: &Cx<'_, S>, number: u64, what: impl FnOnce() -> String) {
        self.note(socket_of(&cx.peer()), number, what);
    }

    fn note(&self, peer: Option<SocketAddr>, number: u64, what: impl FnOnce() -> String) {
        self.is_about(peer, number);
        self.trace.event(&TracePlace::Shard(self.shard), peer, what);
    }

    fn is_about(&self, peer: Option<SocketAddr>, number: u64) {
        self.trace.hash(&[self.shard as u64, peer.map_or(0, |peer| peer.port().into()), number]);
        self.trace.set_subject(peer);
    }

    fn opens(&self, id: ConnId, peer: Peer) {
        let open = Open { peer: socket_of(&peer), is_opening: true, is_told: false, calls: 0 };
        if let Some(before) = self.conns.borrow_mut().insert(id.bits(), open) {
            self.trace.broke(|| {
                format!("a connection of {:?} was not closed before its name was used again", before.peer)
            });
        }
    }

    fn opened(&self, id: ConnId) {
        match self.conns.borrow_mut().get_mut(&id.bits()) {
            Some(open) => open.is_opening = false,
            None => self.trace.broke(|| "an open of a connection that is gone".to_owned()),
        }
    }

    fn draining(&self, id: ConnId) {
        let is_new = match self.conns.borrow_mut().get_mut(&id.bits()) {
            Some(open) => !open.is_opening && !std::mem::replace(&mut open.is_told, true),
            None => false,
        };
        if !is_new {
            self.trace
                .broke(|| "a connection that is not open, or was told before, is told of a drain".to_owned());
        }
    }

    fn closed(&self, id: ConnId, reason: CloseReason) {
        let Some(open) = self.conns.borrow_mut().remove(&id.bits()).filter(|open| !open.is_opening) else {
            return self.trace.broke(|| format!("close ({reason}) of a connection that is not open"));
        };
        self.note(open.peer, 4, || format!("close: {reason}"));
        if open.calls > 0 {
            self.trace
                .broke(|| format!("close ({reason}) while {} calls of {:?} are left", open.calls, open.peer));
        }
    }

    fn count_call(&self, id: ConnId, by: i32) {
        match self.conns.borrow_mut().get_mut(&id.bits()).filter(|open| !open.is_opening) {
            Some(open) => open.calls = open.calls.wrapping_add_signed(by),
            None => self.trace.broke(|| "a call for a connection that is not open".to_owned()),
        }
    }
}

/// The shard ends: whatever is open stays so.
impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(open) = self.conns.get_mut().values().next() {
            let (peer, shard) = (open.peer, self.shard);
            self.trace
                .broke(|| format!("shard {shard} ended without a close for the connection of {peer:?}"));
        }
    }
}

/// A call under way.
struct UnderWay<'a> {
    watcher: &'a Watcher,
    id: ConnId,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.watcher.count_call(self.id, -1);
    }
}

impl<S: Service<H>, H: 'static> Service<H> for Watched<S> {
    type Session = S::Session;
    type Error = S::Error;

    const ACCOUNTS: bool = S::ACCOUNTS;
    const PIECES: bool = S::PIECES;
    const REORDERS: bool = S::REORDERS;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<S::Session, Refusal> {
        let (id, peer) = (opening.id(), opening.peer());
        self.watcher.note(socket_of(&peer), 1, || "open".to_owned());
        self.watcher.opens(id, peer);
        let mut unopened = Unopened { watcher: &self.watcher, id: Some(id) };
        let opened = self.service.open(opening).await;
        match &opened {
            Ok(_) => {
                unopened.id = None;
                self.watcher.opened(id);
            }
            Err(refusal) => self.watcher.note(socket_of(&peer), 8, || format!("open refuses: {refusal}")),
        }
        opened
    }

    async fn call(&self, cx: &Cx<'_, S::Session>, frame: Frame<H>) -> Result<(), S::Error> {
        self.watcher.event(cx, 2 | (frame.len() as u64) << 8, || format!("call with {}", shown(&frame)));
        self.watcher.count_call(cx.id(), 1);
        let _under_way = UnderWay { watcher: &self.watcher, id: cx.id() };
        let done = self.service.call(cx, frame).await;
        self.watcher.event(cx, 3, || match &done {
            Ok(()) => "call is done".to_owned(),
            Err(error) => format!("call failed: {error}"),
        });
        done
    }

    fn shed(&self, cx: &Cx<'_, S::Session>, frame: &Frame<H>, load: Load) -> Shed {
        let shed = self.service.shed(cx, frame, load);
        self.watcher.event(cx, 11, || format!("shed at {load}: {shed:?}"));
        shed
    }

    fn malformed(&self, cx: &Cx<'_, S::Session>, error: &FrameError) {
        self.watcher.event(cx, 5, || format!("malformed: {error}"));
        self.service.malformed(cx, error);
    }

    fn failed(&self, cx: &Cx<'_, S::Session>, failure: &Failure<'_, S::Error>) {
        self.watcher.event(cx, 9, || format!("call {failure}"));
        self.service.failed(cx, failure);
    }

    fn draining(&self, cx: &Cx<'_, S::Session>) {
        self.watcher.event(cx, 10, || "draining".to_owned());
        self.watcher.draining(cx.id());
        self.service.draining(cx);
    }

    fn heartbeat(&self, cx: &Cx<'_, S::Session>) {
        self.watcher.event(cx, 6, || "heartbeat".to_owned());
        self.service.heartbeat(cx);
    }

    fn input_ended(&self, cx: &Cx<'_, S::Session>) {
        self.watcher.event(cx, 7, || "input ended".to_owned());
        self.service.input_ended(cx);
    }

    fn close(&self, closed: &CloseCx<'_, S::Session>) {
        self.watcher.closed(closed.id(), closed.reason());
        self.service.close(closed);
    }
}

/// A connection whose `open` does not succeed has no `close`.
struct Unopened<'a> {
    watcher: &'a Watcher,
    id: Option<ConnId>,
}

impl Drop for Unopened<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.watcher.conns.borrow_mut().remove(&id.bits());
        }
    }
}

/// Bytes as a line shows them.
pub(crate) fn shown(bytes: &[u8]) -> String {
    /// So that a line stays one.
    const BYTES: usize = 32;
    let text = bytes[..bytes.len().min(BYTES)].escape_ascii();
    let more = if bytes.len() > BYTES { ".." } else { "" };
    format!("{} bytes \"{text}{more}\"", bytes.len())
}
