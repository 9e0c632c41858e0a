//! Calls of gRPC through a gateway, by HTTP/2 on both sides.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::rt::{TokioExecutor, TokioIo};
use ringserve::http::hyper::body::Incoming;
use ringserve::http::hyper::client::conn::http2::{Builder, SendRequest};
use ringserve::http::hyper::service::service_fn;
use ringserve::http::hyper::{Error, Request, Response};
use ringserve::{Server, ServerHandle, http};
use ringserve_gateway::config::{GatewayFile, GatewayServer};
use tonic::Code;
use tonic::body::Body;
use tonic::codegen::tokio_stream::StreamExt;
use tonic_health::ServingStatus;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::server::{HealthReporter, health_reporter};
use tower::Service;

use super::*;

/// A connection in the form that tonic's client needs.
struct Channel(SendRequest<Body>);

impl Service<Request<Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Error>>>>;

    fn poll_ready(&mut self, task: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.0.poll_ready(task)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// A server of gRPC that speaks HTTP/2 alone.
fn health_server() -> (HealthReporter, ServerHandle) {
    let (reporter, health) = health_reporter();
    let server = Server::bind("127.0.0.1:0").shards(1).start(move |_shard| {
        let health = health.clone();
        let only_http2 =
            ringserve::http::HttpOptions::default().versions(ringserve::http::HttpVersions::Http2);
        http(service_fn(move |request: Request<Incoming>| health.clone().call(request))).options(only_http2)
    });
    (reporter, server.expect("it starts"))
}

fn gateway(folder: &Folder, upstream: &str) -> ServerHandle {
    let text = format!(
        "admin = false\nserver = {{ shards = 1 }}\n{upstream}\n[[service]]\nlisten = [\"127.0.0.1:0\"]\n\
         [[route]]\nupstream = \"health\"\n"
    );
    let path = folder.file("gateway.toml", &text);
    let file = GatewayFile::read(&path).expect("it is right");
    GatewayServer::new(file).expect("a server").start().expect("it starts")
}

#[test]
fn health_of_grpc_is_checked_and_watched_through_a_gateway() {
    let (folder, (reporter, health)) = (Folder::new(), health_server());
    let backend = health.local_addrs()[0];
    let running =
        gateway(&folder, &format!("[upstream.health]\naddresses = [\"{backend}\"]\nprotocol = \"h2c\""));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let addr = running.local_addrs()[0];
    runtime.block_on(async {
        reporter.set_service_status("live", ServingStatus::Serving).await;
        let stream = tokio::net::TcpStream::connect(addr).await.expect("a connection");
        let builder = Builder::new(TokioExecutor::new());
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.expect("HTTP/2");
        let connection = tokio::spawn(connection);
        let asked = |service: &str| HealthCheckRequest { service: service.into() };
        {
            let origin = "http://health.internal".parse().expect("an origin");
            let mut client = HealthClient::with_origin(Channel(sender), origin);
            let answer = client.check(asked("live")).await.expect("an answer").into_inner();
            assert_eq!(answer.status, ServingStatus::Serving as i32);
            // The status of a call that fails stands in trailers.
            let status = client.check(asked("none")).await.expect_err("there is none");
            assert_eq!((status.code(), status.message()), (Code::NotFound, "service not registered"));
            let mut watched = client.watch(asked("live")).await.expect("a stream").into_inner();
            let first = watched.next().await.expect("a message").expect("a status");
            assert_eq!(first.status, ServingStatus::Serving as i32);
            reporter.set_service_status("live", ServingStatus::NotServing).await;
            let second = watched.next().await.expect("a message").expect("a status");
            assert_eq!(second.status, ServingStatus::NotServing as i32);
        }
        connection.await.expect("it ends").expect("as it should");
    });
    for server in [running, health] {
        server.shutdown();
        server.wait().expect("it ends");
    }
}

#[test]
fn call_of_grpc_without_a_backend_has_a_status() {
    let folder = Folder::new();
    let nowhere = free_port();
    let running =
        gateway(&folder, &format!("[upstream.health]\naddresses = [\"{nowhere}\"]\nprotocol = \"h2c\""));
    let addr = running.local_addrs()[0];
    let mut stream = TcpStream::connect(addr).expect("a connection");
    let fields = "host: a\r\ncontent-type: application/grpc\r\nconnection: close\r\ncontent-length: 0";
    write!(stream, "POST /grpc.health.v1.Health/Check HTTP/1.1\r\n{fields}\r\n\r\n").expect("it is sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("grpc-status: 14\r\n"), "{answer}");
    running.shutdown();
    running.wait().expect("it ends");
}
