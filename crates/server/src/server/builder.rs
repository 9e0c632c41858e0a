//! Building and starting a server.

use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use super::driver::{Driver, Wanted};
use super::error::Error;
use super::launch::{announce, cpus_to_pin, descriptors};
use super::listen::addr::Binds;
use super::listen::sockets::Listen;
use super::memory::{self, Given};
use super::plan::Plan;
use super::running::ServerHandle;
use super::runtime::Runtime;
use super::signals::StopSignals;
use super::socket_options::options::SocketOptions;
use super::starting::Starting;
use crate::guard::guard;
use crate::log;
use crate::peer::Peer;
use crate::service::IntoService;
use crate::shard::blocking::Pool;
use crate::shard::blocking::threads::Threads;
use crate::shard::clock::Clock;
use crate::shard::handle::Shard;
use crate::shard::random::Random;
use crate::shard::state::Admit;
use ringserve_core::framing::{Framing, Raw};
use ringserve_core::{Address, Limits, ServerLimits};

/// Shards at most: beyond, something is wrong with the number.
const SHARDS_MAX: usize = 1024;

/// A server to be. `F` is the framing of all its connections.
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
    pub(super) limits: Limits,
    pub(super) server_limits: ServerLimits,
    /// Which of both are the program's own.
    given: Given,
    pub(super) shards: Option<usize>,
    pin: Option<bool>,
    share_port: bool,
    pub(super) driver: Driver,
    pub(super) sockets: SocketOptions,
    pub(super) incremental: bool,
    pub(super) admit: Option<Admit>,
    runtime: Runtime,
}

impl Server<Raw> {
    /// A server on `addr`, on every address it resolves to. Port 0 finds a free port, the same for all shards.
    /// An address that cannot be resolved is reported at the start. See [`listen`](Server::listen).
    pub fn bind(addr: impl ToSocketAddrs) -> Server<Raw> {
        Server::on(Binds::default().ip(addr))
    }

    /// A server on a Unix socket. See [`listen_unix`](Server::listen_unix).
    pub fn bind_unix(path: impl Into<PathBuf>) -> Server<Raw> {
        Server::on(Binds::default().unix(path))
    }

    fn on(binds: Binds) -> Server<Raw> {
        Server {
            binds,
            framing: Raw,
            limits: Limits::default(),
            server_limits: ServerLimits::default(),
            given: Given::default(),
            shards: None,
            pin: None,
            share_port: false,
            driver: Driver::default(),
            sockets: SocketOptions::default(),
            incremental: false,
            admit: None,
            runtime: Runtime::default(),
        }
    }
}

impl<F: Framing + Clone + Send> Server<F> {
    /// How bytes become frames. Without it each frame is whatever arrived together.
    pub fn framing<G: Framing + Clone + Send>(self, framing: G) -> Server<G> {
        Server {
            framing,
            binds: self.binds,
            limits: self.limits,
            server_limits: self.server_limits,
            given: self.given,
            shards: self.shards,
            pin: self.pin,
            share_port: self.share_port,
            driver: self.driver,
            sockets: self.sockets,
            incremental: self.incremental,
            admit: self.admit,
            runtime: self.runtime,
        }
    }

    /// Listens on `addr` as well, on every address it resolves to. Listeners are numbered in the order in which they are
    /// given ([`Peer::listener`], [`ServerHandle::listeners`]); there may be 1024.
    ///
    /// `[::]` takes IPv4 too, whose peers are shown as `::ffff:192.0.2.1`, unless this server listens at an IPv4 address on the
    /// same port itself: then `[::]` takes IPv6 alone. So `0.0.0.0:7000` and `[::]:7000` go together, in either order.
    ///
    /// ```no_run
    /// # use ringserve::Server;
    /// let server = Server::bind("0.0.0.0:7000").listen("[::]:7000").listen_unix("/run/app.sock");
    /// ```
    pub fn listen(self, addr: impl ToSocketAddrs) -> Server<F> {
        Server { binds: self.binds.ip(addr), ..self }
    }

    /// Listens on a Unix socket as well, at a path of up to 107 bytes. All shards accept from it.
    ///
    /// The file of a server that is gone is replaced: a client that connects to it is refused. One on which a server listens is
    /// [`Error::AddressInUse`], and a file that is no socket is left alone. [`SocketOptions::unix_mode`] gives its
    /// permissions. At its end the server removes the file, unless another one is in its place.
    ///
    /// A path that begins with `@` is an abstract name, for which there is no file: `@app` is what `ss` and `socat` call so
    /// too. A file of such a name is `./@app`.
    ///
    /// Peers have no address ([`Peer::addr`]), a connection that is aborted ends for its peer as one that is closed, and
    /// TCP's options do nothing; all limits hold.
    pub fn listen_unix(self, path: impl Into<PathBuf>) -> Server<F> {
        Server { binds: self.binds.unix(path), ..self }
    }

