//! Sends each message of WebSocket back, for `tests/clients/websocket`: from a service of messages
//! and from inside HTTP, both with and without TLS. It listens in that order: messages, messages
//! over TLS, HTTP, HTTP over TLS.

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use ringserve::listen::{endpoints, tcp};
use ringserve::server::Driver;
use ringserve::tls::{Pem, Tls};
use ringserve::websocket::{Deflate, Message, Messages, Socket, Upgrades, WebSocket, WebSocketOptions, WsCx};
use ringserve::{Limits, Server, http, ws};

#[derive(Parser)]
struct Args {
    /// Address of all listeners; with port 0 each finds a free one.
    #[arg(long, value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// The certificate, as PEM; without it there is no TLS.
    #[arg(long, requires = "key", value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its private key, as PEM.
    #[arg(long, requires = "cert", value_name = "FILE")]
    key: Option<PathBuf>,
    /// Bytes of a message.
    #[arg(long, default_value_t = 1 << 20, value_name = "BYTES")]
    message_bytes_max: usize,
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

struct Echo;

impl WebSocket for Echo {
    type Session = ();
    type Error = Infallible;

    async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Infallible> {
        cx.send(message);
        Ok(())
    }
}

async fn echo(mut socket: Socket) {
    while let Ok(Some(message)) = socket.next().await {
        if socket.send(message).await.is_err() {
            return;
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_ansi(false).with_target(false).init();
    let args = Args::parse();
    let most = args.message_bytes_max;
    let options =
        WebSocketOptions::new().message_bytes_max(most).deflate(Deflate::default().message_bytes_min(0));
    // Room for an echo of the largest message behind another one.
    let outbox = Limits::default().outbox_bytes_max.max(3 * most);
    let limits = Limits::default().frame_bytes_max(most).outbox_bytes_max(outbox);
    let (mut messages, mut http_at) = (vec![tcp(args.listen)], vec![tcp(args.listen)]);
    if let (Some(cert), Some(key)) = (&args.cert, &args.key) {
        let tls = Tls::server().certificate(Pem::file(cert)?, Pem::file(key)?);
        messages.push(tcp(args.listen).tls(tls.clone()));
        http_at.push(tcp(args.listen).tls(tls));
    }
    let messages: Vec<_> =
        messages.into_iter().map(|endpoint| endpoint.websocket_with(options.clone())).collect();
    Ok(Server::new()
        .shards(args.shards)
        .driver(args.driver)
        .service(endpoints(messages).framing(Messages::binary()).limits(limits), |_shard| ws(Echo))
        .service(endpoints(http_at), move |_shard| {
            let upgrades = Upgrades::new(&options);
            http(service_fn(move |request: Request<Incoming>| {
                std::future::ready(Ok::<_, Infallible>(upgrades.upgrade::<_, String, _>(request, echo)))
            }))
        })
        .serve()?)
}
