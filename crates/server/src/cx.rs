//! How user code reaches a connection.

use std::borrow::Cow;
use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use ringserve_buf::ReplyWriter;
use ringserve_core::framing::{HoldsState, Written};
use ringserve_core::proxy::Tlvs;
use ringserve_core::{
    ConnHead, ConnId, ConnLimits, ConnShared, LimitError, Payload, SharedPayload, facts_as,
};

use crate::handle::{ConnHandle, LocalHandle};
use crate::peer::Peer;
use crate::shard::handle::Shard;
use crate::shard::join::{JoinHandle, SpawnError};
use crate::shard::timers::{Sleep, Timeout};

/// The connection a call is for.
///
/// Nothing here waits but [`ready`](Cx::ready), [`sleep`](Cx::sleep) and [`timeout`](Cx::timeout): replies are queued,
/// and all of a turn leave together in one send.
///
/// # What a dropped call leaves
///
/// A call that waits is dropped when its connection ends: the peer is gone, a limit was over, the server stops. What it
/// had queued by then leaves, unless the connection was reset; nothing of what it would have queued later is on the wire,
/// and frames are never cut. So a call that must finish what it began beside its connection, as writing a file, gives
/// that to [`spawn`](Cx::spawn) and waits for the result.
pub struct Cx<'a, S> {
    head: &'a ConnHead,
    session: &'a S,
    shard: &'a Shard,
}

