//! Browsers, and programs that publish: a page, WebSocket, server-sent events and an API, by HTTP.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use percent_encoding::percent_decode_str;
use ringserve::Shard;
use ringserve::http::hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use ringserve::http::hyper::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use ringserve::http::hyper::{Method, Request, Response, StatusCode};
use ringserve::metrics::Metrics;
use ringserve::sync::{AskError, Draining};
use ringserve::time::Sleep;
use ringserve::topics::{PublishError, Since, SubscribeError, TopicReader};
use ringserve::websocket::{Message, Outgoing, Socket, SocketError, Upgrades, WebSocketOptions, close};
use serde::Deserialize;
use serde_json::{Value, json};
use subtle::ConstantTimeEq;

use crate::figures;
use crate::hub::{Hub, Seat};
use crate::token::Rights;

/// The page, with its style and its script.
const PAGE: &str = include_str!("page.html");

/// Bytes of a request's body at most.
const BODY_BYTES_MAX: usize = 256 << 10;

/// Topics of a socket at most.
const TOPICS_MAX: usize = 64;

/// Silence after which a stream of events has a comment, so that proxies keep it open.
const COMMENT: Duration = Duration::from_secs(15);

/// A request by WebSocket.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Asked {
    Token(String),
    Subscribe { topic: String, since: Option<String> },
    Unsubscribe(String),
    Publish { topic: String, data: Value },
}

/// A message that a program publishes.
#[derive(Deserialize)]
struct Publish {
    topic: String,
    #[serde(default)]
    key: String,
    data: Value,
}

#[derive(Deserialize)]
struct Broadcast {
    topics: Vec<String>,
    data: Value,
}

#[derive(Deserialize)]
struct Disconnect {
    user: String,
}

/// The service on one shard.
pub struct Web {
    hub: Rc<Hub>,
    upgrades: Upgrades,
}

type Failed = (StatusCode, String);

fn bad(why: impl ToString) -> Failed {
    (StatusCode::BAD_REQUEST, why.to_string())
}

fn unpublished(error: PublishError) -> Failed {
    let status = match error {
        PublishError::Full | PublishError::Gone | PublishError::Disconnected => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        _ => StatusCode::BAD_REQUEST,
    };
    (status, error.to_string())
}

fn unsubscribed(error: SubscribeError) -> Failed {
    let status = match error {
        SubscribeError::Name => StatusCode::BAD_REQUEST,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, error.to_string())
}

