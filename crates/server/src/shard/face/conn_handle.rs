//! Handles that reach a connection from outside of its calls.

use std::fmt;
use std::future::poll_fn;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use ringserve_buf::{CountedHead, ReplyWriter, WeakHead};
use ringserve_core::framing::WriteResult;
use ringserve_core::{ConnHead, ConnId, Outlet, Payload, RemoteGate, SharedPayload};

use super::handle::Shard;
use crate::shard::wakes::awaited::AwaitedEvent;
use crate::shard::wakes::inbox::{ShardRemote, ShardRequest};
use crate::shard::wakes::notice::notice;

/// Reaches a connection from any thread: from its own shard, another shard, or a thread beside
/// them. A clone costs two reference counts. The handle keeps neither the connection open nor its
/// slot: once the connection has ended, the handle answers [`PushError::Gone`], whatever connection
/// took its place.
///
/// Pushes of one thread arrive in order. A push takes a lock for a few instructions, and wakes the
/// shard if it sleeps. Code of the connection's own shard pushes behind the replies that are queued
/// before the end of its turn, and with them in one send as a rule; a [`LocalHandle`] queues at
/// once.
///
/// Handles of one connection are equal. A handle is safe as the key of a map, since the part that
/// is compared never changes; clippy's `mutable_key_type` does not see that. `(handle.shard(),
/// handle.id())` is a key too, and a smaller one.
#[derive(Clone)]
pub struct ConnHandle {
    id: ConnId,
    gate: Arc<RemoteGate>,
    remote: Arc<ShardRemote>,
    shard: u32,
}

impl ConnHandle {
    pub(crate) fn new(outlet: &Outlet, shard: &Shard) -> ConnHandle {
        let remote = shard.remote().clone();
        ConnHandle { id: outlet.id(), gate: outlet.gate(), remote, shard: shard.index() as u32 }
    }

    /// The id of the connection, unique on its shard.
    pub fn id(&self) -> ConnId {
        self.id
    }

    /// The [index](Shard::index) of the connection's shard. With [`id`](ConnHandle::id) it names
    /// the connection in its server.
    pub fn shard(&self) -> usize {
        self.shard as usize
    }

    /// True once the connection ended, or its end was requested anywhere: it takes no more pushes.
    pub fn is_gone(&self) -> bool {
        self.gate.is_gone()
    }

    /// Queues one frame, encoded by the service's framing on the connection's own shard. The same
    /// `Bytes` may go to many connections without a copy until then, and from 32 KiB on they are
    /// sent without one.
    ///
    /// `Ok` means that the frame was queued while the connection lived, not that the peer got it.
    ///
    /// # Errors
    /// [`PushError::Full`] if the outbox, with everything on the way to it, is over
    /// [`Limits::outbox_bytes_high`](crate::Limits::outbox_bytes_high) because the peer reads too
    /// slowly. The frame is not queued; the caller drops it or closes the connection.
    /// [`PushError::Gone`] if the connection ended, or is about to.
    pub fn push(&self, payload: impl Into<Bytes>) -> Result<(), PushError> {
        self.send(payload.into(), true)
    }

    /// Queues bytes as they are, as [`Cx::write`](crate::Cx::write) does: frames that were encoded
    /// before, once for many connections. They arrive whole, between two frames.
    ///
    /// # Errors
    /// As [`push`](ConnHandle::push).
    pub fn push_raw(&self, bytes: impl Into<Bytes>) -> Result<(), PushError> {
        self.send(bytes.into(), false)
    }

    fn send(&self, payload: Bytes, is_framed: bool) -> Result<(), PushError> {
        if self.gate.is_gone() {
            return Err(PushError::Gone);
        }
        let bytes = ShardRequest::bytes_of(&payload);
        if !self.gate.announce(bytes) {
            return Err(PushError::Full);
        }
        let letter = ShardRequest::Push { id: self.id, gate: self.gate.clone(), payload, is_framed };
        self.remote.send(letter).map_err(|_| {
            self.gate.arrived(bytes);
            PushError::Gone
        })
    }

    /// Waits until a push finds room; returns at once if there is room or the connection is gone.
    /// Otherwise the outbox has to fall to
    /// [`Limits::outbox_bytes_low`](crate::Limits::outbox_bytes_low). Other pushes may fill it
    /// again before the caller's own, so push in a loop.
    ///
    /// Any executor may await it, on any thread. A wait costs an allocation and a message to the
    /// connection's shard. Dropping the future is free.
    pub async fn ready(&self) {
        while !self.gate.is_gone() && self.gate.is_full() {
            wait(&self.remote, self.id, AwaitedEvent::Ready).await;
        }
    }

    /// Waits until the connection ended and its service, if it was opened, returned from
    /// [`Service::close`](crate::Service::close). That is later than
    /// [`is_gone`](ConnHandle::is_gone), by the time that queued replies take to leave. The end of
    /// a shard ends its connections.
    ///
    /// Any executor may await it, as [`ready`](ConnHandle::ready).
    pub async fn closed(&self) {
        wait(&self.remote, self.id, AwaitedEvent::Closed).await;
    }

