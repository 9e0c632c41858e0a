//! The counts of a server, as text for Prometheus and whatever else reads OpenMetrics.
//!
//! Nothing is registered, counted twice or kept: each scrape reads what the shards published
//! ([`ServerControl::stats`]), asks the kernel for the [accept
//! queues](ServerControl::accept_queues), and `/proc` for the time of the shards' threads. No shard
//! is asked, so a shard that is blocked holds up no scrape and is in each.
//!
//! ```no_run
//! use ringserve::framing::Lines;
//! use ringserve::http::hyper::{Response, service::service_fn};
//! use ringserve::listen::tcp;
//! use ringserve::metrics::Metrics;
//! use ringserve::{Server, ServerControl, http};
//! # use ringserve::{Cx, Frame, Service};
//! # struct Echo;
//! # impl Service for Echo {
//! #     type Session = ();
//! #     type Error = std::convert::Infallible;
//! #     async fn call(&self, _cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Self::Error> { Ok(()) }
//! # }
//!
//! async fn metrics(server: ServerControl) -> Result<Response<String>, ringserve::http::hyper::http::Error> {
//!     let mut text = String::new();
//!     server.metrics().write_prometheus(&mut text);
//!     Response::builder().header("content-type", Metrics::CONTENT_TYPE).body(text)
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! Server::new()
//!     .service(tcp("0.0.0.0:7000").framing(Lines::default()), |_shard| Echo)
//!     .service(tcp("127.0.0.1:9000").name("metrics"), |shard| {
//!         let server = shard.server().clone();
//!         http(service_fn(move |_request| metrics(server.clone())))
//!     })
//!     .serve()
//! # }
//! ```
//!
//! Beside these there are the figures of the process by their usual names ([`Process`]). The
//! program's own are [`Figures`].
//!
//! | name, behind `ringserve_` | labels | what it is |
//! |---|---|---|
//! | `build_info` | `version`, `driver` | 1: the version of ringserve, and `io_uring` or `epoll` |
//! | `start_time_seconds` | | when the server started, in seconds since the beginning of 1970. Not in a simulation |
//! | `connections_max`, `held_max_bytes` | | limits: connections of the server, and [bytes that are held](crate::limits::ServerLimits::held_bytes_max) of each shard, as they are now |
//! | `held_bytes` | `shard` | what its connections hold beside receive buffers |
//! | `certificate_expiry_seconds` | `listener`, `name` | when each certificate in use expires, in seconds since the beginning of 1970. `listener` is the place among the addresses with TLS, from 0; `name` is empty for that of all other names. None for a configuration of rustls that the program gave |
//! | `connections` | `shard` | connections now, closing ones included |
//! | `connections_accepted_total`, `connections_opened_total`, `handed_off_total` | `shard` | as in [`ConnStats`] |
//! | `connections_closed_total` | `reason`, `closed_by` | connections that ended |
//! | `headroom_connections` | | connections that may come before [`ServerLimits::connections_max`](crate::limits::ServerLimits::connections_max) or the descriptors are used up |
//! | `refused_total` | `why` | new connections that were refused, by [cause](RefusedBy::name) |
//! | `accepted_waiting` | `why` | connections that were accepted and wait for a place ([`WaitCounts`]): `limit`, `rate`, `postponed`, `behind` |
//! | `waited_total`, `accept_paused_total`, `accept_held_total` | | new connections that found a limit reached, and how often accepting paused at a limit, or waited for the server's rate |
//! | `admission_prefixes`, `admission_connections`, `admission_sketched` | | what the limits on addresses hold ([`AdmissionStats`](crate::stats::AdmissionStats)) |
//! | `key_rates_keys`, `key_rates_refused_total`, `key_rates_sketched_total` | `rates` | rates by key ([`KeyRatesStats`]), by their [name](crate::admission::KeyLimits::name), once a shard was asked of one |
//! | `accept_queue_waiting`, `accept_queue_capacity`, `accept_queue_lost_total` | `shard`, `listener` | the kernel's queues ([`AcceptQueueStats`](crate::stats::AcceptQueueStats)); `shard` is `all` for an adopted socket |
//! | `frames_total` | `shard` | frames handed to the services |
//! | `received_bytes_total`, `sent_bytes_total`, `sends_total`, `receives_paused_total`, `reads_held_total`, `frames_copied_total`, `frames_shed_total` | | of all shards |
//! | `handshakes_total`, `handshakes_waiting` | `result` of the first | handshakes of transports |
//! | `service_connections`, `service_frames_total` | `service` | each service's |
//! | `service_call_seconds` | `service` | histogram: all calls of a service. Those that ended at once are in the first bucket, and no clock was read for them; others have the time from the turn in which they began to the one in which they ended. Of streams and of HTTP the calls are pieces that were received |
//! | `service_calls_in_flight`, `service_call_errors_total` | `service`, `kind` of the last | calls that wait now; those that returned an error, or panicked (`error`, `panic`) |
//! | `upstream_connections`, `upstream_connections_opened_total`, `upstream_connections_closed_total` | `reason` of the last | connections that the server made |
//! | `backend_requests_total`, `backend_answers_total`, `backend_answer_seconds_total`, `backend_failures_total`, `backend_lost_total`, `backend_unsent_total`, `backend_stray_total` | `upstream`, `backend` | of each server of a group ([`Server::upstream`](crate::Server::upstream)), as in [`BackendFigures`](crate::stats::BackendFigures): requests, those answered and the time that they took together, failures, and what ended connections. 200 servers at most |
//! | `backend_connects_total` | `upstream`, `backend`, `result` | connections made to it (`made`), and attempts that failed (`failed`) |
//! | `backend_in_flight`, `backend_connections`, `backend_idle`, `backend_usable` | `upstream`, `backend` | requests and connections that it has now, idle ones among them, and 1 if it may be asked |
//! | `upstream_retries_total`, `upstream_refused_total`, `upstream_panics_total`, `upstream_lookups_total` | `upstream`, `result` of the last | tries beyond the first, requests without a server, choices among all servers, look-ups of its servers (`answered`, `failed`) |
//! | `receive_buffers` | `state` | buffers of receive memory |
//! | `turns_total` | `shard` | turns of the loop |
//! | `system_calls_total` | `kind` | `enter`: those that submit, wait or poll; `other`: all others |
//! | `shard_cpu_seconds_total`, `shard_cpu_wait_seconds_total` | `shard` | time for which a shard's thread ran, which is the time that it was busy; and for which it could have, and others had the CPU. Not in a simulation |
//! | `shard_busy`, `load` | `shard` of the first | share of the last second for which a shard's thread ran, and the busiest one's: 0 to 1 ([`ServerControl::shard_times`]) |
//! | `overload_stage`, `overload_shed_share` | `shard` | the stage of a shard's [load](crate::overload::Load), 0 calm to 4 full, and the part of the frames that services are asked to shed |
//! | `overload_stage_changes_total` | `to`, `cause` | stages that were entered; only those that were |
//! | `stalls_total` | `shard`, `cause` | turns that took too long ([`ServerControl::stalls`]); `cause` is `cpu`, `lock`, `read`, `sleep`, `starved` or `other` |
//! | `shard_stale` | `shard` | 1 if a handler blocks the shard for more than 250 ms: its figures are those from before |
//! | `shard_skew_ratio` | | [`ServerStats::skew`](crate::stats::ServerStats::skew), if there are several shards |
//! | `blocking_threads`, `blocking_queued`, `blocking_calls_total` | `result` of the last | [`Shard::spawn_blocking`](crate::Shard::spawn_blocking) |
//! | `collectors_left_out` | | collectors of the program that a scrape of an admin endpoint lacks; the log has why. Only where there are some |
//! | `log_lines_dropped_total` | | lines that were dropped since their queue was full, or nothing reads the log: all those of `ringserve::log`; with another subscriber those of watchdog, admin endpoint, signals and reloads |
//! | `turn_seconds` | | histogram: turns of all shards. Of those that end in a wait one in 64 is timed and counts for 64; each other one is |
//! | `call_seconds` | | histogram: calls that waited and are done, from the turn in which they began to the one in which they ended |
//! | `first_frame_seconds` | | histogram: from when a connection could send its first frame, with its handshake done, to that frame; in steps of 17 ms |
//! | `send_stall_seconds` | | histogram: until a peer took of a send for which more bytes, a handler or the end of the connection waited, from when it began or the peer last took a part of it; in steps of 17 ms, and shorter ones are not counted |

