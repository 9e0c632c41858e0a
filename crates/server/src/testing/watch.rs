//! A service under watch: what it is told is an event of the run, and must come in order.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::rc::Rc;

use ringserve_core::framing::FrameError;
use ringserve_core::{CloseReason, Frame, Limits};

use super::trace::{Place, Trace};
use crate::cx::Cx;
use crate::service::{IntoService, Refusal, Service};
use crate::shard::handle::Shard;

/// Notes what services are told.
#[derive(Clone)]
pub(crate) struct Watches {
    pub(crate) trace: Rc<Trace>,
}

impl Watches {
    /// What a factory made, under watch.
    pub(crate) fn over<M>(&self, made: M) -> Watch<M> {
        Watch { made, trace: self.trace.clone() }
    }
}

/// What the factory of a watched server returns.
pub(crate) struct Watch<M> {
    pub(crate) made: M,
    pub(crate) trace: Rc<Trace>,
}

impl<F, M: IntoService<F>> IntoService<F> for Watch<M> {
    type Service = Watched<M::Service>;

    fn into_service(self, shard: &Shard) -> Result<Self::Service, Box<dyn Error + Send + Sync>> {
        let service = self.made.into_service(shard)?;
        let (shard, sessions) = (shard.index(), RefCell::default());
        Ok(Watched { service, watcher: Watcher { trace: self.trace, shard, sessions } })
    }

    fn adjust(limits: &mut Limits) {
        M::adjust(limits);
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
    /// Those that are open, by where they lie.
    sessions: RefCell<BTreeMap<usize, Open>>,
}

struct Open {
    peer: Option<SocketAddr>,
    calls: u32,
}

/// Where a session lies, which tells it from all others that live.
fn place<T>(session: &T) -> usize {
    std::ptr::from_ref(session).cast::<()>() as usize
}

impl Watcher {
    fn event<S: 'static>(&self, cx: &Cx<'_, S>, number: u64, what: impl FnOnce() -> String) {
        self.told(cx.peer().addr, number, what);
    }

    fn told(&self, peer: Option<SocketAddr>, number: u64, what: impl FnOnce() -> String) {
        self.trace.hash(&[self.shard as u64, peer.map_or(0, |peer| peer.port().into()), number]);
        self.trace.set_subject(peer);
        self.trace.event(&Place::Shard(self.shard), peer, what);
    }

    fn opened<S: 'static>(&self, cx: &Cx<'_, S>) {
        let open = Open { peer: cx.peer().addr, calls: 0 };
        if let Some(before) = self.sessions.borrow_mut().insert(place(cx.session()), open) {
            self.trace.broke(|| {
                format!("a connection of {:?} was not closed before its memory was used again", before.peer)
            });
        }
    }

    fn closed(&self, session: usize, reason: CloseReason) {
        let Some(open) = self.sessions.borrow_mut().remove(&session) else {
            return self.trace.broke(|| format!("close ({reason}) of a connection that is not open"));
        };
        self.told(open.peer, 4, || format!("close: {reason}"));
        if open.calls > 0 {
            self.trace
                .broke(|| format!("close ({reason}) while {} calls of {:?} are left", open.calls, open.peer));
        }
    }

    fn count_call(&self, session: usize, by: i32) {
        match self.sessions.borrow_mut().get_mut(&session) {
            Some(open) => open.calls = open.calls.wrapping_add_signed(by),
            None => self.trace.broke(|| "a call for a connection that is not open".to_owned()),
        }
    }
}

/// The shard ends: whatever is open stays so.
impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(open) = self.sessions.get_mut().values().next() {
            let (peer, shard) = (open.peer, self.shard);
            self.trace
                .broke(|| format!("shard {shard} ended without a close for the connection of {peer:?}"));
        }
    }
}

/// A call under way.
struct UnderWay<'a> {
    watcher: &'a Watcher,
    session: usize,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.watcher.count_call(self.session, -1);
    }
}

impl<S: Service> Service for Watched<S> {
    type Session = S::Session;
    type Error = S::Error;

    fn open(&self, cx: &Cx<'_, S::Session>) -> Result<(), Refusal> {
        self.watcher.event(cx, 1, || "open".to_owned());
        // Before, since it may have itself called.
        self.watcher.opened(cx);
        let mut unopened = Unopened { watcher: &self.watcher, session: Some(place(cx.session())) };
        let opened = self.service.open(cx);
        if opened.is_ok() {
            unopened.session = None;
        }
        opened
    }

    async fn call(&self, cx: &Cx<'_, S::Session>, frame: Frame) -> Result<(), S::Error> {
        self.watcher.event(cx, 2 | (frame.len() as u64) << 8, || format!("call with {}", shown(&frame)));
        let session = place(cx.session());
        self.watcher.count_call(session, 1);
        let _under_way = UnderWay { watcher: &self.watcher, session };
        let done = self.service.call(cx, frame).await;
        self.watcher.event(cx, 3, || match &done {
            Ok(()) => "call is done".to_owned(),
            Err(error) => format!("call failed: {error}"),
        });
        done
    }

    fn malformed(&self, cx: &Cx<'_, S::Session>, error: &FrameError) {
        self.watcher.event(cx, 5, || format!("malformed: {error}"));
        self.service.malformed(cx, error);
    }

    fn heartbeat(&self, cx: &Cx<'_, S::Session>) {
        self.watcher.event(cx, 6, || "heartbeat".to_owned());
        self.service.heartbeat(cx);
    }

    fn input_ended(&self, cx: &Cx<'_, S::Session>) {
        self.watcher.event(cx, 7, || "input ended".to_owned());
        self.service.input_ended(cx);
    }

    fn close(&self, session: &S::Session, reason: CloseReason) {
        self.watcher.closed(place(session), reason);
        self.service.close(session, reason);
    }
}

/// A connection whose `open` does not succeed has no `close`.
struct Unopened<'a> {
    watcher: &'a Watcher,
    session: Option<usize>,
}

impl Drop for Unopened<'_> {
    fn drop(&mut self) {
        if let Some(session) = self.session {
            self.watcher.sessions.borrow_mut().remove(&session);
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
