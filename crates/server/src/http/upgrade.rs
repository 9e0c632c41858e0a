//! Requests after which a connection, or a stream of HTTP/2, speaks something else.
//!
//! What a service is given of hyper's carries only what is `Send`, and nothing of a shard is. So a request carries a number, and the
//! thread of its shard knows what that stands for:
//!
//! ```text
//!   Watched ── offer: the number ──▶ request ──▶ service ── find ──▶ Offer ── begin_with ──▶ Watch
//!      └─ the service answered: the number stands for nothing       what is to come ◀── the connection, once hyper left it
//! ```

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::thread::ThreadId;

use hyper::Request;
use hyper::body::Bytes;

use super::watch::{Watch, Watching};
use crate::shard::face::handle::Shard;
use crate::stream::byte_stream::Stream;

/// What the request carries. A copy on another thread finds nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Number {
    thread: ThreadId,
    number: u64,
}

/// The connection of a request.
#[derive(Clone)]
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

/// Lets the service of `request` find its connection.
pub(super) fn offer<B>(
    request: &mut Request<B>,
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
    request.extensions_mut().insert(Number { thread: std::thread::current().id(), number });
    Offered(number)
}

/// The connection of `request`, once. `None` if the request asks for nothing else than HTTP, was answered, or is not on the thread
/// of its shard.
pub(crate) fn find<B>(request: &mut Request<B>) -> Option<Offer> {
    let Number { thread, number } = request.extensions_mut().remove()?;
    if thread != std::thread::current().id() {
        return None;
    }
    OFFERS.with_borrow(|offers| offers.open.get(&number).cloned())
}

impl Offer {
    /// Has the connection of HTTP/1.1 go on with `begin`, if the request is answered with 101.
    pub(crate) fn begin_with(
        self,
        begin: impl FnOnce(Stream, Bytes) -> Pin<Box<dyn Future<Output = ()>>> + 'static,
    ) {
        if let Some(watch) = self.watch.upgrade() {
            watch.set_upgrade(Some(Box::new(begin)));
        }
    }

    /// What counts for a stream of HTTP/2 that speaks something else: the connection is not idle, and is not ended for how long this
    /// takes.
    pub(crate) fn into_hold(self) -> Hold {
        self.watching.set_upgraded();
        Hold { watching: self.watching, bytes: 0 }
    }
}

/// Memory that a stream of HTTP/2 holds for what it speaks instead.
pub(crate) struct Hold {
    watching: Rc<Watching>,
    bytes: usize,
}

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

impl Drop for Hold {
    fn drop(&mut self) {
        self.set(0);
    }
}
