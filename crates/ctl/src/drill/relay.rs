//! A place at which a browser finds the server of each case: one address of this machine for the whole drill.
//!
//! The endpoint of a case is a Unix socket, which a browser cannot ask, and may be in another network. So what comes here is
//! copied there, and what comes back is copied back.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Between two tries to accept.
const PAUSE: Duration = Duration::from_millis(100);

/// Ends with the process.
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
                    // As where descriptors are used up, which lasts.
                    thread::sleep(PAUSE);
                    continue;
                };
                let path = to.lock().unwrap_or_else(PoisonError::into_inner).clone();
                // Between two cases no endpoint is there, and the browser asks again.
                if let Ok(endpoint) = UnixStream::connect(path) {
                    let _ended = copy_both(stream, endpoint);
                }
            }
        });
        Ok(relay)
    }

    /// The address, by the name to which an endpoint at a Unix socket answers.
    pub fn url(&self) -> String {
        format!("http://localhost:{}", self.addr.port())
    }

    /// What comes from now on is for the endpoint at this path.
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
