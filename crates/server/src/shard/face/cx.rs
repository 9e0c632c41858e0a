//! The connection of a call, for the code of users.

use std::borrow::Cow;
use std::fmt;
use std::future::poll_fn;
use std::task::Poll;

use ringserve_core::framing::AsFramingState;
use ringserve_core::{ConnHead, ConnShared, Limits, NoMemoryLeft};

use super::conn_methods::conn_methods;
use super::handle::Shard;
use super::reserve::Reserved;
use crate::overload::Load;
use crate::shard::tasks::join::JoinHandle;

/// The connection of a call.
///
/// Only [`ready`](Cx::ready), [`reserve`](Cx::reserve), [`sleep`](Cx::sleep) and
/// [`timeout`](Cx::timeout) wait. Replies are queued, and all replies of a turn leave in one send.
///
/// # What a dropped call leaves
///
/// A pending call is dropped when its connection ends: the peer is gone, a limit was exceeded, or
/// the server stops. Replies that it had queued still leave, unless the connection was reset; later
/// ones do not exist, and no frame is cut. A call that must finish something outside of its
/// connection, such as writing a file, gives that to [`spawn`](Cx::spawn) and awaits the result.
pub struct Cx<'a, S> {
    head: &'a ConnHead,
    session: &'a S,
    shard: &'a Shard,
}

