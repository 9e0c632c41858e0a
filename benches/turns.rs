//! Runs whole turns of a server a given number of times, for tools that count instructions:
//! `scripts/instructions` runs it under callgrind. Below the server is the bookkeeping of the
//! io_uring driver, over a kernel that follows a script, so that work which moves into the driver
//! is still counted.

#[path = "support/echo.rs"]
mod echo;
#[path = "support/scripted.rs"]
mod scripted;

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};

use bytes::Bytes;
use ringserve::handle::PushError;
use ringserve::http::hyper::service::service_fn;
use ringserve::http::hyper::{Request, Response, body::Incoming};
use ringserve::limits::StallOptions;
use ringserve::listen::tcp;
use ringserve::service::{OpenCx, Refusal, Session};
use ringserve::sync::{AskError, Mesh};
use ringserve::topics::{
    self, FormId, History, PublishError, ShardTopics, Since, Slow, TopicOptions, Topics,
};
use ringserve::transport::{Batch, LeaseMut, Transport, TransportConn, TransportError, TransportEvent};
use ringserve::{ConnHandle, Cx, Frame, Server, Service, Stream, http, stream};
use ringserve_server::internals::{start_on, start_several_on};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use echo::Echo;
use scripted::{Script, Scripted};

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let (Some(case), Some(turns)) = (args.next(), args.next().and_then(|turns| turns.parse().ok())) else {
        // `cargo bench` runs every benchmark, and passes no case.
        if std::env::args().any(|arg| arg == "--bench") {
            return;
        }
        return println!(
            "usage: turns CASE TURNS, where CASE is ring, fifty, waits, push, shards, asks, stream, sealed, services, second, http, pipelined, logged, unheard, published or watched"
        );
    };
    let (over, all_turns_over) = sync_channel(0);
    let frame = vec![b'x'; 64];
    let script = Script { connections: 1, listener: 0, shards: 1, frame, sends: 1, rounds: turns, over };
    // The looks of a watchdog follow the clock, which is far behind under callgrind; what a shard
    // stores for it is counted.
    let server = Server::bind("127.0.0.1:0").shards(1);
    let server = if case == "watched" { server } else { server.stalls(StallOptions::off()) };
    let start = |script| Scripted::new(script).expect("there are descriptors");
    // The server stays until the end of the process.
    let _running = match case.as_str() {
        "ring" => start_on(server, start(script), |_| Echo),
        // With its watchdog, and by hand: `top -H` and /proc show what that takes of a CPU next to
        // a shard that never waits.
        "fifty" | "watched" => {
            start_on(server, start(Script { connections: 50, sends: 50, ..script }), |_| Echo)
        }
        "waits" => {
            start_on(server, start(Script { connections: 2, sends: 2, ..script }), |_| Pairs::default())
        }
        "push" => {
            let to = Arc::new(OnceLock::new());
            start_on(server, start(script), move |_| Relay { shard: 0, to: to.clone() })
        }
        "shards" => {
            let to = Arc::new(OnceLock::new());
            let script = Script { shards: 2, ..script };
            start_on(server.shards(2), start(script), move |_| Relay { shard: 1, to: to.clone() })
        }
        "asks" => {
            let questions = Mesh::new();
            let script = Script { shards: 2, ..script };
            start_on(server.shards(2), start(script), move |shard| {
                questions.register(shard, |_from, number: u64| 2 * number);
                Asks { questions: questions.clone() }
            })
        }
        "services" | "second" => {
            let (one, two) = (tcp("127.0.0.1:0"), tcp("127.0.0.1:0"));
            let server = Server::new()
                .shards(1)
                .stalls(StallOptions::off())
                .service(one, |_| Echo)
                .service(two, |_| Echo);
            start_several_on(server, start(Script { listener: (case == "second").into(), ..script }))
        }
        "stream" => start_on(server, start(script), |_| stream(echo_stream)),
        // 16 requests at once, in the second; with an access log of requests that goes nowhere, in
        // the third.
        "http" | "pipelined" | "logged" => {
            if case == "logged" {
                tracing::subscriber::set_global_default(Dropped).expect("the only one");
            }
            let requests = if case == "pipelined" { 16 } else { 1 };
            let frame = b"GET /hello HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".repeat(requests);
            let logs = case == "logged";
            start_on(server, start(Script { frame, ..script }), move |_| {
                http(service_fn(hello)).access_log(logs)
            })
        }
        // Beside a reply, a message to a topic without a member; and a message to its only member,
        // in the place of a reply.
        "unheard" | "published" => {
            let topics = Topics::new(TopicOptions::new(History::none()));
            let (form, is_heard) = (topics.form(topics::Bare), case == "published");
            start_on(server, start(script), move |shard| News {
                topics: topics.register(shard),
                form,
                is_heard,
            })
        }
        "sealed" => start_on(server.transport(|| AsIs), start(script), |_| Echo),
        other => panic!("there is no case {other}"),
    }
    .expect("the server starts");
    all_turns_over.recv().expect("the first shard runs");
    std::process::exit(0);
}