mod backends;
mod families;
mod figures;
mod process;
#[cfg(feature = "admin")]
pub(crate) mod scrape;

use std::fmt;
use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::{Registry, Unit};

use families::{Families, Labels, label};
use ringserve_admission::{KeyRatesStats, RefusedBy};

use crate::histogram::{Histogram, HistogramSum};
use crate::server::running::ServerHandle;
use crate::shard::remote::control::ServerControl;
use crate::snapshot::Snapshot;
use crate::snapshot::durations::CallFigures;
use crate::stats::{ConnStats, DriverStats, ServerStats, ShardTimes, WaitCounts};
#[cfg(feature = "log")]
use crate::subscriber::lines_dropped;

pub use figures::{
    Counter, Counters, Figures, FiguresError, Gauge, Gauges, Histograms, SECONDS, ValueHistogram,
};
pub use process::Process;

/// The crate that writes the text, for a [registry](prometheus_client::registry::Registry) of the
/// program's.
pub use prometheus_client;

/// The shards' time limits count in steps of this.
const STEP: Duration = Duration::from_nanos(1 << 24);

/// The counts of a server, read at each scrape: by [`write_prometheus`](Metrics::write_prometheus),
/// or as a [`Collector`] of a registry that has the program's metrics too.
#[derive(Clone, Debug)]
pub struct Metrics {
    server: ServerControl,
}

