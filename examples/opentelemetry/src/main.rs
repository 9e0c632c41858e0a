//! Gives the figures of a server to an OpenTelemetry collector: observable instruments that read
//! what the shards publish, so that nothing is counted twice and no shard is asked.
//!
//!     cargo run --release -p example-opentelemetry -- --every 5
//!
//! A collector that prints what it receives: `otelcol --config
//! 'yaml:receivers::otlp::protocols::http::endpoint: 127.0.0.1:4318' --config
//! 'yaml:exporters::debug::verbosity: detailed' ..`. Prometheus from 3.0 takes the same, at
//! `/api/v1/otlp/v1/metrics`, and needs none of this if it may scrape: see the feature `metrics`.

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use opentelemetry::KeyValue;
use opentelemetry::metrics::{Meter, MeterProvider};
use opentelemetry_otlp::{MetricExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider};
use ringserve::framing::Lines;
use ringserve::log::LogOptions;
use ringserve::server::Driver;
use ringserve::stats::ConnStats;
use ringserve::{Cx, Frame, Server, ServerControl, Service};

/// A server of lines that gives its figures to a collector.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// URL at which the collector takes OTLP by HTTP.
    #[arg(long, default_value = "http://127.0.0.1:4318/v1/metrics", value_name = "URL")]
    collector: String,
    /// Seconds between two exports.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..), value_name = "SECONDS")]
    every: u64,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        cx.reply(line);
        Ok(())
    }
}

/// Makes instruments that read the server's figures whenever they are exported.
fn observe(server: &ServerControl, meter: &Meter) {
    let of = server.clone();
    let connections = meter.u64_observable_gauge("ringserve.connections").with_unit("{connection}");
    connections
        .with_callback(move |to| {
            for (shard, stats) in of.stats().shards.iter().enumerate() {
                to.observe(stats.connections as u64, &[KeyValue::new("shard", shard as i64)]);
            }
        })
        .build();
    let counter = |name: &'static str, unit: &'static str, count: fn(&ConnStats) -> u64| {
        let of = server.clone();
        let counter = meter.u64_observable_counter(name).with_unit(unit);
        counter.with_callback(move |to| to.observe(count(&of.stats().counters), &[])).build();
    };
    counter("ringserve.connections.opened", "{connection}", |counters| counters.opened);
    counter("ringserve.frames", "{frame}", |counters| counters.frames);
    counter("ringserve.received", "By", |counters| counters.bytes_received);
    counter("ringserve.sent", "By", |counters| counters.bytes_sent);
    let of = server.clone();
    let closed = meter.u64_observable_counter("ringserve.connections.closed").with_unit("{connection}");
    closed
        .with_callback(move |to| {
            for (reason, count) in of.stats().counters.reasons() {
                to.observe(count, &[KeyValue::new("reason", reason)]);
            }
        })
        .build();
}

/// Exports to a collector, from a thread outside the shards.
fn exporter(collector: &str, every: Duration) -> Result<SdkMeterProvider, Box<dyn Error>> {
    let exporter = MetricExporter::builder().with_http().with_endpoint(collector).build()?;
    let reader = PeriodicReader::builder(exporter).with_interval(every).build();
    let resource = Resource::builder().with_service_name("ringserve-example").build();
    Ok(SdkMeterProvider::builder().with_resource(resource).with_reader(reader).build())
}

fn main() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let exporter = exporter(&args.collector, Duration::from_secs(args.every))?;
    let meter = exporter.meter("ringserve");
    let server = Server::bind(args.listen).framing(Lines::default()).shards(args.shards).driver(args.driver);
    server.on_start(move |server| observe(&server, &meter)).serve(|_shard| Echo)?;
    // The last figures.
    exporter.shutdown()?;
    Ok(())
}

#[cfg(test)]
mod tests;