fn unanswered(error: AskError) -> Failed {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

impl Web {
    pub fn new(hub: Rc<Hub>) -> Web {
        let options = WebSocketOptions::new().message_bytes_max(BODY_BYTES_MAX);
        Web { hub, upgrades: Upgrades::new(&options) }
    }

    /// Answers a request.
    pub async fn answer(&self, request: Request<Incoming>) -> Result<Response<Content>, Infallible> {
        let answered = match (request.method(), request.uri().path()) {
            (&Method::GET, "/") => Ok(page()),
            (&Method::GET, "/ws") => Ok(self.socket(request)),
            (&Method::GET, "/events") => self.events(&request).await,
            (&Method::GET, "/metrics") if self.is_allowed(&request) => Ok(self.metrics().await),
            (_, path) if path.starts_with("/api/") || path == "/metrics" => match self.is_allowed(&request) {
                true => self.api(request).await.map(|value| text(StatusCode::OK, value.to_string())),
                false => Err((StatusCode::UNAUTHORIZED, "authorization: Bearer KEY is missing".into())),
            },
            _ => Err((StatusCode::NOT_FOUND, "not found".into())),
        };
        Ok(answered.unwrap_or_else(|(status, why)| text(status, json!({ "error": why }).to_string())))
    }

    /// True for the key of the API, which is compared in a time that tells nothing of it.
    fn is_allowed(&self, request: &Request<Incoming>) -> bool {
        let known = self.hub.gateway.api_key.as_bytes();
        bearer(request).is_some_and(|key| bool::from(key.as_bytes().ct_eq(known)))
    }

    async fn api(&self, request: Request<Incoming>) -> Result<Value, Failed> {
        let (path, query) = (request.uri().path().to_owned(), Query::of(&request));
        let topics = &self.hub.topics;
        match (request.method().as_str(), &path["/api/".len()..]) {
            ("POST", "publish") => {
                let Publish { topic, key, data } = read(request).await?;
                // The answer says that it is kept.
                topics.publish_acked(&topic, key, data.to_string()).await.map_err(unpublished)?;
                Ok(json!({}))
            }
            ("POST", "broadcast") => {
                let Broadcast { topics: all, data } = read(request).await?;
                let data = Bytes::from(data.to_string());
                for topic in all {
                    topics.publish_acked(&topic, "", data.clone()).await.map_err(unpublished)?;
                }
                Ok(json!({}))
            }
            ("POST", "disconnect") => {
                let Disconnect { user } = read(request).await?;
                let user = Arc::<str>::from(user);
                let ended = self.hub.gateway.disconnects.ask_all(|_shard| user.clone()).await;
                Ok(json!({ "ended": ended.into_iter().flatten().sum::<usize>() }))
            }
            ("GET", "presence") => {
                let topic = query.get("topic").ok_or_else(|| bad("topic is missing"))?;
                let (mut members, shards) = (Vec::new(), topics.shard().count());
                for shard in 0..shards {
                    members.extend(topics.members(&topic, shard, 0).await.map_err(unanswered)?);
                }
                let count = topics.count_on_all_nodes(&topic).await.map_err(unanswered)?;
                let members: Vec<&str> = members.iter().map(|member| &**member).collect();
                Ok(json!({ "count": count, "members": members }))
            }
            ("GET", "history") => {
                let topic = query.get("topic").ok_or_else(|| bad("topic is missing"))?;
                let most = query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(100).min(1000);
                let messages = topics.history(&topic, most).await.map_err(unanswered)?;
                let messages = messages.into_iter().map(|(cursor, data)| {
                    let data: Value = serde_json::from_slice(&data).unwrap_or_default();
                    json!({ "cursor": cursor.to_string(), "data": data })
                });
                Ok(json!({ "messages": messages.collect::<Vec<_>>() }))
            }
            _ => Err((StatusCode::NOT_FOUND, "not found".into())),
        }
    }

    /// Figures of the server, its topics and its bridge, as text for Prometheus.
    async fn metrics(&self) -> Response<Content> {
        let gateway = &self.hub.gateway;
        let mut text = String::new();
        figures::write(gateway.figures.ask_all(|_shard| ()).await.into_iter().flatten().flatten(), &mut text);
        if let Some(bridge) = &gateway.bridge {
            figures::write_bridge(&bridge.stats(), &mut text);
        }
        let mut of_server = String::new();
        self.hub.topics.shard().server().metrics().write_prometheus(&mut of_server);
        let mut answer = Response::new(Content::Whole(Bytes::from(text + &of_server)));
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(Metrics::CONTENT_TYPE));
        answer
    }

    /// A topic as server-sent events, from the cursor in `Last-Event-ID` on.
    async fn events(&self, request: &Request<Incoming>) -> Result<Response<Content>, Failed> {
        let (query, hub) = (Query::of(request), &self.hub);
        let token = query.get("token").or_else(|| bearer(request).map(str::to_owned));
        let forbidden = |why: String| (StatusCode::FORBIDDEN, why);
        let rights = hub.gateway.tokens.rights(token.as_deref());
        let rights = rights.map_err(|why| forbidden(why.into()))?;
        let topic = query.get("topic").ok_or_else(|| bad("topic is missing"))?;
        if !rights.may_subscribe(&topic) {
            return Err(forbidden(format!("not allowed: {topic}")));
        }
        let last = request.headers().get("last-event-id").and_then(|last| last.to_str().ok());
        let since = match last.map(str::to_owned).or_else(|| query.get("since")) {
            Some(cursor) => Since::Cursor(cursor.parse().map_err(bad)?),
            None => Since::Newest,
        };
        let feed = hub.topics.reader(&topic, hub.gateway.events, since).await.map_err(unsubscribed)?;
        feed.set_shown(Some(rights.user.clone()));
        let (seat, shard) = (hub.seat(Some(&rights), None), hub.topics.shard().clone());
        let comment = shard.sleep(Duration::ZERO);
        let draining = shard.draining();
        let events = EventStream { feed, seat, ended: None, draining, comment, shard };
        let answer = Response::builder()
            .header(CONTENT_TYPE, "text/event-stream")
            .header(CACHE_CONTROL, "no-store")
            .body(Content::Events(Box::new(events)));
        answer.map_err(bad)
    }

    fn socket(&self, request: Request<Incoming>) -> Response<Content> {
        let query = Query::of(&request);
        let rights = self.hub.gateway.tokens.rights(query.get("token").as_deref());
        let hub = self.hub.clone();
        self.upgrades.upgrade(request, async move |socket| {
            // Its end is all that is left to know.
            let _ = talk(&hub, rights.ok(), socket).await;
        })
    }
}

