//! A server of a file, and what changes when the file is read again.

use std::fmt;
use std::fmt::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use hyper::body::Incoming;
use hyper::service::Service;
use hyper::{Request, Response};
use ringserve_server::admin::{Admin, AdminAnswer, AdminRoute};
use ringserve_server::http::HttpOptions;
use ringserve_server::limits::ServerLimits;
use ringserve_server::listen::{Endpoint, Endpoints, ProxyProtocol, endpoints, tcp};
use ringserve_server::stats::{UpstreamFigures, UpstreamSource};
use ringserve_server::{
    Error, Limits, MultiService, Server, ServerControl, ServerHandle, Shard, Stream, http, stream,
};

use super::error::ConfigError;
use super::file::{GatewayFile, OptionsPart, ProcessPart};
use super::services::{Kind, ServicePart};
use super::upstreams::{Upstreams, set_backends};
use crate::client::request_body::BodyError;
use crate::proxy::body::GatewayBody;
use crate::proxy::gateway::Gateway;
use crate::table::route::Route;
use crate::table::routes::{RouteTable, Routes};

/// Bytes of an answer that are kept for a client that reads slowly: pauses are rare then, each of
/// which costs.
const RELAY_OUTBOX: usize = 1 << 20;

/// A server of a [`GatewayFile`], with its [`Reloader`].
pub struct GatewayServer {
    server: Server<MultiService>,
    reloader: Reloader,
}

/// Reads the file of a running gateway again. Clones are the same one, on any thread.
#[derive(Clone)]
pub struct Reloader {
    shared: Arc<Shared>,
}

struct Shared {
    file: PathBuf,
    process: ProcessPart,
    services: Vec<ServicePart>,
    routes: Routes,
    upstreams: ArcSwap<Upstreams>,
    /// Held by a reload to its end: of two that come at once the later one has the last word.
    reloading: Mutex<()>,
    control: OnceLock<ServerControl>,
}

impl GatewayServer {
    /// A server of what a file says.
    ///
    /// # Errors
    /// A certificate can no longer be used.
    pub fn new(file: GatewayFile) -> Result<GatewayServer, Box<dyn std::error::Error>> {
        let GatewayFile { file, process, services, upstreams, table } = file;
        let routes = Routes::of(table);
        let (shards, drain_timeout) = (process.shards, process.drain_timeout);
        // One for each request or tunnel in flight, for idle connections, and for checks.
        let mut limits = ServerLimits::default().upstreams_max(1 << 20);
        if let Some(time) = drain_timeout {
            limits = limits.drain_timeout(time);
        }
        let mut server = Server::new().shards(shards).server_limits(limits);
        for service in &services {
            server = with_service(server, service, &routes, &process.options, &upstreams)?;
        }
        let admin = process.admin;
        let shared = Shared {
            file,
            process,
            services,
            routes,
            upstreams: ArcSwap::from_pointee(upstreams),
            reloading: Mutex::default(),
            control: OnceLock::new(),
        };
        let reloader = Reloader { shared: Arc::new(shared) };
        for name in reloader.shared.upstreams.load().keys() {
            let source = NamedUpstream { name: name.clone(), shared: reloader.shared.clone() };
            server = server.upstream(&source);
        }
        if let Some(addr) = admin {
            server = server.admin(reloader.admin(Admin::new(addr.to_string())));
        }
        let told = reloader.clone();
        let server = server.on_start(move |control| _ = told.shared.control.set(control));
        Ok(GatewayServer { server, reloader })
    }

    /// The value that reads the file again.
    pub fn reloader(&self) -> Reloader {
        self.reloader.clone()
    }

    /// Serves until SIGINT or SIGTERM.
    ///
    /// # Errors
    /// The server does not start, or a shard broke.
    pub fn serve(self) -> Result<(), Error> {
        self.server.serve()
    }

    /// Starts the server beside the caller.
    ///
    /// # Errors
    /// The server does not start.
    pub fn start(self) -> Result<ServerHandle, Error> {
        self.server.start()
    }
}

/// The endpoints of a service.
fn listening(
    service: &ServicePart,
) -> Result<Endpoints<ringserve_server::framing::Raw>, Box<dyn std::error::Error>> {
    let mut list: Vec<Endpoint> = Vec::new();
    for addr in &service.listen {
        let mut endpoint = tcp(*addr);
        if !service.proxies.is_empty() {
            endpoint = endpoint.proxy_protocol(ProxyProtocol::from(service.proxies.clone()));
        }
        if let Some(tls) = service.tls()? {
            endpoint = endpoint.tls(tls);
        }
        list.push(endpoint);
    }
    let mut limits = Limits::default();
    if let Some(time) = service.idle_timeout {
        limits = limits.idle_timeout(time);
    }
    if let Kind::Tcp(_) = service.kind {
        // In some protocols the server speaks first.
        limits = limits.first_frame_timeout(None);
        limits = limits.outbox_bytes_high(RELAY_OUTBOX).outbox_bytes_low(RELAY_OUTBOX / 2);
    }
    Ok(endpoints(list).name(service.name.clone()).limits(limits))
}

