//! HTTP clients: bytes and answers for HTTP/1.1, hyper's for HTTP/2.

use std::net::SocketAddr;

use http_body_util::combinators::BoxBody;
use hyper::body::Bytes;
use hyper_util::rt::{TokioExecutor, TokioIo};

use crate::{Client, SOON};

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

/// Sends HTTP/2 requests.
pub type Sender = hyper::client::conn::http2::SendRequest<Bodies>;

/// Runs a hyper client on a tokio runtime.
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

/// HTTP/2 frames, by hand.
pub mod frames {
    pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    pub const SETTINGS: &[u8] = b"\0\0\0\x04\0\0\0\0\0";
    /// SETTINGS with no window for streams, and with a window of 1 byte.
    pub const CLOSED: &[u8] = b"\0\0\x06\x04\0\0\0\0\0\0\x04\0\0\0\0";
    pub const ONE_BYTE: &[u8] = b"\0\0\x06\x04\0\0\0\0\0\0\x04\0\0\0\x01";
    pub const PING: &[u8] = b"\0\0\x08\x06\0\0\0\0\0pingpong";
    pub const SETTINGS_ACK: &[u8] = b"\0\0\0\x04\x01\0\0\0\0";

    pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let len = (payload.len() as u32).to_be_bytes();
        [&len[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    /// HEADERS of a request for `path`; with END_STREAM if no body follows.
    pub fn request(stream: u32, method_get: bool, path: &str) -> Vec<u8> {
        let method = if method_get { 0x82 } else { 0x83 };
        let head = [&[method, 0x86, 0x41, 1, b'x', 0x04, path.len() as u8], path.as_bytes()].concat();
        frame(1, if method_get { 5 } else { 4 }, stream, &head)
    }

    /// The next frame of a server: kind, flags, stream, payload.
    pub fn next(client: &mut crate::Client) -> (u8, u8, u32, Vec<u8>) {
        let mut frame = client.read(9);
        let len = u32::from_be_bytes([0, frame[0], frame[1], frame[2]]) as usize;
        frame.extend(client.read(len));
        split(&frame).remove(0)
    }

    /// Splits a server's bytes into frames: kind, flags, stream, payload.
    pub fn split(mut bytes: &[u8]) -> Vec<(u8, u8, u32, Vec<u8>)> {
        let mut frames = Vec::new();
        while bytes.len() >= 9 {
            let len = u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]) as usize;
            let stream = u32::from_be_bytes(bytes[5..9].try_into().unwrap());
            frames.push((bytes[3], bytes[4], stream, bytes[9..9 + len].to_vec()));
            bytes = &bytes[9 + len..];
        }
        frames
    }
}
