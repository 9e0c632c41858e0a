//! An address at which a browser finds the server of each case: one address of this machine for the
//! whole drill.
//!
//! The endpoint of a case is a Unix socket, which a browser cannot reach, and may be in another
//! network. So received bytes are copied there, and answers are copied back.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Pause between two attempts to accept.
const PAUSE: Duration = Duration::from_millis(100);

/// A relay, which ends with the process.
pub struct Relay {
    addr: SocketAddr,
    to: Arc<Mutex<PathBuf>>,
}

impl Relay {
    pub fn start() -> io::Result<Relay> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let relay = Relay { addr: listener.local_addr()?, to: Arc::default() };
        let to = relay.to.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    // For example when descriptors are used up, which lasts.
                    thread::sleep(PAUSE);
                    continue;
                };
                let path = to.lock().unwrap_or_else(PoisonError::into_inner).clone();
                // Between two cases there is no endpoint, and the browser asks again.
                if let Ok(endpoint) = UnixStream::connect(path) {
                    let _ended = copy_both(stream, endpoint);
                }
            }
        });
        Ok(relay)
    }

    /// The address, with the host name that an endpoint at a Unix socket accepts.
    pub fn url(&self) -> String {
        format!("http://localhost:{}", self.addr.port())
    }

    /// Relays to the endpoint at this path from now on.
    pub fn lead_to(&self, endpoint: &Path) {
        *self.to.lock().unwrap_or_else(PoisonError::into_inner) = endpoint.to_owned();
    }
}

/// Copies both ways, on two threads, until either end is closed.
fn copy_both(browser: TcpStream, endpoint: UnixStream) -> io::Result<()> {
    let (mut from_browser, mut to_endpoint) = (browser.try_clone()?, endpoint.try_clone()?);
    thread::spawn(move || {
        let _ended = io::copy(&mut from_browser, &mut to_endpoint);
        let _closed = to_endpoint.shutdown(Shutdown::Both);
    });
    let (mut from_endpoint, mut to_browser) = (endpoint, browser);
    thread::spawn(move || {
        let _ended = io::copy(&mut from_endpoint, &mut to_browser);
        let _closed = to_browser.shutdown(Shutdown::Both);
    });
    Ok(())
}
