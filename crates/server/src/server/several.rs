//! A server of several services.

use std::any::TypeId;
use std::future::Future;

use ringserve_core::Limits;

use super::builder::{Server, prepared};
use super::listen::addr::Binds;
use super::listen::endpoint::{Endpoints, IntoEndpoints};
use super::prepared::{Described, Prepared, ServicePlan, Settings};
use super::running::ServerHandle;
use super::serves::{AllOf, Hosted, One};
use crate::error::Error;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::IntoService;
use crate::shard::running::starting::Starting;
use crate::shard::state::shard_loop::Admit;
use crate::stats::ServerStats;

/// The services of a [`Server`] with several of them. It stands in the place of a framing, since each service has its own.
#[derive(Default)]
pub struct Several {
    services: Vec<Declared>,
}

struct Declared {
    endpoints: Endpoints<()>,
    /// Switches off the limits that do not apply to the service.
    adjust: fn(&mut Limits),
    /// The service, made with the server's `admit`, which a program may set later.
    hosted: Box<dyn FnOnce(Option<Admit>) -> Box<dyn Hosted> + Send>,
    /// The names of the protocols that the service speaks, for TLS.
    protocols: &'static [&'static str],
    /// The type of its framing, by which a transport may go.
    framing: TypeId,
}

impl Server<Several> {
    /// A server of several services on the same shards: an admin port beside the public one, a second protocol, an address with
    /// other limits. The services share connections, memory, threads and the shutdown of the server; each has its own framing,
    /// [`Limits`] and [counters](crate::stats::ServerStats::services).
    ///
    /// ```no_run
    /// use ringserve::listen::{endpoints, tcp, unix};
    /// use ringserve::{Cx, Frame, Server, Service, framing::{LengthPrefix, Lines}};
    /// # struct Echo;
    /// # impl Service for Echo {
    /// #     type Session = ();
    /// #     type Error = std::convert::Infallible;
    /// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    /// #         cx.reply(frame);
    /// #         Ok(())
    /// #     }
    /// # }
    /// # use Echo as Chat;
    /// # use Echo as Admin;
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// Server::new()
    ///     .service(
    ///         endpoints((tcp("0.0.0.0:7000"), tcp("[::]:7000"))).framing(LengthPrefix::default()).name("chat"),
    ///         |_shard| Chat, // one value a shard, for both addresses
    ///     )
    ///     .service(unix("/run/chat.sock").framing(Lines::default()).name("admin"), |_shard| Admin)
    ///     .serve()
    /// # }
    /// ```
    pub fn new() -> Server<Several> {
        Server { binds: Binds::default(), framing: Several::default(), settings: Settings::default() }
    }

    /// Adds a service, reached at all of `endpoints`. `factory` is called once on each shard's thread, may fail, and may
    /// [wait](crate::starting()); it and what it captured live until all shards ended. There may be 32 services.
    pub fn service<E, Make>(
        mut self,
        endpoints: E,
        factory: impl Fn(&Shard) -> Make + Send + Sync + 'static,
    ) -> Server<Several>
    where
        E: IntoEndpoints,
        Make: IntoService<E::Framing>,
    {
        let Endpoints { binds, framing, name, limits, sockets, admit, admission, access_log, drains_after } =
            endpoints.into_endpoints();
        let endpoints = Endpoints {
            binds,
            framing: (),
            name,
            limits,
            sockets,
            admit,
            admission,
            access_log,
            drains_after,
        };
        let hosted = |admit| Box::new(One::new(framing, factory, admit)) as Box<dyn Hosted>;
        self.framing.services.push(Declared {
            endpoints,
            adjust: Make::adjust,
            hosted: Box::new(hosted),
            protocols: Make::protocols(),
            framing: TypeId::of::<E::Framing>(),
        });
        self
    }

    /// Starts the server and waits for its end, as [`Server::serve`] of one service does.
    ///
    /// # Errors
    /// If the server cannot be started, or a shard's driver breaks. An error of one of several services names it
    /// ([`Error::Service`]).
    pub fn serve(self) -> Result<(), Error> {
        self.prepared()?.serve()
    }

    /// Starts the server on its own threads, as [`Server::start`] of one service does.
    ///
    /// # Errors
    /// If any shard cannot be started. Nothing is left running then, except threads of factories that block: they end when the
    /// factories return.
    pub fn start(self) -> Result<ServerHandle, Error> {
        self.prepared()?.start(Starting::new(), None)
    }

    /// Serves until `future` is done, as [`Server::run_until`] of one service does.
    ///
    /// # Errors
    /// Those of [`start`](Server::start) and of [`ServerHandle::wait`].
    pub fn run_until(self, future: impl Future) -> Result<ServerStats, Error> {
        self.prepared()?.serve_until(future)
    }

    pub(crate) fn prepared(self) -> Result<Prepared<AllOf>, Error> {
        let (mut services, mut all) = (Vec::new(), Vec::new());
        for Declared { endpoints, adjust, hosted, protocols, framing } in self.framing.services {
            let Endpoints {
                binds, name, limits, sockets, admit, admission, access_log, drains_after, ..
            } = endpoints;
            let binds = binds.all().map_err(|error| Error::Address(error).of_service(name.as_ref()))?;
            let binds =
                prepared(binds, protocols, framing).map_err(|error| error.of_service(name.as_ref()))?;
            let limits = limits.or_else(|| self.settings.limits.clone());
            let (limits_given, mut limits) = (limits.is_some(), limits.unwrap_or_default());
            adjust(&mut limits);
            let sockets = sockets.unwrap_or_else(|| self.settings.sockets.clone());
            let service = ServicePlan {
                name,
                binds,
                limits,
                limits_given,
                sockets,
                admission,
                access_log,
                drains_after,
            };
            all.push((service.label(), hosted(admit.or_else(|| self.settings.admit.clone()))));
            services.push(service);
        }
        Ok(Prepared { described: Described { settings: self.settings, services }, serves: AllOf(all) })
    }
}

impl Default for Server<Several> {
    fn default() -> Server<Several> {
        Server::new()
    }
}
