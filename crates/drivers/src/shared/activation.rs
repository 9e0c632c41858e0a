//! Listening sockets that a service manager bound and handed to this process, as systemd does
//! (`sd_listen_fds(3)`).

use std::env;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

/// The first descriptor that a service manager passes.
const FIRST: RawFd = 3;

/// More descriptors than a service manager passes: a larger number is rejected.
const MOST: RawFd = 4096;

/// The sockets that were not taken, with their names. `None` before the environment was read.
static LEFT: Mutex<Option<Vec<(String, OwnedFd)>>> = Mutex::new(None);

/// Takes the sockets with this name (`FileDescriptorName=`, by default that of the socket unit)
/// that were passed to this process, in their order. Empty if there are none, or they were taken
/// before. They are close-on-exec.
///
/// The environment (`LISTEN_PID`, `LISTEN_FDS`, `LISTEN_FDNAMES`) is read by the first call.
/// Without `LISTEN_FDNAMES` the name of each is `unknown`, as is that of a socket whose name there
/// is empty.
pub fn take_activated(name: &str) -> Vec<OwnedFd> {
    let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    let all = left.get_or_insert_with(|| {
        let text = |name| env::var(name).unwrap_or_default();
        let names = named(&text("LISTEN_PID"), &text("LISTEN_FDS"), &text("LISTEN_FDNAMES"));
        (FIRST..).zip(names).filter_map(|(fd, name)| Some((name, own(fd).ok()?))).collect()
    });
    let (found, others) = std::mem::take(all).into_iter().partition(|(of, _)| of == name);
    *all = others;
    let found: Vec<(String, OwnedFd)> = found;
    found.into_iter().map(|(_, socket)| socket).collect()
}

/// The names of the descriptors from [`FIRST`] on, if they were passed to this process.
fn named(pid: &str, fds: &str, names: &str) -> Vec<String> {
    let is_ours = pid.parse() == Ok(std::process::id());
    let count = fds.parse().ok().filter(|count| is_ours && (0..=MOST).contains(count)).unwrap_or(0);
    // An empty name keeps its position.
    let mut names = names.split(':').map(|name| if name.is_empty() { "unknown" } else { name });
    (0..count).map(|_| names.next().unwrap_or("unknown").to_owned()).collect()
}

/// Takes ownership of a descriptor, if it is open.
fn own(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: `fcntl` with these commands takes a number and changes a flag of a descriptor, or
    // fails.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    // SAFETY: as above.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFD, flags | libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and was passed to this process to own it: `LISTEN_PID` names the process.
    // This is done once for each number, since the environment is read once, under a lock.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_named_if_they_are_for_this_process() {
        let me = std::process::id().to_string();
        assert_eq!(named(&me, "3", "web:admin"), ["web", "admin", "unknown"]);
        assert_eq!(named(&me, "2", ""), ["unknown", "unknown"]);
        assert_eq!(named(&me, "3", "a::c"), ["a", "unknown", "c"]);
        for (pid, fds) in
            [("1", "1"), ("", "1"), (&*me, ""), (&*me, "-1"), (&*me, "99999999999"), (&*me, "5000")]
        {
            assert_eq!(named(pid, fds, "web"), [""; 0], "{pid} {fds}");
        }
    }
}
