//! Unix sockets: one listener that all shards share, and its file.
//!
//! A server that finds a file decides by connecting to it: a refused connection proves that no
//! server listens there. Between that and the new file no other server may do the same, or one of
//! two servers that start at once would remove the file of the other; so both lock the directory
//! meanwhile, with `flock(2)`, which leaves nothing behind.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringserve_base::clock::Deadline;
use ringserve_base::lines::{info, warn};
use ringserve_core::Address;
use ringserve_drivers::peer_process;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::geteuid;
use socket2::{Domain, SockAddr, Socket, Type};

use super::ip::{RETRY_FOR, process_name};
use crate::error::Error;
use crate::socket_options::apply::Warnings;
use crate::socket_options::options::SocketOptions;

/// Bytes of a path, or of an abstract name, at most: `sun_path` has 108, one of which is a zero.
const NAME_BYTES_MAX: usize = 107;

/// The interval of checks. Longer than for a port: each check is a connection to the server that
/// listens.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The time for which another server may hold the directory. It does for a connection and a bind.
const LOCK_WITHIN: Duration = Duration::from_secs(2);

/// The one listener of a path, and its file. Abstract names have none.
pub(super) fn listen(
    name: &[u8],
    options: &SocketOptions,
    warnings: &mut Warnings,
) -> Result<(Socket, Option<UnixFile>), Error> {
    let path = Path::new(OsStr::from_bytes(name));
    let place = Place { name, path };
    let failed = |error| place.failed(error);
    let addr = place.address().map_err(failed)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed)?;
    options.warn_of_unix(warnings);
    let listen = || socket.listen(options.listen_backlog()).map_err(failed);
    if place.is_abstract() {
        place.bind_name(&socket, &addr)?;
        listen()?;
        return Ok((socket, None));
    }
    let _lock = place.make_room(&addr)?;
    socket.bind(&addr).map_err(|error| failed(place.explained(error)))?;
    let keeps_it = socket.try_clone().map_err(failed)?;
    let file = UnixFile::new(path, keeps_it).map_err(failed)?;
    if let Some(mode) = options.unix_mode {
        // No client is connected before it listens, so none gets in that may not.
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)?;
        let given = fs::symlink_metadata(path).map_err(failed)?.mode() & 0o777;
        warnings.unix_mode(mode, given);
    }
    listen()?;
    Ok((socket, Some(file)))
}

/// A path or an abstract name to listen on.
struct Place<'a> {
    /// As [`Address::Unix`] has it.
    name: &'a [u8],
    path: &'a Path,
}

/// The owner of a socket file.
enum Found {
    Free,
    Holder(Option<String>),
}

