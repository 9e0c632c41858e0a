//! A bound on the calls in flight.

use std::time::Duration;

use ringserve_core::Frame;

use super::permits::Permits;
use crate::shard::face::closed::Failure;
use crate::shard::face::cx::Cx;
use crate::shard::face::service::{Service, delegate_to_service};

/// Bounds the calls in flight of a shard; further calls wait, first in, first out.
///
/// For scarce things of a shard: memory for a large piece of work, places in a pool of connections.
/// A waiting call holds up its connection as any pending call does, and its time counts towards
/// [`Limits::handler_timeout`](crate::Limits::handler_timeout). If its connection ends meanwhile,
/// the call leaves the queue.
///
/// While the shard [sheds](crate::overload::Load::Shedding) the call that came last goes first, and
/// [`Service::shed`] is asked about one that has waited for 10 ms;
/// [`shed_after`](ConcurrencyLimit::shed_after) does so for any queue that stands.
#[derive(Debug)]
pub struct ConcurrencyLimit<S> {
    service: S,
    permits: Permits,
}

impl<S> ConcurrencyLimit<S> {
    /// Bounds the calls of `service` in flight to `max`, on the shard on which this value is made.
    ///
    /// # Panics
    /// If `max` is 0, since no call could ever run.
    #[track_caller]
    pub fn new(service: S, max: usize) -> ConcurrencyLimit<S> {
        assert!(max > 0, "a concurrency limit of 0 lets no call pass; it must be 1 or more");
        ConcurrencyLimit { service, permits: Permits::new(max) }
    }

    /// Sheds calls that wait for too long: while the oldest of those that wait has waited for more
    /// than half of `time` at each moment of the last `10 * time`, the call that came last goes
    /// first, and one that waits for more than `time` is given to [`Service::shed`], whatever the
    /// load of the shard. Where that has it served the call waits on, before all that came later
    /// and were not asked about. 10 ms is prudent for calls of 1 ms.
    ///
    /// Callers that each wait for their answer make such a queue too, if they are more than the
    /// bound: leave this out for them. Without it calls are shed so, after 10 ms, only from
    /// [`Load::Shedding`](crate::overload::Load::Shedding) on.
    #[must_use]
    pub fn shed_after(self, time: Duration) -> Self {
        Self { permits: self.permits.late_after(time), ..self }
    }

    /// The service inside.
    pub fn inner(&self) -> &S {
        &self.service
    }

    /// Calls in flight now, without those that wait for their turn.
    pub fn in_flight(&self) -> usize {
        self.permits.held()
    }

    /// Calls that wait for their turn now.
    pub fn waiting(&self) -> usize {
        self.permits.waiting()
    }
}

impl<S: Service<H>, H: 'static> Service<H> for ConcurrencyLimit<S> {
    type Session = S::Session;
    type Error = S::Error;

    async fn call(&self, cx: &Cx<'_, S::Session>, frame: Frame<H>) -> Result<(), S::Error> {
        let Some(_permit) = self.permits.for_call(&self.service, cx, &frame).await else { return Ok(()) };
        self.service.call(cx, frame).await
    }

    fn failed(&self, cx: &Cx<'_, S::Session>, failure: &Failure<'_, S::Error>) {
        self.service.failed(cx, failure);
    }

    delegate_to_service!(S, H, true);
}