impl Metrics {
    /// The type of the text, for the header of that name.
    pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

    /// The content type of the older text of Prometheus.
    #[cfg(feature = "admin")]
    pub(crate) const TEXT_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

    /// Appends the whole text: OpenMetrics 1.0, as Prometheus takes it since 2.5. About 220 values,
    /// 17 more for each shard, 3 for each listener of a shard, and 35 for each service.
    ///
    /// It makes two system calls for each listener of a shard, and reads a file of `/proc` for each
    /// shard. It waits for nothing, so a handler may call it.
    pub fn write_prometheus(&self, text: &mut String) {
        self.write_families(text);
        // A `String` takes everything.
        let _ = text::encode_eof(text);
    }

    /// The same without the line that ends the text.
    pub(crate) fn write_families(&self, text: &mut String) {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self.clone()));
        // A simulation has no process.
        if !self.server.clock().is_simulated() {
            registry.register_collector(Box::new(Process::default()));
        }
        let _ = text::encode_registry(text, &registry);
    }
}

impl ServerControl {
    /// The counts of the server, as text for Prometheus: see [`metrics`](crate::metrics).
    pub fn metrics(&self) -> Metrics {
        Metrics { server: self.clone() }
    }

    /// The same for a registry of the program's:
    /// `registry.register_collector(Box::new(server.collector()))`.
    pub fn collector(&self) -> impl Collector + use<> {
        self.metrics()
    }
}

impl ServerHandle {
    /// The counts of the server, as text for Prometheus: see [`metrics`](crate::metrics).
    pub fn metrics(&self) -> Metrics {
        self.control().metrics()
    }

