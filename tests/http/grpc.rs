//! gRPC by tonic on an HTTP server: messages and trailers over HTTP/2, streams both ways.

use std::convert::Infallible;

use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use ringserve::{ServerHandle, http};
use ringserve_tests::{On, SOON, no_time_limits};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder, Streaming};
use tonic::codegen::tokio_stream::{self, StreamExt};
use tonic::{Code, Status};

/// A codec whose messages are plain bytes.
#[derive(Clone, Copy, Default)]
struct AsTheyAre;

impl Codec for AsTheyAre {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = AsTheyAre;
    type Decoder = AsTheyAre;

    fn encoder(&mut self) -> AsTheyAre {
        AsTheyAre
    }

    fn decoder(&mut self) -> AsTheyAre {
        AsTheyAre
    }
}

impl Encoder for AsTheyAre {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put(to, item);
        Ok(())
    }
}

impl Decoder for AsTheyAre {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        let len = bytes::Buf::remaining(from);
        Ok(Some(bytes::Buf::copy_to_bytes(from, len)))
    }
}

async fn answer(request: hyper::Request<Incoming>) -> Result<hyper::Response<tonic::body::Body>, Infallible> {
    let mut grpc = tonic::server::Grpc::new(AsTheyAre);
    Ok(match request.uri().path() {
        "/test/Echo" => {
            let echo = |request: tonic::Request<Bytes>| {
                std::future::ready(Ok::<_, Status>(tonic::Response::new(request.into_inner())))
            };
            grpc.unary(tower::service_fn(echo), request).await
        }
        "/test/Stream" => {
            let echo = |request: tonic::Request<Streaming<Bytes>>| {
                std::future::ready(Ok::<_, Status>(tonic::Response::new(request.into_inner())))
            };
            grpc.streaming(tower::service_fn(echo), request).await
        }
        _ => {
            let none = |_: tonic::Request<Bytes>| {
                std::future::ready(Err::<tonic::Response<Bytes>, _>(Status::not_found("no such method")))
            };
            grpc.unary(tower::service_fn(none), request).await
        }
    })
}

/// Runs a tonic client on a tokio runtime.
fn with_grpc(running: &ServerHandle, test: impl AsyncFnOnce(Grpc)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(running.local_addrs()[0]).await.unwrap();
        let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let origin = "http://test".parse().unwrap();
        tokio::time::timeout(SOON, test(tonic::client::Grpc::with_origin(Channel(sender), origin)))
            .await
            .expect("the server answers");
        tokio::time::timeout(SOON, connection).await.expect("the connection ends").unwrap().unwrap();
    });
}

type Grpc = tonic::client::Grpc<Channel>;

/// A connection in the form that tonic's client needs.
struct Channel(hyper::client::conn::http2::SendRequest<tonic::body::Body>);

impl tower::Service<hyper::Request<tonic::body::Body>> for Channel {
    type Response = hyper::Response<Incoming>;
    type Error = hyper::Error;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>>>>;

    fn poll_ready(&mut self, task: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(task)
    }

    fn call(&mut self, request: hyper::Request<tonic::body::Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

fn path(path: &'static str) -> hyper::http::uri::PathAndQuery {
    hyper::http::uri::PathAndQuery::from_static(path)
}

#[test]
fn tonic_serves_calls_and_streams() {
    let server = On::default().server(no_time_limits());
    let running = server.start(|_| http(service_fn(answer))).expect("the server starts");
    with_grpc(&running, async |mut grpc| {
        for len in [0, 5, 100_000] {
            let message = Bytes::from(ringserve_tests::pattern(len));
            grpc.ready().await.unwrap();
            let request = tonic::Request::new(message.clone());
            let answer = grpc.unary(request, path("/test/Echo"), AsTheyAre).await.unwrap();
            assert!(answer.into_inner() == message, "{len} bytes");
        }
        grpc.ready().await.unwrap();
        let request = tonic::Request::new(Bytes::from_static(b"hello"));
        let status = grpc.unary(request, path("/test/None"), AsTheyAre).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::NotFound, "no such method"));
        grpc.ready().await.unwrap();
        let sent: Vec<Bytes> = (0..200).map(|n| Bytes::from(ringserve_tests::pattern(n * 100))).collect();
        let request = tonic::Request::new(tokio_stream::iter(sent.clone()));
        let answers = grpc.streaming(request, path("/test/Stream"), AsTheyAre).await.unwrap().into_inner();
        let back: Vec<Bytes> = answers.map(Result::unwrap).collect().await;
        assert!(back == sent);
    });
    ringserve_tests::finish(running);
}
