//! A collector of a few lines: it takes exports, and has the figures of the server.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::metrics::v1::{NumberDataPoint, metric::Data, number_data_point::Value};
use prost::Message;

use super::*;

const SOON: Duration = Duration::from_secs(20);

/// The content of an export: the sum of each instrument's points.
type Figures = BTreeMap<String, u64>;

fn sum(points: &[NumberDataPoint]) -> u64 {
    let of = |point: &NumberDataPoint| match point.value {
        Some(Value::AsInt(value)) => value as u64,
        _ => panic!("{point:?} is no whole number"),
    };
    points.iter().map(of).sum()
}

fn figures(body: &[u8]) -> Figures {
    let export = ExportMetricsServiceRequest::decode(body).expect("it is OTLP");
    let scopes = export.resource_metrics.into_iter().flat_map(|resource| resource.scope_metrics);
    let metrics = scopes.flat_map(|scope| scope.metrics);
    let of = |metric: opentelemetry_proto::tonic::metrics::v1::Metric| match metric.data {
        Some(Data::Gauge(gauge)) => (metric.name, sum(&gauge.data_points)),
        Some(Data::Sum(total)) => {
            assert!(total.is_monotonic, "{} is a counter", metric.name);
            (metric.name, sum(&total.data_points))
        }
        other => panic!("{}: {other:?}", metric.name),
    };
    metrics.map(of).collect()
}

/// Listens for exports. Returns its URL, and the exports.
fn collector() -> (String, Receiver<Figures>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1/metrics", listener.local_addr().unwrap());
    let (sender, came) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            while let Some(body) = request(&mut reader) {
                let answer =
                    "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n";
                reader.get_mut().write_all(answer.as_bytes()).unwrap();
                if sender.send(figures(&body)).is_err() {
                    return;
                }
            }
        }
    });
    (url, came)
}

/// The body of the next request; `None` at the end.
fn request(reader: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let (mut first, mut len) = (String::new(), 0);
    if reader.read_line(&mut first).ok()? == 0 {
        return None;
    }
    assert_eq!(first, "POST /v1/metrics HTTP/1.1\r\n");
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            len = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; len];
    reader.read_exact(&mut body).ok()?;
    Some(body)
}

#[test]
fn collector_gets_what_the_server_counted() {
    let (url, came) = collector();
    let exporter = exporter(&url, Duration::from_secs(3600)).unwrap();
    let server = Server::bind("127.0.0.1:0").framing(Lines::default()).shards(2).pin(false);
    let running = server.start(|_shard| Echo).unwrap();
    observe(&running.control(), &exporter.meter("ringserve"));
    let mut clients: Vec<_> = (0..3)
        .map(|_| {
            let mut stream = TcpStream::connect(running.local_addrs()[0]).unwrap();
            stream.set_read_timeout(Some(SOON)).unwrap();
            stream.write_all(b"hello\n").unwrap();
            stream.read_exact(&mut [0; 6]).unwrap();
            stream
        })
        .collect();
    clients.pop();
    let expected = [
        ("ringserve.connections", 2),
        ("ringserve.connections.opened", 3),
        ("ringserve.connections.closed", 1),
        ("ringserve.frames", 3),
        ("ringserve.received", 18),
    ];
    let started = Instant::now();
    loop {
        // Published figures may be a tenth of a second old.
        exporter.force_flush().unwrap();
        let figures = came.recv_timeout(SOON).unwrap();
        if expected.iter().all(|(name, value)| figures.get(*name) == Some(value)) {
            break;
        }
        assert!(started.elapsed() < SOON, "{figures:?} is not {expected:?}");
        thread::sleep(Duration::from_millis(10));
    }
    drop(clients);
    running.shutdown();
    running.wait().unwrap();
    exporter.shutdown().unwrap();
    let last = came.recv_timeout(SOON).unwrap();
    assert_eq!((last["ringserve.connections"], last["ringserve.connections.closed"]), (0, 3), "{last:?}");
}
