//! A server of streams, and its end.

use std::net::SocketAddr;

use ringserve::{CloseReason, Limits, Report, Running, Shard, Stream, StreamResult};

use super::{Client, On, SOON, eventually, finish};

pub struct Streams {
    pub running: Running,
}

impl Streams {
    /// One shard, on the driver that the environment decides.
    #[track_caller]
    pub fn start<H, R>(limits: Limits, factory: impl Fn(&Shard) -> H + Send + Sync + 'static) -> Streams
    where
        H: AsyncFn(Stream) -> R + 'static,
        R: StreamResult + 'static,
    {
        let running = On::default().server(limits).start_stream(factory).expect("the server starts");
        Streams { running }
    }

    pub fn addr(&self) -> SocketAddr {
        self.running.local_addrs()[0]
    }

    #[track_caller]
    pub fn client(&self) -> Client {
        Client::connect(self.addr())
    }

    pub fn report(&self) -> Report {
        self.running.report()
    }

    /// Waits until exactly so many connections ended for a reason.
    #[track_caller]
    pub fn closed_for(&self, reason: CloseReason, count: u64) {
        let what = format!("{count} connections end as {}", reason.name());
        let mut last = Report::default();
        let started = std::time::Instant::now();
        eventually(&what, SOON + SOON, || {
            last = self.report();
            assert!(started.elapsed() < SOON, "{what} did not come: {:?}", last.counters);
            last.counters.closed_for(reason) >= count
        });
        assert_eq!(last.counters.closed_for(reason), count, "{what}");
    }

    /// Waits until so many connections are there.
    #[track_caller]
    pub fn holds(&self, connections: usize) {
        eventually("the server holds as many", SOON, || self.report().connections == connections);
    }

    /// Shuts down and checks that nothing is left.
    #[track_caller]
    pub fn finish(self) -> Report {
        finish(self.running)
    }
}
