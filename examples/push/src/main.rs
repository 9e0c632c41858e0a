//! A push gateway for browsers and devices: topics with history and recovery, over all shards.
//!
//!     cargo run --release -p example-push -- --api-key key --anonymous
//!     http://127.0.0.1:8080 in a browser
//!     curl -N 'http://127.0.0.1:8080/events?topic=news'
//!     curl http://127.0.0.1:8080/api/publish -H 'authorization: Bearer key' \
//!         -d '{"topic": "news", "data": {"text": "hello"}}'
//!
//! | who | how |
//! |---|---|
//! | browsers | WebSocket at `/ws`, server-sent events at `/events?topic=T` ([`web`]) |
//! | devices | lines on TCP ([`lines`]) |
//! | programs | an API with a key: publish, broadcast, presence, history, disconnect, and figures at `/metrics` ([`web`]) |
//!
//! A token says who may subscribe to what and publish what ([`token`]), until it expires: then its
//! connection ends. One that shows none has ten seconds, unless the server is `--anonymous`. A
//! client that comes back with the cursor of the message that it saw last gets what it missed, as
//! far as `--history` has it, and else the report of a gap. With `--nats` several nodes have the
//! same topics, and a client comes back to any of them. Members of WebSocket and of events read the
//! log of their topic at their own pace; devices are members of 16 bytes.

mod figures;
mod hub;
mod lines;
#[cfg(test)]
mod tests;
mod token;
mod web;

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use clap::builder::NonEmptyStringValueParser;
use ringserve::framing::Lines;
use ringserve::http::hyper::service::service_fn;
use ringserve::listen::tcp;
use ringserve::log::LogOptions;
use ringserve::server::{Driver, MultiService};
use ringserve::topics::{History, TopicOptions};
use ringserve::{Limits, Server, Shard, http};
use ringserve_nats::NatsOptions;
use ringserve_topics_nats::NatsBridge;

use crate::hub::{Gateway, Hub};
use crate::lines::Devices;
use crate::token::Tokens;
use crate::web::Web;

/// A push gateway.
#[derive(Parser)]
struct Args {
    /// Address and port for lines on TCP.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Address and port of the page, WebSocket, events and the API.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDR:PORT")]
    http: SocketAddr,
    /// The key of the API; one without a byte is refused.
    #[arg(long, value_name = "KEY", value_parser = NonEmptyStringValueParser::new())]
    api_key: String,
    /// The secret that signs the tokens of clients, by HS256; one without a byte is refused.
    #[arg(long, required_unless_present = "anonymous", value_name = "SECRET",
        value_parser = NonEmptyStringValueParser::new())]
    token_secret: Option<String>,
    /// Clients without a token may subscribe to every topic.
    #[arg(long)]
    anonymous: bool,
    /// Messages of a topic that are kept for those who come back.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    history: usize,
    /// Seconds for which they are kept.
    #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
    history_seconds: u64,
    /// Servers of NATS with JetStream, by which nodes with the same ones have the same topics.
    #[arg(long, value_name = "nats://ADDR:PORT,..", value_delimiter = ',')]
    nats: Vec<String>,
    /// Forwards messages between nodes alone, without an order and history of NATS.
    #[arg(long, requires = "nats")]
    nats_live: bool,
    /// The first token of the subjects of NATS, and the name of the stream.
    #[arg(long, default_value = "push", value_name = "NAME")]
    namespace: String,
    /// Lets another process listen at the same addresses, such as the next release of this one.
    #[arg(long)]
    share_port: bool,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// The bridge to other nodes, if there is one.
fn bridge(args: &Args) -> Option<NatsBridge> {
    let (first, others) = args.nats.split_first()?;
    let options = others.iter().fold(NatsOptions::new(first).name("push"), NatsOptions::server);
    Some(match args.nats_live {
        true => NatsBridge::live(options, &args.namespace),
        false => NatsBridge::stream(options, &args.namespace),
    })
}

fn server(args: &Args) -> Server<MultiService> {
    let history = History::last(args.history).within(Duration::from_secs(args.history_seconds));
    let tokens = Tokens::new(args.token_secret.as_deref(), args.anonymous);
    let gateway = Gateway::new(TopicOptions::new(history), tokens, &args.api_key, bridge(args));
    // A device that only listens says nothing; one that vanished answers no probe of the kernel.
    let limits = Limits::default().first_frame_timeout(None).idle_timeout(None).frame_bytes_max(64 << 10);
    let hub = move |shard: &Shard| shard.shared_rc(|| Hub::new(shard, &gateway));
    let of_web = hub.clone();
    Server::new()
        .shards(args.shards)
        .driver(args.driver)
        .share_port(args.share_port)
        .service(tcp(args.listen).framing(Lines::default()).limits(limits).name("lines"), move |shard| {
            Devices(hub(shard))
        })
        .service(tcp(args.http).name("web"), move |shard| {
            let web = Rc::new(Web::new(of_web(shard)));
            http(service_fn(move |request| {
                let web = web.clone();
                async move { web.answer(request).await }
            }))
        })
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    server(&Args::parse()).serve()
}
