//! The endpoint as a server beside another one.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use ringserve_base::clock::seconds_since_1970;
use ringserve_base::lines::{error, info};
use ringserve_core::framing::Raw;
use ringserve_core::{Address, LimitError, Limits, ServerLimits};
use ringserve_drivers::guarded;

use super::Admin;
use super::aside::THREADS;
use super::desk::{Desk, Program, Settings};
use super::gate::{Gate, Tokens};
use super::guests::Guests;
use super::kept::KeptOrders;
use super::places::Place;
use super::target::Target;
use crate::error::Error;
use crate::http::{Http, HttpOptions, HttpVersions};
use crate::server::builder::Server;
use crate::server::driver::Driver;
use crate::server::running::{Beside, Facts, RunsBeside, ServerHandle};
use crate::server::start::ENDPOINT_CONNECTIONS;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::IntoService;
use crate::shard::remote::control::ServerControl;
use crate::socket_options::options::SocketOptions;
use crate::stream::byte_stream::Stream;
use crate::stream::service::stream;
use crate::watch::options::StallOptions;

/// Connections at once: a browser has six, and a scraper one. For each further one another makes
/// room.
const GUESTS_MAX: usize = 32;

/// Connections of probes at once, at their own listener.
const PROBES_MAX: usize = 16;

/// Both, and those that are ended and not gone yet. Further ones wait in the backlog.
const CONNECTIONS_MAX: usize = ENDPOINT_CONNECTIONS;

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
    kept: Option<Arc<KeptOrders>>,
    /// `None` once it ended.
    server: Option<ServerHandle>,
    address: Address,
    probes: Option<Address>,
}

impl Beside for Admin {
    fn start(self: Box<Self>) -> Result<Box<dyn RunsBeside>, Error> {
        let Admin { addr, probes, tokens, read_token, names, log_level, routes, collectors, figures, kept } =
            *self;
        let program = Program::check(routes, collectors, figures).map_err(Error::Admin)?;
        let kept = kept.map(KeptOrders::read).transpose().map_err(Error::Admin)?.map(Arc::new);
        let place = Place::parse(&addr).map_err(Error::Admin)?;
        let probes = probes.map(|addr| Place::parse(&addr)).transpose().map_err(Error::Admin)?;
        let tokens = Tokens::check(tokens, read_token).map_err(Error::Admin)?;
        place.check(tokens.are_asked_for()).map_err(Error::Admin)?;
        let names = names.iter().map(|name| Gate::read_name(name)).collect::<Result<Vec<_>, _>>();
        let gate = Gate::new(names.map_err(Error::Admin)?, place.ips(), tokens);
        let probes_from = place.listeners();
        let listeners = probes_from + probes.as_ref().map_or(0, Place::listeners);
        let server = match place {
            Place::Ip(addrs) => Server::bind(&addrs[..]),
            Place::Unix(path) => Server::bind_unix(path),
        };
        let server = match probes {
            Some(Place::Ip(addrs)) => server.listen(&addrs[..]),
            Some(Place::Unix(path)) => server.listen_unix(path),
            None => server,
        };
        let target = Arc::new(Target::default());
        let log_level = log_level.or_else(Admin::log_level_of_subscriber);
        let settings =
            Arc::new(Settings { gate, log_level, target: target.clone(), program, kept: kept.clone() });
        let started = server
            .shards(1)
            .pin(false)
            .driver(Driver::Epoll)
            .limits(limits())
            .server_limits(server_limits())
            .sockets(SocketOptions::default().unix_mode(UNIX_MODE).peer_credentials(true))
            .stalls(StallOptions::off())
            .beside_another()
            .start(move |shard| serve(shard, Desk::begin(shard, settings.clone()), probes_from));
        let server = started.map_err(|error| Error::Admin(cause(error)))?;
        // One that is counted twice or not would answer what it must not.
        if server.listeners().len() != listeners {
            let found = server.listeners().len();
            return Err(Error::Admin(format!(
                "{found} listeners instead of {listeners}: give each address once"
            )));
        }
        let address = server.listeners()[0].clone();
        let probes = server.listeners().get(probes_from).cloned();
        for (what, address) in [("admin endpoint", Some(&address)), ("probes", probes.as_ref())] {
            guarded(|| match address {
                Some(Address::Ip(addr)) => info!("{what} at http://{addr}"),
                Some(unix) => info!("{what} at {unix}"),
                None => {}
            });
        }
        Ok(Box::new(Endpoint { target, kept, server: Some(server), address, probes }))
    }
}

/// The service of the endpoint's shard. Listeners from this number on are for probes.
fn serve(
    shard: &Shard,
    desk: Rc<Desk>,
    probes_from: usize,
) -> Result<impl IntoService<Raw> + use<>, LimitError> {
    let http = Http::new(shard, &options())?;
    let (guests, probes) = (Rc::new(Guests::new(GUESTS_MAX)), Rc::new(Guests::new(PROBES_MAX)));
    Ok(stream(async move |stream: Stream| {
        let is_for_probes = stream.peer().listener() >= probes_from;
        let guests = if is_for_probes { &probes } else { &guests };
        let stay = guests.welcome(&stream, stream.shard().now());
        let peer = name_of_peer(&stream);
        let served = if is_for_probes {
            http.serve(stream, service_fn(|request| desk.clone().probed(request, stay.guest().clone()))).await
        } else {
            let answer =
                |request| desk.clone().answer(request, guests.clone(), stay.guest().clone(), peer.clone());
            http.serve(stream, service_fn(answer)).await
        };
        // That it made room is no failure.
        if stay.is_sent_away() { Ok(()) } else { served }
    }))
}

/// A peer as the log names it for its orders: its address, or the process at the other end of a
/// Unix socket.
fn name_of_peer(stream: &Stream) -> Rc<str> {
    let peer = stream.peer();
    match (peer.addr(), peer.credentials()) {
        (Some(addr), _) => addr.to_string().into(),
        (None, Some(of)) => format!("unix, user {}, process {}", of.uid, of.pid.unwrap_or_default()).into(),
        (None, None) => "unix".into(),
    }
}

impl RunsBeside for Endpoint {
    fn begins(&self, server: ServerControl, facts: Facts) {
        self.target.begins(server, facts);
        if let (Some(kept), Some(running)) = (&self.kept, self.target.running()) {
            kept.apply(running, seconds_since_1970());
        }
    }

    fn address(&self) -> &Address {
        &self.address
    }

    fn probes(&self) -> Option<&Address> {
        self.probes.as_ref()
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
        .blocking_threads_max(THREADS)
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