    /// The same for a registry of the program's. See [`ServerControl::collector`].
    pub fn collector(&self) -> impl Collector + use<> {
        self.metrics()
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let stats = self.server.stats();
        let mut to = Families::new(encoder, "ringserve_");
        self.about(&mut to)?;
        self.connections(&mut to, &stats)?;
        self.accept_queues(&mut to)?;
        moved(&mut to, &stats)?;
        handshakes(&mut to, &stats.counters)?;
        services(&mut to, &stats)?;
        self.calls(&mut to, &stats)?;
        upstreams(&mut to, &stats)?;
        backends::backends(&mut to, &self.server.upstreams())?;
        driver(&mut to, &stats)?;
        self.shards(&mut to, &stats)?;
        blocking(&mut to, &stats)?;
        let what = "Lines that the log dropped, as what reads it is slow or away";
        to.counter("log_lines_dropped", what, lines_dropped() + ringserve_base::log_thread::dropped())?;
        self.histograms(&mut to)
    }
}

/// The connections that were accepted and wait, by the reason why.
fn accepted_waiting(to: &mut Families<'_>, stats: &ServerStats) -> fmt::Result {
    let mut sums = WaitCounts::default().named();
    for shard in &stats.shards {
        let named = shard.accepted_waiting_by.named();
        sums.iter_mut().zip(named).for_each(|((_, sum), (_, count))| *sum += count);
    }
    let each = sums.map(|(why, count)| (label("why", why), count as u64));
    to.gauges("accepted_waiting", "Connections that were accepted and wait for a place", None, each)
}

/// Without the log that ships it drops nothing.
#[cfg(not(feature = "log"))]
fn lines_dropped() -> u64 {
    0
}

impl Metrics {
    /// The version and the limits of the server.
    fn about(&self, to: &mut Families<'_>) -> fmt::Result {
        let version = ("version", env!("CARGO_PKG_VERSION").to_owned());
        let labels = vec![version, ("driver", self.server.driver().to_owned())];
        to.gauges("build_info", "1, with the version of ringserve and the driver", None, [(labels, 1u64)])?;
        let started = self.server.clock().started().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let started = started.map(|at| (Vec::new(), at.as_secs_f64()));
        let what = "When the server started, since the beginning of 1970";
        to.gauges("start_time", what, Some(&Unit::Seconds), started)?;
        let connections = [(Vec::new(), self.server.connections_max() as u64)];
        to.gauges("connections_max", "Connections that the server takes at once", None, connections)?;
        let held = [(Vec::new(), self.server.held_bytes_max() as u64)];
        let what = "Bytes that the connections of each shard may hold beside receive buffers";
        to.gauges("held_max", what, Some(&Unit::Bytes), held)?;
        self.certificates(to)
    }

    #[cfg(not(feature = "tls"))]
    fn certificates(&self, _to: &mut Families<'_>) -> fmt::Result {
        Ok(())
    }

    #[cfg(feature = "tls")]
    fn certificates(&self, to: &mut Families<'_>) -> fmt::Result {
        let each = self.server.tls().expiries();
        let each = each
            .into_iter()
            .map(|of| (vec![("listener", of.listener.to_string()), ("name", of.name)], of.not_after));
        let what = "When the certificate in use expires, since the beginning of 1970";
        to.gauges("certificate_expiry", what, Some(&Unit::Seconds), each)
    }

    /// Shows `visit` what each shard counts of the calls of each service, by its number.
    fn each_calls(&self, mut visit: impl FnMut(usize, &CallFigures)) {
        let snapshots = self.server.remotes().iter().filter_map(|remote| remote.snapshot());
        for (service, of) in snapshots.flat_map(|snapshot| snapshot.durations.calls.iter().enumerate()) {
            visit(service, of);
        }
    }

