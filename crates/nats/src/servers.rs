//! The servers that may be connected to, and which one is next.

/// Servers that INFO may add.
const LEARNED_MAX: usize = 256;

/// The longest address: that of a name of DNS, and a port.
const ADDRESS_BYTES_MAX: usize = 260;

/// The servers in a random order, configured ones and those that a server named.
pub(crate) struct Servers {
    all: Vec<Known>,
    /// The place of the one that was tried last.
    at: usize,
}

struct Known {
    address: String,
    is_learned: bool,
}

impl Servers {
    pub(crate) fn new(configured: &[String], mut random: impl FnMut() -> u64) -> Servers {
        let mut all: Vec<Known> =
            configured.iter().map(|server| Known { address: address(server), is_learned: false }).collect();
        for at in (1..all.len()).rev() {
            all.swap(at, below(random(), at + 1));
        }
        let at = all.len() - 1;
        Servers { all, at }
    }

    /// The next one in turn.
    pub(crate) fn next(&mut self) -> String {
        self.at = (self.at + 1) % self.all.len();
        self.all[self.at].address.clone()
    }

    /// True if there is another one than that of the connection.
    pub(crate) fn has_others(&self) -> bool {
        self.all.len() > 1
    }

    /// Takes what a server says of its cluster. Those that it names no more are forgotten, unless a
    /// program named them.
    pub(crate) fn learn(&mut self, urls: &[String], random: impl Fn() -> u64) {
        if urls.is_empty() {
            return;
        }
        let urls: Vec<String> = urls
            .iter()
            .filter(|url| !url.is_empty() && url.len() <= ADDRESS_BYTES_MAX)
            .take(LEARNED_MAX)
            .map(|url| address(url))
            .collect();
        let current = self.all[self.at].address.clone();
        self.all
            .retain(|known| !known.is_learned || known.address == current || urls.contains(&known.address));
        self.at = self.all.iter().position(|known| known.address == current).unwrap_or(0);
        for address in urls {
            if self.all.iter().any(|known| known.address == address) {
                continue;
            }
            // Behind the current one, so that none of the others is tried twice before the new one
            // is tried once.
            let place = self.at + 1 + below(random(), self.all.len() - self.at);
            self.all.insert(place, Known { address, is_learned: true });
        }
    }
}

/// The name or the address of a server, without its port, as its certificate has it.
#[cfg_attr(not(feature = "tls"), allow(dead_code))]
pub(crate) fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// An address with a port.
fn address(server: &str) -> String {
    let server = server.strip_prefix("nats://").or_else(|| server.strip_prefix("tls://")).unwrap_or(server);
    let has_port = match server.strip_prefix('[') {
        Some(ip) => ip.contains("]:"),
        None => server.contains(':'),
    };
    match has_port {
        true => server.to_owned(),
        false => format!("{server}:4222"),
    }
}

fn below(random: u64, bound: usize) -> usize {
    usize::try_from(random % bound as u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(servers: &[&str]) -> Vec<String> {
        servers.iter().map(|server| (*server).to_owned()).collect()
    }

    #[test]
    fn addresses_have_ports() {
        for (server, expected) in [
            ("a", "a:4222"),
            ("nats://a:1", "a:1"),
            ("tls://a", "a:4222"),
            ("[::1]", "[::1]:4222"),
            ("[::1]:1", "[::1]:1"),
            ("unix:/run/nats.sock", "unix:/run/nats.sock"),
        ] {
            assert_eq!(address(server), expected);
        }
        assert_eq!((host("a.b:1"), host("[::1]:1"), host("10.0.0.1:1")), ("a.b", "::1", "10.0.0.1"));
    }

    #[test]
    fn each_server_is_tried_in_turn() {
        let mut random = 7u64;
        let mut servers = Servers::new(&texts(&["a:1", "b:1", "c:1"]), || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            random >> 33
        });
        let round: Vec<String> = (0..3).map(|_| servers.next()).collect();
        let mut sorted = round.clone();
        sorted.sort();
        assert_eq!(sorted, ["a:1", "b:1", "c:1"]);
        assert_eq!((0..3).map(|_| servers.next()).collect::<Vec<_>>(), round);
    }

    #[test]
    fn cluster_of_an_info_is_learned_and_forgotten() {
        let mut servers = Servers::new(&texts(&["a:1"]), || 0);
        assert_eq!((servers.next(), servers.has_others()), ("a:1".to_owned(), false));
        servers.learn(&texts(&["a:1", "b:1", "", "c"]), || 0);
        assert!(servers.has_others());
        let mut others = [servers.next(), servers.next()];
        others.sort();
        assert_eq!(others, ["b:1", "c:4222"]);
        // On one of the two: it stays until it is left.
        servers.learn(&texts(&["d:1"]), || 5);
        assert_eq!(servers.all.len(), 3);
        servers.learn(&[], || 5);
        assert_eq!(servers.all.len(), 3, "a server without a cluster says nothing of it");
        servers.next();
        servers.next();
        let many: Vec<String> = (0..1000).map(|n| format!("e{n}:1")).collect();
        servers.learn(&many, || 3);
        assert!(servers.all.len() <= LEARNED_MAX + 2);
        servers.learn(&["x".repeat(300)], || 3);
        assert!(servers.all.iter().all(|known| known.address.len() < 300));
    }
}