async fn hello(_request: Request<Incoming>) -> Result<Response<String>, Infallible> {
    Ok(Response::new("hello".into()))
}

/// Drops each event of `tracing`, since any subscriber may be installed.
struct Dropped;

impl Subscriber for Dropped {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Sends back the bytes of a stream.
async fn echo_stream(mut stream: Stream) -> io::Result<()> {
    while let Some(frame) = stream.read_frame().await? {
        stream.write_all(&frame).await?;
    }
    Ok(())
}

/// Changes no bytes, so that the shard's work for a channel is counted, and not the channel's own.
struct AsIs;

impl Transport for AsIs {
    fn begin(&self, _: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        Some(Box::new(Unchanged { is_ready: false }))
    }
}

struct Unchanged {
    is_ready: bool,
}

impl TransportConn for Unchanged {
    fn decode(&mut self, wire: &mut LeaseMut, _: &mut Vec<u8>) -> TransportEvent {
        if !std::mem::replace(&mut self.is_ready, true) {
            return TransportEvent::Ready;
        }
        if wire.is_empty() { TransportEvent::More } else { TransportEvent::Plain(std::mem::take(wire)) }
    }

    fn work(&mut self, _: &mut Vec<u8>) -> TransportEvent {
        TransportEvent::More
    }

    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError> {
        plain.pieces().for_each(|piece| out.extend_from_slice(piece));
        Ok(())
    }

    fn finish(&mut self, _: &mut Vec<u8>) {}

    fn held_bytes(&self) -> usize {
        0
    }

    fn is_mid_record(&self) -> bool {
        false
    }

    fn wants_more(&self) -> bool {
        self.is_ready
    }
}

/// Of two calls the first waits, and the second wakes it.
#[derive(Default)]
struct Pairs {
    waiting: RefCell<Option<Waker>>,
    is_woken: Cell<bool>,
}

impl Service for Pairs {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match self.waiting.take() {
            Some(first) => {
                self.is_woken.set(true);
                first.wake();
            }
            None => {
                let until_woken = |task: &mut std::task::Context<'_>| {
                    if self.is_woken.take() {
                        return Poll::Ready(());
                    }
                    *self.waiting.borrow_mut() = Some(task.waker().clone());
                    Poll::Pending
                };
                poll_fn(until_woken).await;
            }
        }
        cx.reply(frame);
        Ok(())
    }
}

/// Asks another shard 16 questions at once for each frame.
struct Asks {
    questions: Mesh<u64, u64>,
}

impl Service for Asks {
    type Session = ();
    type Error = AskError;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), AskError> {
        let asked = std::array::from_fn::<_, 16, _>(|number| self.questions.ask(1, number as u64));
        for ask in asked {
            ask.await?;
        }
        cx.reply(frame);
        Ok(())
    }
}

/// Pushes each frame to the one connection of a shard.
struct Relay {
    shard: usize,
    to: Arc<OnceLock<ConnHandle>>,
}

impl Service for Relay {
    type Session = ();
    type Error = PushError;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        if opening.shard().index() == self.shard {
            let _ = self.to.set(opening.handle());
        }
        Ok(())
    }

    async fn call(&self, _: &Cx<'_, ()>, frame: Frame) -> Result<(), PushError> {
        self.to.get().ok_or(PushError::Gone)?.push(Bytes::copy_from_slice(&frame))
    }
}

/// Publishes each frame, and sends it back where its connection is no member.
struct News {
    topics: ShardTopics,
    form: FormId,
    is_heard: bool,
}

struct Member(topics::Subscriber);
impl Session for Member {}

impl Service for News {
    type Session = Member;
    type Error = PublishError;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Member, Refusal> {
        let member = Member(self.topics.subscriber(opening.local_handle(), self.form));
        if self.is_heard {
            let _ = member.0.subscribe("news", Since::Newest, Slow::Skip).await;
        }
        Ok(member)
    }

    async fn call(&self, cx: &Cx<'_, Member>, frame: Frame) -> Result<(), PublishError> {
        if self.is_heard {
            return self.topics.publish("news", Bytes::copy_from_slice(&frame));
        }
        self.topics.publish("news", Bytes::from_static(b"unheard"))?;
        cx.reply(frame);
        Ok(())
    }
}