    /// All calls of each service: those that waited by their times, and those that ended at once,
    /// of which no clock was read, in the lowest bucket.
    fn calls(&self, to: &mut Families<'_>, stats: &ServerStats) -> fmt::Result {
        let mut all = vec![Calls::default(); stats.services.len()];
        self.each_calls(|service, of| {
            if let Some(sum) = all.get_mut(service) {
                sum.add(of);
            }
        });
        let each =
            || stats.services.iter().zip(&all).map(|(of, calls)| (label("service", &of.name), of, calls));
        let times = each().map(|(labels, of, calls)| {
            let (counters, mut times) = (&of.counters, calls.times.clone());
            let others = counters.frames_shed + counters.calls_waited;
            times.add_shortest(counters.frames.saturating_sub(others));
            (labels, times)
        });
        let times: Vec<(Labels, HistogramSum)> = times.collect();
        let what = "All calls of a service: those that ended at once are in the first bucket";
        to.histograms("service_call", what, &times)?;
        let in_flight = each().map(|(labels, _, calls)| (labels, calls.in_flight));
        to.gauges("service_calls_in_flight", "Calls of a service that wait now", None, in_flight)?;
        let failed = each().flat_map(|(labels, _, calls)| {
            let kinds = [("error", calls.failed), ("panic", calls.panicked)];
            kinds.map(|(kind, count)| ([labels.clone(), label("kind", kind)].concat(), count))
        });
        let what = "Calls of a service that returned an error, or panicked";
        to.counters("service_call_errors", what, None, failed)
    }

    fn connections(&self, to: &mut Families<'_>, stats: &ServerStats) -> fmt::Result {
        to.gauges("connections", "Connections now", None, by_shard(stats, |shard| shard.connections as u64))?;
        let accepted = by_shard(stats, |shard| shard.counters.accepted);
        to.counters("connections_accepted", "Connections that the kernel accepted", None, accepted)?;
        let opened = by_shard(stats, |shard| shard.counters.opened);
        to.counters("connections_opened", "Connections that were opened", None, opened)?;
        let handed_off = by_shard(stats, |shard| shard.counters.handed_off);
        to.counters("handed_off", "Connections that a shard accepted for another one", None, handed_off)?;
        let counters = &stats.counters;
        to.counters("connections_closed", "Connections that ended", None, by_reason(counters))?;
        let headroom = self.server.connections_max().saturating_sub(stats.connections) as u64;
        to.gauges(
            "headroom_connections",
            "Connections that may come before a limit is reached",
            None,
            [(Vec::new(), headroom)],
        )?;
        let refused = RefusedBy::ALL.map(|by| (label("why", by.name()), counters.refused_by(by)));
        to.counters("refused", "Connections that were refused", None, refused)?;
        let held = counters.accept_held;
        to.counter("accept_held", "Times that accepting waited for the server's rate", held)?;
        let admission = self.server.admission_stats();
        let prefixes = [(Vec::new(), admission.prefixes as u64)];
        to.gauges("admission_prefixes", "Prefixes of addresses that are tracked", None, prefixes)?;
        let counted = [(Vec::new(), admission.connections as u64)];
        to.gauges("admission_connections", "Connections that count for a prefix", None, counted)?;
        let sketched = [(Vec::new(), admission.sketched as u64)];
        to.gauges("admission_sketched", "Those of them beyond what is tracked exactly", None, sketched)?;
        self.key_rates(to)?;
        accepted_waiting(to, stats)?;
        to.counter("waited", "Connections that waited since a limit was reached", counters.waited)?;
        to.counter("accept_paused", "Times that accepting stopped at a limit", counters.accept_paused)
    }

    fn key_rates(&self, to: &mut Families<'_>) -> fmt::Result {
        let rates = self.server.key_rates_stats();
        let each = |of: fn(&KeyRatesStats) -> u64| {
            rates.iter().map(move |(name, stats)| (label("rates", name), of(stats)))
        };
        to.gauges("key_rates_keys", "Keys whose rates are tracked", None, each(|stats| stats.keys as u64))?;
        let what = "Frames, or whatever a service takes, that came too early for their key";
        to.counters("key_rates_refused", what, None, each(|stats| stats.refused))?;
        let what = "Those of keys beyond what is tracked exactly";
        to.counters("key_rates_sketched", what, None, each(|stats| stats.sketched))
    }

