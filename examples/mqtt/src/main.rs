//! A broker of MQTT 3.1.1 and 5, over all shards, on TCP, TLS and WebSocket, all by one service.
//!
//!     cargo run --release -p example-mqtt
//!     mosquitto_sub -p 1883 -v -t 'rooms/+/light'
//!     mosquitto_pub -p 1883 -t rooms/kitchen/light -m on
//!
//! With TLS, and for browsers, beside plain TCP:
//!
//!     cargo run --release -p example-mqtt -- --cert cert.pem --key key.pem --tls [::]:8883 --ws [::]:8080 --wss [::]:8081
//!
//! Packets are frames ([`packet`]). A message goes to each shard once, where the filters of its clients are a tree ([`topics`]),
//! and is encoded there once for all that take it in one form ([`node`]). The session of a client, with what it did not
//! acknowledge, lies on the shard that the hash of its client id says, wherever the client is connected ([`sessions`]).
//! Everything is in memory.
//!
//! * Supported: QoS 0 and 1, retained messages, wills with delay, wildcards, `$` topics, keep-alive, sessions that outlive their
//!   connection for at most `--session-expiry-max`, take-over of a client id, receive maximum, maximum packet size, message
//!   expiry, no local, retain as published, retain handling.
//! * There is no authentication: any user name and password are welcome, and by WebSocket the pages of every origin.
//! * Refused, with the protocol's code: QoS 2 (subscribed to, it is granted as QoS 1), topic aliases, ids of subscriptions,
//!   shared subscriptions, enhanced authentication. Where 3.1.1 has no code the connection ends.
//! * A client that reads too slowly misses messages of QoS 0. Messages of QoS 1 wait, connected or not, up to the bounds of
//!   `--session-bytes-max`; behind that they are dropped. Filters of a client that overlap bring a message once for each.

mod node;
mod packet;
mod service;
mod session;
mod sessions;
#[cfg(test)]
mod tests;
mod topics;

use std::error::Error;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use ringserve::limits::ServerLimits;
use ringserve::listen::{Endpoint, endpoints, tcp};
use ringserve::sync::Mesh;
use ringserve::tls::{Pem, Tls};
use ringserve::websocket::WebSocketOptions;
use ringserve::{Driver, Limits, Server, Several, with_heads};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::node::{Bounds, Node};
use crate::packet::Mqtt;
use crate::service::Broker;

/// Messages that may wait for a shard, each of `--packet-bytes-max` at most.
const MESSAGES_MAX: usize = 1024;

/// A broker of MQTT 3.1.1 and 5.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:1883", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Address and port for TLS; without it there is none.
    #[arg(long, requires = "cert", value_name = "ADDR:PORT")]
    tls: Option<SocketAddr>,
    /// Address and port for WebSocket; without it there is none.
    #[arg(long, value_name = "ADDR:PORT")]
    ws: Option<SocketAddr>,
    /// Address and port for WebSocket over TLS; without it there is none.
    #[arg(long, requires = "cert", value_name = "ADDR:PORT")]
    wss: Option<SocketAddr>,
    /// The certificate and those between it and its authority, as PEM.
    #[arg(long, requires = "key", value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its private key, as PEM.
    #[arg(long, requires = "cert", value_name = "FILE")]
    key: Option<PathBuf>,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
    #[command(flatten)]
    bounds: Bounds,
}

impl Args {
    /// The broker at these endpoints, without what chooses the machine's part: driver and shards.
    fn server(&self, endpoints_of_all: Vec<Endpoint>) -> Server<Several> {
        let (limits, of_server, packet) =
            (Limits::default(), ServerLimits::default(), self.bounds.packet_bytes_max as usize);
        let outbox = limits.outbox_bytes_max.max(2 * packet);
        let held = of_server.held_bytes_max.max(4 * packet);
        let limits = limits.frame_bytes_max(packet).outbox_bytes_max(outbox);
        let (bounds, mesh) = (self.bounds.clone(), Mesh::with_capacity(MESSAGES_MAX));
        let service = endpoints(endpoints_of_all).framing(Mqtt).limits(limits).name("mqtt");
        Server::new()
            .server_limits(of_server.held_bytes_max(held))
            .service(service, move |shard| with_heads(Broker(Node::new(shard, &mesh, bounds.clone()))))
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>, Box<dyn Error>> {
        let tls = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Some(Tls::server().certificate(Pem::file(cert)?, Pem::file(key)?)),
            _ => None,
        };
        let encrypted = |addr| tls.clone().map(|tls| tcp(addr).tls(tls));
        let websocket = WebSocketOptions::new().protocols(["mqtt"]);
        let websocket = websocket.message_bytes_max((self.bounds.packet_bytes_max as usize).max(1 << 20));
        let mut all = vec![tcp(self.listen)];
        all.extend(self.tls.and_then(encrypted));
        all.extend(self.ws.map(|addr| tcp(addr).websocket_with(websocket.clone())));
        all.extend(self.wss.and_then(encrypted).map(|tls| tls.websocket_with(websocket)));
        Ok(all)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let log = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(log).with_target(false).with_ansi(color).init();
    let args = Args::parse();
    Ok(args.server(args.endpoints()?).driver(args.driver).shards(args.shards).serve()?)
}