impl Place<'_> {
    fn addr(&self) -> Address {
        Address::Unix(self.name.into())
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::Listen { addr: self.addr(), error }
    }

    fn in_use(&self, holder: Option<String>) -> Error {
        Error::AddressInUse { addr: self.addr(), holder }
    }

    fn is_abstract(&self) -> bool {
        self.name.first() == Some(&0)
    }

    fn address(&self) -> io::Result<SockAddr> {
        let (what, name) = match self.name.split_first() {
            Some((0, name)) => ("name", name),
            _ => ("path", self.name),
        };
        let wrong = |text| Err(io::Error::new(ErrorKind::InvalidInput, text));
        if name.is_empty() {
            return wrong(format!("the {what} is empty"));
        }
        if name.len() > NAME_BYTES_MAX {
            let hint = if what == "path" { "; a relative path may be shorter" } else { "" };
            return wrong(format!(
                "the {what} has {} bytes and a Unix socket's has {NAME_BYTES_MAX} at most{hint}",
                name.len()
            ));
        }
        if name.contains(&0) {
            return wrong(format!("the {what} has a zero byte in it"));
        }
        SockAddr::unix(OsStr::from_bytes(self.name))
    }

    /// Binds an abstract name, which is gone with its last socket.
    fn bind_name(&self, socket: &Socket, addr: &SockAddr) -> Result<(), Error> {
        let deadline = Deadline::within(RETRY_FOR);
        loop {
            match socket.bind(addr) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() != ErrorKind::AddrInUse => return Err(self.failed(error)),
                Err(_) if deadline.pauses(LOOK_EVERY) => {}
                Err(_) => {
                    let holder = match who_is_at(addr) {
                        Ok(Found::Holder(holder)) => holder,
                        _ => None,
                    };
                    return Err(self.in_use(holder));
                }
            }
        }
    }

    /// Removes the file of a server that is gone, and nothing else.
    ///
    /// Returns the lock of the directory under which the path is free. It is not held while a
    /// server that listens is given time to end: starts at other paths would wait for that.
    fn make_room(&self, addr: &SockAddr) -> Result<Option<File>, Error> {
        let deadline = Deadline::within(RETRY_FOR);
        loop {
            let lock = lock(directory(self.path));
            match self.holder_of_file(addr)? {
                Found::Free => return Ok(lock),
                Found::Holder(holder) => {
                    drop(lock);
                    if !deadline.pauses(LOOK_EVERY) {
                        return Err(self.in_use(holder));
                    }
                }
            }
        }
    }

    /// Removes the file if no process listens at it.
    fn holder_of_file(&self, addr: &SockAddr) -> Result<Found, Error> {
        let failed = |error| self.failed(self.explained(error));
        match fs::symlink_metadata(self.path) {
            // If its directory is not there either, the bind will say so.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Free),
            Err(error) => return Err(failed(error)),
            Ok(file) if !file.file_type().is_socket() => {
                let text = "a file that is no socket is there already; it is left alone";
                return Err(self.failed(io::Error::new(ErrorKind::AlreadyExists, text)));
            }
            Ok(_) => {}
        }
        match who_is_at(addr) {
            Ok(Found::Free) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Free),
            found => return found.map_err(failed),
        }
        match fs::remove_file(self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
            _ => info!("{} was left behind by a server that is gone, and is replaced", self.addr()),
        }
        Ok(Found::Free)
    }

    /// With what is to be done about it.
    fn explained(&self, error: io::Error) -> io::Error {
        let dir = directory(self.path).display();
        let text = match error.kind() {
            ErrorKind::NotFound => format!("{error}: there is no directory {dir}"),
            ErrorKind::NotADirectory => format!("{error}: {dir} is no directory"),
            ErrorKind::PermissionDenied => format!(
                "{error}: user {} may not make the socket in {dir}, or may not look for its owner",
                geteuid().as_raw()
            ),
            _ => return error,
        };
        io::Error::new(error.kind(), text)
    }
}

/// Asks by connecting, without waiting.
fn who_is_at(addr: &SockAddr) -> io::Result<Found> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(addr) {
        Ok(()) => {
            let pid = peer_process(&socket);
            Ok(Found::Holder(pid.map(process_name)))
        }
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::CONNREFUSED) => Ok(Found::Free),
            // Its queue is full; it is of another kind.
            Some(Errno::AGAIN | Errno::PROTOTYPE) => Ok(Found::Holder(None)),
            _ => Err(error),
        },
    }
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Keeps other servers from looking at files of the directory. Best effort: it must be readable,
/// and the file system must know locks.
fn lock(dir: &Path) -> Option<File> {
    let file = File::open(dir).ok()?;
    let deadline = Deadline::within(LOCK_WITHIN);
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(file),
            Err(Errno::WOULDBLOCK) if deadline.pauses(Duration::from_millis(1)) => {}
            Err(_) => return None,
        }
    }
}

/// The file of a Unix socket, removed when this is dropped, unless another one is in its place.
pub(crate) struct UnixFile {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// As long as it is open no other file has this number.
    _socket: Socket,
}

impl UnixFile {
    fn new(path: &Path, socket: Socket) -> io::Result<UnixFile> {
        let file = fs::symlink_metadata(path)?;
        // The current directory may be another one at the end.
        let path = std::path::absolute(path)?;
        Ok(UnixFile { path, device: file.dev(), inode: file.ino(), _socket: socket })
    }
}

impl Drop for UnixFile {
    fn drop(&mut self) {
        let _lock = lock(directory(&self.path));
        let Ok(file) = fs::symlink_metadata(&self.path) else { return };
        if (file.dev(), file.ino()) != (self.device, self.inode) {
            return;
        }
        if let Err(error) = fs::remove_file(&self.path) {
            warn!("unix:{} stays behind: {error}", self.path.display());
        }
    }
}
