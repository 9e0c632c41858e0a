//! Building and starting a server.

use std::fmt;
use std::future::Future;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ringserve_admission::Admission;
use ringserve_admission::proxy_protocol::ProxyProtocol;
use ringserve_base::doctor::{self, Finding, Workload};
use ringserve_base::peer::Peer;
use ringserve_core::framing::{Raw, TypedFraming};
use ringserve_core::{Limits, ServerLimits, Transport};

use super::config::given::{ServerConfig, ServiceConfig, ServiceKind};
use super::driver::Driver;
use super::listen::addr::Binds;
use super::listen::transport::MakeTransport;
use super::running::ServerHandle;
#[cfg(feature = "admin")]
use super::running::{Beside, Companion};
use super::runtime::Runtime;
use super::serves::One;
use super::start::{Prepared, StartHooks};
use crate::error::Error;
use crate::overload::Overload;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::IntoService;
use crate::shard::remote::control::ServerControl;
use crate::shard::running::starting::StartWait;
use crate::socket_options::options::SocketOptions;
use crate::stats::{ServerStats, UpstreamSource};
use crate::watch::options::StallOptions;

/// A server before its start. `F` is the framing of its one service, or
/// [`MultiService`](super::several::MultiService) for [several services](Server::new).
///
/// ```no_run
/// use ringserve::{Cx, Frame, Server, Service, framing::Lines};
/// # struct Echo;
/// # impl Service for Echo {
/// #     type Session = ();
/// #     type Error = std::convert::Infallible;
/// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
/// #         cx.reply(frame);
/// #         Ok(())
/// #     }
/// # }
/// # fn main() -> Result<(), ringserve::Error> {
/// Server::bind("127.0.0.1:7000").framing(Lines::default()).serve(|_shard| Echo)
/// # }
/// ```
#[must_use = "a server does nothing until it is started"]
pub struct Server<F = Raw> {
    pub(super) binds: Binds,
    pub(super) framing: F,
    pub(super) config: ServerConfig,
    pub(super) hooks: StartHooks,
}

impl Server<Raw> {
    /// A server on `addr`, on every address that it resolves to. Port 0 finds a free port, the same
    /// for all shards. An address that cannot be resolved is an error of the start. See
    /// [`listen`](Server::listen).
    pub fn bind(addr: impl ToSocketAddrs + fmt::Debug) -> Server<Raw> {
        Server::on(Binds::default().ip(addr))
    }

    /// A server on a Unix socket. See [`listen_unix`](Server::listen_unix).
    pub fn bind_unix(path: impl Into<PathBuf>) -> Server<Raw> {
        Server::on(Binds::default().unix(path))
    }

    fn on(binds: Binds) -> Server<Raw> {
        Server { binds, framing: Raw, config: ServerConfig::default(), hooks: StartHooks::default() }
    }
}

impl<F: TypedFraming + Clone + Send> Server<F> {
    /// Sets how bytes become frames. Without a framing each frame is a piece of received bytes.
    pub fn framing<G: TypedFraming + Clone + Send>(self, framing: G) -> Server<G> {
        Server { framing, binds: self.binds, config: self.config, hooks: self.hooks }
    }

    /// Listens on `addr` as well, on every address that it resolves to. Listeners are numbered in
    /// the order in which they are given ([`Peer::listener`], [`ServerHandle::listeners`]); there
    /// may be 1024.
    ///
    /// `[::]` takes IPv4 too, with peers shown as `192.0.2.1`, unless this server listens at an
    /// IPv4 address on the same port: then `[::]` takes IPv6 alone. So `0.0.0.0:7000` and
    /// `[::]:7000` go together, in either order.
    ///
    /// ```no_run
    /// # use ringserve::Server;
    /// let server = Server::bind("0.0.0.0:7000").listen("[::]:7000").listen_unix("/run/app.sock");
    /// ```
    pub fn listen(self, addr: impl ToSocketAddrs + fmt::Debug) -> Server<F> {
        Server { binds: self.binds.ip(addr), ..self }
    }

