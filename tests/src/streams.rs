//! A server of streams, and its end.

use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;

use ringserve::net::StreamResult;
use ringserve::stats::ServerStats;
use ringserve::{CloseReason, ServerHandle, Shard, Stream, stream};

use crate::Bounds;
use crate::{Client, On, finish, watch};

/// A handler, whatever it is.
type Handler = Box<dyn Fn(Stream) -> Pin<Box<dyn Future<Output = Result<(), String>>>>>;

type Factory = Box<dyn Fn(&Shard) -> Handler + Send + Sync>;

pub struct Streams {
    pub running: ServerHandle,
}

impl Streams {
    /// One shard, on the driver that the environment decides.
    #[track_caller]
    pub fn start<H, R>(limits: Bounds, factory: impl Fn(&Shard) -> H + Send + Sync + 'static) -> Streams
    where
        H: AsyncFn(Stream) -> R + 'static,
        R: StreamResult + 'static,
    {
        Streams::start_boxed(
            limits,
            Box::new(move |shard| {
                let handler = Rc::new(factory(shard));
                Box::new(move |stream| {
                    let handler = handler.clone();
                    Box::pin(async move {
                        handler(stream).await.error().map_or(Ok(()), |error| Err(error.to_string()))
                    })
                })
            }),
        )
    }

    /// The same for every handler, so that a server of streams is compiled once and not for each
    /// test.
    #[track_caller]
    fn start_boxed(limits: Bounds, factory: Factory) -> Streams {
        let running = On::default().server(limits).start(move |shard| {
            let handler = factory(shard);
            stream(async move |stream| handler(stream).await)
        });
        Streams { running: running.expect("the server starts") }
    }

    pub fn addr(&self) -> SocketAddr {
        self.running.local_addrs()[0]
    }

    #[track_caller]
    pub fn client(&self) -> Client {
        Client::connect(self.addr())
    }

    pub fn stats(&self) -> ServerStats {
        self.running.stats_now()
    }

    /// Waits until exactly `count` connections ended for `reason`.
    #[track_caller]
    pub fn closed_for(&self, reason: CloseReason, count: u64) {
        watch::closed_for(&self.running, reason, count);
    }

    /// Waits until the server holds `connections`.
    #[track_caller]
    pub fn holds(&self, connections: usize) {
        watch::holds(&self.running, connections);
    }

    /// Shuts down and checks that nothing is left.
    #[track_caller]
    pub fn finish(self) -> ServerStats {
        finish(self.running)
    }
}
