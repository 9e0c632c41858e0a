//! A connection that was accepted: its service makes a session, or refuses it.

use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use ringserve_base::peer::Peer;
use ringserve_buf::ReplyWriter;
use ringserve_core::framing::WriteResult;
use ringserve_core::proxy::Tlvs;
use ringserve_core::{ConnHead, ConnId, ConnLimits, LimitError, Payload, SharedPayload, facts_as};

use super::conn_handle::{ConnHandle, LocalHandle};
use super::handle::Shard;
use crate::shard::tasks::join::{JoinHandle, SpawnError};
use crate::shard::wakes::timers::{Sleep, Timeout};

/// State that a service keeps for one connection. Every type that is `Default` is a session, and
/// [`Service::open`](crate::Service::open) makes it by default. A type that is not `Default`, because it is made from the peer,
/// implements this trait, and `open` makes it:
///
/// ```
/// use ringserve::{Cx, Frame, OpenCx, Refusal, Service, Session};
///
/// /// A peer that may speak.
/// struct Member {
///     port: u16,
/// }
///
/// impl Session for Member {}
///
/// struct Club;
///
/// impl Service for Club {
///     type Session = Member;
///     type Error = std::convert::Infallible;
///
///     async fn open(&self, opening: &OpenCx<'_>) -> Result<Member, Refusal> {
///         let addr = opening.peer().addr().ok_or_else(|| Refusal::new("no address"))?;
///         opening.reply("welcome");
///         Ok(Member { port: addr.port() })
///     }
///
///     async fn call(&self, cx: &Cx<'_, Member>, _frame: Frame) -> Result<(), Self::Error> {
///         cx.reply(&cx.session().port.to_be_bytes());
///         Ok(())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither `Default` nor a `Session`",
    note = "write `impl Session for {Self} {{}}`, and make it in `Service::open`"
)]
pub trait Session: Sized + 'static {
    /// Makes a session without the connection, if the type is `Default`.
    const DEFAULT: Option<fn() -> Self> = None;
}

impl<T: Default + 'static> Session for T {
    const DEFAULT: Option<fn() -> T> = Some(T::default);
}

/// A session made without the connection.
pub(crate) fn by_default<S: Session>() -> Result<S, Refusal> {
    match S::DEFAULT {
        Some(make) => Ok(make()),
        None => Err(Refusal::new("its session is made by `open`")),
    }
}

/// The reason why [`Service::open`](crate::Service::open) refuses a connection, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(String);

impl Refusal {
    /// Makes a refusal with its reason.
    pub fn new(reason: impl Into<String>) -> Refusal {
        Refusal(reason.into())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A connection that was accepted and that [`Service::open`](crate::Service::open) may take or refuse. It replies, waits and
/// gives handles as a [`Cx`](crate::Cx) does, but has no session yet.
///
/// Replies queued here leave before those to the first frame, and as last words if the connection is refused.
#[doc(alias = "Opening")]
pub struct OpenCx<'a> {
    head: &'a ConnHead,
    shard: &'a Shard,
}

impl<'a> OpenCx<'a> {
    pub(crate) fn new(head: &'a ConnHead, shard: &'a Shard) -> OpenCx<'a> {
        OpenCx { head, shard }
    }

    pub(crate) fn head(&self) -> &'a ConnHead {
        self.head
    }

    /// The peer that wants to connect.
    pub fn peer(&self) -> Peer {
        Peer::of(self.head)
    }

    /// Fields that the proxy sent about the peer beside its address, if the peer came through one and
    /// [`ProxyProtocol::keep_tlvs`](crate::listen::ProxyProtocol::keep_tlvs) is on.
    pub fn tlvs(&self) -> Option<Tlvs> {
        self.head.tlvs()
    }

    /// Facts from the handshake of the connection's [transport](crate::transport), if they are a `T`.
    #[doc(alias = "facts")]
    pub fn transport_info<T: 'static>(&self) -> Option<Rc<T>> {
        facts_as(self.head.transport_info()?)
    }

    /// The id of the connection, unique on its shard.
    pub fn id(&self) -> ConnId {
        self.head.id()
    }

    /// The shard that accepted the connection.
    pub fn shard(&self) -> &'a Shard {
        self.shard
    }

    /// Queues a greeting or last words as one frame, encoded by the service's framing. As [`Cx::reply`](crate::Cx::reply).
    pub fn reply<'p>(&self, payload: impl Into<Payload<'p>>) {
        self.head.reply(payload.into());
    }

    /// As [`Cx::reply_with`](crate::Cx::reply_with).
    pub fn reply_with<R: WriteResult>(&self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        self.head.reply_with(write)
    }

    /// As [`Cx::reply_parts`](crate::Cx::reply_parts).
    pub fn reply_parts<'p, P: Into<Payload<'p>>>(&self, parts: impl IntoIterator<Item = P>) {
        self.head.reply_parts(parts);
    }

    /// As [`Cx::reply_shared`](crate::Cx::reply_shared).
    pub fn reply_shared(&self, payload: &SharedPayload) {
        self.head.reply_shared(payload);
    }

    /// Queues bytes as they are.
    pub fn write<'p>(&self, bytes: impl Into<Payload<'p>>) {
        self.head.write_payload(bytes.into());
    }

    /// As [`Cx::write_with`](crate::Cx::write_with).
    pub fn write_with<R: WriteResult>(&self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        self.head.write_with(write)
    }

    /// A handle that may be kept and sent to other threads. Pushes through it leave at once, even before the connection is
    /// open. It allocates.
    pub fn handle(&self) -> ConnHandle {
        ConnHandle::new(self.head, self.shard)
    }

    /// A handle for this shard alone. It does not allocate.
    pub fn local_handle(&self) -> LocalHandle {
        LocalHandle::new(self.head, self.shard)
    }

    /// As [`Cx::spawn_on_connection`](crate::Cx::spawn_on_connection). If the connection is refused, the task ends with it.
    ///
    /// # Errors
    /// Those of [`Cx::spawn_on_connection`](crate::Cx::spawn_on_connection).
    pub fn spawn_on_connection<T: 'static>(
        &self,
        future: impl Future<Output = T> + 'static,
    ) -> Result<JoinHandle<T>, SpawnError> {
        self.shard.spawn_on(self.head, future)
    }

    /// As [`Cx::hold_open`](crate::Cx::hold_open).
    pub fn hold_open(&self) {
        self.head.hold_open();
    }

    /// As [`Cx::set_limits`](crate::Cx::set_limits).
    ///
    /// # Errors
    /// A value out of its range, or one that contradicts another limit. Nothing is changed then.
    pub fn set_limits(&self, limits: &ConnLimits) -> Result<(), LimitError> {
        self.head.set_limits(limits)
    }

    /// True once the server shuts down.
    pub fn is_draining(&self) -> bool {
        self.head.lane().shard().is_draining()
    }

    /// Sleeps for at least `time`; may overshoot by about 1 ms. Frames wait meanwhile.
    pub fn sleep(&self, time: Duration) -> Sleep {
        self.shard.sleep(time)
    }

    /// Runs a future for at most `time`, then drops it. [`Limits::open_timeout`](crate::Limits::open_timeout) bounds `open` as
    /// a whole.
    ///
    /// # Errors
    /// [`Elapsed`](crate::time::Elapsed) if `time` was over first.
    pub fn timeout<F: Future>(&self, time: Duration, future: F) -> Timeout<'a, F> {
        self.shard.timeout(time, future)
    }
}

impl fmt::Debug for OpenCx<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Opening").field(self.head).finish()
    }
}
