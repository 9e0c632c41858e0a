//! A broker of MQTT 3.1.1 and 5, over all shards, on TCP and WebSocket, plain and by TLS, by one
//! service.
//!
//!     cargo run --release -p example-mqtt -- --ws [::]:8080
//!     mosquitto_sub -p 1883 -v -t 'rooms/+/light'
//!     mosquitto_pub -p 1883 -t rooms/kitchen/light -m on
//!
//! With a certificate by TLS too, and by WebSocket over TLS:
//!
//!     cargo run --release -p example-mqtt -- --tls [::]:8883 --wss [::]:8443 --cert cert.pem --key key.pem
//!
//! Packets are frames ([`packet`]). The session of a client, with its filters and with what it did
//! not acknowledge, is at home on the shard that the hash of the client id says, wherever the
//! client is connected ([`sessions`]): what a client asks on its connection ([`broker`]) is done
//! there, as a closure. A message goes to each shard once, where the filters of all sessions are a
//! tree ([`Filters`](ringserve::topics::Filters)). Everything is in memory.
//!
//! `STANDARD.md` goes through the numbered statements of both standards, with a test for each.
//!
//! * Supported: QoS 0 and 1, retained messages, wills, wildcards, `$` topics, keep-alive, sessions
//!   that outlive their connection for a day at most, take-over of a client id, receive maximum,
//!   maximum packet size, message expiry, no local, retain as published, retain handling.
//! * Refused: QoS 2 (subscribed to, it is granted as QoS 1), topic aliases, ids of subscriptions,
//!   shared subscriptions, enhanced authentication. The delay of a will is ignored.
//! * There is no authentication: any user name and password are welcome, and by WebSocket the pages
//!   of every origin.
//! * Messages for a client that reads or acknowledges too slowly, or with QoS 1 is not connected,
//!   wait up to `--session-bytes-max`; what comes then is dropped for it, retained messages too. A
//!   retained message without room in `--retained-bytes-max`, a packet above 256 KiB and a will
//!   above 4 KiB end the connection that sends them. Filters of a client that overlap bring a
//!   message once for each.
//! * All shards retain the same messages, since each topic has a shard that all others hear of it
//!   from.

mod broker;
mod packet;
mod sessions;
#[cfg(test)]
mod tests;

use std::{error::Error, net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use ringserve::listen::{endpoints, tcp};
use ringserve::log::LogOptions;
use ringserve::server::{Driver, MultiService};
use ringserve::sync::Mesh;
use ringserve::tls::{Pem, Tls, TlsError};
use ringserve::websocket::WebSocketOptions;
use ringserve::{Limits, Server};

use crate::broker::Broker;
use crate::packet::{PACKET_BYTES_MAX, PACKETS};
use crate::sessions::{Bounds, Node};

/// Jobs that may wait for a shard, each with a packet at most.
const JOBS_MAX: usize = 1024;

/// A broker of MQTT 3.1.1 and 5.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:1883", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Address and port for WebSocket; without it there is none.
    #[arg(long, value_name = "ADDR:PORT")]
    ws: Option<SocketAddr>,
    /// Address and port for TLS; without it there is none.
    #[arg(long, requires = "cert", value_name = "ADDR:PORT")]
    tls: Option<SocketAddr>,
    /// Address and port for WebSocket over TLS; without it there is none.
    #[arg(long, requires = "cert", value_name = "ADDR:PORT")]
    wss: Option<SocketAddr>,
    /// The certificate and those between it and its authority, as PEM. Read again when it changes.
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
    /// Microseconds that a shard waits for more behind messages of several clients, as
    /// `Server::coalesce` says; 0 is off.
    #[arg(long, default_value_t = 50, value_name = "MICROSECONDS")]
    coalesce: u64,
    #[command(flatten)]
    bounds: Bounds,
}

impl Args {
    /// The broker, without what chooses the machine's part: driver and shards.
    fn server(&self) -> Result<Server<MultiService>, TlsError> {
        let options = WebSocketOptions::new().protocols(["mqtt"]).binary_only();
        let websocket = |addr| tcp(addr).websocket_with(options.clone());
        let mut listeners: Vec<_> = [tcp(self.listen)].into_iter().chain(self.ws.map(websocket)).collect();
        if let (Some(cert), Some(key)) = (&self.cert, &self.key) {
            let tls = Tls::server().certificate(Pem::file(cert)?, Pem::file(key)?);
            let tls = tls.watch_files(Duration::from_secs(10));
            let secured = self.tls.map(tcp).into_iter().chain(self.wss.map(websocket));
            listeners.extend(secured.map(|endpoint| endpoint.tls(tls.clone())));
        }
        let limits = Limits::default().frame_bytes_max(PACKET_BYTES_MAX);
        let clients = endpoints(listeners).framing(PACKETS).limits(limits).name("mqtt");
        let (bounds, mesh) = (self.bounds.clone(), Mesh::with_capacity(JOBS_MAX));
        Ok(Server::new().service(clients, move |shard| Broker(Node::new(shard, &mesh, &bounds))))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let coalesce = Duration::from_micros(args.coalesce);
    Ok(args.server()?.driver(args.driver).shards(args.shards).coalesce(coalesce).serve()?)
}