/// The next event of a socket.
enum Event {
    Message(Result<Option<Message>, SocketError>),
    Entry(Bytes),
    Disconnected,
    Draining,
}

/// A client of WebSocket, its topics, and who it is.
struct Client<'a> {
    hub: &'a Rc<Hub>,
    rights: Option<Rights>,
    seat: Seat,
    feeds: Vec<(String, TopicReader)>,
}

async fn talk(hub: &Rc<Hub>, rights: Option<Rights>, mut socket: Socket) -> Result<(), SocketError> {
    let seat = hub.seat(rights.as_ref(), None);
    let mut client = Client { hub, rights, seat, feeds: Vec::new() };
    loop {
        match client.next(&mut socket).await {
            Event::Message(message) => {
                let Some(message) = message? else { return Ok(()) };
                let answer = match serde_json::from_slice(message.as_bytes()) {
                    Ok(asked) => client.answer(asked).await,
                    Err(error) => Err(error.to_string()),
                };
                let answer = answer.unwrap_or_else(|why| json!({ "error": why }));
                socket.send(answer.to_string()).await?;
            }
            Event::Entry(entry) => {
                let sent = socket.send(Outgoing::text_unchecked(entry));
                // A client that reads nothing is disconnected without a word.
                let Some(sent) = client.unless_ended(sent).await else { return Ok(()) };
                sent?;
            }
            // The client comes back to another process, with its cursor.
            Event::Draining => return socket.close(close::GOING_AWAY, "shutdown").await,
            Event::Disconnected => return socket.close(close::POLICY, "disconnected").await,
        }
    }
}

impl Client<'_> {
    /// Waits for what is done, unless the client has to end first.
    async fn unless_ended<T>(&self, done: impl Future<Output = T>) -> Option<T> {
        let (mut done, mut ended) = (pin!(done), pin!(self.seat.end.notified()));
        poll_fn(|task| match done.as_mut().poll(task) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => ended.as_mut().poll(task).map(|_| None),
        })
        .await
    }

    async fn next(&mut self, socket: &mut Socket) -> Event {
        let Client { seat, feeds, .. } = self;
        let (mut message, mut ended) = (pin!(socket.next()), pin!(seat.end.notified()));
        let mut draining = self.hub.topics.shard().draining();
        poll_fn(|task| {
            // Before messages, of which there may always be one.
            if ended.as_mut().poll(task).is_ready() {
                return Poll::Ready(Event::Disconnected);
            }
            if Pin::new(&mut draining).poll(task).is_ready() {
                return Poll::Ready(Event::Draining);
            }
            if let Poll::Ready(message) = message.as_mut().poll(task) {
                return Poll::Ready(Event::Message(message));
            }
            for n in 0..feeds.len() {
                if let Poll::Ready(entry) = feeds[n].1.poll_next(task) {
                    // The others are first the next time.
                    feeds.rotate_left(n + 1);
                    return Poll::Ready(Event::Entry(entry));
                }
            }
            Poll::Pending
        })
        .await
    }

    async fn answer(&mut self, asked: Asked) -> Result<Value, String> {
        let (hub, gateway) = (self.hub, &self.hub.gateway);
        if let Asked::Token(token) = asked {
            let rights = gateway.tokens.rights(Some(&token))?;
            self.feeds.clear();
            let user = rights.user.clone();
            self.seat = hub.seat(Some(&rights), None);
            self.rights = Some(rights);
            return Ok(json!({ "user": &*user }));
        }
        let rights = self.rights.as_ref().ok_or("a token comes first")?;
        match asked {
            Asked::Token(_) => Err("a token is there".into()),
            Asked::Subscribe { topic, since } => {
                let is_known = self.feeds.iter().any(|(known, _)| *known == topic);
                if !rights.may_subscribe(&topic) {
                    return Err(format!("not allowed: {topic}"));
                }
                if is_known || self.feeds.len() >= TOPICS_MAX {
                    let why = if is_known { "subscribed already" } else { "too many topics" };
                    return Err(why.into());
                }
                let since = match since {
                    Some(cursor) => Since::Cursor(cursor.parse().map_err(|_| "no cursor")?),
                    None => Since::Newest,
                };
                let feed = hub.topics.reader(&topic, gateway.json, since).await;
                let feed = feed.map_err(|error| error.to_string())?;
                feed.set_shown(Some(rights.user.clone()));
                let said = json!({ "subscribed": topic, "cursor": feed.cursor().to_string() });
                self.feeds.push((topic, feed));
                Ok(said)
            }
            Asked::Unsubscribe(topic) => {
                self.feeds.retain(|(known, _)| *known != topic);
                Ok(json!({ "unsubscribed": topic }))
            }
            Asked::Publish { topic, .. } if !rights.may_publish(&topic) => {
                Err(format!("not allowed: {topic}"))
            }
            Asked::Publish { topic, data } => {
                let published = hub.topics.publish_acked(&topic, "", data.to_string()).await;
                published.map(|()| json!({ "published": topic })).map_err(|error| error.to_string())
            }
        }
    }
}

