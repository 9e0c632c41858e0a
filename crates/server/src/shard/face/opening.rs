//! A connection that was accepted: its service makes a session, or refuses it.

use std::fmt;

use ringserve_core::ConnHead;

use super::conn_methods::conn_methods;
use super::handle::Shard;

/// State that a service keeps for one connection. Every type that is `Default` is a session, and
/// [`Service::open`](crate::Service::open) makes it by default. A type that is not `Default`,
/// because it is made from the peer, implements this trait, and `open` makes it:
///
/// ```
/// use ringserve::{Cx, Frame, Service, service::{OpenCx, Refusal, Session}};
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

/// A connection that was accepted and that [`Service::open`](crate::Service::open) may take or
/// refuse. It replies, waits and gives handles as a [`Cx`](crate::Cx) does, but has no session yet.
///
/// Replies queued here leave before those to the first frame, and as the rejection message if the
/// connection is refused. Pushes through its [handles](OpenCx::handle) leave at once, even before
/// the connection is open. Frames wait until `open` is done, which
/// [`Limits::open_timeout`](crate::Limits::open_timeout) bounds as a whole. If the connection is
/// refused, its [tasks](OpenCx::spawn_on_connection) end with it.
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

    conn_methods!();
}

impl fmt::Debug for OpenCx<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Opening").field(self.head).finish()
    }
}
