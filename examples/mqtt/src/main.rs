//! A broker of MQTT 3.1.1 and 5, over all shards, on TCP, TLS and WebSocket.
//!
//!     cargo run --release -p example-mqtt
//!     mosquitto_sub -p 1883 -v -t 'rooms/+/light'
//!     mosquitto_pub -p 1883 -t rooms/kitchen/light -m on
//!
//! Packets are frames ([`packet`]). A message goes to each shard once, where the filters of its clients are a tree ([`topics`]), and is
//! encoded there once for all that take it in one form ([`node`]). The session of a client, with what it did not acknowledge, lies on
//! the shard that the hash of its client id says, wherever the client is connected ([`sessions`]). Everything is in memory.
//!
//! * Supported: QoS 0 and 1, retained messages, wills with delay, wildcards, `$` topics, keep-alive, sessions that outlive their
//!   connection for at most `--session-expiry-max`, take-over of a client id, receive maximum, maximum packet size, message expiry,
//!   no local, retain as published, retain handling. Any user name and password are welcome.
//! * Refused, with the protocol's code: QoS 2 (subscribed to, it is granted as QoS 1), topic aliases, ids of subscriptions, shared
//!   subscriptions, enhanced authentication. Where 3.1.1 has no code the connection ends.
//! * A client that reads too slowly misses messages of QoS 0. Messages of QoS 1 wait, connected or not, up to the bounds of
//!   `--session-bytes-max`; behind that they are dropped. Filters of a client that overlap bring a message once for each.

mod node;
mod packet;
mod service;
mod sessions;
#[cfg(test)]
mod tests;
mod topics;

use std::error::Error;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, value_parser};
use ringserve::limits::ServerLimits;
use ringserve::listen::{Endpoint, endpoints, tcp};
use ringserve::sync::Mesh;
use ringserve::tls::{Pem, Tls};
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
    #[arg(long, value_name = "ADDR:PORT")]
    tls: Option<SocketAddr>,
    /// The certificate and those between it and its authority, as PEM. Without it the broker makes one, for localhost.
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
    /// Bytes of a packet at most.
    #[arg(long, default_value_t = 256 << 10, value_name = "BYTES", value_parser = value_parser!(u32).range(1024..=(256 << 20)))]
    packet_bytes_max: u32,
    /// Sessions of each shard at most, of clients that are connected or were.
    #[arg(long, default_value_t = 100_000, value_name = "N")]
    sessions_max: usize,
    /// Seconds for which a session outlives its connection at most.
    #[arg(long, default_value_t = 86_400, value_name = "SECONDS", value_parser = value_parser!(u32).range(..=86_400))]
    session_expiry_max: u32,
    /// Bytes of messages that wait for a client at most, each with 128 more. One may always wait.
    #[arg(long, default_value_t = 1 << 20, value_name = "BYTES")]
    session_bytes_max: usize,
    /// Bytes of messages that wait for all clients whose home a shard is.
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES")]
    sessions_bytes_max: usize,
    /// Filters of a client at most.
    #[arg(long, default_value_t = 100, value_name = "N")]
    filters_max: usize,
    /// Bytes of retained messages, each with 128 more.
    #[arg(long, default_value_t = 64 << 20, value_name = "BYTES")]
    retained_bytes_max: usize,
}

impl Args {
    fn bounds(&self) -> Bounds {
        Bounds {
            sessions_max: self.sessions_max,
            session_bytes_max: self.session_bytes_max,
            sessions_bytes_max: self.sessions_bytes_max,
            filters_max: self.filters_max,
            retained_bytes_max: self.retained_bytes_max,
            expiry_max: Duration::from_secs(self.session_expiry_max.into()),
            packet_bytes_max: self.packet_bytes_max as usize,
        }
    }

    /// The broker at these endpoints, without what chooses the machine's part: driver and shards.
    fn server(&self, endpoints_of_all: Vec<Endpoint>) -> Server<Several> {
        let (limits, of_server, packet) =
            (Limits::default(), ServerLimits::default(), self.packet_bytes_max as usize);
        let outbox = limits.outbox_bytes_max.max(2 * packet);
        let held = of_server.held_bytes_max.max(4 * packet);
        let limits = limits.frame_bytes_max(packet).outbox_bytes_max(outbox);
        let (bounds, mesh) = (self.bounds(), Mesh::with_capacity(MESSAGES_MAX));
        let service = endpoints(endpoints_of_all).framing(Mqtt).limits(limits).name("mqtt");
        Server::new()
            .server_limits(of_server.held_bytes_max(held))
            .service(service, move |shard| with_heads(Broker(Node::new(shard, &mesh, bounds.clone()))))
    }

    fn encryption(&self) -> Result<Tls, Box<dyn Error>> {
        let (cert, key) = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => (Pem::file(cert)?, Pem::file(key)?),
            _ => self_signed()?,
        };
        Ok(Tls::server().certificate(cert, key))
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>, Box<dyn Error>> {
        let mut all = vec![tcp(self.listen)];
        if let Some(addr) = self.tls {
            all.push(tcp(addr).tls(self.encryption()?));
        }
        Ok(all)
    }
}

/// A certificate for localhost, which no authority has signed.
fn self_signed() -> Result<(Pem, Pem), Box<dyn Error>> {
    let made = rcgen::generate_simple_self_signed(["localhost".into()])?;
    let file = std::env::temp_dir().join("ringserve-mqtt.pem");
    std::fs::write(&file, made.cert.pem())?;
    println!("made a certificate for localhost; clients believe it with {}", file.display());
    Ok((made.cert.pem().into(), made.signing_key.serialize_pem().into()))
}

fn main() -> Result<(), Box<dyn Error>> {
    let log = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(log).with_target(false).with_ansi(color).init();
    let args = Args::parse();
    Ok(args.server(args.endpoints()?).driver(args.driver).shards(args.shards).serve()?)
}
