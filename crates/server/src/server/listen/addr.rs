//! Where a server is told to listen.

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

    fn fail(&mut self, error: io::Error) {
        self.failed.get_or_insert(error);
    }

    /// All of them, if each can be resolved and none comes twice.
    pub(crate) fn all(self) -> io::Result<Vec<Address>> {
        let wrong = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        if let Some(error) = self.failed {
            return Err(error);
        }
        if self.addrs.len() > LISTENERS_MAX {
            return wrong(format!("there are {} of them; {LISTENERS_MAX} is the most", self.addrs.len()));
        }
        for (n, addr) in self.addrs.iter().enumerate() {
            if self.addrs[..n].contains(addr) && !is_any_port(addr) {
                return wrong(format!("{addr} is given twice"));
            }
        }
        Ok(self.addrs)
    }
}

fn is_any_port(addr: &Address) -> bool {
    addr.as_ip().is_some_and(|addr| addr.port() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_given_twice_is_named_and_free_ports_are_not() {
        let twice = Binds::default().ip("127.0.0.1:7").unix("a").ip("127.0.0.1:7").all().unwrap_err();
        assert!(twice.to_string().ends_with("127.0.0.1:7 is given twice"), "{twice}");
        let twice = Binds::default().unix("a").unix("a").all().unwrap_err();
        assert!(twice.to_string().ends_with("unix:a is given twice"), "{twice}");
        assert_eq!(Binds::default().ip("127.0.0.1:0").ip("127.0.0.1:0").all().unwrap().len(), 2);
        let none = Binds::default().ip(&[][..]).all().unwrap_err();
        assert!(none.to_string().ends_with("it resolves to no address"), "{none}");
    }
}
