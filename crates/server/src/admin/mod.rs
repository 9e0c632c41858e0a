//! A port beside the server, for people and programs that operate it: a page, metrics, health, what
//! each connection does, and orders. With the feature `admin`, which is off by default.
//!
//! ```no_run
//! use ringserve::{Server, framing::Lines};
//! # use ringserve::{Cx, Frame, Service};
//! # struct Echo;
//! # impl Service for Echo {
//! #     type Session = ();
//! #     type Error = std::convert::Infallible;
//! #     async fn call(&self, _cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Self::Error> { Ok(()) }
//! # }
//!
//! fn main() -> Result<(), ringserve::Error> {
//!     Server::bind("0.0.0.0:7000").framing(Lines::default()).admin("127.0.0.1:9000").serve(|_shard| Echo)
//! }
//! ```
//!
//! | path | answer |
//! |---|---|
//! | `/` | a page for a browser |
//! | `/report.json` | all that is seen of the server, as a [`Report`](ringserve_report::Report); at most 200 ms old |
//! | `/events` | the same each second, as server-sent events |
//! | `/metrics` | figures for Prometheus, with those of the program: [`metrics`](crate::metrics). As OpenMetrics, or as the older text where the request's `Accept` prefers that |
//! | `/connections?by=outbox&limit=20` | connections by `outbox`, `idle`, `bytes_in`, `age` or `oldest_call`, 1000 at most |
//! | `/stalls` | the last times for which a shard did not go on |
//! | `/doctor?for=connections=1000000,accepts=20000` | what is wrong with the machine and the settings, for what is [expected](crate::doctor::Workload) |
//! | `/healthz` | 503 if a shard has not gone on for 10 s, or none is left, so that no busy server is restarted |
//! | `/readyz` | 503 while the server starts or drains, or its [load](crate::overload::Load) is refusing or full |
//! | `/admission` | the limits on who is let in as they are now, as an [`Admission`](ringserve_report::Admission) |
//! | POST `/admission/deny?network=192.0.2.0/24&seconds=600` | denies networks for a time; `allow` lets them in, but for what the kernel filters; `forget` ends either |
//! | POST `/admission/limit?per_address=20` | sets a limit: `per_address`, `address_rate=5/20`, `connections_max`, `connection_rate`, `accept_rate`; or `off` |
//! | POST `/drain` | shuts the server down, as [`ServerControl::shutdown`](crate::ServerControl::shutdown) |
//! | POST `/connections/ID/close` | closes a connection, after its queued replies |
//! | POST `/log-level` | gives the body to the function of [`Admin::log_level`] |
//!
//! A program adds its own [paths](Admin::route), [collectors](Admin::collector) and
//! [figures](Admin::figures).
//!
//! Each order is a line in the log: what, from which peer, by the token of which
//! [name](Admin::named_token), and with what result, or that its caller left before that. So is one
//! that was refused, ten a second at most.
//!
//! An order of `/admission` holds for all listeners that count for it, and says so if those are not
//! all (`at 1 of 2 listeners`); with `&listener=` for the one at that address and those that share
//! its limits. `accept_rate` is that of the server. It is what
//! [`AdmissionControl`](crate::admission::AdmissionControl) does, and says what is wrong with
//! status 400.
//!
//! # Beside the server
//!
//! The endpoint is a second server with one shard on its own thread, on epoll. It starts before the
//! first shard of the server, so that it answers while factories are pending, and ends after the
//! last one, so that it answers during a drain. A port that is taken is an error of the start.
//!
//! It reads what shards publish, so a shard that is blocked holds up no answer and is in each. Only
//! `/connections` and the lists of reports ask the shards, within a second and a quarter of one: a
//! shard that does not answer is named. It samples the server each second, and writes reports while
//! they are asked for.
//!
//! It has room for 32 connections, about 1 MiB, and closes those that ask for nothing or read
//! nothing for 10 s. For each further one another makes room at once: the oldest that has asked
//! nothing yet, or else the one that has been quiet for longest after its last answer. A
//! connection whose request is being answered, or that listens to events, makes room for none:
//! there may be 16 listeners, and of one address 12 such requests at once, probes (`/healthz`,
//! `/readyz`) not counted; more are answered with 503. So no crowd keeps a probe out. Probes may
//! have [their own listener](Admin::probes), with room for 16 connections.
//!
//! # Who may ask
//!
//! Without more it listens at loopback or a Unix socket, whose file is its owner's alone; at any
//! other address the server does not start unless a [token](Admin::token) is set. A local user who
//! reaches it can read everything and stop the server.
//!
//! Each request must have a `Host` that is `localhost`, the endpoint's address, or a [name that was
//! given](Admin::host_name): so a page of another site, whose name is made to resolve to 127.0.0.1,
//! reads nothing. Probes (`/healthz`, `/readyz`, and `OPTIONS /`, which is `/readyz` for HAProxy)
//! may call it as they like, and need no `Host` where they speak HTTP/1.0: one of HTTP/1.1 without
//! it is no request, and is answered with 400. A POST needs the header `X-Ringserve: 1`, and no
//! `Origin` but the endpoint's:
//!
//! ```text
//! curl -X POST -H 'X-Ringserve: 1' http://127.0.0.1:9000/drain
//! ```