fn with_service(
    server: Server<MultiService>,
    service: &ServicePart,
    routes: &Routes,
    options: &OptionsPart,
    upstreams: &Upstreams,
) -> Result<Server<MultiService>, Box<dyn std::error::Error>> {
    let endpoints = listening(service)?;
    let mut bounds = HttpOptions::default().response_timeout(None);
    if let Some(time) = service.header_timeout {
        bounds = bounds.header_timeout(time);
    }
    if let Some(bytes) = service.header_bytes_max {
        bounds = bounds.header_bytes_max(bytes);
    }
    Ok(match &service.kind {
        Kind::Tcp(name) => {
            let Some(running) = upstreams.get(name) else {
                return Err(format!("there is no upstream {name:?}").into());
            };
            let upstream = running.http.upstream().clone();
            server.service(endpoints, move |shard| {
                let relay = upstream.relay(shard);
                stream(async move |mut client: Stream| -> Result<(), Box<dyn std::error::Error>> {
                    relay.connect(&client).await?.copy(&mut client).await?;
                    Ok(())
                })
            })
        }
        Kind::Http => {
            let (routes, options) = (routes.clone(), options.clone());
            server.service(endpoints, move |shard| {
                // One for all services: they have the same routes, and share connections.
                let make = || OnShard(options.applied(Gateway::new(&routes, shard)));
                http(SharedGateway(shard.shared(make))).options(bounds.clone())
            })
        }
        Kind::RedirectToHttps => {
            let table = RouteTable::new().route("/*", Route::redirect_to_https())?;
            let (routes, options) = (Routes::new(table)?, options.clone());
            server.service(endpoints, move |shard: &Shard| {
                http(options.applied(Gateway::new(&routes, shard))).options(bounds.clone())
            })
        }
    })
}

/// The gateway of a shard.
struct OnShard(Gateway);

/// The same, for one of its services.
struct SharedGateway(Rc<OnShard>);

impl Service<Request<Incoming>> for SharedGateway {
    type Response = Response<GatewayBody>;
    type Error = BodyError;
    type Future = <Gateway as Service<Request<Incoming>>>::Future;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.0.0.call(request)
    }
}

/// The figures of the upstream that has a name now. One that comes with a reload is reported after
/// a restart.
#[derive(Clone)]
struct NamedUpstream {
    name: String,
    shared: Arc<Shared>,
}

impl UpstreamSource for NamedUpstream {
    fn figures(&self) -> UpstreamFigures {
        let upstreams = self.shared.upstreams.load();
        let running = upstreams.get(&self.name);
        running.map_or_else(UpstreamFigures::default, |running| running.http.upstream().figures())
    }
}

impl Reloader {
    /// Reads the file again, and the files of certificates. Routes and upstreams are replaced at
    /// once; an upstream that is as it was keeps its connections, and what is known of its
    /// backends. Returns a line for people, which says what has to wait for a restart.
    ///
    /// # Errors
    /// The file is wrong. Nothing is changed then.
    pub fn reload(&self) -> Result<String, ConfigError> {
        let shared = &self.shared;
        let _held = shared.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let upstreams = shared.upstreams.load_full();
        let file = GatewayFile::read_with(&shared.file, &upstreams)?;
        let of_file = |error: &dyn fmt::Display| ConfigError::of_file(&shared.file, error);
        if let Some(control) = shared.control.get() {
            control.tls().reload().map_err(|error| of_file(&error))?;
        }
        shared.routes.set(file.table);
        set_backends(&file.upstreams, &upstreams);
        let relays = shared.services.iter().filter_map(|service| match &service.kind {
            Kind::Tcp(name) => Some(name),
            _ => None,
        });
        let is_other = |name: &String| {
            let key = |of: &Upstreams| of.get(name).map(|running| running.http.key());
            key(&upstreams) != key(&file.upstreams)
        };
        let other_relays = relays.filter(|name| is_other(name)).count();
        let count = file.upstreams.len();
        shared.upstreams.store(Arc::new(file.upstreams));
        let mut line = format!("{}: read again, {count} upstreams", shared.file.display());
        if other_relays > 0 {
            line.push_str("; upstreams of mode = \"tcp\" changed, which takes a restart");
        }
        if file.services != shared.services {
            line.push_str("; services changed, which takes a restart");
        }
        if file.process != shared.process {
            line.push_str("; server, admin or gateway changed, which takes a restart");
        }
        Ok(line)
    }

    /// The same, with a line in the log.
    pub fn reload_and_log(&self) -> Result<String, ConfigError> {
        let reloaded = self.reload();
        match &reloaded {
            Ok(line) => tracing::info!("{line}"),
            Err(error) => tracing::error!("{error}; the old one goes on"),
        }
        reloaded
    }

    /// Paths of the admin endpoint.
    fn admin(&self, admin: Admin) -> Admin {
        let (reloader, shown) = (self.clone(), self.clone());
        let reload = AdminRoute::post("/gateway/reload", move |_| match reloader.reload_and_log() {
            Ok(line) => AdminAnswer::from(format!("{line}\n")),
            Err(error) => AdminAnswer::error(422, format!("{error}\n")),
        });
        let upstreams = AdminRoute::get("/gateway/upstreams", move |_| shown.upstreams_text());
        admin
            .route(reload.about("reads the file of the gateway again"))
            .route(upstreams.about("upstreams and their backends"))
    }

    /// A line for each backend.
    fn upstreams_text(&self) -> String {
        let mut text = String::new();
        for (name, running) in self.shared.upstreams.load().iter() {
            let stats = running.http.upstream().stats();
            _ = writeln!(text, "{name}: {} retries, {} refused", stats.retries, stats.refused);
            for backend in stats.backends {
                let drained = if backend.is_drained { ", drained" } else { "" };
                let ejected = if backend.is_ejected { ", ejected" } else { "" };
                _ = writeln!(
                    text,
                    "  {} {:?}{drained}{ejected}: {} in flight of {}, {} failures, {} lost, {} connects, {} failed",
                    backend.name,
                    backend.health,
                    backend.in_flight,
                    backend.requests,
                    backend.failures,
                    backend.lost,
                    backend.connects,
                    backend.connects_failed
                );
            }
        }
        text
    }
}

impl fmt::Debug for Reloader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reloader").field(&self.shared.file).finish()
    }
}
