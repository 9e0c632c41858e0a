//! Whole servers by seed, in virtual time: with several shards, many connections, and what a
//! network does to them.

mod keys;
mod model;
mod protocol;
mod pubsub;
mod replies;
mod shards;

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use clap::Parser;
use foldhash::SharedSeed;
use ringserve::testing::{ClientStream, Net, Sim, SimServer};

use super::*;

const ADDR: &str = "10.0.0.1:6379";
const SECOND: Duration = Duration::from_secs(1);

/// The Unix time at which shards start: within a millisecond, as it is for most.
const UNIX_START: Duration = Duration::from_micros(1_000_000_000_000_900);

/// One that these two numbers decide.
pub fn keyer_of(seed: u64, seeds: u64) -> Keyer {
    Keyer::with_seed(seed, Box::leak(Box::new(SharedSeed::from_u64(seeds))))
}

/// A server on one to four shards. Each seed deals the keys out in another way.
fn starts(sim: &Sim, args: &[&str]) -> SimServer {
    let args = Args::parse_from([&["kv"], args].concat());
    let keyer = keyer_of(sim.random(), sim.random());
    let server = args.server(ADDR.parse().unwrap()).shards(1 + sim.seed() as usize % 4);
    sim.start(server, service(keyer, args.request_bytes_max as usize, REQUESTS_MAX, |age| UNIX_START + age))
        .unwrap()
}

/// A client of the protocol.
struct Redis(ClientStream);

impl Redis {
    async fn connect(net: &Net, addr: SocketAddr) -> io::Result<Redis> {
        Ok(Redis(net.connect(addr).await?))
    }

    /// A reply: `+OK`, `-ERR ...`, `:7`, `"text"`, `nil`, or `[` replies `]`.
    fn reply(&mut self) -> Pin<Box<dyn Future<Output = io::Result<String>> + '_>> {
        Box::pin(async {
            let line = self.0.line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            Ok(match line.split_at_checked(1).unwrap_or_else(|| panic!("an empty line")) {
                ("$", "-1") | ("_", "") => "nil".to_owned(),
                ("$" | "=", len) => {
                    let len: usize = len.parse().unwrap_or_else(|_| panic!("{line}"));
                    let bytes = self.0.exactly(len + 2).await?;
                    let text = bytes.strip_suffix(b"\r\n").unwrap_or_else(|| panic!("{len} bytes, and more"));
                    format!("\"{}\"", String::from_utf8_lossy(text))
                }
                ("*", "-1") => "nil".to_owned(),
                (kind @ ("*" | "%" | "~" | ">"), count) => {
                    let count: usize = count.parse().unwrap_or_else(|_| panic!("{line}"));
                    let mut elements = Vec::new();
                    for _ in 0..if kind == "%" { 2 * count } else { count } {
                        elements.push(self.reply().await?);
                    }
                    format!("[{}]", elements.join(" "))
                }
                ("+" | "-" | ":", _) => line,
                _ => panic!("no reply: {line}"),
            })
        })
    }

    async fn ask(&mut self, line: &str) -> io::Result<String> {
        self.0.send(format!("{line}\r\n")).await?;
        self.reply().await
    }

    async fn check(&mut self, cases: &[(&str, &str)]) -> io::Result<()> {
        for (line, expected) in cases {
            assert_eq!(self.ask(line).await?, *expected, "{line}");
        }
        Ok(())
    }
}

/// A request as an array of strings.
pub fn request(words: &[impl AsRef<[u8]>]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", words.len()).into_bytes();
    for word in words.iter().map(AsRef::as_ref) {
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
    out
}

/// A request as a line.
fn line(words: &[String]) -> Vec<u8> {
    let quoted = |word: &String| {
        if !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b":-*".contains(&byte))
        {
            return word.clone();
        }
        format!("\"{}\"", word.bytes().fold(String::new(), |text, byte| text + &format!("\\x{byte:02x}")))
    };
    (words.iter().map(quoted).collect::<Vec<_>>().join(" ") + "\r\n").into_bytes()
}