/// The body of an answer: all of it, or events without an end.
#[derive(Default)]
pub enum Content {
    #[default]
    Empty,
    Whole(Bytes),
    Events(Box<EventStream>),
}

/// A topic as a body.
pub struct EventStream {
    feed: TopicReader,
    seat: Seat,
    /// Waits for the order to disconnect.
    ended: Option<Pin<Box<dyn Future<Output = ()>>>>,
    draining: Draining,
    comment: Sleep,
    shard: Shard,
}

impl EventStream {
    fn poll(&mut self, task: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let end = self.seat.end.clone();
        let ended = self.ended.get_or_insert_with(|| Box::pin(async move { end.notified().await }));
        // In a shutdown the client comes back to another process, with its cursor.
        if ended.as_mut().poll(task).is_ready() || Pin::new(&mut self.draining).poll(task).is_ready() {
            return Poll::Ready(None);
        }
        if let Poll::Ready(event) = self.feed.poll_next(task) {
            self.comment = self.shard.sleep(COMMENT);
            return Poll::Ready(Some(event));
        }
        if Pin::new(&mut self.comment).poll(task).is_ready() {
            self.comment = self.shard.sleep(COMMENT);
            // Woken by it from now on.
            let _ = Pin::new(&mut self.comment).poll(task);
            return Poll::Ready(Some(Bytes::from_static(b":\n\n")));
        }
        Poll::Pending
    }
}

impl Body for Content {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Content::Empty => Poll::Ready(None),
            Content::Whole(bytes) => {
                let bytes = std::mem::take(bytes);
                *self = Content::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Content::Events(events) => {
                events.poll(task).map(|event| event.map(|event| Ok(Frame::data(event))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Content::Empty)
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Content::Empty => SizeHint::with_exact(0),
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Events(_) => SizeHint::default(),
        }
    }
}

fn text(status: StatusCode, json: String) -> Response<Content> {
    let mut answer = Response::new(Content::Whole(Bytes::from(json + "\n")));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, "application/json".parse().expect("a value of a header"));
    answer
}

fn page() -> Response<Content> {
    let own = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
               img-src data:; connect-src 'self' ws: wss: http: https:";
    let answer = Response::builder()
        .header(CONTENT_TYPE, "text/html; charset=utf-8")
        .header("content-security-policy", own)
        .header("x-content-type-options", "nosniff");
    answer.body(Content::Whole(Bytes::from_static(PAGE.as_bytes()))).unwrap_or_default()
}

fn bearer(request: &Request<Incoming>) -> Option<&str> {
    request.headers().get(AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

async fn read<T: for<'de> Deserialize<'de>>(request: Request<Incoming>) -> Result<T, Failed> {
    let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
    let body = body.map_err(|_| (StatusCode::PAYLOAD_TOO_LARGE, "the body is too large".to_owned()))?;
    serde_json::from_slice(&body.to_bytes()).map_err(bad)
}

/// The query of a request.
struct Query(String);

impl Query {
    fn of(request: &Request<Incoming>) -> Query {
        Query(request.uri().query().unwrap_or_default().to_owned())
    }

    fn get(&self, name: &str) -> Option<String> {
        let mut pairs = self.0.split('&').filter_map(|pair| pair.split_once('='));
        let (_, value) = pairs.find(|(known, _)| *known == name)?;
        Some(percent_decode_str(value).decode_utf8().ok()?.into_owned())
    }
}
