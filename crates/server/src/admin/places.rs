//! The addresses at which the endpoint listens.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

/// A place, as the program gave it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// All addresses of a name, or the one.
    Ip(Vec<SocketAddr>),
    Unix(PathBuf),
}

impl Place {
    /// Reads `127.0.0.1:9000`, `localhost:9000`, `unix:/run/admin.sock` or `unix:@admin`.
    ///
    /// # Errors
    /// A sentence with the cause and the fix.
    pub(super) fn parse(text: &str) -> Result<Place, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path.is_empty() {
                true => Err("unix: names no path: give one, such as unix:/run/admin.sock".to_owned()),
                false => Ok(Place::Unix(path.into())),
            };
        }
        if text.starts_with('/') {
            return Err(format!("{text} is no address: for a Unix socket say unix:{text}"));
        }
        let wrong = |error| {
            format!("{text:?} is no address ({error}): give one as 127.0.0.1:9000 or unix:/run/admin.sock")
        };
        match Place::of(text.to_socket_addrs().map_err(wrong)?) {
            Place::Ip(found) if found.is_empty() => Err(format!("{text} has no address")),
            place => Ok(place),
        }
    }

    /// Each address once, as the server listens: a name may resolve to an address twice.
    fn of(addrs: impl Iterator<Item = SocketAddr>) -> Place {
        let mut found = Vec::new();
        for addr in addrs {
            if !found.contains(&addr) {
                found.push(addr);
            }
        }
        Place::Ip(found)
    }

    /// Refuses addresses that other machines reach, unless they have to say a token.
    ///
    /// # Errors
    /// A sentence with the cause and the fix.
    pub(super) fn check(&self, has_token: bool) -> Result<(), String> {
        let Place::Ip(addrs) = self else { return Ok(()) };
        let open = addrs.iter().find(|addr| !addr.ip().to_canonical().is_loopback());
        match open.filter(|_| !has_token) {
            Some(addr) => Err(format!(
                "{addr} is reached by other machines, which could read everything and stop the server: listen at \
                 127.0.0.1 or unix:PATH, or give a token by Admin::token"
            )),
            None => Ok(()),
        }
    }

    /// The number of listeners at it.
    pub(super) fn listeners(&self) -> usize {
        match self {
            Place::Ip(addrs) => addrs.len(),
            Place::Unix(_) => 1,
        }
    }

    /// The addresses by which a request may call the endpoint.
    pub(super) fn ips(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let addrs = match self {
            Place::Ip(addrs) => &addrs[..],
            Place::Unix(_) => &[],
        };
        addrs.iter().map(|addr| addr.ip().to_canonical())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_users_write_them() {
        let ip = |text: &str| Place::Ip(vec![text.parse().unwrap()]);
        assert_eq!(Place::parse("127.0.0.1:9000"), Ok(ip("127.0.0.1:9000")));
        assert_eq!(Place::parse("[::1]:0"), Ok(ip("[::1]:0")));
        assert_eq!(Place::parse("unix:/run/a.sock"), Ok(Place::Unix("/run/a.sock".into())));
        assert_eq!(Place::parse("unix:@a"), Ok(Place::Unix("@a".into())));
        for (text, words) in [
            ("unix:", "names no path"),
            ("/run/a.sock", "unix:/run/a.sock"),
            ("127.0.0.1", "127.0.0.1:9000"),
            ("", "127.0.0.1:9000"),
            ("127.0.0.1:99999", "is no address"),
        ] {
            let error = Place::parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn address_that_a_name_has_twice_is_one_listener() {
        let addrs = ["127.0.0.1:9000", "[::1]:9000", "127.0.0.1:9000", "127.0.0.1:0", "127.0.0.1:0"];
        let place = Place::of(addrs.iter().map(|addr| addr.parse().unwrap()));
        assert_eq!(place.listeners(), 3, "{place:?}");
    }

    #[test]
    fn addresses_that_other_machines_reach_need_a_token() {
        for (text, is_local) in [
            ("127.0.0.1:9000", true),
            ("127.8.9.1:9000", true),
            ("[::1]:9000", true),
            ("[::ffff:127.0.0.1]:9000", true),
            ("unix:/run/a.sock", true),
            ("0.0.0.0:9000", false),
            ("[::]:9000", false),
            ("10.0.0.1:9000", false),
            ("[::ffff:10.0.0.1]:9000", false),
        ] {
            let place = Place::parse(text).unwrap();
            assert_eq!(place.check(false).is_ok(), is_local, "{text}");
            assert_eq!(place.check(true), Ok(()), "{text}");
        }
        let error = Place::parse("0.0.0.0:9000").unwrap().check(false).unwrap_err();
        assert!(error.contains("0.0.0.0:9000") && error.contains("Admin::token"), "{error}");
    }
}