mod admission;
mod answer;
mod aside;
mod caller;
mod desk;
mod endpoint;
mod gate;
mod guests;
mod history;
mod kept;
mod orders;
mod places;
mod press;
mod program;
mod reports;
mod routes;
mod sources;
mod target;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::metrics::Figures;
use crate::metrics::prometheus_client::collector::Collector;
use crate::server::builder::Server;

pub use program::{AdminAnswer, AdminRequest, AdminRoute};

/// The answers of `/report.json` and others, as types.
pub use ringserve_report as report;

/// Sets the filter of the log, or says why not.
type LogLevel = Arc<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// An [admin endpoint](crate::admin) to be: its address and who may ask it. An address alone makes
/// one, too.
///
/// ```no_run
/// # use ringserve::Server;
/// use ringserve::admin::Admin;
///
/// let token = std::env::var("ADMIN_TOKEN").unwrap();
/// let server = Server::bind("0.0.0.0:7000").admin(Admin::new("0.0.0.0:9000").token(token));
/// ```
#[must_use = "an endpoint is given to Server::admin"]
pub struct Admin {
    addr: String,
    probes: Option<String>,
    /// Those for orders, by name.
    tokens: Vec<(String, String)>,
    read_token: Option<String>,
    names: Vec<String>,
    log_level: Option<LogLevel>,
    routes: Vec<AdminRoute>,
    collectors: Vec<Box<dyn Collector>>,
    figures: Vec<Figures>,
    kept: Option<PathBuf>,
}

impl Admin {
    /// An endpoint at `addr`: `127.0.0.1:9000`, `localhost:9000`, `[::1]:9000`,
    /// `unix:/run/app/admin.sock`, `unix:@app`. Port 0 finds a free one. The start checks it.
    pub fn new(addr: impl Into<String>) -> Admin {
        Admin {
            addr: addr.into(),
            probes: None,
            tokens: Vec::new(),
            read_token: None,
            names: Vec::new(),
            log_level: None,
            routes: Vec::new(),
            collectors: Vec::new(),
            figures: Vec::new(),
            kept: None,
        }
    }

    /// Answers `/healthz` and `/readyz` at this address too, and nothing else there: in the forms
    /// of [`new`](Admin::new), also without a token at an address that other machines reach, and
    /// whatever name a request has for it. So the rest may stay at a Unix socket or at loopback,
    /// and a crowd at one listener keeps no peer out of the other. A later call replaces the former
    /// one; without it the endpoint has one place.
    ///
    /// ```no_run
    /// # use ringserve::Server;
    /// use ringserve::admin::Admin;
    ///
    /// let server = Server::bind("0.0.0.0:7000").admin(Admin::new("unix:/run/app/admin.sock").probes("0.0.0.0:9001"));
    /// ```
    pub fn probes(mut self, addr: impl Into<String>) -> Admin {
        self.probes = Some(addr.into());
        self
    }

