//! Reports who its clients are, whether they come directly or through a proxy that speaks the PROXY
//! protocol.
//!
//!     cargo run --release --example behind_a_proxy -- --proxies 127.0.0.1:7001 --trust 127.0.0.0/8
//!     printf 'hello\n' | nc -N 127.0.0.1 7000
//!     printf 'PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\nhello\n' | nc -N 127.0.0.1 7001

use std::convert::Infallible;
use std::fmt::Write;
use std::net::SocketAddr;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::listen::{ProxyProtocol, endpoints, tcp};
use ringserve::log::LogOptions;
use ringserve::server::Driver;
use ringserve::{Cx, Frame, Server, Service};

/// A server that answers each line with the address of its client.
#[derive(Parser)]
struct Args {
    /// Address and port for clients; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Address and port for proxies.
    #[arg(long, default_value = "127.0.0.1:7001", value_name = "ADDR:PORT")]
    proxies: SocketAddr,
    /// A network from which proxies come, such as 10.0.0.0/8. May be given several times.
    #[arg(long, required = true, value_name = "NETWORK")]
    trust: Vec<String>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// The service knows nothing of proxies except what it shows.
struct WhoAmI;

impl Service for WhoAmI {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let mut text = format!("you are {}", cx.peer());
        let mut add = |what: &str, value: String| write!(text, ", {what} {value}").unwrap_or_default();
        if let Some(via) = cx.peer().via() {
            add("via", via.to_string());
        }
        if let Some(local) = cx.peer().local_addr() {
            add("at", local.to_string());
        }
        if let Some(tlvs) = cx.tlvs() {
            if let Some(id) = tlvs.unique_id() {
                add("id", String::from_utf8_lossy(id).into_owned());
            }
            if let Some(name) = tlvs.authority() {
                add("asked for", name.to_owned());
            }
            if let Some(ssl) = tlvs.ssl().filter(|ssl| ssl.is_tls()) {
                add("by", ssl.version().unwrap_or("TLS").to_owned());
                if let Some(name) = ssl.common_name().filter(|_| ssl.is_verified()) {
                    add("as", name.to_owned());
                }
            }
        }
        cx.reply(text.as_str());
        if line.is_empty() {
            cx.close();
        }
        Ok(())
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let protocol = ProxyProtocol::from(args.trust).keep_tlvs();
    let listeners = (tcp(args.listen), tcp(args.proxies).proxy_protocol(protocol));
    Server::new()
        .driver(args.driver)
        .service(endpoints(listeners).framing(Lines::default()), |_shard| WhoAmI)
        .serve()
}