    /// Closes the connection after its queued replies; a pending call is dropped then. Pushes find
    /// it gone at once. Its shard carries the order out in its next turn, or as a rule at the end
    /// of this one if the caller runs on that shard: frames that came before may still be handed
    /// over. [`Cx::close`](crate::Cx::close) closes at once.
    pub fn close(&self) {
        // A request that is repeated must not fill the shard's inbox.
        if self.gate.ask_close() {
            let _ = self.remote.send(ShardRequest::Close { id: self.id });
        }
    }

    /// Resets the connection in its shard's next turn, or as a rule at the end of this one if the
    /// caller runs on that shard. Pushes find it gone at once.
    pub fn abort(&self) {
        if self.gate.ask_abort() {
            let _ = self.remote.send(ShardRequest::Abort { id: self.id });
        }
    }
}

impl PartialEq for ConnHandle {
    fn eq(&self, other: &ConnHandle) -> bool {
        Arc::ptr_eq(&self.gate, &other.gate)
    }
}

impl Eq for ConnHandle {}

impl Hash for ConnHandle {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.shard, self.id).hash(state);
    }
}

impl fmt::Debug for ConnHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnHandle({})", self.id)
    }
}

/// Waits until `until` has happened to a connection, or its shard ended.
async fn wait(remote: &ShardRemote, id: ConnId, until: AwaitedEvent) {
    let (noticed, notify) = notice();
    // If the shard ended, the letter comes back, and its drop gives the notice.
    let _ = remote.send(ShardRequest::Await { id, until, notify });
    noticed.await;
}

/// Reaches a [`Stream`](crate::Stream) from any thread, as [`ConnHandle`] reaches a connection of
/// frames. It cannot push: a stream has no frames, so pushed bytes could land in the middle of a
/// message that its owner writes. Send bytes for a stream to its owner, through a channel or a
/// [`Mesh`](crate::sync::Mesh); the owner writes them between two messages.
///
/// ```compile_fail,E0599
/// fn push(handle: ringserve_server::StreamHandle) {
///     let _ = handle.push("into the middle of a message");
/// }
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct StreamHandle(ConnHandle);

impl StreamHandle {
    pub(crate) fn new(outlet: &Outlet, shard: &Shard) -> StreamHandle {
        StreamHandle(ConnHandle::new(outlet, shard))
    }

    /// The id of the connection, unique on its shard.
    pub fn id(&self) -> ConnId {
        self.0.id()
    }

    /// The shard of the connection, as [`ConnHandle::shard`].
    pub fn shard(&self) -> usize {
        self.0.shard()
    }

    /// Waits for the end, as [`ConnHandle::closed`].
    pub async fn closed(&self) {
        self.0.closed().await;
    }

    /// True once the connection is ending, as [`ConnHandle::is_gone`].
    pub fn is_gone(&self) -> bool {
        self.0.is_gone()
    }

    /// Closes the connection after its queued bytes, as [`ConnHandle::close`]. Bytes that the
    /// stream's owner has yet to write are not waited for.
    pub fn close(&self) {
        self.0.close();
    }

    /// Resets the connection, as [`ConnHandle::abort`].
    pub fn abort(&self) {
        self.0.abort();
    }
}

impl fmt::Debug for StreamHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamHandle({})", self.id())
    }
}

/// Reaches a connection from other code on its own shard. The handle keeps the connection's memory,
/// about 200 bytes and the session, from being reused, but does not keep the connection open.
#[derive(Clone)]
pub struct LocalHandle {
    id: ConnId,
    shared: WeakHead<Outlet>,
    shard: Shard,
}

impl LocalHandle {
    pub(crate) fn new(shared: &ConnHead, shard: &Shard) -> LocalHandle {
        LocalHandle { id: shared.id(), shared: shared.downgrade(), shard: shard.clone() }
    }

    /// The id of the connection, unique on its shard.
    pub fn id(&self) -> ConnId {
        self.id
    }

    /// The [index](Shard::index) of the connection's shard, which is the caller's.
    pub fn shard(&self) -> usize {
        self.shard.index()
    }

    /// True once the connection ended, or its end was requested anywhere: it takes no more pushes.
    pub fn is_gone(&self) -> bool {
        self.shared.upgrade().is_none_or(|shared| shared.is_ending())
    }

