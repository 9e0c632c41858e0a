//! Connections that speak something else after a request.
//!
//! [`switch`] takes the connection of a request of HTTP/1.1 that asks for an upgrade, and
//! [`Switch::then`] says what follows an answer of 101: a future that is given the [`Stream`]
//! itself, on the shard's thread. Where the service answers otherwise, nothing of that happens.
//! `hyper::upgrade::on` does the same with bytes that may go to any thread, for 18 KiB a connection
//! and a copy each way.
//!
//! A request is given by hyper, and carries only what is `Send`, which nothing of a shard is. So it
//! carries a number, and the thread of its shard knows what that stands for:
//!
//! ```text
//!   Watched ── offer: the number ──▶ request ──▶ service ── find ──▶ Offer ── begin_with ──▶ Watch
//!      └─ the service answered: the number stands for nothing       what is to come ◀── the connection, once hyper left it
//! ```

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::thread::ThreadId;

use hyper::body::Bytes;
use hyper::http::Extensions;

use super::watch::{Watch, Watching};
use crate::shard::face::handle::Shard;
use crate::stream::byte_stream::Stream;

/// The key of the offer that a request carries. A copy on another thread finds nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Number {
    thread: ThreadId,
    number: u64,
}

/// Takes the connection of a request of HTTP/1.1 by its extensions, once. `None` if the request
/// asks for no upgrade, was answered, is one of HTTP/2, or is not on the thread of its shard.
///
/// ```no_run
/// use std::convert::Infallible;
/// use std::future::ready;
///
/// use ringserve::http::hyper::body::{Bytes, Incoming};
/// use ringserve::http::hyper::header::{CONNECTION, UPGRADE};
/// use ringserve::http::hyper::service::service_fn;
/// use ringserve::http::hyper::{Request, Response, StatusCode};
/// use ringserve::http::upgrade::switch;
/// use ringserve::{Server, Stream, http};
///
/// /// Echoes bytes after an upgrade to `echo`.
/// fn answer(mut request: Request<Incoming>) -> Response<String> {
///     let mut response = Response::new(String::new());
///     let asks = request.headers().get(UPGRADE).is_some_and(|name| name == "echo");
///     let Some(switch) = switch(request.extensions_mut()).filter(|_| asks) else { return response };
///     switch.then(async |mut stream: Stream, read: Bytes| {
///         stream.queue(&read[..]);
///         while let Ok(Some(bytes)) = stream.read_frame().await {
///             stream.queue(bytes);
///         }
///     });
///     *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
///     response.headers_mut().insert(UPGRADE, "echo".parse().expect("a value"));
///     response.headers_mut().insert(CONNECTION, "upgrade".parse().expect("a value"));
///     response
/// }
///
/// fn main() -> Result<(), ringserve::Error> {
///     let service = |_shard: &_| http(service_fn(|request| ready(Ok::<_, Infallible>(answer(request)))));
///     Server::bind("127.0.0.1:8080").serve(service)
/// }
/// ```
pub fn switch(extensions: &mut Extensions) -> Option<Switch> {
    let offer = find(extensions)?;
    let is_http2 = offer.watch.upgrade().is_none_or(|watch| watch.is_http2());
    (!is_http2).then_some(Switch { offer })
}

/// A connection that may go on as something else. See [`switch`]. Its drop leaves the connection as
/// it is.
#[must_use = "nothing follows before `then` says what"]
pub struct Switch {
    offer: Offer,
}

impl Switch {
    /// Lets the connection go on with `then`, if the request is answered with 101: it gets the
    /// stream, and the bytes that hyper had read of it after the request. It runs to its end in
    /// the connection's task, and a drain waits for it as for a [`Stream`].
    pub fn then<F>(self, then: F)
    where
        F: AsyncFnOnce(Stream, Bytes) + 'static,
    {
        self.offer.begin_with(|stream, read| Box::pin(then(stream, read)));
    }
}

impl fmt::Debug for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Switch").finish_non_exhaustive()
    }
}

/// The connection of a request.
#[derive(Clone)]
#[cfg_attr(
    not(feature = "websocket"),
    allow(dead_code, reason = "a WebSocket needs more than a switch does")
)]
pub(crate) struct Offer {
    pub(crate) shard: Shard,
    watch: Weak<Watch>,
    watching: Rc<Watching>,
}

#[derive(Default)]
struct Offers {
    next: u64,
    open: HashMap<u64, Offer>,
}

thread_local! {
    static OFFERS: RefCell<Offers> = RefCell::default();
}

/// A number that stands for a connection until this is dropped.
pub(super) struct Offered(u64);

impl Drop for Offered {
    fn drop(&mut self) {
        let offer = OFFERS.try_with(|offers| offers.borrow_mut().open.remove(&self.0));
        drop(offer);
    }
}

/// Lets the service of a request with these extensions find its connection.
pub(super) fn offer(
    extensions: &mut Extensions,
    shard: &Shard,
    watch: &Rc<Watch>,
    watching: &Rc<Watching>,
) -> Offered {
    let offer = Offer { shard: shard.clone(), watch: Rc::downgrade(watch), watching: watching.clone() };
    let number = OFFERS.with_borrow_mut(|offers| {
        offers.next += 1;
        offers.open.insert(offers.next, offer);
        offers.next
    });
    extensions.insert(Number { thread: std::thread::current().id(), number });
    Offered(number)
}

/// The connection of a request with these extensions, once. `None` if the request asks for nothing
/// else than HTTP, was answered, or is not on the thread of its shard.
pub(crate) fn find(extensions: &mut Extensions) -> Option<Offer> {
    let Number { thread, number } = extensions.remove()?;
    if thread != std::thread::current().id() {
        return None;
    }
    OFFERS.with_borrow(|offers| offers.open.get(&number).cloned())
}

impl Offer {
    /// Lets the connection of HTTP/1.1 go on with `begin`, if the request is answered with 101.
    pub(crate) fn begin_with(
        self,
        begin: impl FnOnce(Stream, Bytes) -> Pin<Box<dyn Future<Output = ()>>> + 'static,
    ) {
        if let Some(watch) = self.watch.upgrade() {
            watch.set_upgrade(Some(Box::new(begin)));
        }
    }

    /// The hold of a stream of HTTP/2 that speaks something else: the connection is not idle, and
    /// is not ended for how long this takes.
    #[cfg(feature = "websocket")]
    pub(crate) fn into_hold(self) -> Hold {
        self.watching.set_upgraded();
        Hold { watching: self.watching, bytes: 0 }
    }
}

/// Memory that a stream of HTTP/2 holds for what it speaks instead.
#[cfg(feature = "websocket")]
pub(crate) struct Hold {
    watching: Rc<Watching>,
    bytes: usize,
}

#[cfg(feature = "websocket")]
impl Hold {
    /// All that came on this stream until now was taken.
    pub(crate) fn all_read(&self) {
        self.watching.all_read();
    }

    pub(crate) fn set(&mut self, bytes: usize) {
        self.watching.hold_received(self.bytes, bytes);
        self.bytes = bytes;
    }

    /// Resets the stream: hyper would keep what it has of it until the client takes that.
    pub(crate) fn reset(&self) {
        self.watching.reset();
    }
}

#[cfg(feature = "websocket")]
impl Drop for Hold {
    fn drop(&mut self) {
        self.set(0);
    }
}
