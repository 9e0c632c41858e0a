//! Listening sockets: for each shard one for each address, and the checks that no other process
//! listens there.

use std::io;
use std::net::{IpAddr, SocketAddr};

use ringserve_core::Address;
use ringserve_drivers::Listener;

use super::addr::Bind;
use super::ip;
use super::unix::{self, UnixFile};
use crate::error::Error;
use crate::socket_options::apply::{SocketOptionWarning, Warnings};
use crate::socket_options::options::SocketOptions;

/// The addresses, warnings and files of the listeners, which a running server keeps in addition to
/// the sockets.
#[derive(Default)]
pub(crate) struct Listening {
    /// With the real ports.
    pub(crate) addrs: Vec<Address>,
    /// The IP addresses of them.
    pub(crate) ips: Vec<SocketAddr>,
    /// Which of all addresses are those of adopted sockets.
    pub(crate) adopted: Vec<bool>,
    pub(crate) warnings: Vec<SocketOptionWarning>,
    /// Removed when this is dropped.
    _files: Vec<UnixFile>,
}

impl Listening {
    pub(crate) fn new(
        addrs: Vec<Address>,
        adopted: Vec<bool>,
        warnings: Vec<SocketOptionWarning>,
        files: Vec<UnixFile>,
    ) -> Listening {
        let ips = addrs.iter().filter_map(Address::as_ip).collect();
        Listening { addrs, ips, adopted, warnings, _files: files }
    }
}

/// The settings by which listeners are made.
pub(crate) struct Listen<'a> {
    pub(crate) shards: usize,
    pub(crate) share_port: bool,
    /// The CPU of each shard, or none.
    pub(crate) cpus: &'a [usize],
}

/// One of the places at which a server listens.
pub(crate) struct ListenPlace<'a> {
    pub(crate) bind: &'a Bind,
    pub(crate) options: &'a SocketOptions,
    /// The service that is reached there, if there are several.
    pub(crate) service: Option<String>,
}

impl Listen<'_> {
    /// For each shard its listeners, in the order of the places.
    ///
    /// # Errors
    /// Nothing listens then.
    pub(crate) fn at(&self, places: &[ListenPlace<'_>]) -> Result<(Vec<Vec<Listener>>, Listening), Error> {
        let addrs: Vec<&Address> = places.iter().map(|place| &place.bind.addr).collect();
        let is_made = |place: &&ListenPlace<'_>| place.bind.adopted.is_none();
        // All are looked at before the first one listens: 127.0.0.1:7000 and 0.0.0.0:7000 do not
        // stand in each other's way.
        if !self.share_port {
            for place in places.iter().filter(is_made) {
                if let Some(addr) = place.bind.addr.as_ip().filter(|addr| addr.port() != 0) {
                    ip::refuse_second_instance(addr, is_v6_only(addr, &addrs))
                        .map_err(|error| error.of_service(place.service.as_ref()))?;
                }
            }
        }
        let mut by_shard: Vec<Vec<Listener>> = (0..self.shards).map(|_| Vec::new()).collect();
        let (mut local_addrs, mut files) = (Vec::new(), Vec::new());
        let mut warnings = Warnings::default();
        places
            .iter()
            .filter(is_made)
            .for_each(|place| place.options.warn_beforehand(!self.cpus.is_empty(), &mut warnings));
        if self.share_port && places.iter().filter(is_made).any(|place| place.bind.addr.as_ip().is_some()) {
            warnings.shared_port();
        }
        for place in places {
            let addr = &place.bind.addr;
            let failed = |error| Error::Listen { addr: addr.clone(), error };
            let local = match (&place.bind.adopted, addr) {
                (Some(adopted), _) => adopted
                    .set(place.options, addr, &mut warnings)
                    .map_err(Error::SocketOption)
                    .and_then(|()| adopted.for_shards(&mut by_shard).map_err(failed))
                    .map(|()| addr.clone()),
                (None, Address::Ip(ip)) => {
                    let v6_only = is_v6_only(*ip, &addrs);
                    self.ip(*ip, place.options, v6_only, &mut by_shard, &mut warnings).map(Address::Ip)
                }
                (None, Address::Unix(name)) => {
                    unix::listen(name, place.options, &mut warnings).and_then(|made| {
                        let (socket, file) = made;
                        files.extend(file);
                        for shard in &mut by_shard {
                            // One queue for all: there is no SO_REUSEPORT here.
                            shard.push(Listener::own(socket.try_clone().map_err(failed)?));
                        }
                        Ok(addr.clone())
                    })
                }
                _ => Err(failed(io::ErrorKind::Unsupported.into())),
            };
            local_addrs.push(local.map_err(|error| error.of_service(place.service.as_ref()))?);
        }
        let adopted = places.iter().map(|place| !is_made(&place)).collect();
        Ok((by_shard, Listening::new(local_addrs, adopted, warnings.all(), files)))
    }

    /// A listener for each shard. Returns the address with its port.
    fn ip(
        &self,
        addr: SocketAddr,
        options: &SocketOptions,
        v6_only: bool,
        by_shard: &mut [Vec<Listener>],
        warnings: &mut Warnings,
    ) -> Result<SocketAddr, Error> {
        // The first one finds a port if 0 was asked for; the others join it.
        let mut local = addr;
        for (n, shard) in by_shard.iter_mut().enumerate() {
            let failed = |error| Error::Listen { addr: local.into(), error };
            let socket = ip::bind(local, v6_only).map_err(failed)?;
            let cpu = self.cpus.get(n).copied();
            options.set_on_tcp(&socket, cpu, warnings).map_err(Error::SocketOption)?;
            socket.listen(options.listen_backlog()).map_err(failed)?;
            local = ip::local_addr(&socket).map_err(failed)?;
            shard.push(Listener::own(socket));
        }
        Ok(local)
    }
}