impl<'a, S: 'static> Cx<'a, S> {
    pub(crate) fn new(shared: &'a ConnShared<S>, shard: &'a Shard) -> Cx<'a, S> {
        Cx { head: shared.head(), session: shared.body(), shard }
    }

    #[cfg(any(feature = "codec", feature = "websocket"))]
    pub(crate) fn head(&self) -> &'a ConnHead {
        self.head
    }

    /// Queues one frame, encoded by the service's framing. A [`Frame`](crate::Frame) of 4 KiB or more is lent, and owned bytes
    /// (`Bytes`, `Vec<u8>`, `String`, `Arc<[u8]>`) of 32 KiB or more are kept until they are sent: not copied. A payload the
    /// framing cannot express closes the connection ([`CloseReason::ReplyNotFramed`](crate::CloseReason::ReplyNotFramed)).
    #[inline]
    pub fn reply<'p>(&self, payload: impl Into<Payload<'p>>) {
        self.head.reply(payload.into());
    }

    /// Queues one frame whose payload `write` writes where it is sent from, without a buffer in between. If `write` returns an
    /// error nothing of the frame is sent, and the error is returned; it is the caller's to go on or to close.
    ///
    /// ```
    /// use std::fmt;
    /// use ringserve::{Cx, Frame, Service};
    ///
    /// struct Count;
    ///
    /// impl Service for Count {
    ///     type Session = ();
    ///     type Error = fmt::Error;
    ///
    ///     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), fmt::Error> {
    ///         cx.reply_with(|out| write!(out, "{} bytes from {:?}", frame.len(), cx.peer().addr()))
    ///     }
    /// }
    /// ```
    ///
    /// A payload that has no frame, as one longer than its length prefix can say, closes the connection as in
    /// [`reply`](Cx::reply), and nothing of it is sent. `write` is not called once the connection takes nothing any more; the
    /// result is `Ok` then.
    ///
    /// # Panics
    /// If `write` does, and if it replies to this connection or asks how much is queued for it: then the connection is reset.
    pub fn reply_with<R: Written>(&self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        self.head.reply_with(write)
    }

    /// Queues one frame whose payload comes in parts, as `cx.reply_parts([head, body])`. Each part is copied or not as in
    /// [`reply`](Cx::reply).
    pub fn reply_parts<'p, P: Into<Payload<'p>>>(&self, parts: impl IntoIterator<Item = P>) {
        self.head.reply_parts(parts);
    }

    /// Queues one frame that other connections of this shard are sent too.
    pub fn reply_shared(&self, payload: &SharedPayload) {
        self.head.reply_shared(payload);
    }

    /// Queues bytes as they are, copied or not as in [`reply`](Cx::reply).
    #[inline]
    pub fn write<'p>(&self, bytes: impl Into<Payload<'p>>) {
        self.head.write_payload(bytes.into());
    }

    /// As [`reply_with`](Cx::reply_with), for bytes that leave as they are.
    ///
    /// # Panics
    /// As [`reply_with`](Cx::reply_with).
    pub fn write_with<R: Written>(&self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        self.head.write_with(write)
    }

    /// Closes the connection after what is queued has left. No further frame is handed over; this call, if it
    /// waits after that, is dropped once the replies are gone.
    pub fn close(&self) {
        self.head.close();
    }

    /// Resets the connection. What is queued is dropped.
    pub fn abort(&self) {
        self.head.abort();
    }

    /// True if the connection was closed or reset by the service, or ended otherwise. Another call of it that waits may have done
    /// that: a request that came behind is better not begun.
    pub fn is_ending(&self) -> bool {
        self.head.is_ending()
    }

    /// Waits until the outbox is below its high mark; at once if it is. A handler that writes without end
    /// awaits this between pieces, so that a slow peer slows it down.
    pub async fn ready(&self) {
        poll_fn(|task| {
            let outlet = &**self.head;
            if !outlet.is_full() || outlet.is_gone() {
                return Poll::Ready(());
            }
            outlet.wake_when_ready(task.waker());
            Poll::Pending
        })
        .await
    }

    /// Switches the rule by which this connection's bytes are cut into frames: the state of its
    /// [framing](crate::framing::TypedFraming), which its session [holds](HoldsState). What was received and handed over stays as
    /// it is; every byte behind that is cut by the new rule, also where the start of a frame was seen by the former one.
    ///
    /// With [`Limits::calls_in_flight_max`](crate::Limits::calls_in_flight_max) above 1 the next frame may be cut as soon as this
    /// call waits: then a call switches before its first `await`.
    pub fn switch<T: Copy>(&self, state: T)
    where
        S: HoldsState<T>,
    {
        self.session.framing_state().set(state);
        self.head.switched();
    }

    /// The connection's state.
    #[inline]
    pub fn session(&self) -> &'a S {
        self.session
    }

    /// The same connection with a part of its session, for a service inside whose session that part is. Everything but
    /// [`session`](Cx::session) is as it was. It copies three pointers, and a call that waits may keep it.
    /// [`middleware`](crate::middleware#with-a-session) has an example.
    #[inline]
    pub fn project<T: 'static>(&self, part: impl FnOnce(&'a S) -> &'a T) -> Cx<'a, T> {
        Cx { head: self.head, session: part(self.session), shard: self.shard }
    }

    /// Who is on the other end.
    pub fn peer(&self) -> Peer {
        Peer::of(self.head)
    }

    /// What the proxy said of the peer beside its address, if it came through one and
    /// [`ProxyProtocol::keep_tlvs`](crate::listen::ProxyProtocol::keep_tlvs) is on.
    pub fn tlvs(&self) -> Option<Tlvs> {
        self.head.tlvs()
    }

    /// What the connection's [transport](crate::transport) found out in its handshake, if that is a `T`.
    pub fn facts<T: 'static>(&self) -> Option<Rc<T>> {
        facts_as(self.head.facts()?)
    }

    /// The connection's name on its shard.
    pub fn id(&self) -> ConnId {
        self.head.id()
    }

    /// True once the server shuts down: a good moment for a goodbye.
    pub fn is_draining(&self) -> bool {
        self.head.lane().shard().is_draining()
    }

    /// Bytes of replies that the kernel has not taken yet.
    pub fn outbox_bytes(&self) -> usize {
        self.head.outbox_bytes()
    }

    /// Keeps the connection open after the peer has sent its last byte, until [`close`](Cx::close); the service hears of
    /// the peer's end in [`Service::input_ended`](crate::Service::input_ended). For protocols in which a peer closes its
    /// half and goes on reading for longer than its last call takes. A drain waits for such a connection, up to
    /// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout).
    pub fn hold_open(&self) {
        self.head.hold_open();
    }

    /// Bounds this connection by other limits than those of its service, until others are set: the keep-alive that a client
    /// asked for, small frames before a login, a call that waits for as long as its peer does. What is not set, or no longer, is as
    /// [`Limits`](crate::Limits) say. They hold from the next frame on, and for the calls that wait. It allocates some 150 bytes, which stay until the
    /// connection ends; one that sets no limits holds nothing for them. Its frames take a few instructions more from then on.
    ///
    /// # Errors
    /// A value out of its range, or one that contradicts another limit: nothing is changed then.
    pub fn set_limits(&self, limits: &ConnLimits) -> Result<(), LimitError> {
        self.head.set_limits(limits)
    }

    /// The shard this connection lives on.
    pub fn shard(&self) -> &'a Shard {
        self.shard
    }

    /// Runs a future on this shard, independent of this connection: it goes on when the connection ends, and a handle to
    /// that which it holds says so. See [`Shard::spawn`].
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        self.shard.spawn(future)
    }

    /// As [`spawn`](Cx::spawn), for a task that is called `name` in the line that is logged if it panics.
    pub fn spawn_named<T: 'static>(
        &self,
        name: impl Into<Cow<'static, str>>,
        future: impl Future<Output = T> + 'static,
    ) -> JoinHandle<T> {
        self.shard.spawn_named(name, future)
    }

    /// Runs a future that ends with this connection: it is dropped when that has ended, before
    /// [`Service::close`](crate::Service::close). For subscriptions and pushes that serve this peer alone. A panic in it resets
    /// the connection, as one in a call does.
    ///
    /// A connection that is idle or drained is closed though tasks of it wait, unless it is [held open](Cx::hold_open). No time
    /// limit ends a task, and [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max) does not count it. A
    /// connection without tasks has no byte for them.
    ///
    /// # Errors
    /// [`SpawnError::Full`] if the connection has
    /// [`Limits::connection_tasks_max`](crate::Limits::connection_tasks_max) tasks, [`SpawnError::Gone`] if it takes nothing any
    /// more. The future is dropped then.
    pub fn spawn_on_connection<T: 'static>(
        &self,
        future: impl Future<Output = T> + 'static,
    ) -> Result<JoinHandle<T>, SpawnError> {
        self.shard.spawn_on(self.head, future)
    }

    /// Sleeps for at least `time`; may overshoot by about 1 ms. Frames of this connection wait
    /// meanwhile, up to [`Limits::inbox_bytes_high`](crate::Limits::inbox_bytes_high); others go on.
    pub fn sleep(&self, time: Duration) -> Sleep {
        self.shard.sleep(time)
    }

    /// Runs a future for `time` at most, and drops it then. One that does not wait costs no timer and no look at the
    /// clock.
    ///
    /// # Errors
    /// [`Elapsed`](crate::time::Elapsed) if the time was over first.
    #[inline]
    pub fn timeout<F: Future>(&self, time: Duration, future: F) -> Timeout<'a, F> {
        self.shard.timeout(time, future)
    }

    /// A handle that can be kept and sent to other threads, to push to this connection from anywhere. The first call
    /// for a connection allocates.
    pub fn handle(&self) -> ConnHandle {
        ConnHandle::new(self.head, self.shard)
    }

    /// A handle for use on this shard alone. It costs nothing to make, and a push is a copy into the outbox.
    pub fn local_handle(&self) -> LocalHandle {
        LocalHandle::new(self.head, self.shard)
    }
}

impl<S> fmt::Debug for Cx<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cx").field(self.head).finish()
    }
}