    fn accept_queues(&self, to: &mut Families<'_>) -> fmt::Result {
        let queues = self.server.accept_queues();
        let labels = |n: usize| {
            let shard = queues[n].shard.map_or("all".to_owned(), |shard| shard.to_string());
            vec![("shard", shard), ("listener", self.server.listeners()[queues[n].listener].to_string())]
        };
        let each = || (0..queues.len()).map(|n| (labels(n), &queues[n]));
        let waiting = each().map(|(labels, queue)| (labels, queue.waiting));
        to.gauges("accept_queue_waiting", "Connections that wait to be accepted", None, waiting)?;
        let capacity = each().map(|(labels, queue)| (labels, queue.capacity));
        to.gauges(
            "accept_queue_capacity",
            "Connections that may wait to be accepted, and one more",
            None,
            capacity,
        )?;
        let lost = each().filter_map(|(labels, queue)| Some((labels, queue.lost?)));
        to.counters(
            "accept_queue_lost",
            "Packets of newcomers dropped at a listener while its queue was nearly full, or queues of the network namespace \
             overflowed",
            None,
            lost,
        )?;
        let dropped = each().filter_map(|(labels, queue)| Some((labels, queue.dropped?)));
        to.counters(
            "accept_queue_dropped",
            "Packets discarded at a listener for any reason: lost ones, those of denied networks, and those that a peer repeats",
            None,
            dropped,
        )
    }

    fn shards(&self, to: &mut Families<'_>, stats: &ServerStats) -> fmt::Result {
        to.counters(
            "turns",
            "Turns of the shards' loops",
            None,
            by_shard(stats, |shard| shard.driver.turns),
        )?;
        let held = by_shard(stats, |shard| shard.held_bytes as u64);
        let what = "Bytes that connections hold beside receive buffers";
        to.gauges("held", what, Some(&Unit::Bytes), held)?;
        to.gauges(
            "shard_stale",
            "1 for a shard that is blocked",
            None,
            by_shard(stats, |shard| u64::from(shard.stale)),
        )?;
        if let Some(skew) = stats.skew() {
            let what = "Connections that came to the shard with most, over the mean of all";
            to.gauges("shard_skew", what, Some(&Unit::Other("ratio".to_owned())), [(Vec::new(), skew)])?;
        }
        self.times(to)?;
        self.overload(to)?;
        let stalls = self.server.watch().counts().map(|(shard, cause, count)| {
            (vec![("shard", shard.to_string()), ("cause", cause.as_str().to_owned())], count)
        });
        to.counters(
            "stalls",
            "Turns of a shard that took too long, by what it spent most of the time with",
            None,
            stalls,
        )
    }

    fn overload(&self, to: &mut Families<'_>) -> fmt::Result {
        let loads = self.server.shard_loads();
        let stages = loads.iter().map(|of| (label("shard", of.shard), of.load as u64));
        to.gauges("overload_stage", "0 calm, 1 busy, 2 shedding, 3 refusing, 4 full", None, stages)?;
        let shares = loads.iter().map(|of| (label("shard", of.shard), of.shed_share));
        to.gauges("overload_shed_share", "Part of the frames that a service is asked to shed", None, shares)?;
        let changes = self.server.watch().loads.changes().filter(|(_, _, count)| *count > 0);
        let changes = changes.map(|(load, cause, count)| {
            (vec![("to", load.to_string()), ("cause", cause.as_str().to_owned())], count)
        });
        to.counters("overload_stage_changes", "Stages that were entered", None, changes)
    }

