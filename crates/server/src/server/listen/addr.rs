//! The addresses on which a server listens.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::mem;
use std::net::ToSocketAddrs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;

use ringserve_admission::Admission;
use ringserve_admission::proxy_protocol::ProxyProtocol;
use ringserve_core::Address;

use super::adopted::Adopted;
use super::tls::TlsLayer;
use super::transport::MakeTransport;
use super::websocket::WebSocketLayer;

/// Listeners at most: beyond, something is wrong with the list.
const LISTENERS_MAX: usize = 1024;

/// One place to listen at.
#[derive(Debug)]
pub(crate) struct Bind {
    pub(crate) addr: Address,
    /// The socket that listens there already; `None` if one is to be made.
    pub(crate) adopted: Option<Adopted>,
    /// Its connections begin with a PROXY header.
    pub(crate) proxy: Option<ProxyProtocol>,
    /// The layer between socket and framing of its connections.
    pub(crate) transport: Option<MakeTransport>,
    /// Whom it lets in, if it has that apart from its service.
    pub(crate) admission: Option<Arc<Admission>>,
    /// Neither TLS nor a layer of the program lies there. WebSocket may.
    pub(crate) is_plain: bool,
    /// The TLS that the layer is made from, if it is TLS.
    pub(crate) tls: TlsLayer,
    /// The WebSocket layer above both, if there is one.
    pub(crate) websocket: WebSocketLayer,
}

impl Bind {
    pub(super) fn new(addr: Address) -> Bind {
        Bind {
            addr,
            adopted: None,
            proxy: None,
            transport: None,
            admission: None,
            is_plain: true,
            tls: TlsLayer::default(),
            websocket: WebSocketLayer::default(),
        }
    }
}

/// The addresses that the program asked for, in order.
#[derive(Debug, Default)]
pub(crate) struct Binds {
    binds: Vec<Bind>,
    /// The first one that cannot be resolved, or cannot be adopted.
    failed: Option<io::Error>,
    /// Settings of all of them.
    proxy: Option<ProxyProtocol>,
    transport: Option<MakeTransport>,
    admission: Option<Arc<Admission>>,
    tls: TlsLayer,
    websocket: WebSocketLayer,
}

impl Binds {
    pub(crate) fn ip(mut self, addr: impl ToSocketAddrs + fmt::Debug) -> Binds {
        match addr.to_socket_addrs() {
            Ok(found) => {
                let before = self.binds.len();
                for addr in found.map(Address::Ip) {
                    // A name may resolve to an address twice. Port 0 is another port each time.
                    if is_any_port(&addr) || self.binds[before..].iter().all(|bind| bind.addr != addr) {
                        self.binds.push(Bind::new(addr));
                    }
                }
                if self.binds.len() == before {
                    self.fail(io::Error::new(
                        io::ErrorKind::InvalidInput,
                        format!("{addr:?} has no address"),
                    ));
                }
            }
            Err(error) => self.fail(unusable(&addr, &error)),
        }
        self
    }

    pub(crate) fn unix(mut self, path: impl Into<PathBuf>) -> Binds {
        self.binds.push(Bind::new(Address::unix(path.into().into_os_string().into_vec())));
        self
    }

    pub(crate) fn adopted(mut self, socket: OwnedFd) -> Binds {
        match Adopted::look_at(socket) {
            Ok((addr, adopted)) => self.binds.push(Bind { adopted: Some(adopted), ..Bind::new(addr) }),
            Err(error) => self.fail(error),
        }
        self
    }

    /// Appends the addresses of another list.
    pub(crate) fn and(mut self, mut more: Binds) -> Binds {
        self.binds = self.each();
        self.binds.extend(more.each());
        self.failed = self.failed.or(more.failed);
        self
    }

    /// All of them expect proxies.
    pub(crate) fn proxy_protocol(mut self, proxy: ProxyProtocol) -> Binds {
        self.proxy = Some(proxy);
        self
    }

    /// All of them have a transport.
    pub(crate) fn transport(mut self, make: MakeTransport) -> Binds {
        self.transport = Some(make);
        self
    }

    /// All of them let in whom this says.
    pub(crate) fn admission(mut self, admission: Admission) -> Binds {
        self.admission = Some(Arc::new(admission));
        self
    }

    /// All of them have TLS.
    #[cfg(feature = "tls")]
    pub(crate) fn tls(mut self, tls: ringserve_tls::TlsListener) -> Binds {
        self.tls = TlsLayer::of(tls);
        self
    }

    /// All of them speak WebSocket.
    #[cfg(feature = "websocket")]
    pub(crate) fn websocket(mut self, options: ringserve_websocket::WebSocketOptions) -> Binds {
        self.websocket = WebSocketLayer::of(options);
        self
    }