    /// Listens on a Unix socket as well, at a path of up to 107 bytes. All shards accept from it.
    ///
    /// The file of a server that is gone is replaced: the kernel refuses connections to it. A file
    /// on which a server listens is [`Error::AddressInUse`], and a file that is not a socket is
    /// left alone. [`SocketOptions::unix_mode`] sets its permissions. At its end the server removes
    /// the file, unless another one has taken its place.
    ///
    /// A path that begins with `@` is an abstract name without a file: `@app`, as `ss` and `socat`
    /// write it. For a file of that name say `./@app`.
    ///
    /// Peers have no address ([`Peer::addr`]), an abort looks to the peer like a close, and options
    /// of TCP do nothing; all limits hold.
    pub fn listen_unix(self, path: impl Into<PathBuf>) -> Server<F> {
        Server { binds: self.binds.unix(path), ..self }
    }

    /// Expects a header of the PROXY protocol at the begin of each connection, which names the
    /// client, at all addresses of the server. If clients also connect directly, use [several
    /// endpoints](Server::new), of which some [expect
    /// headers](crate::listen::Endpoint::proxy_protocol).
    ///
    /// ```no_run
    /// # use ringserve::Server;
    /// use ringserve::listen::ProxyProtocol;
    ///
    /// let server = Server::bind("0.0.0.0:7000").proxy_protocol(ProxyProtocol::from(["10.0.0.0/8", "fd00::/8"]));
    /// ```
    pub fn proxy_protocol(self, protocol: ProxyProtocol) -> Server<F> {
        Server { binds: self.binds.proxy_protocol(protocol), ..self }
    }

    /// Puts a [transport](crate::transport) between socket and framing of all connections. `make`
    /// makes one value for each address on each shard, at the start; its panic is
    /// [`Error::FactoryPanicked`]. For a server that has plain listeners too, use [several
    /// endpoints](Server::new), of which some [have a
    /// transport](crate::listen::Endpoint::transport).
    pub fn transport<T: Transport>(self, make: impl Fn() -> T + Send + Sync + 'static) -> Server<F> {
        Server { binds: self.binds.transport(MakeTransport::new(make)), ..self }
    }