    /// Asks each request for this token, as `Authorization: Bearer TOKEN`: 16 visible characters or
    /// more. With it the endpoint may listen at addresses that other machines reach. Nothing is
    /// encrypted, so put a proxy with TLS in front where the network between is not trusted.
    ///
    /// `/`, `/healthz` and `/readyz` answer without it: the page holds nothing until it has the
    /// token, and probes of balancers and of Kubernetes have none.
    ///
    /// Who has it may give orders too. Give scrapers and dashboards a [token for
    /// reading](Admin::read_token). Lines of the log about orders call it `token`; a later call
    /// replaces it.
    pub fn token(mut self, token: impl Into<String>) -> Admin {
        self.tokens.retain(|(name, _)| name != gate::TOKEN);
        self.named_token(gate::TOKEN, token)
    }

    /// A further token for orders, of a person or a program, whose name the log has for each of its
    /// orders: 1 to 40 letters, digits, `-`, `_`, `.` and `@`. It is of the same form as
    /// [`token`](Admin::token), and there may be 16 of both.
    ///
    /// ```no_run
    /// # use ringserve::Server;
    /// use ringserve::admin::Admin;
    ///
    /// let secret = |name| std::env::var(name).unwrap();
    /// let admin = Admin::new("0.0.0.0:9000").named_token("anna", secret("ANNA")).named_token("deploy", secret("DEPLOY"));
    /// ```
    pub fn named_token(mut self, name: impl Into<String>, token: impl Into<String>) -> Admin {
        self.tokens.push((name.into(), token.into()));
        self
    }

    /// Lets requests with this token read, and gives them 403 where they have an effect. It is of
    /// the same form as [`token`](Admin::token), and another one. Set alone it asks each request
    /// for it, and no order is taken.
    pub fn read_token(mut self, token: impl Into<String>) -> Admin {
        self.read_token = Some(token.into());
        self
    }

    /// Answers to this name too, with any port: for a proxy in front, or a name of the machine. May
    /// be called several times. The server does not start with a name that has a port itself, or
    /// that is an address.
    pub fn host_name(mut self, name: impl Into<String>) -> Admin {
        self.names.push(name.into());
        self
    }

    /// Has POST `/log-level` call `set` with the body, up to 1 KiB of text such as
    /// `info,ringserve=debug`. A program that logs by `ringserve::log` needs no function. With
    /// another subscriber the level is that one's, so the program says how it is set; without a
    /// function the path answers 501.
    ///
    /// `set` runs on the endpoint's thread. Its error is the answer, with status 400.
    ///
    /// ```
    /// # struct Handle; // as that of `tracing_subscriber::reload`
    /// # impl Handle { fn reload(&self, _filter: &str) -> Result<(), String> { Ok(()) } }
    /// use ringserve::admin::Admin;
    ///
    /// fn endpoint(handle: Handle) -> Admin {
    ///     Admin::new("127.0.0.1:9000").log_level(move |filter| handle.reload(filter))
    /// }
    /// ```
    pub fn log_level<E: fmt::Display>(
        mut self,
        set: impl Fn(&str) -> Result<(), E> + Send + Sync + 'static,
    ) -> Admin {
        self.log_level = Some(Arc::new(move |text| set(text).map_err(|error| error.to_string())));
        self
    }

    /// Answers at a path of the program's too: see [`AdminRoute`]. May be called 64 times.
    ///
    /// ```no_run
    /// use ringserve::admin::{Admin, AdminRoute};
    ///
    /// let connections = AdminRoute::get("/app/connections", |request| {
    ///     format!("{}\n", request.server().map_or(0, |server| server.stats().connections))
    /// });
    /// let admin = Admin::new("127.0.0.1:9000").route(connections.about("how many there are"));
    /// ```
    pub fn route(mut self, route: AdminRoute) -> Admin {
        self.routes.push(route);
        self
    }

