//! Facts of a WebSocket connection.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use crate::close;
use crate::upgrade::{Accept, Upgrade};

/// Facts of a WebSocket connection's request, and the way it ends. Takes 56 bytes from when a
/// service first asks for it, plus the reasons. Before that the connection holds the request
/// itself, unless the shard shortly before had an equal one: 56 bytes, plus target, protocol and
/// kept value; a target of `/` takes none.
pub struct WebSocketInfo {
    /// `None` for `/`.
    target: Option<Rc<str>>,
    agreed: Option<Rc<Agreement>>,
    /// The code of the peer's close frame; 0 before it, 1005 if it has none.
    peer_code: Cell<u16>,
    /// The code with which the service closes it; 0 if it names none.
    code: Cell<u16>,
    /// The reasons of both sides, if there are any.
    reasons: Cell<Option<Box<Reasons>>>,
}

/// The decisions about the request.
struct Agreement {
    protocol: Option<Arc<str>>,
    data: Option<Rc<dyn Any>>,
}

#[derive(Default)]
struct Reasons {
    peer: Box<str>,
    own: Box<str>,
}

/// Represents a close frame without a code, and is never sent.
const NO_CODE: u16 = 1005;

impl WebSocketInfo {
    pub(crate) fn new(upgrade: &Upgrade<'_>, accept: &Accept) -> WebSocketInfo {
        WebSocketInfo {
            target: Some(upgrade.target()).filter(|target| *target != "/").map(Rc::from),
            agreed: (accept.protocol.is_some() || accept.data.is_some())
                .then(|| Rc::new(Agreement { protocol: accept.protocol.clone(), data: accept.data.clone() })),
            peer_code: Cell::new(0),
            code: Cell::new(0),
            reasons: Cell::new(None),
        }
    }

    /// Copies the request's facts for another connection with an equal request, without the facts
    /// of its end.
    pub(crate) fn fresh(&self) -> WebSocketInfo {
        WebSocketInfo {
            target: self.target.clone(),
            agreed: self.agreed.clone(),
            peer_code: Cell::new(0),
            code: Cell::new(0),
            reasons: Cell::new(None),
        }
    }

    /// True if connections with equal requests may share it.
    fn may_be_shared(&self) -> bool {
        // A kept value belongs to one connection, and is dropped with it.
        self.target().len() <= SHARED_BYTES_MAX
            && self.agreed.as_ref().is_none_or(|agreed| agreed.data.is_none())
    }

    /// Path and query of the request, as they were sent.
    pub fn target(&self) -> &str {
        self.target.as_deref().unwrap_or("/")
    }

    /// The path of the request: `/chat` of `/chat?room=1`.
    pub fn path(&self) -> &str {
        self.target().split_once('?').map_or(self.target(), |(path, _)| path)
    }

    /// The part after the `?` of the request.
    pub fn query(&self) -> Option<&str> {
        self.target().split_once('?').map(|(_, query)| query)
    }

    /// The protocol spoken above WebSocket, if one was agreed upon.
    pub fn protocol(&self) -> Option<&str> {
        self.agreed.as_ref()?.protocol.as_deref()
    }

    /// The value kept for the service when the client was [admitted](Accept::data), if it is a `T`.
    pub fn data<T: 'static>(&self) -> Option<Rc<T>> {
        self.agreed.as_ref()?.data.clone()?.downcast().ok()
    }

    /// The code of the peer's close frame: 1005 if it has none, `None` until it arrives.
    pub fn peer_code(&self) -> Option<u16> {
        Some(self.peer_code.get()).filter(|code| *code != 0)
    }

    /// The reason in the peer's close frame; empty if it has none.
    pub fn peer_reason(&self) -> String {
        self.with_reasons(|reasons| reasons.peer.to_string())
    }

    /// Sets the code and reason with which the connection ends, once it is closed. The first call
    /// counts.
    ///
    /// # Panics
    /// If no close frame may carry the code ([`close::is_valid`]), or the reason is longer than 123
    /// bytes.
    pub fn end_with(&self, code: u16, reason: &str) {
        assert!(close::is_valid(code), "no close frame may carry the code {code}");
        assert!(close::is_reason(reason.as_bytes()), "the reason of a close frame has at most 123 bytes");
        if self.code.get() == 0 {
            self.code.set(code);
            if !reason.is_empty() {
                self.with_reasons(|reasons| reasons.own = reason.into());
            }
        }
    }

    /// Calls `call` with the reasons, which have memory while one of them is not empty.
    fn with_reasons<T>(&self, call: impl FnOnce(&mut Reasons) -> T) -> T {
        let mut reasons = self.reasons.take();
        let mut none = Reasons::default();
        let answer = call(reasons.as_deref_mut().unwrap_or(&mut none));
        let is_some = !none.peer.is_empty() || !none.own.is_empty();
        self.reasons.set(reasons.or_else(|| is_some.then(|| Box::new(none))));
        answer
    }

    /// Notes that the peer's close frame arrived.
    pub fn peer_closed(&self, said: Option<(u16, &str)>) {
        self.peer_code.set(said.map_or(NO_CODE, |(code, _)| code));
        if let Some((_, reason)) = said.filter(|(_, reason)| !reason.is_empty()) {
            self.with_reasons(|reasons| reasons.peer = reason.into());
        }
    }

    /// Sets the code with which the connection ends, unless the service named one.
    pub(crate) fn ends_by(&self, code: u16) {
        if self.code.get() == 0 {
            self.code.set(code);
        }
    }

    /// Appends the connection's close frame to `out`. A close frame of the peer is answered with
    /// its own code.
    pub(crate) fn write_close(&self, out: &mut Vec<u8>) {
        match (self.peer_code.get(), self.code.get()) {
            (NO_CODE, _) => close::write(None, "", out),
            (0, 0) => close::write(Some(close::NORMAL), "", out),
            (0, own) => self.with_reasons(|reasons| close::write(Some(own), &reasons.own, out)),
            (peer, _) => close::write(Some(peer), "", out),
        }
    }
}

/// The facts of a shard's latest requests, each once: most connections send equal ones.
#[derive(Default)]
pub(crate) struct Recent {
    /// The latest one is last.
    infos: RefCell<[Option<Rc<WebSocketInfo>>; RECENT]>,
}

/// The number of paths that a server is likely to have.
const RECENT: usize = 4;

/// A longer target is likely to identify the client. So each shard holds little: 4 KiB.
const SHARED_BYTES_MAX: usize = 1024;

impl Recent {
    /// Returns the entry that equals `info`, or `info`. True if other connections may have it too.
    pub(crate) fn share(&self, info: WebSocketInfo) -> (Rc<WebSocketInfo>, bool) {
        if !info.may_be_shared() {
            return (Rc::new(info), false);
        }
        let mut infos = self.infos.borrow_mut();
        let is_same = |known: &Option<Rc<WebSocketInfo>>| {
            known
                .as_ref()
                .is_some_and(|known| known.target == info.target && known.protocol() == info.protocol())
        };
        let at = infos.iter().position(is_same);
        infos[at.unwrap_or(0)..].rotate_left(1);
        let latest = &mut infos[RECENT - 1];
        if at.is_none() {
            *latest = None;
        }
        (latest.get_or_insert_with(|| Rc::new(info)).clone(), true)
    }
}

impl fmt::Debug for WebSocketInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebSocketInfo")
            .field("target", &self.target())
            .field("protocol", &self.protocol())
            .field("peer_code", &self.peer_code())
            .finish_non_exhaustive()
    }
}