    /// Starts the server and waits until it has shut down, which SIGINT or SIGTERM begins:
    /// listeners are closed, frames that had arrived are answered, and the rest is reset after
    /// [`ServerLimits::drain_timeout`] ([`ServerHandle::shutdown`]). A second signal ends the
    /// server at once; two SIGTERMs within 200 ms are one. A signal while a factory still waits
    /// ends the server before it began, with `Ok`: the future of
    /// [`from_future`](crate::from_future()) is dropped, and the thread of a factory that blocks is
    /// left alone. Where the start fails otherwise the signal then ends the process.
    ///
    /// The process ends with status 1 where a call blocks a shard: a second after the second
    /// signal, and 10 s after `drain_delay` and `drain_timeout`. SIGHUP reads certificates again
    /// and opens the files of `ringserve::log` again, or drains where the process has a terminal,
    /// since that was closed; SIGUSR1 and SIGUSR2 are logged. These three are left alone if the
    /// program handles or ignores them.
    ///
    /// `Ok` says that the server drained, also where `drain_timeout` cut connections: the log has
    /// their number, and [`ServerHandle::wait`](crate::ServerHandle::wait) returns the counts.
    ///
    /// After the return, even with an error, signals do what they did before the first server of
    /// the process. So install a signal handler of the program before that, or
    /// [start](Server::start) the server instead. An ignored signal, such as SIGINT below `nohup`,
    /// stays ignored.
    ///
    /// # Errors
    /// If the server cannot be started, or a shard's driver breaks.
    pub fn serve<Make>(self, factory: impl Fn(&Shard) -> Make + Send + Sync + 'static) -> Result<(), Error>
    where
        Make: IntoService<F>,
    {
        self.with(factory).serve()
    }

    /// Starts the server on its own threads. `factory` is called on each shard's thread, may fail,
    /// and may [wait](crate::from_future()). Signals are left alone.
    ///
    /// The factory, and what it captured, lives until all shards ended and the last blocking call
    /// did: a lock of a file that it holds is kept for as long.
    ///
    /// ```no_run
    /// use std::fs::File;
    ///
    /// use ringserve::{Cx, Frame, Server, Service, framing::Lines};
    /// # struct Store;
    /// # impl Service for Store {
    /// #     type Session = ();
    /// #     type Error = std::convert::Infallible;
    /// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    /// #         cx.reply(frame);
    /// #         Ok(())
    /// #     }
    /// # }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let lock = File::create("/var/lib/store/lock")?;
    /// lock.try_lock()?;
    /// let server = Server::bind("127.0.0.1:7000").framing(Lines::default()).start(move |_shard| {
    ///     let _held = &lock;
    ///     Store
    /// })?;
    /// server.wait()?; // from here on another process may lock it
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If any shard cannot be started. Nothing is left running then, except threads of factories
    /// that block: they end when the factories return.
    pub fn start<Make>(
        self,
        factory: impl Fn(&Shard) -> Make + Send + Sync + 'static,
    ) -> Result<ServerHandle, Error>
    where
        Make: IntoService<F>,
    {
        self.with(factory).start(StartWait::new(), None)
    }

    /// Starts the server and serves until `future` is done or a shard ended by itself; then shuts
    /// down as [`ServerHandle::shutdown`] does and waits for the end. Signals are left alone: the
    /// future may be the program's own signal handler. It is polled on this thread, from the moment
    /// at which every shard is ready or [waits](crate::from_future()) for a service. If it is done
    /// before all services are there, the server ends before it began, and all figures are zero. If
    /// it panics, the server ends at once.
    ///
    /// ```no_run
    /// # use ringserve::{Cx, Frame, Server, Service};
    /// # struct Echo;
    /// # impl Service for Echo {
    /// #     type Session = ();
    /// #     type Error = std::convert::Infallible;
    /// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    /// #         cx.reply(frame);
    /// #         Ok(())
    /// #     }
    /// # }
    /// # fn main() -> Result<(), ringserve::Error> {
    /// # async fn told_to_stop() {}
    /// let stats = Server::bind("127.0.0.1:7000").run_until(told_to_stop(), |_shard| Echo)?;
    /// println!("{} connections", stats.counters.opened);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`start`](Server::start) and of [`ServerHandle::wait`].
    pub fn run_until<Make>(
        self,
        future: impl Future,
        factory: impl Fn(&Shard) -> Make + Send + Sync + 'static,
    ) -> Result<ServerStats, Error>
    where
        Make: IntoService<F>,
    {
        self.with(factory).serve_until(future)
    }

    #[cfg(any(feature = "tls", feature = "websocket"))]
    pub(crate) fn with_binds(self, change: impl FnOnce(Binds) -> Binds) -> Server<F> {
        Server { binds: change(self.binds), ..self }
    }

    /// The server with its service.
    pub(crate) fn with<Factory, Make>(self, factory: Factory) -> Prepared<One<F, Factory>>
    where
        Factory: Fn(&Shard) -> Make,
        Make: IntoService<F>,
    {
        let Server { binds, framing, mut config, hooks } = self;
        let serves = One::new(framing, factory, config.admit.take());
        let kind = ServiceKind::of::<F, Make>();
        config.services.push(ServiceConfig { kind, binds, ..ServiceConfig::default() });
        Prepared { config, hooks, serves }
    }
}

impl<F> Server<F> {
    /// Sets limits of the service and of each of its connections; with several services, of those
    /// that set [none](crate::listen::Endpoints::limits) themselves. They are checked at the start,
    /// and stay as they are. Without them the service takes the defaults, [fitted](Limits::fitted)
    /// into the limits of the server.
    pub fn limits(mut self, limits: Limits) -> Server<F> {
        self.config.limits = Some(limits);
        self
    }

    /// Sets limits of the server: connections, memory, upstreams and the shutdown. They are checked
    /// at the start. Those on memory are lowered where the control group or `RLIMIT_AS` has no room
    /// for them; see [`fit_limits`](Server::fit_limits). Without limits of the program the server
    /// takes the defaults, [fitted](ServerLimits::fitted) into the [memory that the process may
    /// use](crate::limits::usable_memory), with room for one connection by
    /// [`limits`](Server::limits), and logs the result.
    pub fn server_limits(mut self, server_limits: ServerLimits) -> Server<F> {
        self.config.server_limits = Some(server_limits);
        self
    }

