//! Where a server is told to listen.

use std::collections::HashMap;
use std::io;
use std::net::ToSocketAddrs;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use ringserve_core::Address;

/// Listeners at most: beyond, something is wrong with the list.
const LISTENERS_MAX: usize = 1024;

/// What the program asked for, in its order.
#[derive(Debug, Default)]
pub(crate) struct Binds {
    addrs: Vec<Address>,
    /// The first one that cannot be resolved.
    failed: Option<io::Error>,
}

impl Binds {
    pub(crate) fn ip(mut self, addr: impl ToSocketAddrs) -> Binds {
        match addr.to_socket_addrs() {
            Ok(found) => {
                let before = self.addrs.len();
                for addr in found.map(Address::Ip) {
                    // A name may resolve to an address twice. Port 0 is another port each time.
                    if !self.addrs[before..].contains(&addr) || is_any_port(&addr) {
                        self.addrs.push(addr);
                    }
                }
                if self.addrs.len() == before {
                    self.fail(io::Error::new(io::ErrorKind::InvalidInput, "it resolves to no address"));
                }
            }
            Err(error) => self.fail(error),
        }
        self
    }

    pub(crate) fn unix(mut self, path: impl Into<PathBuf>) -> Binds {
        self.addrs.push(Address::unix(path.into().into_os_string().into_vec()));
        self
    }

    /// Those of another list behind these.
    pub(crate) fn and(mut self, more: Binds) -> Binds {
        self.addrs.extend(more.addrs);
        self.failed = self.failed.or(more.failed);
        self
    }

    fn fail(&mut self, error: io::Error) {
        self.failed.get_or_insert(error);
    }

    /// All of them, if each can be resolved.
    pub(crate) fn all(self) -> io::Result<Vec<Address>> {
        self.failed.map_or(Ok(self.addrs), Err)
    }
}

/// Checks the list of all addresses of a server: none comes twice. Each has the service that it leads to, if there are several.
pub(crate) fn check<'a>(addrs: impl Iterator<Item = (&'a Address, Option<&'a str>)>) -> io::Result<()> {
    let wrong = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    let mut claimed = HashMap::new();
    for (count, (addr, service)) in addrs.enumerate() {
        if count == LISTENERS_MAX {
            return wrong(format!("there are more of them than {LISTENERS_MAX}, which is the most"));
        }
        if is_any_port(addr) {
            continue;
        }
        match (claimed.insert(addr, service), service) {
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
    use super::*;

    #[test]
    fn an_address_given_twice_is_named_and_free_ports_are_not() {
        let check = |binds: Binds, services: [Option<&'static str>; 3]| {
            let addrs = binds.all().unwrap();
            super::check(addrs.iter().zip(services)).map_err(|error| error.to_string())
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
        let none = Binds::default().ip(&[][..]).all().unwrap_err();
        assert!(none.to_string().ends_with("it resolves to no address"), "{none}");
    }
}
