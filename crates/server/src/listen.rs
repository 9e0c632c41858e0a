//! Listening sockets: one for each shard and address, and the check that nobody else has the port.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::error::Error;
use crate::socket_options::SocketOptions;

/// How long a port may stay taken by a process that was just killed: with 1000 connections 8 ms were seen.
const RETRY_FOR: Duration = Duration::from_millis(250);
const RETRY_EVERY: Duration = Duration::from_millis(10);

/// For each shard its listeners, one for each address, and the addresses with their real ports.
pub(crate) fn listeners(
    addrs: &[SocketAddr],
    shards: usize,
    share_port: bool,
    options: &SocketOptions,
) -> Result<(Vec<Vec<OwnedFd>>, Vec<SocketAddr>), Error> {
    let mut by_shard: Vec<Vec<OwnedFd>> = (0..shards).map(|_| Vec::new()).collect();
    let mut local_addrs = Vec::new();
    for &addr in addrs {
        if !share_port && addr.port() != 0 {
            refuse_second_instance(addr)?;
        }
        // The first one finds a port if 0 was asked for; the others join it.
        let mut local = addr;
        for shard in &mut by_shard {
            let socket = bind(local).map_err(|error| Error::Listen { addr: local, error })?;
            options.set_on(&socket).map_err(Error::SocketOption)?;
            let backlog = i32::try_from(options.backlog).unwrap_or(i32::MAX);
            socket.listen(backlog).map_err(|error| Error::Listen { addr: local, error })?;
            local = local_addr(&socket).map_err(|error| Error::Listen { addr, error })?;
            shard.push(socket.into());
        }
        local_addrs.push(local);
    }
    Ok((by_shard, local_addrs))
}

/// `SO_REUSEPORT` lets a second server bind the same port without a word and take half of the connections. A
/// bind without it fails if anybody listens there.
fn refuse_second_instance(addr: SocketAddr) -> Result<(), Error> {
    let started = Instant::now();
    loop {
        let bound = stream_socket(addr).and_then(|socket| {
            socket.bind(&SockAddr::from(addr))?;
            // Two sockets that do not listen may share an address with SO_REUSEADDR: only listening tells.
            socket.listen(1)
        });
        match bound {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                return Err(Error::Listen { addr, error });
            }
            Err(_) if started.elapsed() < RETRY_FOR => sleep(RETRY_EVERY),
            Err(_) => return Err(Error::AddressInUse { addr, holder: holder_of(addr) }),
        }
    }
}

fn stream_socket(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    // Connections of an earlier run in TIME_WAIT must not keep the port.
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    Ok(socket)
}

fn bind(addr: SocketAddr) -> io::Result<Socket> {
    let socket = stream_socket(addr)?;
    socket.set_reuse_port(true)?;
    socket.bind(&SockAddr::from(addr))?;
    Ok(socket)
}

fn local_addr(socket: &Socket) -> io::Result<SocketAddr> {
    let addr = socket.local_addr()?;
    addr.as_socket().ok_or_else(|| io::Error::other("the listener has no IP address"))
}

/// The process that listens on a port, as "process 123 (name)", by way of /proc. Best effort: other users'
/// processes are seen only by root.
fn holder_of(addr: SocketAddr) -> Option<String> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|path| {
        let table = fs::read_to_string(path).ok()?;
        table.lines().skip(1).find_map(|line| {
            let mut fields = line.split_whitespace();
            let port = fields.nth(1)?.rsplit(':').next()?;
            let (_, state) = (fields.next()?, fields.next()?);
            let listens = state == "0A" && u16::from_str_radix(port, 16).ok()? == addr.port();
            listens.then(|| fields.nth(5).map(str::to_owned))?
        })
    })?;
    let link = format!("socket:[{inode}]");
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().filter(|name| name.parse::<u32>().is_ok()) else { continue };
        let Ok(descriptors) = fs::read_dir(process.path().join("fd")) else { continue };
        let holds = descriptors
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|target| target.to_str() == Some(&link)));
        if holds {
            let command = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("process {pid} ({})", command.trim()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn all_shards_share_the_port_the_first_one_found() {
        let (by_shard, addrs) =
            listeners(&["127.0.0.1:0".parse().unwrap()], 3, false, &SocketOptions::default()).unwrap();
        assert_eq!((by_shard.len(), by_shard[2].len(), addrs.len()), (3, 1, 1));
        assert_ne!(addrs[0].port(), 0);
    }

    #[test]
    fn a_port_that_is_taken_is_refused_with_its_holder_even_if_it_would_be_shared() {
        let (_held, addrs) =
            listeners(&["127.0.0.1:0".parse().unwrap()], 1, false, &SocketOptions::default()).unwrap();
        let error = listeners(&addrs, 1, false, &SocketOptions::default()).unwrap_err().to_string();
        let me = format!("is in use by process {}", std::process::id());
        assert!(error.contains(&me), "{error}");
        assert!(listeners(&addrs, 1, true, &SocketOptions::default()).is_ok());
    }

    #[test]
    fn a_port_held_by_another_kind_of_program_is_refused_too() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = other.local_addr().unwrap();
        assert!(matches!(
            listeners(&[addr], 1, false, &SocketOptions::default()),
            Err(Error::AddressInUse { .. })
        ));
    }
}