    fn times(&self, to: &mut Families<'_>) -> fmt::Result {
        let times = self.server.shard_times();
        // One that ended, or is simulated, has none; and a thread's file cannot be opened while
        // descriptors are missing.
        let runs = self.server.remotes().iter().map(|remote| remote.thread().is_some());
        let times: Vec<_> = times
            .into_iter()
            .zip(runs)
            .filter_map(|(times, runs)| (runs && !times.cpu.is_zero()).then_some(times))
            .collect();
        let each = |of: fn(&ShardTimes) -> f64| {
            let of_shard = move |times: &ShardTimes| (label("shard", times.shard), of(times));
            times.iter().map(of_shard).collect::<Vec<_>>()
        };
        let what = "Time for which a shard's thread ran";
        to.counters("shard_cpu", what, Some(&Unit::Seconds), each(|times| times.cpu.as_secs_f64()))?;
        let what = "Time for which a shard's thread waited for a CPU";
        to.counters(
            "shard_cpu_wait",
            what,
            Some(&Unit::Seconds),
            each(|times| times.cpu_wait.as_secs_f64()),
        )?;
        let what = "Share of the last second for which a shard's thread ran";
        to.gauges("shard_busy", what, None, each(|times| times.busy))?;
        let busiest = times.iter().map(|times| times.busy).reduce(f64::max);
        let what = "Share of the last second for which the busiest shard's thread ran";
        to.gauges("load", what, None, busiest.map(|busiest| (Vec::new(), busiest)))
    }

    fn histograms(&self, to: &mut Families<'_>) -> fmt::Result {
        let sum = |of: fn(&Snapshot) -> &Histogram| {
            let mut sum = HistogramSum::new();
            let snapshots = self.server.remotes().iter().filter_map(|remote| remote.snapshot());
            snapshots.for_each(|snapshot| of(snapshot).add_to(&mut sum));
            sum
        };
        let turns = sum(|snapshot| &snapshot.durations.turns);
        to.histogram("turn", "Turns of the shards' loops, without the wait behind", &turns, Duration::ZERO)?;
        let mut calls = HistogramSum::new();
        self.each_calls(|_, of| of.waited.add_to(&mut calls));
        to.histogram("call", "Calls that waited", &calls, Duration::ZERO)?;
        let first = sum(|snapshot| &snapshot.durations.first_frames);
        to.histogram(
            "first_frame",
            "Until a connection's first frame, from when it could send one",
            &first,
            STEP,
        )?;
        let stalls = sum(|snapshot| &snapshot.durations.send_stalls);
        to.histogram("send_stall", "Until a peer took what waited for it", &stalls, STEP)
    }
}

/// The calls of a service on all shards.
#[derive(Clone)]
struct Calls {
    times: HistogramSum,
    in_flight: u64,
    failed: u64,
    panicked: u64,
}

impl Default for Calls {
    fn default() -> Calls {
        Calls { times: HistogramSum::new(), in_flight: 0, failed: 0, panicked: 0 }
    }
}

impl Calls {
    fn add(&mut self, of: &CallFigures) {
        of.waited.add_to(&mut self.times);
        self.in_flight += of.in_flight();
        self.failed += of.failed.load(Ordering::Relaxed);
        self.panicked += of.panicked.load(Ordering::Relaxed);
    }
}

fn moved(to: &mut Families<'_>, stats: &ServerStats) -> fmt::Result {
    let counters = &stats.counters;
    to.counters(
        "frames",
        "Frames handed to the services",
        None,
        by_shard(stats, |shard| shard.counters.frames),
    )?;
    let one = |count| [(Vec::new(), count)];
    to.counters("received", "Bytes received", Some(&Unit::Bytes), one(counters.bytes_received))?;
    to.counters(
        "sent",
        "Bytes that the kernel took for sending",
        Some(&Unit::Bytes),
        one(counters.bytes_sent),
    )?;
    to.counter("sends", "Send operations", counters.sends)?;
    let what = "Times that receiving was paused because a connection held too much";
    to.counter("receives_paused", what, counters.receives_paused)?;
    let what = "Times that frames of a connection waited, since its peer sent faster than it may";
    to.counter("reads_held", what, counters.reads_held)?;
    to.counter("frames_copied", "Frames copied, mostly as receive memory was short", counters.frames_copied)?;
    let what = "Frames that services answered without a call, as their shard was asked for too much";
    to.counter("frames_shed", what, counters.frames_shed)
}

