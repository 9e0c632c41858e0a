//! The body of an answer to a client.

use std::cell::Cell;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use crate::client::body::UpstreamBody;
use crate::client::request_body::{BodyError, BoxedBody};

/// The body of an answer of a [`Gateway`](crate::Gateway).
pub struct GatewayBody {
    kind: Kind,
    /// The request counts until its answer is sent.
    _place: Option<Place>,
}

enum Kind {
    Upstream(Box<UpstreamBody>),
    Whole(Bytes),
    Other(BoxedBody),
}

/// The place of a request among those of its route.
pub(super) struct Place {
    count: Rc<Cell<usize>>,
}

impl Place {
    /// `None` if there are as many as may be.
    pub(super) fn take(count: &Rc<Cell<usize>>, max: usize) -> Option<Place> {
        if count.get() >= max {
            return None;
        }
        count.set(count.get() + 1);
        Some(Place { count: count.clone() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.count.set(self.count.get() - 1);
    }
}

impl GatewayBody {
    pub(super) fn of_upstream(body: UpstreamBody) -> GatewayBody {
        GatewayBody { kind: Kind::Upstream(Box::new(body)), _place: None }
    }

    pub(super) fn whole(bytes: impl Into<Bytes>) -> GatewayBody {
        GatewayBody { kind: Kind::Whole(bytes.into()), _place: None }
    }

    pub(super) fn other(body: BoxedBody) -> GatewayBody {
        GatewayBody { kind: Kind::Other(body), _place: None }
    }

    pub(super) fn keep(self, place: Option<Place>) -> GatewayBody {
        GatewayBody { _place: place, ..self }
    }
}

impl Body for GatewayBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.kind {
            Kind::Upstream(body) => Pin::new(&mut **body).poll_frame(task).map_err(Into::into),
            Kind::Whole(bytes) => {
                let bytes = std::mem::take(bytes);
                Poll::Ready((!bytes.is_empty()).then(|| Ok(Frame::data(bytes))))
            }
            Kind::Other(body) => body.as_mut().poll_frame(task),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Upstream(body) => body.is_end_stream(),
            Kind::Whole(bytes) => bytes.is_empty(),
            Kind::Other(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Upstream(body) => body.size_hint(),
            Kind::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Kind::Other(body) => body.size_hint(),
        }
    }
}

impl fmt::Debug for GatewayBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayBody").field("is_end_stream", &self.is_end_stream()).finish_non_exhaustive()
    }
}