    /// Queues one frame, encoded by the service's framing.
    ///
    /// # Errors
    /// [`PushError::Full`] if the outbox is over its high mark because the peer reads too slowly.
    /// The frame is not queued; the caller drops it or closes the connection. [`PushError::Gone`]
    /// if the connection ended, or is about to.
    pub fn push<'p>(&self, payload: impl Into<Payload<'p>>) -> Result<(), PushError> {
        self.room()?.reply(payload.into());
        Ok(())
    }

    /// Queues one frame whose payload `write` writes in place, as in
    /// [`Cx::reply_with`](crate::Cx::reply_with). The `Ok` holds the result of `write`, its own
    /// error included.
    ///
    /// # Errors
    /// As [`push`](LocalHandle::push); `write` is not called then.
    pub fn push_with<R: WriteResult>(
        &self,
        write: impl FnOnce(&mut ReplyWriter<'_>) -> R,
    ) -> Result<R, PushError> {
        Ok(self.room()?.reply_with(write))
    }

    /// Queues one frame whose payload comes in parts, as in
    /// [`Cx::reply_parts`](crate::Cx::reply_parts).
    ///
    /// # Errors
    /// As [`push`](LocalHandle::push).
    pub fn push_parts<'p, P: Into<Payload<'p>>>(
        &self,
        parts: impl IntoIterator<Item = P>,
    ) -> Result<(), PushError> {
        self.room()?.reply_parts(parts);
        Ok(())
    }

    /// Queues one frame that other connections of this shard get too. It is encoded once for all
    /// connections of a service.
    ///
    /// # Errors
    /// As [`push`](LocalHandle::push), and [`PushError::Unframed`] if the framing has no frame for
    /// the payload. The connection stays, unlike after another push of such a payload: one message
    /// for many does not end them all.
    pub fn push_shared(&self, payload: &SharedPayload) -> Result<(), PushError> {
        if self.room()?.push_shared(payload) { Ok(()) } else { Err(PushError::Unframed) }
    }

    /// Queues bytes as they are, as [`Cx::write`](crate::Cx::write) does.
    ///
    /// # Errors
    /// As [`push`](LocalHandle::push).
    pub fn push_raw<'p>(&self, bytes: impl Into<Payload<'p>>) -> Result<(), PushError> {
        self.room()?.write_payload(bytes.into());
        Ok(())
    }

    /// Checks whether a push would find room now.
    #[cfg(feature = "tokio")]
    pub(crate) fn check(&self) -> Result<(), PushError> {
        self.room().map(drop)
    }

    /// As [`Cx::transport_info`](crate::Cx::transport_info), of a connection that lives.
    #[cfg(feature = "websocket")]
    pub(crate) fn transport_info<T: 'static>(&self) -> Option<std::rc::Rc<T>> {
        ringserve_core::facts_as(self.shared.upgrade()?.transport_info()?)
    }

    /// The connection's outlet, if a push would find room.
    pub(crate) fn room(&self) -> Result<CountedHead<Outlet>, PushError> {
        let shared = self.shared.upgrade().filter(|shared| !shared.is_ending()).ok_or(PushError::Gone)?;
        if shared.is_full() { Err(PushError::Full) } else { Ok(shared) }
    }

    /// True if [`ready`](LocalHandle::ready) returns at once.
    pub fn is_ready(&self) -> bool {
        self.shared.upgrade().is_none_or(|shared| !shared.is_full() || shared.is_ending())
    }

    /// Waits until a push finds room; returns at once if there is room or the connection is gone.
    /// Otherwise the outbox has to fall to
    /// [`Limits::outbox_bytes_low`](crate::Limits::outbox_bytes_low).
    pub async fn ready(&self) {
        poll_fn(|task| match self.shared.upgrade() {
            Some(shared) if shared.is_full() && !shared.is_ending() => {
                shared.wake_when_ready(task.waker());
                Poll::Pending
            }
            _ => Poll::Ready(()),
        })
        .await
    }

    /// Waits until the connection ended and its service, if it was opened, returned from
    /// [`Service::close`](crate::Service::close). That is later than
    /// [`is_gone`](LocalHandle::is_gone), by the time that queued replies take to leave.
    pub async fn closed(&self) {
        wait(self.shard.remote(), self.id, AwaitedEvent::Closed).await;
    }

    /// Closes the connection after its queued replies; a pending call is dropped then.
    pub fn close(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.close();
        }
    }

    /// Resets the connection.
    pub fn abort(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.abort();
        }
    }
}

impl PartialEq for LocalHandle {
    fn eq(&self, other: &LocalHandle) -> bool {
        self.shared == other.shared
    }
}

impl Eq for LocalHandle {}

impl Hash for LocalHandle {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

impl fmt::Debug for LocalHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalHandle({})", self.id)
    }
}

/// The reason why a push was not queued.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PushError {
    /// The peer reads too slowly.
    Full,
    /// The connection ended, or its end was requested.
    Gone,
    /// The framing has no frame for the payload, as where it holds the delimiter or is too long: of
    /// [`LocalHandle::push_shared`] alone. Other pushes close the connection then
    /// ([`CloseReason::ReplyNotFramed`](crate::CloseReason::ReplyNotFramed)).
    Unframed,
}

impl fmt::Display for PushError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PushError::Full => "the peer reads too slowly: its outbox is over outbox_bytes_high",
            PushError::Gone => "the connection ended",
            PushError::Unframed => "the framing has no frame for the payload",
        })
    }
}

ringserve_buf::debug_is_display!(PushError);

impl std::error::Error for PushError {}