    /// Fits limits that the program set into the memory of the process's control group and
    /// `RLIMIT_AS`, or, by `false`, keeps them. By default they are fitted.
    ///
    /// [`held_bytes_max`](ServerLimits::held_bytes_max) and
    /// [`receive_bytes_max`](ServerLimits::receive_bytes_max) fit if all shards need no more than
    /// 1.25 and 1 times of them, and 20 MiB. If not, they are lowered as by
    /// [`ServerLimits::fitted`], and [`Limits`] of which one connection may hold more than its
    /// shard as by [`Limits::fitted`]; a warning says so. A server for which even the least limits
    /// are too much does not start. Nothing else is lowered: memory that is available on the
    /// machine is shared with others, so where there is less of it than the limits allow, a warning
    /// says that.
    ///
    /// The limit of a control group may change while the server runs: both follow within a second,
    /// down and up again, and never above what the program set, or the default. That takes a thread
    /// which looks twice a second, where the process is in such a group.
    ///
    /// ```no_run
    /// use ringserve_core::ServerLimits;
    /// use ringserve_server::Server;
    ///
    /// // The service's own memory was measured: it leaves enough for this.
    /// let server = Server::bind("127.0.0.1:7000")
    ///     .server_limits(ServerLimits::default().held_bytes_max(200 << 20))
    ///     .fit_limits(false);
    /// ```
    pub fn fit_limits(mut self, fit: bool) -> Server<F> {
        self.config.keeps_limits = !fit;
        self
    }

    /// Sets the number of shards, 1 to 1024. By default, and by `None`, it is the number of CPUs
    /// that the process may use at once ([`std::thread::available_parallelism`]), control group
    /// quotas included.
    pub fn shards(mut self, shards: impl Into<Option<usize>>) -> Server<F> {
        self.config.shards = shards.into();
        self
    }

    /// Pins each shard to one CPU, or not. By default shards are pinned exactly when there are as
    /// many as CPUs that the process may use and no CPU quota is set: twenty containers must not
    /// all sit on CPU 0.
    pub fn pin(mut self, pin: bool) -> Server<F> {
        self.config.pin = Some(pin);
        self
    }

    /// Lets another process listen on the same port at the same time, so that a new server can
    /// start before the old one stops. By default a second instance is refused, since it would
    /// silently take half of the connections. Unix sockets cannot be shared.
    ///
    /// Each connection belongs to the process that got its first packet. A process that shuts down
    /// rejects further first packets, which their peers repeat after a second and which then reach
    /// the other process; takes in its accept queue; waits 50 ms for handshakes that had begun; and
    /// closes its listeners. A handshake that takes longer is reset, unless
    /// `net.ipv4.tcp_migrate_req` is 1 (Linux 5.14): then the kernel hands it to the other process.
    /// A log line at the start says if that is off.
    pub fn share_port(mut self, share_port: bool) -> Server<F> {
        self.config.share_port = share_port;
        self
    }

    /// Sets the driver.
    pub fn driver(mut self, driver: Driver) -> Server<F> {
        self.config.driver = driver;
        self
    }

    /// Sets the runtime inside which each shard runs; none by default. Inside tokio, code that
    /// needs a runtime of tokio's works in handlers.
    pub fn runtime(mut self, runtime: Runtime) -> Server<F> {
        self.config.runtime = runtime;
        self
    }

    /// Sets when a shard asks its service to [shed](crate::Service::shed) requests, and how fast it
    /// stops to. The watchdog finds it out, so `StallOptions::off()` leaves it out too. By default
    /// as [`Overload::default`] says; a service that sheds nothing is not affected, and
    /// [`ServerControl::load`](crate::ServerControl::load) tells the stage all the same.
    pub fn overload(mut self, overload: Overload) -> Server<F> {
        self.config.overload = overload;
        self
    }

    /// Sets when a shard counts as stalled, which a separate thread watches: by default
    /// from 25 ms in one turn on. `StallOptions::off()` leaves that thread out.
    pub fn stalls(mut self, stalls: StallOptions) -> Server<F> {
        self.config.stalls = stalls;
        self
    }

    /// Sets options of the server's sockets; with several services, of those that set
    /// [none](crate::listen::Endpoints::sockets) themselves. They are checked at the start.
    pub fn sockets(mut self, sockets: SocketOptions) -> Server<F> {
        self.config.sockets = sockets;
        self
    }

