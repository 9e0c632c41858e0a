//! WebSocket inside a service of HTTP.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use hyper::header::{HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Version};
use ringserve_websocket::{WebSocketOptions, in_http};

use super::socket::{Parts, Shared, Socket, Times};
use super::upgrade::find;

use ringserve_base::lines::debug;

/// Silence of a client after which it is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(30);

/// As [`Limits::write_stall_timeout`](crate::Limits::write_stall_timeout).
pub(super) const WRITE_STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Lets a client that asks for WebSocket in, for a service of [`http`](crate::http()): the answer
/// is what the service returns, and `handler` has the socket once it left. Messages of 1 MiB, every
/// origin; [`Upgrades`] bound and choose otherwise.
///
/// A connection of HTTP/1.1 is `handler`'s from then on; a stream of HTTP/2 (RFC 8441) is a task of
/// the shard beside others of its connection. When the server drains, the client gets the code
/// 1001, and the handler sees the end of its messages. Bounds of a request, as
/// [`request_timeout`](crate::http::HttpOptions::request_timeout), end with the answer.
///
/// A request that does not ask for WebSocket is answered with 426, or what else is wrong with it,
/// without a body.
///
/// ```no_run
/// use std::convert::Infallible;
///
/// use ringserve::http::hyper::body::Incoming;
/// use ringserve::http::hyper::service::service_fn;
/// use ringserve::http::hyper::{Request, Response};
/// use ringserve::websocket::upgrade;
/// use ringserve::{Server, http};
///
/// async fn answer(request: Request<Incoming>) -> Result<Response<String>, Infallible> {
///     Ok(match request.uri().path() {
///         "/echo" => upgrade(request, async |mut socket| {
///             while let Ok(Some(message)) = socket.next().await {
///                 _ = socket.send(message).await;
///             }
///         }),
///         _ => Response::new("hello".into()),
///     })
/// }
///
/// fn main() -> Result<(), ringserve::Error> {
///     Server::bind("127.0.0.1:8080").serve(|_shard| http(service_fn(answer)))
/// }
/// ```
pub fn upgrade<R, B, H>(request: Request<R>, handler: H) -> Response<B>
where
    B: Default,
    H: AsyncFnOnce(Socket) + 'static,
{
    Upgrades::new(&WebSocketOptions::new()).upgrade(request, handler)
}

/// Options for a service of [`http`](crate::http()) that lets in clients which ask for WebSocket.
/// One value a shard, since its sockets share what compresses.
#[derive(Clone)]
pub struct Upgrades {
    options: WebSocketOptions,
    extension: Option<Shared>,
    times: Times,
}

impl Upgrades {
    /// By these options. A client that says nothing for 30 s is pinged, and is gone after as long
    /// again; one of HTTP/2 that takes nothing of what is sent has 30 s too.
    pub fn new(options: &WebSocketOptions) -> Upgrades {
        let extension = options.make_extension().map(|extension| Rc::new(RefCell::new(extension)));
        let times = Times { ping: Some(PING_INTERVAL), write_stall: WRITE_STALL_TIMEOUT };
        Upgrades { options: options.clone(), extension, times }
    }

    /// Silence after which a client is pinged. Off with `None`: then
    /// [`Limits::idle_timeout`](crate::Limits::idle_timeout) ends a silent connection of HTTP/1.1.
    #[must_use]
    pub fn ping_interval(mut self, time: impl Into<Option<Duration>>) -> Upgrades {
        self.times.ping = time.into();
        self
    }

    /// Time in which a client of HTTP/2 has to take something of what is sent.
    #[must_use]
    pub fn write_stall_timeout(mut self, time: Duration) -> Upgrades {
        self.times.write_stall = time;
        self
    }

    /// As [`upgrade`], by these options.
    pub fn upgrade<R, B, H>(&self, mut request: Request<R>, handler: H) -> Response<B>
    where
        B: Default,
        H: AsyncFnOnce(Socket) + 'static,
    {
        let offer = find(request.extensions_mut());
        let answer = self.answer(&request);
        let (status, upgrades) = match (answer.info, offer) {
            (None, _) => (answer.status, None),
            (Some(info), Some(offer)) => (answer.status, Some((info, offer))),
            (Some(_), None) => {
                debug!(
                    "a request of WebSocket is not on the thread of its shard, or not hyper's: answered with 500"
                );
                (500, None)
            }
        };
        let mut response = Response::new(B::default());
        *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        for (name, value) in &answer.fields {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                response.headers_mut().append(name, value);
            }
        }
        let Some((info, offer)) = upgrades else { return response };
        let shard = offer.shard.clone();
        let parts = Parts {
            shard: shard.clone(),
            info,
            extension: self.extension.clone().filter(|_| answer.compresses),
            message_bytes_max: self.options.largest_message(),
            times: self.times,
            masks: None,
        };
        if request.version() == Version::HTTP_2 {
            let upgraded = hyper::upgrade::on(request);
            shard.spawn(async move {
                // It does not come where the client resets the stream before it is answered.
                if let Ok(stream) = upgraded.await {
                    handler(Socket::over_http2(stream, offer.into_hold(), parts)).await;
                }
            });
        } else {
            offer.begin_with(|stream, read| Box::pin(handler(Socket::over_http1(stream, read, parts))));
        }
        response
    }

    fn answer<R>(&self, request: &Request<R>) -> in_http::Answer {
        let is_http2 = request.version() == Version::HTTP_2;
        let authority = request.uri().authority().filter(|_| is_http2);
        let fields = request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
        let fields: Vec<(&str, &[u8])> =
            fields.chain(authority.map(|authority| ("host", authority.as_str().as_bytes()))).collect();
        let is_websocket = |protocol: &hyper::ext::Protocol| protocol.as_str() == "websocket";
        let asks = match *request.method() {
            Method::CONNECT => is_http2 && request.extensions().get().is_some_and(is_websocket),
            Method::GET => request.version() == Version::HTTP_11,
            _ => false,
        };
        if !asks {
            let upgrade = ("upgrade".to_owned(), "websocket".to_owned());
            let (status, fields) = if is_http2 { (400, Vec::new()) } else { (426, vec![upgrade]) };
            return in_http::Answer { status, fields, info: None, compresses: false };
        }
        let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
        let extension = self.extension.as_ref().map(|extension| extension.borrow());
        let extension = extension.as_ref().map(|extension| &***extension);
        in_http::answer(&self.options, extension, target, &fields, is_http2)
    }
}

impl fmt::Debug for Upgrades {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upgrades").field("options", &self.options).finish_non_exhaustive()
    }
}