    /// Bounds of the service and of each of its connections. They are checked at the start, and stay as they are. Without them
    /// the service has the defaults, [fitted](Limits::fitted) into what the server may hold.
    pub fn limits(self, limits: Limits) -> Server<F> {
        Server { limits, given: Given { service: true, ..self.given }, ..self }
    }

    /// Bounds of the server: connections, memory, upstreams and the end. They are checked at the start, and stay as they are:
    /// where they allow more memory than the process may use, a warning says so. Without them the server has the defaults,
    /// [fitted](ServerLimits::fitted) into [that memory](crate::limits::usable_memory) and with room for what one connection may
    /// hold by [`limits`](Server::limits), and logs what followed from it.
    pub fn server_limits(self, server_limits: ServerLimits) -> Server<F> {
        Server { server_limits, given: Given { server: true, ..self.given }, ..self }
    }

    /// How many shards, 1 to 1024. By default as many as the process may use CPUs at once
    /// ([`std::thread::available_parallelism`]), control group quotas included.
    pub fn shards(self, shards: usize) -> Server<F> {
        Server { shards: Some(shards), ..self }
    }

    /// Whether each shard stays on one CPU. By default it does exactly when there are as many shards as CPUs
    /// the process may use and no CPU quota is set: twenty containers must not all sit on CPU 0.
    pub fn pin(self, pin: bool) -> Server<F> {
        Server { pin: Some(pin), ..self }
    }

    /// Lets another process listen on the same port at the same time, so that a new server is started before the old one is
    /// told to stop. By default a second instance is refused: it would silently take half of the connections. Unix sockets
    /// cannot be shared.
    ///
    /// Each connection belongs to the process to which its first packet came. One that shuts down turns further first packets
    /// away, which their peers repeat after a second and which then reach the other process; takes what is queued; waits 50 ms
    /// for handshakes that had begun; and closes its listeners. A handshake that takes longer is reset, unless
    /// `net.ipv4.tcp_migrate_req` is 1 (Linux 5.14): then the kernel hands it to the other process. Its value is named at the
    /// start if it is off.
    pub fn share_port(self, share_port: bool) -> Server<F> {
        Server { share_port, ..self }
    }

    /// Which driver to run on.
    pub fn driver(self, driver: Driver) -> Server<F> {
        Server { driver, ..self }
    }

    /// The runtime that each shard runs in: by default none. Inside a runtime of tokio's what needs one works in handlers.
    pub fn runtime(self, runtime: Runtime) -> Server<F> {
        Server { runtime, ..self }
    }

    /// What the kernel is told about the sockets. Checked at the start.
    pub fn sockets(self, sockets: SocketOptions) -> Server<F> {
        Server { sockets, ..self }
    }

    /// Lets io_uring put the bytes of several receives into one buffer (Linux 6.12, prudent from 6.14; ignored
    /// elsewhere). Set [`ServerLimits::receive_buffer_bytes`] to about 1 MiB with it. Since a kept frame would pin all of such
    /// a buffer, every frame is copied before it is handed to the service. Off by default: measured, it gains nothing
    /// at 64 bytes and costs a quarter more at 16 KiB; it saves memory where many connections send little.
    pub fn incremental_buffers(self, incremental: bool) -> Server<F> {
        Server { incremental, ..self }
    }

    /// Decides about each connection when it is accepted, before anything is kept for it. Where it answers
    /// false the connection is closed at once. It is called from all shards.
    pub fn admit(self, admit: impl Fn(&Peer) -> bool + Send + Sync + 'static) -> Server<F> {
        Server { admit: Some(Arc::new(admit)), ..self }
    }