/// `[::]` takes IPv4 as well, unless the same server has a separate listener for it.
fn is_v6_only(addr: SocketAddr, all: &[&Address]) -> bool {
    let is_own_v4 = |other: &SocketAddr| other.is_ipv4() && other.port() == addr.port() && addr.port() != 0;
    matches!(addr.ip(), IpAddr::V6(ip) if ip.is_unspecified())
        && all.iter().filter_map(|addr| addr.as_ip()).any(|other| is_own_v4(&other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn listen(
        addrs: &[Address],
        shards: usize,
        share_port: bool,
    ) -> Result<(Vec<Vec<Listener>>, Listening), Error> {
        let options = SocketOptions::default();
        let binds = addrs.iter().map(|addr| Bind::new(addr.clone())).collect::<Vec<_>>();
        let place = |bind| ListenPlace { bind, options: &options, service: None };
        Listen { shards, share_port, cpus: &[] }.at(&binds.iter().map(place).collect::<Vec<_>>())
    }

    fn any_port() -> Vec<Address> {
        vec![Address::Ip(([127, 0, 0, 1], 0).into())]
    }

    #[test]
    fn all_shards_share_the_port_the_first_one_found() {
        let (by_shard, listening) = listen(&any_port(), 3, false).unwrap();
        assert_eq!((by_shard.len(), by_shard[2].len(), listening.addrs.len()), (3, 1, 1));
        assert_ne!(listening.ips[0].port(), 0);
    }

    #[test]
    fn taken_port_is_refused_with_its_holder_even_if_shared() {
        let (_held, listening) = listen(&any_port(), 1, false).unwrap();
        let error = listen(&listening.addrs, 1, false).err().unwrap().to_string();
        let me = format!("is in use by process {}", std::process::id());
        assert!(error.contains(&me), "{error}");
        assert!(listen(&listening.addrs, 1, true).is_ok());
    }

    #[test]
    fn a_port_held_by_another_kind_of_program_is_refused_too() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = other.local_addr().unwrap();
        assert!(matches!(listen(&[addr.into()], 1, false), Err(Error::AddressInUse { .. })));
    }

    #[test]
    fn wildcard_of_ipv6_leaves_ipv4_to_a_listener_on_its_port() {
        let addrs = |list: &[&str]| -> Vec<Address> {
            list.iter().map(|addr| Address::Ip(addr.parse().unwrap())).collect()
        };
        let wildcard = "[::]:7000".parse().unwrap();
        for (others, v6_only) in [
            (&["0.0.0.0:7000"][..], true),
            (&["127.0.0.1:7000"], true),
            (&["0.0.0.0:7001"], false),
            (&["[::1]:7000"], false),
            (&[], false),
        ] {
            assert_eq!(
                is_v6_only(wildcard, &addrs(others).iter().collect::<Vec<_>>()),
                v6_only,
                "{others:?}"
            );
        }
        assert!(!is_v6_only("[::1]:7000".parse().unwrap(), &[&addrs(&["0.0.0.0:7000"])[0]]));
        assert!(!is_v6_only("[::]:0".parse().unwrap(), &[&addrs(&["0.0.0.0:0"])[0]]));
    }
}
