//! A request as the endpoint tells of it: who sent it, what it orders, and its body.

use std::future::poll_fn;
use std::pin::Pin;

use hyper::body::{Body, Incoming};
use hyper::{Request, StatusCode};
use ringserve_drivers::guarded;

use ringserve_base::lines::info;

/// Characters of an order in the log at most.
const ORDER_CHARS_MAX: usize = 300;

/// Who asks.
#[derive(Clone, Copy)]
pub(super) struct Who<'a> {
    /// Its address, or what it is at the other end of a Unix socket.
    pub(super) peer: &'a str,
    /// The name of its token, if one is asked for.
    pub(super) token: Option<&'a str>,
}

impl Who<'_> {
    /// The filter of the log is about to be set.
    pub(super) fn sets_the_log(self, filter: &str) {
        let Who { peer, token } = self;
        guarded(|| info!(peer, token, "the admin endpoint sets the log to {filter:?}"));
    }
}

/// An order that is carried out. The log has a line of it whether it is answered, or its caller
/// leaves before that: what was begun is done all the same.
pub(super) struct OrderRecord<'a> {
    who: Who<'a>,
    order: String,
    status: Option<StatusCode>,
}

impl<'a> OrderRecord<'a> {
    pub(super) fn begin<B>(who: Who<'a>, request: &Request<B>) -> OrderRecord<'a> {
        OrderRecord { who, order: order_of(request), status: None }
    }

    pub(super) fn answered(mut self, status: StatusCode) {
        self.status = Some(status);
    }
}

impl Drop for OrderRecord<'_> {
    fn drop(&mut self) {
        let OrderRecord { who: Who { peer, token }, order, status } = self;
        match status.map(|status| status.as_u16()) {
            Some(status) => guarded(|| info!(peer, token, status, "order to the admin endpoint: {order}")),
            None => guarded(|| {
                info!(
                    peer,
                    token, "order to the admin endpoint, whose caller left before the answer: {order}"
                )
            }),
        }
    }
}

/// An order as the log has it.
pub(super) fn order_of<B>(request: &Request<B>) -> String {
    let target = request.uri().path_and_query().map_or("", |target| target.as_str());
    let text = format!("{} {target}", request.method());
    text.chars().take(ORDER_CHARS_MAX).collect()
}

/// Why a body was not read.
pub(super) enum BodyError {
    TooLarge,
    Broken(String),
}

/// Reads a body.
///
/// # Errors
/// It is larger, or its peer is gone.
pub(super) async fn read_body(mut body: Incoming, bytes_max: usize) -> Result<Vec<u8>, BodyError> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|task| Pin::new(&mut body).poll_frame(task)).await {
        let frame = frame.map_err(|error| BodyError::Broken(error.to_string()))?;
        let data = frame.into_data().unwrap_or_default();
        if bytes.len() + data.len() > bytes_max {
            return Err(BodyError::TooLarge);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}