    /// Sets options of sockets to upstreams, which are checked at the start. By default they are
    /// those of the first service, with probes of silent peers after 15 s, 5 s apart, three of
    /// them, and a [`user_timeout`](field@SocketOptions::user_timeout) of 30 s, where that service
    /// has the defaults: so an upstream that vanished without a FIN is noticed within half a
    /// minute.
    pub fn upstream_sockets(mut self, sockets: SocketOptions) -> Server<F> {
        self.config.upstream_sockets = Some(sockets);
        self
    }

    /// Reports a group of other servers with this server: on the [admin page](crate::admin), in its
    /// report, and in the [metrics](crate::metrics), for [200](crate::stats::BACKENDS_REPORTED_MAX)
    /// of their servers at most. Each call adds one. An `Upstream` works as well without.
    pub fn upstream(mut self, upstream: &(impl UpstreamSource + Clone)) -> Server<F> {
        self.config.upstreams.push(Arc::new(upstream.clone()));
        self
    }

    /// The same for several.
    pub fn upstreams<'u, U: UpstreamSource + Clone>(
        self,
        upstreams: impl IntoIterator<Item = &'u U>,
    ) -> Server<F> {
        upstreams.into_iter().fold(self, Server::upstream)
    }

    /// Delays each turn of a busy shard by this long to gather more input: the wait begins if bytes
    /// of several connections came since the shard last waited, as a network card coalesces its
    /// interrupts. 0, which is off, or 1 µs to 1 ms; off by default. Another value is an error of
    /// the start ([`Error::Coalesce`]).
    ///
    /// It saves CPU where many peers send a little each without waiting for answers: there are
    /// fewer turns, and fewer sends to those whose replies or pushes gather. Everything that
    /// reaches a busy shard is delayed by as much: requests, messages of other shards, timers that
    /// other threads set meanwhile, an order to drain. Limits and timers that the shard knows of
    /// are not late, nor are replies, as far as their sockets take them at once. On io_uring 256
    /// events end the wait, and so does a send that something waits for. A single connection, or
    /// one peer at a time, waits for nothing; a shard that always has something to do rarely
    /// reaches such a wait. Try 50 µs, then 500, and measure both CPU and latency.
    ///
    /// With epoll the wait is a system call more, in place of the ones that it saves, and the
    /// shard's thread has a timer slack of 1 ns from the first one on, which threads that it starts
    /// from then on inherit. Inside [tokio](Runtime) it does nothing, since the shard does not wait
    /// by itself there.
    ///
    /// ```no_run
    /// # use ringserve::Server;
    /// use std::time::Duration;
    ///
    /// let server = Server::bind("127.0.0.1:7000").coalesce(Duration::from_micros(50));
    /// ```
    pub fn coalesce(mut self, wait: Duration) -> Server<F> {
        self.config.coalesce = wait;
        self
    }

    /// Decides about each connection when it is accepted, before anything is kept for it: if
    /// `admit` returns false the connection is closed at once. All shards call it.
    ///
    /// For a connection through a [proxy](crate::listen::ProxyProtocol) it is called twice: for the
    /// proxy ([`Peer::is_proxy`]), and for the client once its header is there.
    pub fn admit(mut self, admit: impl Fn(&Peer) -> bool + Send + Sync + 'static) -> Server<F> {
        self.config.admit = Some(Arc::new(admit));
        self
    }

    /// Limits who is let in, and how fast: connections of an address, their rate, the rate of all,
    /// lists of networks. Off by default. It is checked at the start, when the lists are read.
    /// Services that set [their own](crate::listen::Endpoints::admission) have that instead, but
    /// for the rate of all.
    ///
    /// It comes before [`admit`](Server::admit).
    pub fn admission(mut self, admission: Admission) -> Server<F> {
        self.config.admission = admission;
        self
    }

    /// Sets the companion endpoint, replacing any previous one.
    #[cfg(feature = "admin")]
    pub(crate) fn with_beside(mut self, beside: Box<dyn Beside>) -> Server<F> {
        self.hooks.companion = Companion::of(beside);
        self
    }

    /// The server is such an endpoint itself.
    #[cfg(feature = "admin")]
    pub(crate) fn beside_another(mut self) -> Server<F> {
        self.config.is_beside = true;
        self
    }

