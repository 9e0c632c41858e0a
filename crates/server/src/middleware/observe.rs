//! Observing calls.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;

use ringserve_core::Frame;

use crate::shard::face::closed::Failure;
use crate::shard::face::cx::Cx;
use crate::shard::face::service::{Service, delegate_to_service};

/// Tells `observer` of each call of a service: its begin, its wait if it has one, and its end.
///
/// [`Calls`](super::Calls) counts and logs. A closure sees the ends,
///
/// ```
/// use ringserve::{Cx, Service, middleware::{CallEnd, Observe}};
///
/// # use ringserve::Frame;
/// # struct Echo;
/// # impl Service for Echo {
/// #     type Session = ();
/// #     type Error = std::convert::Infallible;
/// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
/// #         cx.reply(frame);
/// #         Ok(())
/// #     }
/// # }
/// let service = Observe::new(Echo, |cx: &Cx<'_, _>, end: CallEnd<'_, _>| {
///     if let CallEnd::Failed(error) = end {
///         eprintln!("{}: {error}", cx.peer());
///     }
/// });
/// # fn is_service(_: impl Service) {}
/// # is_service(service);
/// ```
///
/// and a [`CallObserver`] of your own decides for each call what it remembers: a time, a number,
/// nothing. `Observe` itself neither reads the clock nor allocates.
#[derive(Clone, Debug)]
pub struct Observe<S, O> {
    service: S,
    observer: O,
}

impl<S, O> Observe<S, O> {
    /// Tells `observer` of the calls of `service`.
    pub fn new(service: S, observer: O) -> Observe<S, O> {
        Observe { service, observer }
    }

    /// The service inside.
    pub fn inner(&self) -> &S {
        &self.service
    }

    /// The observer.
    pub fn observer(&self) -> &O {
        &self.observer
    }
}

/// Observes the calls of a service `S`. All methods run on the shard, inside the call, so they must
/// not block.
pub trait CallObserver<S: Service<H>, H = ()>: 'static {
    /// State of a call in progress: `()`, or an `Option<Instant>` where its time matters.
    type Call;

    /// A call begins.
    fn begins(&self, cx: &Cx<'_, S::Session>, frame: &Frame<H>) -> Self::Call;

    /// A call is not done at once. Called once for each pending call: the moment to read the clock,
    /// if only pending calls matter.
    fn waits(&self, cx: &Cx<'_, S::Session>, call: &mut Self::Call) {
        let _ = (cx, call);
    }

    /// A call ended. Called once for each call that began.
    fn ends(&self, cx: &Cx<'_, S::Session>, call: Self::Call, end: CallEnd<'_, S::Error>);
}

impl<S, H, F> CallObserver<S, H> for F
where
    S: Service<H>,
    F: Fn(&Cx<'_, S::Session>, CallEnd<'_, S::Error>) + 'static,
{
    type Call = ();

    fn begins(&self, _cx: &Cx<'_, S::Session>, _frame: &Frame<H>) {}

    fn ends(&self, cx: &Cx<'_, S::Session>, _call: (), end: CallEnd<'_, S::Error>) {
        self(cx, end);
    }
}

/// The end of a call.
#[derive(Debug)]
#[non_exhaustive]
pub enum CallEnd<'a, E> {
    /// The call succeeded.
    Done,
    /// The call returned an error, which closes its connection.
    Failed(&'a E),
    /// The call was dropped before it was done: its connection ended, a limit around it was
    /// exceeded, or it panicked.
    Dropped,
}

impl<E> Clone for CallEnd<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for CallEnd<'_, E> {}

impl<E: fmt::Display> fmt::Display for CallEnd<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallEnd::Done => f.write_str("done"),
            CallEnd::Failed(error) => write!(f, "failed: {error}"),
            CallEnd::Dropped => f.write_str("dropped"),
        }
    }
}

impl<S: Service<H>, H: 'static, O: CallObserver<S, H>> Service<H> for Observe<S, O> {
    type Session = S::Session;
    type Error = S::Error;

    async fn call(&self, cx: &Cx<'_, S::Session>, frame: Frame<H>) -> Result<(), S::Error> {
        let call = self.observer.begins(cx, &frame);
        let mut under_way = UnderWay { observer: &self.observer, cx, call: Some(call) };
        let mut future = pin!(self.service.call(cx, frame));
        let mut waits = false;
        let result = poll_fn(|task| {
            let polled = future.as_mut().poll(task);
            if polled.is_pending() && !waits {
                waits = true;
                under_way.waits();
            }
            polled
        })
        .await;
        under_way.ends(match &result {
            Ok(()) => CallEnd::Done,
            Err(error) => CallEnd::Failed(error),
        });
        result
    }

    fn failed(&self, cx: &Cx<'_, S::Session>, failure: &Failure<'_, S::Error>) {
        self.service.failed(cx, failure);
    }

    delegate_to_service!(S, H);
}

/// Tells the observer of the end of a call, however it ends.
struct UnderWay<'a, S: Service<H>, H, O: CallObserver<S, H>> {
    observer: &'a O,
    cx: &'a Cx<'a, S::Session>,
    call: Option<O::Call>,
}

impl<S: Service<H>, H, O: CallObserver<S, H>> UnderWay<'_, S, H, O> {
    fn waits(&mut self) {
        if let Some(call) = &mut self.call {
            self.observer.waits(self.cx, call);
        }
    }

    fn ends(&mut self, end: CallEnd<'_, S::Error>) {
        if let Some(call) = self.call.take() {
            self.observer.ends(self.cx, call, end);
        }
    }
}

impl<S: Service<H>, H, O: CallObserver<S, H>> Drop for UnderWay<'_, S, H, O> {
    fn drop(&mut self) {
        self.ends(CallEnd::Dropped);
    }
}