    /// Adds metrics of the program's to `/metrics`, by a [`Collector`] of prometheus-client. May be
    /// called several times.
    ///
    /// It runs on a thread beside the endpoint's, for 8 s at most: then, and if it panics, has the
    /// name of another figure or more than 2 MiB of text, the scrape goes without it, with a line
    /// in the log. `ringserve_collectors_left_out` counts those that a scrape lacks.
    ///
    /// ```no_run
    /// use ringserve::admin::Admin;
    /// use ringserve::metrics::prometheus_client::collector::Collector;
    /// use ringserve::metrics::prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
    /// use ringserve::metrics::prometheus_client::metrics::gauge::ConstGauge;
    ///
    /// #[derive(Debug)]
    /// struct Disk;
    ///
    /// impl Collector for Disk {
    ///     fn encode(&self, mut to: DescriptorEncoder<'_>) -> std::fmt::Result {
    ///         let gauge = ConstGauge::new(7i64); // what a query of the disk returns
    ///         gauge.encode(to.encode_descriptor("app_disk_free_bytes", "Free bytes", None, gauge.metric_type())?)
    ///     }
    /// }
    ///
    /// let admin = Admin::new("127.0.0.1:9000").collector(Disk);
    /// ```
    pub fn collector(mut self, collector: impl Collector) -> Admin {
        self.collectors.push(Box::new(collector));
        self
    }

    /// Adds figures that the program counts on its shards to `/metrics`. The server does not start
    /// if some of them [cannot be shown](Figures::check).
    pub fn figures(mut self, figures: &Figures) -> Admin {
        self.figures.push(figures.clone());
        self
    }

    /// Keeps what orders change of the admission (POST `/admission/..`) in this file, and makes the
    /// same changes at the next start, for the rest of their time: a denied network stays denied
    /// over a deploy. Without it orders are gone with the process.
    ///
    /// The file has a line for each order, and is replaced as a whole before the order is answered.
    /// Without one the server begins without orders. Changes by the program itself, through
    /// [`AdmissionControl`](crate::admission::AdmissionControl), are not kept. An order for one
    /// listener names its address, so give that a fixed port. The orders hold within moments of the
    /// start, when all shards are ready; one that can no longer be made is a warning and stays in
    /// the file.
    ///
    /// The server does not start if the file cannot be read, or has a line that is no order.
    pub fn keep_admission(mut self, file: impl Into<PathBuf>) -> Admin {
        self.kept = Some(file.into());
        self
    }

    /// The way to set the filter of `ringserve::log`, where that is the log.
    #[cfg(feature = "log")]
    fn log_level_of_subscriber() -> Option<LogLevel> {
        let is_the_log = ringserve_base::log_thread::never_blocks();
        is_the_log.then(|| Arc::new(crate::subscriber::set_filter) as LogLevel)
    }

    #[cfg(not(feature = "log"))]
    fn log_level_of_subscriber() -> Option<LogLevel> {
        None
    }
}

impl From<&str> for Admin {
    fn from(addr: &str) -> Admin {
        Admin::new(addr)
    }
}

impl From<String> for Admin {
    fn from(addr: String) -> Admin {
        Admin::new(addr)
    }
}

/// Without the tokens.
impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin")
            .field("addr", &self.addr)
            .field("probes", &self.probes)
            .field("tokens", &self.tokens.iter().map(|(name, _)| name).collect::<Vec<_>>())
            .field("has_read_token", &self.read_token.is_some())
            .field("names", &self.names)
            .field("routes", &self.routes)
            .field("collectors", &self.collectors)
            .field("figures", &self.figures)
            .field("kept", &self.kept)
            .finish_non_exhaustive()
    }
}

impl<F> Server<F> {
    /// Runs an [admin endpoint](crate::admin) beside the server, at an address such as
    /// `127.0.0.1:9000` or `unix:/run/admin.sock`; by [`Admin`] with more to it. Called again, it
    /// replaces the former one. In a simulation there is none.
    ///
    /// The start fails with [`Error::Admin`](crate::Error::Admin) if the address is taken, is none,
    /// or is reached by other machines and there is no token.
    pub fn admin(self, admin: impl Into<Admin>) -> Server<F> {
        self.with_beside(Box::new(admin.into()))
    }
}
