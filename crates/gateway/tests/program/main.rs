//! The file of the gateway, and the program that reads it, on the real kernel.

mod files;
mod grpc;
mod running;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder of this test, which is removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ringserve-gateway-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("a file");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A backend of HTTP that answers each request with these words, for as long as the test runs.
fn backend(words: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || answers(stream, words));
        }
    });
    addr
}

fn answers(mut stream: TcpStream, words: &str) -> io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?);
    loop {
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            if lines.read_line(&mut line)? == 0 {
                return Ok(());
            }
        }
        write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{words}", words.len())?;
    }
}

/// The status and the body of an answer, on a new connection.
fn ask(addr: SocketAddr, method: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).expect("a connection");
    let fields = "host: localhost\r\nx-ringserve: 1\r\nconnection: close";
    let head = format!("{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n");
    stream.write_all(head.as_bytes()).expect("it is sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

/// A port that was free.
fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port")
}

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/gateway.toml")
}