fn handshakes(to: &mut Families<'_>, counters: &ConnStats) -> fmt::Result {
    let ends = [
        ("done", counters.handshakes_done),
        ("failed", counters.handshakes_failed),
        ("timed_out", counters.handshakes_timed_out),
    ];
    let ends = ends.map(|(result, count)| (label("result", result), count));
    to.counters("handshakes", "Handshakes of transports that ended", None, ends)?;
    let waiting = [(Vec::new(), counters.handshakes_waiting)];
    to.gauges("handshakes_waiting", "Handshakes of which a step waits", None, waiting)
}

fn services(to: &mut Families<'_>, stats: &ServerStats) -> fmt::Result {
    let each = || stats.services.iter().map(|service| (label("service", &service.name), service));
    let connections = each().map(|(labels, service)| (labels, service.connections as u64));
    to.gauges("service_connections", "Connections of a service now", None, connections)?;
    let frames = each().map(|(labels, service)| (labels, service.counters.frames));
    to.counters("service_frames", "Frames handed to a service", None, frames)
}

fn upstreams(to: &mut Families<'_>, stats: &ServerStats) -> fmt::Result {
    let upstreams = &stats.upstreams;
    let connections = [(Vec::new(), upstreams.connections as u64)];
    to.gauges("upstream_connections", "Connections to upstreams now", None, connections)?;
    let opened = upstreams.counters.opened;
    to.counter("upstream_connections_opened", "Connections to upstreams that were tried", opened)?;
    // Most reasons are those of peers, so these stay away until there is one.
    let closed = by_reason(&upstreams.counters).filter(|(_, count)| *count > 0);
    to.counters("upstream_connections_closed", "Connections to upstreams that ended", None, closed)
}

fn driver(to: &mut Families<'_>, stats: &ServerStats) -> fmt::Result {
    let sum = |of: fn(&DriverStats) -> u64| stats.shards.iter().map(|shard| of(&shard.driver)).sum::<u64>();
    let calls = [("enter", sum(|driver| driver.enters)), ("other", sum(|driver| driver.calls))];
    let calls = calls.map(|(kind, count)| (label("kind", kind), count));
    to.counters("system_calls", "System calls of the drivers", None, calls)?;
    let buffers = stats.shards.iter().map(|shard| shard.buffers);
    let (mut free, mut with_kernel, mut leased) = (0, 0, 0);
    for of in buffers {
        free += of.free;
        with_kernel += of.with_kernel;
        leased += of.leased;
    }
    let buffers = [("free", free), ("with_kernel", with_kernel), ("leased", leased)];
    let buffers = buffers.map(|(state, count)| (label("state", state), count as u64));
    to.gauges("receive_buffers", "Buffers of receive memory", None, buffers)
}

fn blocking(to: &mut Families<'_>, stats: &ServerStats) -> fmt::Result {
    let blocking = &stats.blocking;
    let one = |count: usize| [(Vec::new(), count as u64)];
    to.gauges("blocking_threads", "Threads for calls that block", None, one(blocking.threads))?;
    to.gauges("blocking_queued", "Calls that wait for such a thread", None, one(blocking.queued))?;
    let ends = [("done", blocking.done), ("refused", blocking.refused), ("panicked", blocking.panicked)];
    let ends = ends.map(|(result, count)| (label("result", result), count));
    to.counters("blocking_calls", "Calls that block and ended", None, ends)
}

fn by_shard<'a>(
    stats: &'a ServerStats,
    of: impl Fn(&crate::stats::ShardStats) -> u64 + 'a,
) -> impl Iterator<Item = (Labels, u64)> + 'a {
    stats.shards.iter().enumerate().map(move |(index, shard)| (label("shard", index), of(shard)))
}

fn by_reason(counters: &ConnStats) -> impl Iterator<Item = (Labels, u64)> + '_ {
    counters.each_reason().map(|(reason, count)| {
        let closed_by = format!("{:?}", reason.closed_by()).to_lowercase();
        (vec![("reason", reason.name().to_owned()), ("closed_by", closed_by)], count)
    })
}
