//! What a server tells of single connections: accounts, an access log, spans.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use ringserve_core::LaneId;

use super::builder::Server;
use super::error::Error;
use crate::traces::Chosen;

/// The program's settings.
#[derive(Clone, Default)]
pub(crate) struct Telling {
    pub(super) accounts: bool,
    pub(super) access_log: bool,
    chosen: Chosen,
    /// The first network that could not be parsed.
    unclear: Option<String>,
}

/// A set of services, by lane.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LaneSet(u32);

impl LaneSet {
    fn add(&mut self, lane: usize) {
        self.0 |= 1 << lane;
    }

    /// True if no service is in it.
    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// True if the lane's service is in it.
    #[inline]
    pub(crate) fn has(self, lane: LaneId) -> bool {
        // Upstreams are behind all services.
        lane.index() < u32::BITS as usize && self.0 >> lane.index() & 1 == 1
    }
}

/// The same for the shards, by lane.
#[derive(Clone, Default)]
pub(crate) struct Told {
    /// Services whose connections have accounts, whatever they say themselves.
    pub(crate) accounted: LaneSet,
    /// Services whose connections are in the access log.
    pub(crate) logged: LaneSet,
    pub(crate) chosen: Arc<Chosen>,
}

impl Telling {
    /// Refuses networks that are none.
    pub(super) fn check(&self) -> Result<(), Error> {
        match &self.unclear {
            None => Ok(()),
            Some(text) => Err(Error::Trace(text.clone())),
        }
    }

    /// For services that say themselves whether they are in the access log, or do not.
    pub(super) fn told(&self, services: impl Iterator<Item = Option<bool>>) -> Told {
        let mut told = Told { chosen: Arc::new(self.chosen.clone()), ..Told::default() };
        for (lane, access_log) in services.enumerate() {
            let is_logged = access_log.unwrap_or(self.access_log);
            if is_logged {
                told.logged.add(lane);
            }
            if is_logged || self.accounts {
                told.accounted.add(lane);
            }
        }
        told
    }

    fn trace_peer(&mut self, text: &str) {
        let network = text.parse::<IpNet>().ok();
        match network.or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from)) {
            Some(network) => self.chosen.networks.push(network),
            None => _ = self.unclear.get_or_insert_with(|| text.to_owned()),
        }
    }
}

impl<F> Server<F> {
    /// Keeps an account of each accepted connection: bytes and frames in both directions, for
    /// [inspections](crate::inspect::ConnInfo::bytes_in) and [`Closed::account`](crate::Closed::account). It costs 56 bytes for
    /// each connection, in chunks of 256, and a few instructions for each frame, each receive and each send. Off by default;
    /// services that keep [accounts](crate::Service::ACCOUNTS) themselves have them in any case.
    pub fn accounts(mut self, accounts: bool) -> Server<F> {
        self.settings.telling.accounts = accounts;
        self
    }

    /// Writes a line to the [access log](crate::access_log) for each connection that ended; with several services, for
    /// connections of those that do not [say otherwise](crate::listen::Endpoints::access_log). Off by default. Connections then
    /// have [accounts](Server::accounts). The lines are not limited: see [`access_log`](crate::access_log).
    pub fn access_log(mut self, access_log: bool) -> Server<F> {
        self.settings.telling.access_log = access_log;
        self
    }

    /// Gives one in `n` of each shard's accepted connections a span of `tracing`, from accept to end, with events for its frames,
    /// sends and pauses: level INFO, target `ringserve::trace`. 0 gives none, which is the default.
    ///
    /// Each other connection costs a look at one bit for each frame and each send; the chosen ones what the subscriber does
    /// with the events, which comes for every frame.
    ///
    /// ```no_run
    /// # use ringserve::Server;
    /// let server = Server::bind("0.0.0.0:7000").trace_one_in(1000).trace_peer("10.1.2.3").trace_peer("192.0.2.0/24");
    /// ```
    pub fn trace_one_in(mut self, n: u32) -> Server<F> {
        self.settings.telling.chosen.one_in = n;
        self
    }

    /// Gives connections of these peers such a [span](Server::trace_one_in), in addition to the chosen ones: an address, or a
    /// network such as `10.1.2.0/24`. May be called several times. Behind a [proxy](crate::listen::ProxyProtocol) the address
    /// is that of the proxy or that of the client. A text that is neither is an error of the start ([`Error::Trace`]).
    pub fn trace_peer(mut self, network: impl AsRef<str>) -> Server<F> {
        self.settings.telling.trace_peer(network.as_ref());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_that_says_nothing_follows_its_server() {
        let telling = Telling { access_log: true, ..Telling::default() };
        let mut says = vec![None, Some(false), Some(true)];
        says.resize(32, None);
        let told = telling.told(says.into_iter());
        let logged = |lane: u8| told.logged.has(LaneId::nth(lane));
        assert_eq!([logged(0), logged(1), logged(2), logged(31)], [true, false, true, true]);
        assert!(!logged(32), "upstreams are behind 32 services");
        assert!(!told.accounted.has(LaneId::nth(1)) && told.accounted.has(LaneId::nth(2)));
        let told = Telling { accounts: true, ..Telling::default() }.told([None, None].into_iter());
        assert!(told.logged.is_empty() && told.accounted.has(LaneId::nth(1)));
    }
}
