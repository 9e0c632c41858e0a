//! Clients of WebSocket: tungstenite, and one that writes frames by hand.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use ringserve::server::Driver;
use ringserve::{Server, ServerHandle};
use ringserve_tests::{SOON, on_epoll};
use ringserve_websocket::frame::{DecodeOutcome, Header, Opcode, put_masked};
use tungstenite::client::IntoClientRequest;
use tungstenite::protocol::{Role, WebSocketConfig};

pub type Socket = tungstenite::WebSocket<TcpStream>;

pub fn drivers() -> Vec<Driver> {
    if on_epoll() { vec![Driver::Epoll] } else { vec![Driver::IoUring, Driver::Epoll] }
}

pub fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// A server for WebSocket.
pub fn server(driver: Driver) -> Server<ringserve::framing::Raw> {
    Server::bind(any_port()).driver(driver).shards(1)
}

/// Shuts a server down whose connections all ended, or end with it.
pub fn shut_down(server: ServerHandle) {
    server.shutdown();
    let stats = server.wait().unwrap();
    assert_eq!(stats.counters.opened, stats.counters.closed);
}

pub fn tcp_to(addr: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(addr).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket.set_nodelay(true).unwrap();
    socket
}

/// A client that sends a message in one frame, whatever its size.
pub fn connect(addr: SocketAddr) -> Socket {
    connect_for(addr, format!("ws://{addr}/"))
}

pub fn connect_for(addr: SocketAddr, request: impl IntoClientRequest) -> Socket {
    tungstenite::client(request, tcp_to(addr)).unwrap().0
}

/// A client above any stream.
pub fn above<S: Read + Write>(stream: S) -> tungstenite::WebSocket<S> {
    tungstenite::client("ws://localhost/", stream).map_err(|error| error.to_string()).unwrap().0
}

/// A client that writes frames by hand.
pub struct ByHand {
    pub stream: TcpStream,
}

impl ByHand {
    pub fn connect(addr: SocketAddr) -> ByHand {
        let mut by_hand = ByHand { stream: tcp_to(addr) };
        by_hand.upgrade("/");
        by_hand
    }

    pub fn upgrade(&mut self, target: &str) {
        self.stream.write_all(request(target).as_bytes()).unwrap();
        let answer = self.head();
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    }

    /// The head of an answer of HTTP.
    pub fn head(&mut self) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.stream.read_exact(&mut byte).unwrap();
            head.extend(byte);
        }
        String::from_utf8(head).unwrap()
    }

    pub fn send(&mut self, fin: bool, opcode: Opcode, payload: &[u8]) {
        self.stream.write_all(&frame(fin, opcode, payload)).unwrap();
    }

    /// The next frame.
    pub fn recv(&mut self) -> (Opcode, Vec<u8>) {
        let mut head = Vec::new();
        loop {
            match Header::decode(&head).unwrap() {
                DecodeOutcome::Needs(_) => {
                    let mut byte = [0];
                    self.stream.read_exact(&mut byte).unwrap();
                    head.extend(byte);
                }
                DecodeOutcome::Header(header, _) => {
                    assert!(header.fin && header.rsv == 0 && header.mask.is_none());
                    let mut payload = vec![0; header.len as usize];
                    self.stream.read_exact(&mut payload).unwrap();
                    return (header.opcode, payload);
                }
            }
        }
    }

    /// The code of the close frame that comes next, after which there is FIN.
    pub fn closed_with(&mut self) -> u16 {
        let (opcode, payload) = self.recv();
        assert_eq!(opcode, Opcode::Close, "{payload:?}");
        self.ends();
        u16::from_be_bytes(*payload.first_chunk().expect("a code"))
    }

    /// Checks that FIN comes next.
    pub fn ends(&mut self) {
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"");
    }
}

pub fn request(target: &str) -> String {
    format!(
        "GET {target} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
}

pub fn frame(fin: bool, opcode: Opcode, payload: &[u8]) -> Vec<u8> {
    let mut wire = Vec::new();
    put_masked(fin, 0, opcode, payload, [0xa1, 0xb2, 0xc3, 0xd4], &mut wire);
    wire
}

/// A client without a limit on the size of messages.
pub fn unbounded(addr: SocketAddr) -> Socket {
    let mut socket = ByHand { stream: tcp_to(addr) };
    socket.upgrade("/");
    let config = WebSocketConfig::default().max_frame_size(None).max_message_size(None);
    tungstenite::WebSocket::from_raw_socket(socket.stream, Role::Client, Some(config))
}