    /// Findings about this server on this machine, the worst first, before it starts: io_uring is
    /// tried for real, and settings of the kernel, limits of the process and the program's build
    /// are compared with what the server needs. Takes two tenths of a second, in which it watches
    /// what grows. Options that services set themselves are not checked. See
    /// [`doctor`](crate::doctor).
    ///
    /// ```
    /// # use ringserve::Server;
    /// for finding in Server::bind("127.0.0.1:7000").doctor() {
    ///     println!("{}: {finding}", finding.severity);
    /// }
    /// ```
    pub fn doctor(&self) -> Vec<Finding> {
        self.doctor_for(&Workload::default())
    }

    /// The same for what is expected of the server.
    ///
    /// ```
    /// # use ringserve::Server;
    /// use ringserve::doctor::{Severity, Workload};
    ///
    /// let expected = Workload::default().connections(1000).accepts_per_second(500);
    /// let findings = Server::bind("127.0.0.1:7000").doctor_for(&expected);
    /// let is_ready = findings.iter().all(|finding| finding.severity < Severity::Error);
    /// # let _ = is_ready;
    /// ```
    pub fn doctor_for(&self, expected: &Workload) -> Vec<Finding> {
        doctor::examine(&self.config.setup_so_far(), expected)
    }

    /// Keeps an account of each accepted connection: bytes and frames in both directions, for
    /// [inspections](crate::inspect::ConnInfo::bytes_in) and
    /// [`CloseCx::account`](crate::CloseCx::account). It costs 56 bytes for each connection, in
    /// chunks of 256, and a few instructions for each frame, each receive and each send. Off by
    /// default; services that keep [accounts](crate::Service::ACCOUNTS) themselves have them in any
    /// case.
    pub fn accounts(mut self, accounts: bool) -> Server<F> {
        self.config.telling.accounts = accounts;
        self
    }

    /// Writes a line to the [access log](crate::access_log) for each connection that ended; with
    /// several services, for connections of those that do not [say
    /// otherwise](crate::listen::Endpoints::access_log). Off by default. Connections then have
    /// [accounts](Server::accounts). The lines are not limited: see
    /// [`access_log`](crate::access_log).
    pub fn access_log(mut self, access_log: bool) -> Server<F> {
        self.config.telling.access_log = access_log;
        self
    }

    /// Gives one in `n` of each shard's accepted connections a span of `tracing`, from accept to
    /// end, with events for its frames, sends and pauses: level INFO, target `ringserve::trace`. 0
    /// gives none, which is the default.
    ///
    /// Each other connection costs a look at one bit for each frame and each send; the chosen ones
    /// what the subscriber does with the events, which comes for every frame.
    ///
    /// ```no_run
    /// # use ringserve::Server;
    /// let server = Server::bind("0.0.0.0:7000").trace_one_in(1000).trace_peer("10.1.2.3").trace_peer("192.0.2.0/24");
    /// ```
    pub fn trace_one_in(mut self, n: u32) -> Server<F> {
        self.config.telling.chosen.one_in = n;
        self
    }

    /// Gives connections of these peers such a [span](Server::trace_one_in), in addition to the
    /// chosen ones: an address, or a network such as `10.1.2.0/24`. May be called several times.
    /// Behind a [proxy](crate::listen::ProxyProtocol) the address is that of the proxy or that of
    /// the client. A text that is neither is an error of the start ([`Error::Trace`]).
    pub fn trace_peer(mut self, network: impl AsRef<str>) -> Server<F> {
        self.config.telling.trace_peer(network.as_ref());
        self
    }

    /// Calls `tell` once every shard is ready, on the thread that starts the server, with a control
    /// that has the counters and can shut the server down: for a thread that watches a server while
    /// [`serve`](Server::serve) runs. On a shard [`Shard::server`] is the same.
    ///
    /// ```no_run
    /// # use ringserve::Server;
    /// # let server = Server::bind("127.0.0.1:7000");
    /// let server = server.on_start(|server| {
    ///     std::thread::spawn(move || loop {
    ///         std::thread::sleep(std::time::Duration::from_secs(60));
    ///         println!("{} connections", server.stats().connections);
    ///     });
    /// });
    /// ```
    pub fn on_start(mut self, tell: impl FnOnce(ServerControl) + Send + 'static) -> Server<F> {
        self.hooks.on_start = Some(Box::new(tell));
        self
    }
}
