//! Records of single connections: accounts, an access log, spans.

use std::sync::Arc;

use ringserve_admission::internals::network;
use ringserve_core::LaneId;

use crate::traces::SpanFilter;

/// The program's settings.
#[derive(Clone, Default)]
pub(crate) struct ObserverConfig {
    pub(crate) accounts: bool,
    pub(crate) access_log: bool,
    pub(crate) chosen: SpanFilter,
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
pub(crate) struct Observers {
    /// Services whose connections have accounts, whatever they say themselves.
    pub(crate) accounted: LaneSet,
    /// Services whose connections are in the access log.
    pub(crate) logged: LaneSet,
    pub(crate) chosen: Arc<SpanFilter>,
}

impl ObserverConfig {
    /// The first network that is none.
    pub(crate) fn unclear(&self) -> Option<&str> {
        self.unclear.as_deref()
    }

    /// For services that say themselves whether they are in the access log, or do not.
    pub(crate) fn told(&self, services: impl Iterator<Item = Option<bool>>) -> Observers {
        let mut told = Observers { chosen: Arc::new(self.chosen.clone()), ..Observers::default() };
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

    pub(crate) fn trace_peer(&mut self, text: &str) {
        match network(text) {
            Some(network) => self.chosen.networks.push(network),
            None => _ = self.unclear.get_or_insert_with(|| text.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_that_says_nothing_follows_its_server() {
        let telling = ObserverConfig { access_log: true, ..ObserverConfig::default() };
        let mut says = vec![None, Some(false), Some(true)];
        says.resize(32, None);
        let told = telling.told(says.into_iter());
        let logged = |lane: u8| told.logged.has(LaneId::nth(lane));
        assert_eq!([logged(0), logged(1), logged(2), logged(31)], [true, false, true, true]);
        assert!(!logged(32), "upstreams are behind 32 services");
        assert!(!told.accounted.has(LaneId::nth(1)) && told.accounted.has(LaneId::nth(2)));
        let told =
            ObserverConfig { accounts: true, ..ObserverConfig::default() }.told([None, None].into_iter());
        assert!(told.logged.is_empty() && told.accounted.has(LaneId::nth(1)));
    }
}