    /// Starts the server and waits until it has shut down, which SIGINT and SIGTERM begin: listeners are closed, what had
    /// arrived is answered, and what is left after [`ServerLimits::drain_timeout`] is reset ([`ServerHandle::shutdown`]). A second signal forces.
    /// A signal that comes while a factory still waits ends the server before it began: this returns `Ok`, and the factory's
    /// thread is left alone.
    ///
    /// When this returns, with an error too, both signals do what they did before the first server of the process. So a handler
    /// of the program's own belongs before that, or the server is [started](Server::start) instead. A signal that is ignored, as
    /// SIGINT is below `nohup`, is left alone.
    ///
    /// # Errors
    /// If it cannot be started, or a shard's driver breaks.
    pub fn serve<Make>(self, factory: impl Fn(&Shard) -> Make + Send + Sync + 'static) -> Result<(), Error>
    where
        Make: IntoService<F>,
    {
        let starting = Starting::new();
        let signals = StopSignals::take(starting.interrupter())?;
        let running = match self.start_with(starting, factory) {
            Err(Error::Interrupted) => return Ok(()),
            started => started?,
        };
        signals.stop(&running);
        let ended = running.wait();
        drop(signals);
        let report = ended?;
        let _ = guard(|| log::stopped(&report));
        Ok(())
    }

    /// Starts the server on threads of its own. `factory` is called on each shard's thread, and may fail.
    /// Signals are left alone.
    ///
    /// # Errors
    /// If any shard cannot be started. Nothing is left running then, but for the threads of factories that still wait: they
    /// end when those return.
    pub fn start<Make>(
        self,
        factory: impl Fn(&Shard) -> Make + Send + Sync + 'static,
    ) -> Result<ServerHandle, Error>
    where
        Make: IntoService<F>,
    {
        self.start_with(Starting::new(), factory)
    }

    fn start_with<Make>(
        mut self,
        starting: Starting,
        factory: impl Fn(&Shard) -> Make + Send + Sync + 'static,
    ) -> Result<ServerHandle, Error>
    where
        Make: IntoService<F>,
    {
        let parallelism = || thread::available_parallelism().map_or(1, usize::from);
        let (addrs, shards) = self.check::<Make>(parallelism)?;
        self.runtime.check()?;
        let (server_limits, limits) = memory::fit(self.server_limits, self.limits, self.given, shards);
        let descriptors = descriptors(shards, addrs.len())?;
        let wanted = Wanted {
            driver: self.driver,
            incremental: self.incremental,
            shards,
            descriptors,
            limits: &server_limits,
            sockets: &self.sockets,
        };
        let chosen = wanted.choose()?;
        let cpus = cpus_to_pin(self.pin, shards);
        let listen = Listen { shards, share_port: self.share_port, options: &self.sockets, cpus: &cpus };
        let (sockets, listening) = listen.at(&addrs)?;
        announce(&listening, shards, &cpus, &chosen, &server_limits, &limits);

        let blocking: Arc<dyn Pool> = Arc::new(Threads::new(&server_limits));
        let plan = Plan {
            framing: self.framing,
            server_limits,
            limits,
            chosen,
            admit: self.admit,
            asks: self.sockets.asks(),
            runtime: self.runtime,
            factory: Arc::new(factory),
            shards,
            clock: Clock::start(),
            seed: Random::system_seed(),
            blocking: blocking.clone(),
        };
        let (remotes, threads) = plan.launch(starting, sockets, &cpus, |shard, ready| shard.run(ready))?;
        Ok(ServerHandle::new(listening, remotes, threads, blocking))
    }
}

impl<F> Server<F> {
    /// Checks what the program set, for a service that `Make` becomes. Returns where the server listens, and with how many
    /// shards: `by_default` if the program does not say.
    pub(super) fn check<Make: IntoService<F>>(
        &mut self,
        by_default: impl FnOnce() -> usize,
    ) -> Result<(Vec<Address>, usize), Error> {
        let addrs = std::mem::take(&mut self.binds).all().map_err(Error::Address)?;
        Make::adjust(&mut self.limits);
        self.server_limits.check().map_err(Error::Limits)?;
        self.limits.check().map_err(Error::Limits)?;
        if !self.given.server {
            self.server_limits = self.server_limits.clone().with_room_for(&self.limits);
        } else if self.given.service {
            self.server_limits.check_service(&self.limits).map_err(Error::Limits)?;
        } else {
            self.limits = self.limits.clone().fitted(&self.server_limits);
        }
        self.sockets.check().map_err(Error::SocketOption)?;
        let shards = self.shards.unwrap_or_else(by_default);
        if !(1..=SHARDS_MAX).contains(&shards) {
            return Err(Error::Shards(shards));
        }
        Ok((addrs, shards))
    }

    /// A simulation steps shards, and no runtime's loop.
    #[cfg(feature = "testing")]
    pub(super) fn refuse_runtime(&self) -> Result<(), Error> {
        if self.runtime == Runtime::Own {
            return Ok(());
        }
        let error =
            std::io::Error::other("a runtime around shards is not simulated: leave Server::runtime out");
        Err(Error::Runtime { shard: 0, error })
    }
}
