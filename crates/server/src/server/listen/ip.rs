//! TCP listeners, and the check that no other process has the port.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use ringserve_base::clock::Deadline;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::error::Error;

/// The time for which a port may stay taken by a process that was just killed, whose ring the
/// kernel takes apart in the background: with 1000 connections 8 ms were seen, and more than 250 ms
/// on two CPUs with a load of 14.
pub(super) const RETRY_FOR: Duration = Duration::from_secs(1);
pub(super) const RETRY_EVERY: Duration = Duration::from_millis(10);

/// `SO_REUSEPORT` lets a second server bind the same port without a word and take half of the
/// connections. A bind without it fails if a process listens there.
pub(super) fn refuse_second_instance(addr: SocketAddr, v6_only: bool) -> Result<(), Error> {
    let deadline = Deadline::within(RETRY_FOR);
    loop {
        let bound = stream_socket(addr, v6_only).and_then(|socket| {
            socket.bind(&SockAddr::from(addr))?;
            // Two sockets that do not listen may share an address with SO_REUSEADDR: only listening
            // tells.
            socket.listen(1)
        });
        match bound {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                return Err(Error::Listen { addr: addr.into(), error });
            }
            Err(_) if deadline.pauses(RETRY_EVERY) => {}
            Err(_) => return Err(Error::AddressInUse { addr: addr.into(), holder: holder_of(addr) }),
        }
    }
}

/// Names a call that failed, and where it is one that nothing but a sandbox refuses, how to allow
/// it.
fn refused(call: &str, error: io::Error) -> io::Error {
    let name = call.split('(').next().unwrap_or(call);
    let hint = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported => {
            format!("; most likely a seccomp profile or another sandbox refuses it: allow {name} in it")
        }
        _ => String::new(),
    };
    io::Error::new(error.kind(), format!("{call} failed: {error}{hint}"))
}

fn stream_socket(addr: SocketAddr, v6_only: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))
        .map_err(|error| refused("socket", error))?;
    // Connections of an earlier run in TIME_WAIT must not keep the port.
    let refused_option = |option: &'static str| move |error| refused(option, error);
    socket.set_reuse_address(true).map_err(refused_option("setsockopt(SOL_SOCKET, SO_REUSEADDR)"))?;
    if addr.is_ipv6() {
        socket.set_only_v6(v6_only).map_err(refused_option("setsockopt(IPPROTO_IPV6, IPV6_V6ONLY)"))?;
    }
    Ok(socket)
}

pub(super) fn bind(addr: SocketAddr, v6_only: bool) -> io::Result<Socket> {
    let socket = stream_socket(addr, v6_only)?;
    let refused = |error| refused("setsockopt(SOL_SOCKET, SO_REUSEPORT)", error);
    socket.set_reuse_port(true).map_err(refused)?;
    socket.bind(&SockAddr::from(addr))?;
    Ok(socket)
}

pub(super) fn local_addr(socket: &Socket) -> io::Result<SocketAddr> {
    let addr = socket.local_addr()?;
    addr.as_socket().ok_or_else(|| io::Error::other("the listener has no IP address"))
}

/// The process that listens on a port, as "process 123 (name)", by way of /proc. Best effort: other
/// users' processes are seen only by root.
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
            return pid.parse().ok().map(process_name);
        }
    }
    None
}

/// As `process 123 (name)`.
pub(super) fn process_name(pid: u32) -> String {
    let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("process {pid} ({})", command.trim())
}
