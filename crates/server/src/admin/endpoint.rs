//! The endpoint as a server beside another one.

use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use ringserve_core::{Address, Limits, ServerLimits};
use tracing::{error, info};

use super::Admin;
use super::desk::{Desk, Settings};
use super::gate::Gate;
use super::places::Place;
use super::target::Target;
use crate::http::{HttpOptions, HttpVersions, http};
use crate::log::guarded;
use crate::server::builder::Server;
use crate::server::control::ServerControl;
use crate::server::driver::Driver;
use crate::server::error::Error;
use crate::server::running::{Beside, Facts, RunsBeside, ServerHandle};
use crate::server::socket_options::options::SocketOptions;
use crate::watchdog::Stalls;

/// Connections at once: a browser has six, and a scraper one. Further ones wait in the backlog.
const CONNECTIONS_MAX: usize = 32;

/// A client that sends no request for this long, or reads nothing, makes room for others.
const PATIENCE: Duration = Duration::from_secs(10);

/// The largest answer is a report of a thousand shards, with some hundreds of KiB.
const OUTBOX_BYTES_MAX: usize = 4 << 20;

/// Answers that are being sent when the server ends have this long.
const DRAIN: Duration = Duration::from_millis(500);

/// A user who may open the file may stop the server, so that is its owner alone.
const UNIX_MODE: u32 = 0o600;

/// An endpoint that runs.
struct Endpoint {
    target: Arc<Target>,
    /// `None` once it ended.
    server: Option<ServerHandle>,
    address: Address,
}

impl Beside for Admin {
    fn start(self: Box<Self>) -> Result<Box<dyn RunsBeside>, Error> {
        let Admin { addr, token, names, log_level } = *self;
        let place = Place::parse(&addr).map_err(Error::Admin)?;
        token.as_deref().map_or(Ok(()), Gate::check_token).map_err(Error::Admin)?;
        place.check(token.is_some()).map_err(Error::Admin)?;
        let names = names.iter().map(|name| Gate::read_name(name)).collect::<Result<Vec<_>, _>>();
        let gate = Gate::new(names.map_err(Error::Admin)?, place.ips(), token.as_deref());
        let server = match place {
            Place::Ip(addrs) => Server::bind(&addrs[..]),
            Place::Unix(path) => Server::bind_unix(path),
        };
        let target = Arc::new(Target::default());
        let settings = Arc::new(Settings { gate, log_level, target: target.clone() });
        let started = server
            .shards(1)
            .pin(false)
            .driver(Driver::Epoll)
            .limits(limits())
            .server_limits(server_limits())
            .sockets(SocketOptions::default().unix_mode(UNIX_MODE))
            .stalls(Stalls::off())
            .beside_another()
            .start(move |shard| {
                let desk = Desk::begin(shard, settings.clone());
                http(service_fn(move |request| desk.clone().answer(request))).options(options())
            });
        let server = started.map_err(|error| Error::Admin(cause(error)))?;
        let address = server.listeners()[0].clone();
        guarded(|| match &address {
            Address::Ip(addr) => info!("admin endpoint at http://{addr}"),
            unix => info!("admin endpoint at {unix}"),
        });
        Ok(Box::new(Endpoint { target, server: Some(server), address }))
    }
}

impl RunsBeside for Endpoint {
    fn begins(&self, server: ServerControl, facts: Facts) {
        self.target.begins(server, facts);
    }

    fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let Some(server) = self.server.take() else { return };
        server.shutdown();
        if let Err(error) = server.wait() {
            guarded(|| error!("the admin endpoint ended early: {error}"));
        }
    }
}

/// The reason as a sentence, with fixes that an endpoint has.
fn cause(error: Error) -> String {
    match error {
        Error::AddressInUse { addr, holder } => {
            let by = holder.map_or_else(String::new, |holder| format!(" by {holder}"));
            format!("{addr} is in use{by}: stop that, or choose another address")
        }
        error => error.to_string(),
    }
}

fn limits() -> Limits {
    Limits::default()
        .frame_bytes_max(64 << 10)
        .outbox_bytes_max(OUTBOX_BYTES_MAX)
        .idle_timeout(6 * PATIENCE)
        .write_stall_timeout(PATIENCE)
}

fn server_limits() -> ServerLimits {
    ServerLimits::default()
        .connections_max(CONNECTIONS_MAX)
        .handshakes_max(CONNECTIONS_MAX)
        .held_bytes_max(4 * OUTBOX_BYTES_MAX)
        .receive_bytes_max(1 << 20)
        .upstreams_max(0)
        .blocking_threads_max(1)
        .blocking_queue_max(CONNECTIONS_MAX)
        .drain_timeout(DRAIN)
}

fn options() -> HttpOptions {
    HttpOptions::default()
        .versions(HttpVersions::Http1)
        .header_timeout(PATIENCE)
        .header_bytes_max(8 << 10)
        .buffer_bytes_max(16 << 10)
        .rate_window(PATIENCE)
        .response_timeout(PATIENCE)
        .websocket_streams(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_of_the_endpoint_are_valid() {
        assert_eq!(limits().check(), Ok(()));
        assert_eq!(server_limits().check(), Ok(()));
        assert_eq!(server_limits().check_service(&limits()), Ok(()));
        assert_eq!(options().check(), Ok(()));
    }

    #[test]
    fn taken_port_is_said_without_advice_that_does_not_apply() {
        let addr = Address::Ip("127.0.0.1:9000".parse().unwrap());
        let text = cause(Error::AddressInUse { addr, holder: Some("process 7 (app)".to_owned()) });
        assert_eq!(text, "127.0.0.1:9000 is in use by process 7 (app): stop that, or choose another address");
    }
}
