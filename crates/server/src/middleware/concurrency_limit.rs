//! A bound on the calls in flight.

use super::permits::Permits;
use crate::closed::Failure;
use crate::cx::Cx;
use crate::service::{Service, delegate_to_service};
use ringserve_core::Frame;

/// Bounds the calls in flight of a shard; further calls wait, first in, first out.
///
/// For scarce things of a shard: memory for a large piece of work, places in a pool of connections. A waiting call holds up its
/// connection as any pending call does, and its time counts towards
/// [`Limits::handler_timeout`](crate::Limits::handler_timeout). If its connection ends meanwhile, the call leaves the queue.
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
        let _permit = self.permits.acquire().await;
        self.service.call(cx, frame).await
    }

    fn failed(&self, cx: &Cx<'_, S::Session>, failure: &Failure<'_, S::Error>) {
        self.service.failed(cx, failure);
    }

    delegate_to_service!(S, H);
}
