//! A question to an upstream.

use std::time::Duration;

use super::call::Call;
use super::connections::Connections;
use crate::policy::maglev::hash;
use crate::pool::Connection;

/// A question to an upstream, and how it may be asked.
///
/// ```
/// use std::time::Duration;
///
/// use ringserve::upstream::Request;
///
/// let question = Request::new(b"GET key").idempotent().timeout(Duration::from_secs(1));
/// # let _ = question;
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub(super) payload: &'a [u8],
    pub(super) timeout: Option<Duration>,
    pub(super) is_idempotent: bool,
    pub(super) key: Option<u64>,
}

impl<'a> Request<'a> {
    /// A question with this payload, which is asked once: a backend that may have heard it is the
    /// last one.
    pub fn new<P: AsRef<[u8]> + ?Sized>(payload: &'a P) -> Request<'a> {
        Request { payload: payload.as_ref(), timeout: None, is_idempotent: false, key: None }
    }

    /// Says that the question may be asked twice: a lost one is, as far as [`Retry`](crate::Retry)
    /// goes.
    pub fn idempotent(self) -> Request<'a> {
        Request { is_idempotent: true, ..self }
    }

    /// Begins the tries of this question.
    pub(super) fn call<C: Connection>(&self, connections: &Connections<C>) -> Call<C> {
        let call = connections.call();
        let call = if self.is_idempotent { call.idempotent() } else { call };
        let call = call.hashed_key(self.key);
        match self.timeout {
            Some(time) => call.timeout(time),
            None => call,
        }
    }

    /// Asks the backend that the key belongs to: see [`Call::key`](crate::Call::key).
    pub fn key(self, key: impl AsRef<[u8]>) -> Request<'a> {
        Request { key: Some(hash(key.as_ref())), ..self }
    }

    /// Time limit of the request with all tries, instead of
    /// [`Upstream::answer_timeout`](crate::Upstream::answer_timeout).
    pub fn timeout(self, time: Duration) -> Request<'a> {
        Request { timeout: Some(time), ..self }
    }
}

impl<'a, P: AsRef<[u8]> + ?Sized> From<&'a P> for Request<'a> {
    fn from(payload: &'a P) -> Request<'a> {
        Request::new(payload)
    }
}
