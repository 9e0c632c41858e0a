//! A bound on the calls in flight.

use super::permits::Permits;
use crate::closed::Failure;
use crate::cx::Cx;
use crate::service::{Service, delegate_to_service};
use ringserve_core::Frame;

/// Lets a number of calls of a shard be in flight at once; further ones wait, first in, first out.
///
/// It is for what a shard has few of: memory for a large piece of work, places in a pool of connections. A call that waits
/// holds up its connection as any call does that waits, and its time counts to
/// [`Limits::handler_timeout`](crate::Limits::handler_timeout). When its connection ends meanwhile it leaves the queue.
#[derive(Debug)]
pub struct ConcurrencyLimit<S> {
    service: S,
    permits: Permits,
    max: usize,
}

impl<S> ConcurrencyLimit<S> {
    /// At most `max` calls of `service` are in flight on the shard this value is made on.
    ///
    /// # Panics
    /// If `max` is 0, which no call could pass.
    #[track_caller]
    pub fn new(service: S, max: usize) -> ConcurrencyLimit<S> {
        assert!(max > 0, "a concurrency limit of 0 lets no call pass; it must be 1 or more");
        ConcurrencyLimit { service, permits: Permits::new(max), max }
    }

    /// The service inside.
    pub fn inner(&self) -> &S {
        &self.service
    }

    /// Calls in flight now, those that wait for their turn not counted.
    pub fn in_flight(&self) -> usize {
        self.max - self.permits.free()
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