    /// Each with what holds for all.
    fn each(&mut self) -> Vec<Bind> {
        let (proxy, transport) = (self.proxy.take(), self.transport.take());
        let admission = self.admission.take();
        let (tls, websocket) = (mem::take(&mut self.tls), mem::take(&mut self.websocket));
        let mut binds = mem::take(&mut self.binds);
        for bind in &mut binds {
            bind.proxy = bind.proxy.take().or_else(|| proxy.clone());
            bind.transport = bind.transport.take().or_else(|| transport.clone());
            bind.admission = bind.admission.take().or_else(|| admission.clone());
            bind.tls = mem::take(&mut bind.tls).or(&tls);
            bind.websocket = mem::take(&mut bind.websocket).or(&websocket);
        }
        binds
    }

    /// The first address, before anything is checked.
    pub(crate) fn first(&self) -> Option<&Address> {
        self.binds.first().map(|bind| &bind.addr)
    }

    fn fail(&mut self, error: io::Error) {
        self.failed.get_or_insert(error);
    }

    /// All of them, if each can be resolved or adopted.
    pub(crate) fn all(mut self) -> io::Result<Vec<Bind>> {
        let binds = self.each();
        self.failed.map_or(Ok(binds), Err)
    }
}

/// The error of an address that is none, or that nothing is found for: with the address as it was
/// written, and what to write.
fn unusable(addr: &impl fmt::Debug, error: &io::Error) -> io::Error {
    let said = format!("{addr:?}");
    let text = if said.starts_with("\"unix:") || said.starts_with("\"/") {
        format!(
            "{said} is no address of TCP; a Unix socket is reached by Server::bind_unix, Server::listen_unix or listen::unix"
        )
    } else if error.kind() == io::ErrorKind::InvalidInput {
        format!(
            "{said} is no address ({error}); write HOST:PORT, such as \"127.0.0.1:7000\" or \"[::1]:7000\", with port 0 for a \
             free one"
        )
    } else {
        format!(
            "{said} is not found: {error}; write a name or an address of this machine, or 0.0.0.0 or [::] for all that it has"
        )
    };
    io::Error::new(error.kind(), text)
}

/// Settings of a single address.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Claim<'a> {
    Addr(&'a Address),
    /// By its inode. Several sockets may have one address.
    Socket(u64),
}

/// Checks the list of all places of a server: none comes twice, and proxies are expected as they
/// can be. Each has the service that it leads to, if there are several.
pub(crate) fn check<'a>(binds: impl Iterator<Item = (&'a Bind, Option<&'a str>)>) -> io::Result<()> {
    let wrong = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    let mut claimed = HashMap::new();
    for (count, (bind, service)) in binds.enumerate() {
        let addr = &bind.addr;
        if count == LISTENERS_MAX {
            return wrong(format!("there are more of them than {LISTENERS_MAX}, which is the most"));
        }
        if let Some(proxy) = &bind.proxy {
            proxy.check(addr)?;
        }
        if is_any_port(addr) {
            continue;
        }
        let claim = bind.adopted.as_ref().map_or(Claim::Addr(addr), |adopted| Claim::Socket(adopted.inode));
        match (claimed.insert(claim, service), service) {
            (None, _) => {}
            (Some(Some(first)), Some(second)) if first != second => {
                return wrong(format!("{addr} is given twice: to the service {first} and to {second}"));
            }
            _ => return wrong(format!("{addr} is given twice")),
        }
    }
    Ok(())
}

fn is_any_port(addr: &Address) -> bool {
    addr.as_ip().is_some_and(|addr| addr.port() == 0)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn an_address_given_twice_is_named_and_free_ports_are_not() {
        let check = |binds: Binds, services: [Option<&'static str>; 3]| {
            let binds = binds.all().unwrap();
            super::check(binds.iter().zip(services)).map_err(|error| error.to_string())
        };
        let twice = check(Binds::default().ip("127.0.0.1:7").unix("a").ip("127.0.0.1:7"), [None; 3]);
        assert_eq!(twice.unwrap_err(), "127.0.0.1:7 is given twice");
        let twice = check(Binds::default().unix("a").unix("a"), [None; 3]);
        assert_eq!(twice.unwrap_err(), "unix:a is given twice");
        let twice = || Binds::default().ip("127.0.0.1:7").and(Binds::default().unix("b").ip("127.0.0.1:7"));
        let claimed = check(twice(), [Some("web"), Some("admin"), Some("admin")]);
        assert_eq!(claimed.unwrap_err(), "127.0.0.1:7 is given twice: to the service web and to admin");
        assert_eq!(check(twice(), [Some("web"); 3]).unwrap_err(), "127.0.0.1:7 is given twice");
        assert_eq!(check(Binds::default().ip("127.0.0.1:0").ip("127.0.0.1:0"), [None; 3]), Ok(()));
        let adopted = |binds: Binds, socket: &TcpListener| binds.adopted(socket.try_clone().unwrap().into());
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = socket.local_addr().unwrap();
        let twice = adopted(adopted(Binds::default(), &socket), &socket);
        let claimed = check(twice, [Some("web"), Some("admin"), None]);
        assert_eq!(claimed.unwrap_err(), format!("{addr} is given twice: to the service web and to admin"));
        let none = Binds::default().ip(&[][..]).all().unwrap_err();
        assert!(none.to_string().ends_with("[] has no address"), "{none}");
    }
}
