//! Load of peers on a server of the drill, until the drill is over.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::causes::Cause;

/// Connections that arrive at once.
const BURST: usize = 200;

/// More connections than the table, or the descriptors, have room for.
const CROWD: usize = 200;

/// Connections that the small table of the firewall cannot hold.
pub const TRACKED_MAX: usize = 64;

/// Pause between two rounds of repeated load.
const PAUSE: Duration = Duration::from_millis(100);

/// Time until peers are replaced by others: sooner than a limit of the server ends them.
const RENEWED: Duration = Duration::from_secs(20);

/// Peers at once that do not read. Each stays for seconds longer than the server waits for it.
const READERS: usize = 32;

/// Time limit of each connect and each call.
const SOON: Duration = Duration::from_secs(5);

/// Runs until `stop` is set. Errors of connections are part of the load, and no failure.
pub fn load(cause: Cause, addr: SocketAddr, stop: &AtomicBool) {
    let goes_on = || !stop.load(Ordering::Relaxed);
    let rest = |time| {
        let begun = Instant::now();
        while goes_on() && begun.elapsed() < time {
            thread::sleep(PAUSE);
        }
    };
    match cause {
        Cause::Backlog => {
            while goes_on() {
                let _burst = crowd(addr, BURST);
                rest(PAUSE);
            }
        }
        Cause::Table | Cause::Descriptors => {
            // Connections that find no room wait in the accept queue.
            let mut _before = Vec::new();
            while goes_on() {
                _before = crowd(addr, CROWD);
                rest(RENEWED);
            }
        }
        Cause::Conntrack => {
            let _tracked = crowd(addr, 2 * TRACKED_MAX);
            rest(Duration::MAX);
        }
        Cause::Lock => {
            let _peer = asks(addr, b"L\n");
            rest(Duration::MAX);
        }
        Cause::Cpu => {
            // One call after another, as many as there is time for.
            let _peer = asks(addr, &b"C\n".repeat(2000));
            rest(Duration::MAX);
        }
        Cause::Slow => {
            // Further calls queue after the first, more than are received for one that waits.
            let mut _before = None;
            while goes_on() {
                let peer = asks(addr, &b"S\n".repeat(50_000));
                rest(RENEWED);
                _before = peer;
            }
        }
        Cause::Reader => {
            let mut peers = VecDeque::new();
            while goes_on() {
                // A peer that was reset is replaced by another.
                peers.extend(asks(addr, b"F\n"));
                if peers.len() > READERS {
                    peers.pop_front();
                }
                rest(if peers.len() < READERS / 2 { PAUSE } else { 5 * PAUSE });
            }
        }
        Cause::Memory => {
            let frame = [&[b'D'; 4000][..], b"\n"].concat();
            let peers = || {
                let mut peers: Vec<_> = (0..32).filter_map(|_| connected(addr).ok()).collect();
                while goes_on() && !peers.is_empty() {
                    peers.retain_mut(|peer| peer.write_all(&frame).is_ok());
                }
            };
            thread::scope(|scope| {
                scope.spawn(peers);
                scope.spawn(peers);
            });
        }
        Cause::Quota => {
            let echoes = || {
                let Ok(mut peer) = connected(addr) else { return };
                // Much work for the server and little for the peer.
                let (asked, mut answer) = (b"e\n".repeat(2000), vec![0; 4000]);
                while goes_on() && peer.write_all(&asked).and_then(|()| peer.read_exact(&mut answer)).is_ok()
                {
                }
            };
            thread::scope(|scope| {
                scope.spawn(echoes);
                scope.spawn(echoes);
            });
        }
    }
}

/// Begins connects without waiting for them.
fn crowd(addr: SocketAddr, peers: usize) -> Vec<Socket> {
    (0..peers).filter_map(|_| begun(addr).ok()).collect()
}

/// Begins a connect without waiting for it.
fn begun(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    // The kernel completes it.
    let _in_progress = socket.connect(&addr.into());
    Ok(socket)
}

fn connected(addr: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&addr, SOON)?;
    stream.set_read_timeout(Some(SOON))?;
    stream.set_write_timeout(Some(SOON))?;
    Ok(stream)
}

/// A peer that sent a request and reads no answer.
fn asks(addr: SocketAddr, request: &[u8]) -> Option<TcpStream> {
    let mut peer = connected(addr).ok()?;
    peer.write_all(request).ok().map(|()| peer)
}
