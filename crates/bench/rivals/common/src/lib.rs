//! Shared parts of the rivals: their arguments, their listener, and the line that reports its
//! address.
//!
//! None of it is on the data path except [`echo_lines`], for libraries that come without a codec.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use socket2::{Domain, Protocol, Socket, Type};

/// Bytes of a connection's receive buffer, the same as a receive buffer of the product.
pub const BUFFER_BYTES: usize = 16 * 1024;

/// Bytes of the longest line, without the `\n`.
pub const LINE_BYTES_MAX: usize = 64 * 1024;

/// Bytes of the longest WebSocket message, the same as the product's.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Connections that may wait to be accepted: the default of `net.core.somaxconn`, to which the
/// kernel limits it.
pub const BACKLOG: i32 = 4096;

/// Submissions that fit in the ring of a library on io_uring: one for each of 4096 connections, so
/// that a full ring is never what holds it back.
pub const RING_ENTRIES: u32 = 4096;

/// The units that a server echoes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Bytes as they arrive.
    Raw,
    /// Lines of at most [`LINE_BYTES_MAX`], each sent back with `\n`.
    Lines,
}

/// Reads `raw|lines --listen ADDRESS` and makes the process die with its parent. Ends the process
/// with status 2 when they cannot be read.
pub fn arguments() -> (Mode, SocketAddr) {
    read_arguments(&[("raw", Mode::Raw), ("lines", Mode::Lines)])
}

/// Reads the arguments of a server that echoes WebSocket messages and nothing else: `websocket
/// --listen ADDRESS`.
pub fn websocket_arguments() -> SocketAddr {
    read_arguments(&[("websocket", ())]).1
}

/// Calls that compute at once, in a server that sheds the rest: with 200 µs each the last one is
/// served after 13 ms.
pub const WORK_LIMIT: usize = 64;

/// Reads `work --listen ADDRESS --micros N`, of a server whose calls compute for `N` microseconds:
/// 200 if it is left out.
pub fn work_arguments() -> (Duration, SocketAddr) {
    let mut arguments: Vec<String> = std::env::args().collect();
    let mut micros = 200;
    if let [.., option, number] = &arguments[..]
        && option == "--micros"
        && let Ok(number) = number.parse()
    {
        micros = number;
        arguments.truncate(arguments.len() - 2);
    }
    let address = parse_arguments(arguments, &[("work", ())]).1;
    (Duration::from_micros(micros), address)
}

/// Reads one of `modes` and the address after it.
fn read_arguments<M: Copy>(modes: &[(&str, M)]) -> (M, SocketAddr) {
    parse_arguments(std::env::args().collect(), modes)
}

fn parse_arguments<M: Copy>(arguments: Vec<String>, modes: &[(&str, M)]) -> (M, SocketAddr) {
    let name = arguments.first().map_or("rival", String::as_str);
    let parsed = match &arguments[arguments.len().min(1)..] {
        [mode, option, address] if option == "--listen" => {
            let mode = modes.iter().find(|(known, _)| known == mode);
            mode.zip(address.parse().ok()).map(|((_, mode), address)| (*mode, address))
        }
        _ => None,
    };
    let Some(parsed) = parsed else {
        let known: Vec<&str> = modes.iter().map(|(known, _)| *known).collect();
        eprintln!("usage: {name} {} --listen ADDRESS:PORT", known.join("|"));
        std::process::exit(2);
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        eprintln!("{name}: cannot ask to die with the parent: {error}");
    }
    parsed
}

/// A non-blocking listener whose accepted sockets inherit `TCP_NODELAY` from it.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_tcp_nodelay(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Does the same, but blocking: a ring accepts from it without a turn through poll, and fails on a
/// non-blocking one that has nothing.
pub fn listen_blocking(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = listen(address)?;
    listener.set_nonblocking(false)?;
    Ok(listener)
}

/// Prints the address of the server.
pub fn announce(address: SocketAddr) -> io::Result<()> {
    let mut stdout = io::stdout();
    writeln!(stdout, "listening {address}")?;
    stdout.flush()
}

/// Appends each whole line of `input` to `output`, with `\n` in place of its `\n` or `\r\n`, and
/// returns how many bytes of the input that took. Fails on a line that is too long, even if its end
/// has not arrived.
#[inline]
pub fn echo_lines(input: &[u8], output: &mut Vec<u8>) -> io::Result<usize> {
    let mut taken = 0;
    for end in memchr::memchr_iter(b'\n', input) {
        let line = &input[taken..end];
        if line.len() > LINE_BYTES_MAX {
            return Err(too_long());
        }
        output.extend_from_slice(line.strip_suffix(b"\r").unwrap_or(line));
        output.push(b'\n');
        taken = end + 1;
    }
    if input.len() - taken > LINE_BYTES_MAX { Err(too_long()) } else { Ok(taken) }
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a line is longer than 64 KiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_are_echoed_and_the_rest_is_left() {
        let mut output = Vec::new();
        assert_eq!(echo_lines(b"a\n\nbc\r\nrest", &mut output).unwrap(), 7);
        assert_eq!(output, b"a\n\nbc\n");
    }

    #[test]
    fn the_longest_line_passes_and_a_longer_one_fails() {
        let mut line = vec![b'x'; LINE_BYTES_MAX];
        assert_eq!(echo_lines(&line, &mut Vec::new()).unwrap(), 0);
        line.push(b'\n');
        assert_eq!(echo_lines(&line, &mut Vec::new()).unwrap(), line.len());
        line[LINE_BYTES_MAX] = b'x';
        assert!(echo_lines(&line, &mut Vec::new()).is_err());
        line.push(b'\n');
        assert!(echo_lines(&line, &mut Vec::new()).is_err());
    }
}
