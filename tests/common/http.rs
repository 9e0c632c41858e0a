//! Clients of HTTP: bytes and answers for HTTP/1.1, hyper's for HTTP/2.

use std::net::SocketAddr;

use http_body_util::combinators::BoxBody;
use hyper::body::Bytes;
use hyper_util::rt::{TokioExecutor, TokioIo};

use super::{Client, SOON};

/// Any body.
pub type Bodies = BoxBody<Bytes, hyper::Error>;

/// Reads one answer with a `content-length`.
pub fn read_answer(client: &mut Client) -> (String, Vec<u8>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.extend(client.read(1));
    }
    let head = String::from_utf8(head).unwrap();
    let len = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
    let body = client.read(len.parse().unwrap());
    (head, body)
}

/// Reads one answer in chunks.
pub fn read_chunked(client: &mut Client) -> Vec<u8> {
    let line = |client: &mut Client| {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.extend(client.read(1));
        }
        String::from_utf8(line).unwrap()
    };
    let mut chunked = false;
    loop {
        let header = line(client);
        chunked |= header == "transfer-encoding: chunked\r\n";
        if header == "\r\n" {
            break;
        }
    }
    assert!(chunked);
    let mut body = Vec::new();
    loop {
        let len = usize::from_str_radix(line(client).trim(), 16).unwrap();
        body.extend(client.read(len));
        assert_eq!(client.read(2), b"\r\n");
        if len == 0 {
            return body;
        }
    }
}

/// Sends requests of HTTP/2.
pub type Sender = hyper::client::conn::http2::SendRequest<Bodies>;

/// Runs a client of hyper's on a runtime of tokio's.
pub fn with_http2<F: Future<Output = ()>>(addr: SocketAddr, test: impl FnOnce(Sender) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(addr).await.unwrap();
        let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        tokio::time::timeout(SOON, test(sender)).await.expect("the server answers");
        tokio::time::timeout(SOON, connection).await.expect("the connection ends").unwrap().unwrap();
    });
}
