//! What peers do to a server of the drill, until it is over.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use super::causes::Cause;

/// Connections that come at once.
const BURST: usize = 200;

/// More connections than the table, or the descriptors, have room for.
const CROWD: usize = 200;

/// Connections that the small table of the firewall cannot hold.
pub const TRACKED_MAX: usize = 64;

/// Between two rounds of what is done again and again.
const PAUSE: Duration = Duration::from_millis(100);

/// Within it each connect and each call has to be done.
const SOON: Duration = Duration::from_secs(5);

/// Runs until told to stop. Errors of connections are part of what is planted, and no failure.
pub fn load(cause: Cause, addr: SocketAddr, stop: &AtomicBool) {
    let goes_on = || !stop.load(Ordering::Relaxed);
    let rest = || {
        while goes_on() {
            thread::sleep(PAUSE);
        }
    };
    match cause {
        Cause::Backlog => {
            while goes_on() {
                let _burst: Vec<_> = (0..BURST).filter_map(|_| begun(addr).ok()).collect();
                thread::sleep(PAUSE);
            }
        }
        Cause::Table | Cause::Descriptors => {
            // Those that find no room wait in the accept queue.
            let _crowd: Vec<_> = (0..CROWD).filter_map(|_| begun(addr).ok()).collect();
            rest();
        }
        Cause::Conntrack => {
            let _tracked: Vec<_> = (0..2 * TRACKED_MAX).filter_map(|_| begun(addr).ok()).collect();
            rest();
        }
        Cause::Lock => {
            let _peer = asks(addr, b"L\n");
            rest();
        }
        Cause::Cpu => {
            // One call after the other, as many as there is time for.
            let _peer = asks(addr, &b"C\n".repeat(50));
            rest();
        }
        Cause::Slow => {
            // Further ones wait behind the first.
            let _peer = asks(addr, &b"S\n".repeat(50));
            rest();
        }
        Cause::Reader => {
            let mut peers = Vec::new();
            while goes_on() {
                // One that was reset is followed by another.
                if peers.len() < 16 {
                    peers.extend(asks(addr, b"F\n"));
                }
                thread::sleep(PAUSE);
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
                // Much to do for the server and little for the peer.
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

/// A connect that is not waited for.
fn begun(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    // It goes on by itself.
    let _in_progress = socket.connect(&addr.into());
    Ok(socket)
}

fn connected(addr: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&addr, SOON)?;
    stream.set_read_timeout(Some(SOON))?;
    stream.set_write_timeout(Some(SOON))?;
    Ok(stream)
}

/// A peer that asked for something and reads no answer.
fn asks(addr: SocketAddr, request: &[u8]) -> Option<TcpStream> {
    let mut peer = connected(addr).ok()?;
    peer.write_all(request).ok().map(|()| peer)
}
