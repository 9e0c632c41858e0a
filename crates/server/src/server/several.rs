//! A server of several services.

use std::future::Future;

use super::builder::Server;
use super::config::given::{ServerConfig, ServiceConfig, ServiceKind};
use super::endpoint::{Endpoints, IntoEndpoints};
use super::listen::addr::Binds;
use super::running::ServerHandle;
use super::serves::{AllOf, Hosted, One};
use super::start::{Prepared, StartHooks};
use crate::error::Error;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::IntoService;
use crate::shard::running::starting::StartWait;
use crate::shard::state::shard_loop::Admit;
use crate::stats::ServerStats;

/// The services of a [`Server`] with several of them. It stands in the place of a framing, since
/// each service has its own.
#[doc(alias = "Several")]
#[derive(Default)]
pub struct MultiService {
    /// Makes each service with the server's `admit`, which a program may set later.
    hosted: Vec<HostedBy>,
}

type HostedBy = Box<dyn FnOnce(Option<Admit>) -> Box<dyn Hosted> + Send>;

impl Server<MultiService> {
    /// A server of several services on the same shards: an admin port beside the public one, a
    /// second protocol, an address with other limits. The services share connections, memory,
    /// threads and the shutdown of the server; each has its own framing, [`Limits`](crate::Limits)
    /// and [counters](crate::stats::ServerStats::services).
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
    pub fn new() -> Server<MultiService> {
        Server {
            binds: Binds::default(),
            framing: MultiService::default(),
            config: ServerConfig::default(),
            hooks: StartHooks::default(),
        }
    }

    /// Adds a service, reached at all of `endpoints`. `factory` is called once on each shard's
    /// thread, may fail, and may [wait](crate::from_future()); it and what it captured live until
    /// all shards ended. There may be 32 services.
    pub fn service<E, Make>(
        mut self,
        endpoints: E,
        factory: impl Fn(&Shard) -> Make + Send + Sync + 'static,
    ) -> Server<MultiService>
    where
        E: IntoEndpoints,
        Make: IntoService<E::Framing>,
    {
        let Endpoints { framing, config } = endpoints.into_endpoints();
        let kind = ServiceKind::of::<E::Framing, Make>();
        self.config.services.push(ServiceConfig { kind, ..config });
        let hosted = |admit| Box::new(One::new(framing, factory, admit)) as Box<dyn Hosted>;
        self.framing.hosted.push(Box::new(hosted));
        self
    }

    /// Starts the server and waits for its end, as [`Server::serve`] of one service does.
    ///
    /// # Errors
    /// If the server cannot be started, or a shard's driver breaks. An error of one of several
    /// services names it ([`Error::Service`]).
    pub fn serve(self) -> Result<(), Error> {
        self.prepared().serve()
    }

    /// Starts the server on its own threads, as [`Server::start`] of one service does.
    ///
    /// # Errors
    /// If any shard cannot be started. Nothing is left running then, except threads of factories
    /// that block: they end when the factories return.
    pub fn start(self) -> Result<ServerHandle, Error> {
        self.prepared().start(StartWait::new(), None)
    }

    /// Serves until `future` is done, as [`Server::run_until`] of one service does.
    ///
    /// # Errors
    /// Those of [`start`](Server::start) and of [`ServerHandle::wait`].
    pub fn run_until(self, future: impl Future) -> Result<ServerStats, Error> {
        self.prepared().serve_until(future)
    }

    pub(crate) fn prepared(self) -> Prepared<AllOf> {
        let Server { framing, mut config, hooks, .. } = self;
        let of_all = config.admit.take();
        let each = config.services.iter_mut().zip(framing.hosted);
        let all = each.map(|(service, hosted)| {
            let admit = service.admit.take().or_else(|| of_all.clone());
            (service.label(), hosted(admit))
        });
        let serves = AllOf(all.collect());
        Prepared { config, hooks, serves }
    }
}

impl Default for Server<MultiService> {
    fn default() -> Server<MultiService> {
        Server::new()
    }
}