impl<'a, S: 'static> Cx<'a, S> {
    pub(crate) fn new(shared: &'a ConnShared<S>, shard: &'a Shard) -> Cx<'a, S> {
        Cx { head: shared.head(), session: shared.body(), shard }
    }

    pub(crate) fn head(&self) -> &'a ConnHead {
        self.head
    }

    conn_methods!();

    /// Closes the connection after its queued replies. No further frame is handed over; if this
    /// call is still pending when the replies have left, it is dropped.
    pub fn close(&self) {
        self.head.close();
    }

    /// Resets the connection and drops its queued replies.
    pub fn abort(&self) {
        self.head.abort();
    }

    /// The demand on the shard in relation to its capacity: under load a call may leave out what is
    /// expensive and not needed. Reads a number that the watchdog sets, each 35 ms unless all
    /// shards are calm.
    pub fn load(&self) -> Load {
        self.shard.load()
    }

    /// True once the connection was closed, reset, or ended otherwise. Another pending call may
    /// have closed it: a request after it is better not begun.
    #[doc(alias = "is_ending")]
    pub fn is_closed(&self) -> bool {
        self.head.is_ending()
    }

    /// Waits until the outbox is below its high mark; returns at once if it is. A handler that
    /// writes without end awaits this between pieces, so that a slow peer slows it down.
    pub async fn ready(&self) {
        poll_fn(|task| {
            if self.is_ready() {
                return Poll::Ready(());
            }
            self.head.wake_when_ready(task.waker());
            Poll::Pending
        })
        .await
    }

    /// True if [`ready`](Cx::ready) returns at once.
    #[inline]
    pub fn is_ready(&self) -> bool {
        !self.head.is_full() || self.head.is_gone()
    }

    /// Reserves memory for a large answer before it is built: at once where all connections of the
    /// shard hold less than three quarters of
    /// [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max) with it, else
    /// in a line, first come, first served. Reserved bytes count as held by this connection until
    /// the result is dropped: queue the answer, then drop it. An answer that is not reserved, and
    /// passes the limit, has those closed that hold most.
    ///
    /// If the line lasts for 50 ms, connections are closed whose peers took nothing of a send for 2
    /// s, the one that holds most first, until every waiting reservation fits. A peer that reads
    /// stays, and so does a connection that owes nothing.
    ///
    /// # Errors
    /// [`NoMemoryLeft::UsedUp`](crate::limits::NoMemoryLeft::UsedUp) after 5 s, and at once where
    /// more is asked for than is ever reserved, or the connection takes no more bytes. Answer with
    /// a short error then.
    ///
    /// ```
    /// use ringserve::{Cx, Frame, Service};
    ///
    /// struct Pages;
    ///
    /// impl Service for Pages {
    ///     type Session = ();
    ///     type Error = std::convert::Infallible;
    ///
    ///     async fn call(&self, cx: &Cx<'_, ()>, _: Frame) -> Result<(), Self::Error> {
    ///         match cx.reserve(1_000_000).await {
    ///             Ok(_reserved) => cx.reply(vec![b'.'; 1_000_000]),
    ///             Err(_) => cx.reply("busy"),
    ///         }
    ///         Ok(())
    ///     }
    /// }
    /// ```
    pub async fn reserve(&self, bytes: usize) -> Result<Reserved, NoMemoryLeft> {
        Reserved::wait(self.head, self.shard, bytes).await
    }

    /// Counts memory that is there already as held by this connection, of
    /// [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max), until the
    /// result is dropped: what a service keeps for a peer that reads slowly. It is counted whether
    /// it fits or not: above the limit the connections that hold most are closed, which may be this
    /// one. For a connection that is gone nothing is counted.
    pub fn hold_bytes(&self, bytes: usize) -> Reserved {
        Reserved::held(self.head, bytes)
    }

    /// Keeps the replies that are queued by now, and those that follow, from leaving until the
    /// result is dropped, the last one of several: then all of them leave in one send. They leave
    /// before that if what is queued comes to be more than 4 KiB, or if the connection or its
    /// writing ends. Drop the result before [`ready`](Cx::ready) or [`reserve`](Cx::reserve) is
    /// awaited, which may wait for these bytes to leave.
    pub fn hold_replies(&self) -> HeldReplies<'a> {
        HeldReplies(self.head.hold_replies().then_some(self.head))
    }

    /// The limits of the service. What [`set_limits`](Cx::set_limits) changed for this connection
    /// is not in them.
    pub fn limits(&self) -> &'a Limits {
        self.head.lane().limits()
    }

    /// Switches the rule that cuts this connection's bytes into frames: the state of its
    /// [framing](crate::framing::TypedFraming), which the session [holds](AsFramingState). Frames
    /// that were handed over stay as they are; every byte after them is cut by the new rule, even
    /// if the former rule has seen it.
    ///
    /// With [`Limits::calls_in_flight_max`](crate::Limits::calls_in_flight_max) above 1 the next
    /// frame may be cut as soon as this call waits, so switch before the first `await`.
    #[doc(alias = "switch")]
    pub fn set_framing_state<T: Copy>(&self, state: T)
    where
        S: AsFramingState<T>,
    {
        self.session.framing_state().set(state);
        self.head.switched();
    }

    /// The session of the connection.
    #[inline]
    pub fn session(&self) -> &'a S {
        self.session
    }

    /// The same connection with a part of its session, for a wrapped service. Everything but
    /// [`session`](Cx::session) stays the same. Copies three pointers; a pending call may keep the
    /// result. [`middleware`](crate::middleware#with-a-session) has an example.
    #[inline]
    #[doc(alias = "project")]
    pub fn map_session<T: 'static>(&self, part: impl FnOnce(&'a S) -> &'a T) -> Cx<'a, T> {
        Cx { head: self.head, session: part(self.session), shard: self.shard }
    }

    /// Bytes of replies that the kernel has not taken yet.
    pub fn outbox_bytes(&self) -> usize {
        self.head.outbox_bytes()
    }

    /// Runs a future on this shard, independent of this connection: it goes on when the connection
    /// ends, and its handles to the connection say so. See [`Shard::spawn`].
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        self.shard.spawn(future)
    }

    /// As [`spawn`](Cx::spawn), for a task whose panic is logged with `name`.
    pub fn spawn_named<T: 'static>(
        &self,
        name: impl Into<Cow<'static, str>>,
        future: impl Future<Output = T> + 'static,
    ) -> JoinHandle<T> {
        self.shard.spawn_named(name, future)
    }
}

impl<S> fmt::Debug for Cx<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cx").field(self.head).finish()
    }
}

/// Replies of a connection that wait for more ([`Cx::hold_replies`]). Its drop lets them leave.
#[must_use = "the replies leave when it is dropped"]
pub struct HeldReplies<'a>(Option<&'a ConnHead>);

impl Drop for HeldReplies<'_> {
    fn drop(&mut self) {
        if let Some(head) = self.0 {
            head.release_replies();
        }
    }
}

impl fmt::Debug for HeldReplies<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HeldReplies").field(&self.0.map(|head| head.id())).finish()
    }
}
