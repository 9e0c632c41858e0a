//! The work of `cores`, and the servers that do it.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;

use crate::generator::Pace;
use crate::steps::{REPLY_MAX, Shape, expect_reply};
use crate::wire::{Exchange, Layer};

/// The program that speaks the Redis protocol.
pub(super) const KV: &str = "example-kv";

/// A piece of work.
pub(crate) struct Work {
    pub(crate) name: &'static str,
    pub(super) shape: Shape,
    pub(super) pace: Pace,
    pub(super) servers: &'static [Server],
}

/// A server that does the work.
pub(super) struct Server {
    pub(super) name: &'static str,
    pub(super) starts: Starts,
}

impl Server {
    /// Whether its program is in that directory.
    pub(super) fn is_there(&self, programs: &Path) -> bool {
        match self.starts {
            Starts::Own(_) => true,
            Starts::Rival(_) => programs.join(self.name).is_file(),
            Starts::Kv(_) => programs.join(KV).is_file(),
        }
    }
}

/// The way to start it.
#[derive(Clone, Copy)]
pub(super) enum Starts {
    /// A server of this program.
    Own(&'static str),
    /// A program of that name, which echoes raw bytes or lines.
    Rival(&'static str),
    /// [`KV`] with that driver.
    Kv(&'static str),
}

/// All pieces of work. Only rivals that use every CPU by themselves take part.
pub(crate) const WORKS: &[Work] = &[
    Work { name: "echo", shape: echoed(1, false), pace: Pace::Closed, servers: RAW },
    Work {
        name: "lines",
        shape: echoed(16, true),
        pace: Pace::Closed,
        servers: &[
            Server { name: "ringserve", starts: Starts::Own("ringserve-lines") },
            Server { name: "ringserve-epoll", starts: Starts::Own("ringserve-epoll-lines") },
            Server { name: "tokio-multi", starts: Starts::Rival("lines") },
            Server { name: "go-net", starts: Starts::Rival("lines") },
        ],
    },
    Work {
        name: "kv",
        shape: asked(&GET),
        pace: Pace::Closed,
        servers: &[
            Server { name: "ringserve", starts: Starts::Kv("io_uring") },
            Server { name: "ringserve-epoll", starts: Starts::Kv("epoll") },
        ],
    },
    Work {
        name: "http",
        shape: asked(&HELLO),
        pace: Pace::Closed,
        servers: &[
            Server { name: "ringserve", starts: Starts::Own("ringserve-http") },
            Server { name: "ringserve-epoll", starts: Starts::Own("ringserve-epoll-http") },
            Server { name: "tokio-multi", starts: Starts::Own("tokio-http-multi") },
        ],
    },
    Work { name: "accepts", shape: echoed(1, false), pace: Pace::Churn, servers: RAW },
];

const RAW: &[Server] = &[
    Server { name: "ringserve", starts: Starts::Own("ringserve") },
    Server { name: "ringserve-epoll", starts: Starts::Own("ringserve-epoll") },
    Server { name: "tokio-multi", starts: Starts::Rival("raw") },
    Server { name: "go-net", starts: Starts::Rival("raw") },
];

const fn echoed(pipeline: usize, lines: bool) -> Shape {
    Shape { bytes: 64, pipeline, lines, layer: Layer::Plain }
}

const fn asked(exchange: &'static Exchange) -> Shape {
    Shape { bytes: exchange.request.len(), pipeline: 1, lines: false, layer: Layer::Exchange(exchange) }
}

/// Each connection asks for another key, so that keys lie on all shards.
static GET: Exchange = Exchange {
    request: b"*2\r\n$3\r\nGET\r\n$12\r\nkey:00000000\r\n",
    number_at: Some(22),
    reply: b"$64\r\nvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvvv\r\n",
};

/// The answer contains the time.
static HELLO: Exchange = Exchange {
    request: b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
    number_at: None,
    reply: b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\ndate: \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\r\n\r\nhello\n",
};

/// Sets the keys for which this number of `connections` asks.
pub(super) fn fill_kv(address: SocketAddr, connections: usize) -> io::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(REPLY_MAX))?;
    let value = "v".repeat(64);
    let mut reply = Vec::new();
    for number in 0..connections {
        write!(stream, "*3\r\n$3\r\nSET\r\n$12\r\nkey:{number:08}\r\n$64\r\n{value}\r\n")?;
        expect_reply(&mut stream, b"+OK\r\n", &mut reply)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{GET, HELLO, WORKS};

    #[test]
    fn the_number_of_a_connection_is_in_its_key() {
        let at = GET.number_at.unwrap_or_default();
        assert_eq!(&GET.request[at - 4..at + 10], b"key:00000000\r\n");
        assert_eq!(GET.reply.len(), 5 + 64 + 2);
    }

    #[test]
    fn the_answer_of_http_has_room_for_a_date() {
        let zeros = HELLO.reply.iter().filter(|byte| **byte == 0).count();
        assert_eq!(zeros, "Fri, 27 Nov 2026 20:09:18 GMT".len());
    }

    #[test]
    fn names_are_unique() {
        for work in WORKS {
            let names: std::collections::BTreeSet<_> =
                work.servers.iter().map(|server| server.name).collect();
            assert_eq!(names.len(), work.servers.len());
        }
    }
}
