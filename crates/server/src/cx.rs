//! How user code reaches a connection.

use std::any::Any;
use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::task::Poll;

use ringserve_core::{Block, ConnId, Payload};

/// The connection a call is for.
///
/// Nothing here waits but [`ready`](Cx::ready): replies are queued, and all of a turn leave together in one
/// send.
pub struct Cx<'a, S> {
    block: &'a Rc<Block<S>>,
}

impl<'a, S: 'static> Cx<'a, S> {
    pub(crate) fn new(block: &'a Rc<Block<S>>) -> Cx<'a, S> {
        Cx { block }
    }

    /// Queues one frame, encoded by the server's framing. A [`Frame`](crate::Frame) of 4 KiB or more is lent,
    /// not copied. A payload the framing cannot express closes the connection
    /// ([`CloseReason::ReplyNotFramed`](crate::CloseReason::ReplyNotFramed)).
    #[inline]
    pub fn reply<'p>(&self, payload: impl Into<Payload<'p>>) {
        self.block.link.reply(payload.into());
    }

    /// Queues bytes as they are.
    #[inline]
    pub fn write(&self, bytes: &[u8]) {
        self.block.link.write(bytes);
    }

    /// Closes the connection after what is queued has left. No further frame is handed over; this call, if it
    /// waits after that, is dropped once the replies are gone.
    pub fn close(&self) {
        self.block.link.close();
    }

    /// Resets the connection. What is queued is dropped.
    pub fn abort(&self) {
        self.block.link.abort();
    }

    /// Waits until the outbox is below its high mark; at once if it is. A handler that writes without end
    /// awaits this between pieces, so that a slow peer slows it down.
    pub async fn ready(&self) {
        poll_fn(|task| {
            let link = &self.block.link;
            if !link.is_full() || link.is_gone() {
                return Poll::Ready(());
            }
            link.wake_when_ready(task.waker());
            Poll::Pending
        })
        .await
    }

    /// The connection's state.
    #[inline]
    pub fn session(&self) -> &'a S {
        &self.block.session
    }

    /// Who is on the other end.
    pub fn peer(&self) -> Peer {
        Peer { addr: self.block.link.peer(), listener: self.block.link.listener() }
    }

    /// The connection's name on its shard.
    pub fn id(&self) -> ConnId {
        self.block.link.id()
    }

    /// True once the server shuts down: a good moment for a goodbye.
    pub fn is_draining(&self) -> bool {
        self.block.link.local().is_draining()
    }

    /// Bytes of replies that the kernel has not taken yet.
    pub fn outbox_bytes(&self) -> usize {
        self.block.link.outbox_bytes()
    }

    /// A handle that can be kept, to push to this connection from other calls on the same shard.
    pub fn handle(&self) -> ConnHandle {
        let block: Rc<Block<dyn Any>> = self.block.clone();
        ConnHandle { id: self.id(), block: Rc::downgrade(&block) }
    }
}

impl<S> fmt::Debug for Cx<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cx").field(&self.block.link).finish()
    }
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub(crate) addr: Option<SocketAddr>,
    pub(crate) listener: u16,
}

impl Peer {
    /// Its address. `None` for a peer that was gone before it could be asked.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// Which of the server's addresses it connected to, in the order of
    /// [`Running::local_addrs`](crate::Running::local_addrs).
    pub fn listener(&self) -> usize {
        usize::from(self.listener)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.addr {
            Some(addr) => addr.fmt(f),
            None => f.write_str("unknown"),
        }
    }
}

/// Reaches a connection from elsewhere on its shard, as long as it lives. It keeps the connection's memory
/// (about 200 bytes and the session's size) from being used again, but not the connection open.
#[derive(Clone)]
pub struct ConnHandle {
    id: ConnId,
    block: Weak<Block<dyn Any>>,
}

impl ConnHandle {
    /// The connection's name on its shard.
    pub fn id(&self) -> ConnId {
        self.id
    }

    /// True once the connection takes nothing any more.
    pub fn is_gone(&self) -> bool {
        self.block.upgrade().is_none_or(|block| block.link.is_gone())
    }

    /// Queues one frame, encoded by the server's framing.
    ///
    /// # Errors
    /// [`PushError::Full`] if the outbox is over its high mark, since the peer reads too slowly: the frame is
    /// not queued, and it is yours to drop it or to close the connection. [`PushError::Gone`] if the connection
    /// ended.
    pub fn push<'p>(&self, payload: impl Into<Payload<'p>>) -> Result<(), PushError> {
        let block = self.block.upgrade().filter(|block| !block.link.is_gone()).ok_or(PushError::Gone)?;
        if block.link.is_full() {
            return Err(PushError::Full);
        }
        block.link.reply(payload.into());
        Ok(())
    }

    /// Closes the connection after what is queued has left; a handler that waits is dropped then.
    pub fn close(&self) {
        if let Some(block) = self.block.upgrade() {
            block.link.close();
        }
    }

    /// Resets the connection.
    pub fn abort(&self) {
        if let Some(block) = self.block.upgrade() {
            block.link.abort();
        }
    }
}

impl PartialEq for ConnHandle {
    fn eq(&self, other: &ConnHandle) -> bool {
        self.block.ptr_eq(&other.block)
    }
}

impl Eq for ConnHandle {}

impl fmt::Debug for ConnHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnHandle({})", self.id)
    }
}

/// Why a push was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushError {
    /// The peer reads too slowly.
    Full,
    /// The connection ended.
    Gone,
}

impl fmt::Display for PushError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PushError::Full => "the peer reads too slowly: its outbox is over outbox_bytes_high",
            PushError::Gone => "the connection ended",
        })
    }
}

impl std::error::Error for PushError {}
