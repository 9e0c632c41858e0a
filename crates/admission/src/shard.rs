//! Admission on one shard: which limits hold at a listener, and what each connection was counted
//! for.

use std::net::SocketAddr;
use std::sync::Arc;

use ringserve_base::peer::Peer;
use ringserve_core::internals::{Chunked, Gcra};
use ringserve_core::{Address, ConnId, Time};

use super::{AdmissionStats, Charge, Limiter, RefusedBy, Source};

/// The limits at each listener of a server; empty if there are none.
#[derive(Clone, Default)]
pub struct Limiters(Arc<[Limited]>);

/// A listener.
struct Limited {
    limiter: Option<Arc<Limiter>>,
    is_unix: bool,
    /// Its connections begin with a PROXY header: their peers are proxies.
    is_proxied: bool,
    /// Nothing lies between its sockets and the bytes that are said to a refused connection.
    is_plain: bool,
}

/// Connections that are refused with a message in a second, on all shards, and at once after a
/// pause.
const WORDS_RATE: (u32, u32) = (2000, 200);

impl Limiters {
    /// Of the listeners in their order: the limits that hold there, the address, whether proxies
    /// connect there, and whether words reach a connection that is not begun.
    pub fn of<'a>(
        listeners: impl Iterator<Item = (Option<&'a Arc<Limiter>>, &'a Address, bool, bool)>,
    ) -> Limiters {
        type Listener<'a> = (Option<&'a Arc<Limiter>>, &'a Address, bool, bool);
        let limited = |(limiter, addr, is_proxied, is_plain): Listener<'_>| Limited {
            limiter: limiter.cloned(),
            is_unix: addr.as_unix().is_some(),
            is_proxied,
            is_plain,
        };
        let all: Arc<[_]> = listeners.map(limited).collect();
        if all.iter().any(|limited| limited.limiter.is_some()) { Limiters(all) } else { Limiters::default() }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn at(&self, listener: usize) -> Option<(&Limited, &Arc<Limiter>)> {
        let limited = self.0.get(listener)?;
        Some((limited, limited.limiter.as_ref()?))
    }

    /// The limits at a listener, of peers and of proxies alike.
    pub(super) fn limiter_at(&self, listener: usize) -> Option<&Arc<Limiter>> {
        self.at(listener).map(|(_, limiter)| limiter)
    }

    /// The limits that hold for the sockets of a listener, and not for those behind them.
    pub(super) fn in_front_of(&self, listener: usize) -> Option<&Arc<Limiter>> {
        self.at(listener).filter(|(limited, _)| !limited.is_proxied).map(|(_, limiter)| limiter)
    }

    /// The number of listeners.
    pub(super) fn listeners(&self) -> usize {
        self.0.len()
    }

    /// At how many of them these limits hold.
    pub(super) fn listeners_of(&self, limiter: &Arc<Limiter>) -> usize {
        let is_it = |limited: &&Limited| limited.limiter.as_ref().is_some_and(|of| Arc::ptr_eq(of, limiter));
        self.0.iter().filter(is_it).count()
    }

    /// Each of them once.
    pub fn each(&self) -> impl Iterator<Item = &Arc<Limiter>> {
        let all = self.0.iter().enumerate().filter_map(|(n, limited)| Some((n, limited.limiter.as_ref()?)));
        let is_first = move |(n, limiter): &(usize, &Arc<Limiter>)| {
            let is_it = |of: &Limited| of.limiter.as_ref().is_some_and(|of| Arc::ptr_eq(of, limiter));
            !self.0[..*n].iter().any(is_it)
        };
        all.filter(is_first).map(|(_, limiter)| limiter)
    }

    /// The sum of the figures of all of them.
    pub fn stats(&self) -> AdmissionStats {
        let mut sum = AdmissionStats::default();
        for of in self.each().map(|limiter| limiter.stats()) {
            let AdmissionStats { prefixes, connections, sketched } = &mut sum;
            *prefixes += of.prefixes;
            *connections += of.connections;
            *sketched += of.sketched;
        }
        sum
    }

    /// True if the users at the other ends of Unix sockets are to be asked for.
    pub fn count_users(&self) -> bool {
        self.0.iter().any(|of| of.is_unix && of.limiter.as_ref().is_some_and(|limiter| limiter.counts()))
    }

    /// True if some peers may have slots in addition to those of all.
    pub fn reserve(&self) -> bool {
        (0..self.0.len()).any(|listener| self.in_front_of(listener).is_some_and(|of| of.allow.is_some()))
    }

    /// True for a peer that may have such a slot. It is asked without the time: networks that are
    /// allowed for a time have none.
    pub fn allows(&self, listener: u16, peer: SocketAddr) -> bool {
        self.in_front_of(listener.into()).is_some_and(|limiter| limiter.allows(peer.ip()))
    }
}

/// Asks a limiter, which counts a connection that it lets in.
#[inline]
fn let_in(
    limiter: &Arc<Limiter>,
    source: Source,
    (from, now): (Time, Time),
) -> Result<Option<ChargeGuard>, RefusedBy> {
    let charge = limiter.let_in_since(source, from, now)?;
    Ok(charge.map(|charge| ChargeGuard { limiter: limiter.clone(), charge: Some(charge), now }))
}

/// A connection that was counted and is not kept yet. Its drop takes the charge back, so each way
/// out of what follows does.
pub struct ChargeGuard {
    limiter: Arc<Limiter>,
    /// `None` once it is kept.
    charge: Option<Charge>,
    now: Time,
}

impl Drop for ChargeGuard {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            self.limiter.release(charge, self.now);
        }
    }
}

/// The charges of a shard's connections.
pub struct ShardAdmission {
    limiters: Limiters,
    /// By slot.
    charges: Chunked<Option<Charge>>,
    words_rate: Gcra,
    words: u64,
}

impl ShardAdmission {
    /// `None` if the server has no limits.
    pub fn new(limiters: Limiters, shards: usize) -> Option<Box<ShardAdmission>> {
        let of_shard = |all: u32| (all / shards.max(1) as u32).max(1);
        let words_rate = Gcra::new(of_shard(WORDS_RATE.0), of_shard(WORDS_RATE.1));
        let is_empty = limiters.is_empty();
        let admission =
            || Box::new(ShardAdmission { limiters, charges: Chunked::new(), words_rate, words: 0 });
        (!is_empty).then(admission)
    }

    /// The message to a connection that is refused for the load. `None` if it is not refused, since
    /// the program has no message for it, or its address is let in whatever the load.
    pub fn words_for_load(&self, peer: &Peer, now: Time) -> Option<Arc<[u8]>> {
        let is_allowed =
            |limiter: &Arc<Limiter>| peer.addr().is_some_and(|addr| limiter.allows_now(addr.ip(), now));
        let (limited, limiter) = self.limiters.at(peer.listener())?;
        if !limited.is_plain || !limited.is_proxied && is_allowed(limiter) {
            return None;
        }
        limiter.shed_reply.clone()
    }

    /// The message to a connection that is refused for a count or a rate.
    pub fn words_for(&self, listener: usize, by: RefusedBy) -> Option<Arc<[u8]>> {
        let (_, limiter) = self.limiters.at(listener).filter(|(limited, _)| limited.is_plain)?;
        use RefusedBy::{AddressCount, AddressRate, ConnectionCount, ConnectionRate};
        let is_told = matches!(by, AddressCount | AddressRate | ConnectionCount | ConnectionRate);
        limiter.shed_reply.clone().filter(|_| is_told)
    }

    /// True if one more connection may be refused with a message now.
    pub fn has_words(&self, now: Time) -> bool {
        self.words_rate.take(self.words, now.as_nanos()).is_some()
    }

    /// The same, and it is.
    pub fn takes_words(&mut self, now: Time) -> bool {
        let taken = self.words_rate.take(self.words, now.as_nanos());
        self.words = taken.unwrap_or(self.words);
        taken.is_some()
    }

    /// True if a rate of an address, or of all peers, holds at a listener.
    #[inline]
    pub fn has_rate(&self, listener: usize) -> bool {
        self.limiters.at(listener).is_some_and(|(_, limiter)| limiter.has_rate())
    }

    /// Asks whether a connection that was accepted may begin. At listeners of proxies that is asked
    /// of their [clients](ShardAdmission::let_client_in). It came between the two times, which
    /// differ where the shard was away.
    ///
    /// # Errors
    /// The reason for which it is refused.
    pub fn let_in(&self, peer: &Peer, (from, now): (Time, Time)) -> Result<Option<ChargeGuard>, RefusedBy> {
        let Some((limited, limiter)) = self.limiters.at(peer.listener()).filter(|(of, _)| !of.is_proxied)
        else {
            return Ok(None);
        };
        let source = match (peer.addr(), peer.asked().credentials) {
            (Some(addr), _) => Source::Address(addr.ip()),
            (None, Some(credentials)) => Source::User(credentials.uid),
            // Of its peers the kernel may not tell.
            (None, None) if limited.is_unix => return Ok(None),
            // It was reset before it could be asked for its address.
            (None, None) => return Err(RefusedBy::AddressUnknown),
        };
        let_in(limiter, source, (from, now))
    }

    /// The same for the client behind a proxy, whose header was read. A proxy that speaks for
    /// itself is let in.
    ///
    /// # Errors
    /// The reason for which it is refused.
    pub fn let_client_in(
        &self,
        peer: &Peer,
        (from, now): (Time, Time),
    ) -> Result<Option<ChargeGuard>, RefusedBy> {
        let Some((limited, limiter)) = self.limiters.at(peer.listener()) else { return Ok(None) };
        match peer.addr().filter(|_| peer.via().is_some() || limited.is_unix) {
            Some(addr) => let_in(limiter, Source::Address(addr.ip()), (from, now)),
            None => Ok(None),
        }
    }

    /// Keeps what a connection was counted for until it ended. False if there is no memory for
    /// that: the charge is taken back then.
    pub fn keep(&mut self, id: ConnId, mut guard: ChargeGuard) -> bool {
        let Some(kept) = self.charges.entry(id.slot()) else { return false };
        debug_assert!(kept.is_none(), "{id} was counted already");
        *kept = guard.charge.take();
        true
    }

    /// A connection of a listener ended.
    pub fn ended(&mut self, id: ConnId, listener: u16, now: Time) {
        if let Some(charge) = self.charges.get_mut(id.slot()).and_then(Option::take)
            && let Some((_, limiter)) = self.limiters.at(listener.into())
        {
            limiter.release(charge, now);
        }
    }

    /// Says that a connection was refused.
    #[cold]
    pub fn report(&self, shard: usize, service: Option<&str>, peer: &Peer, by: RefusedBy, now: Time) {
        if let Some((_, limiter)) = self.limiters.at(peer.listener()) {
            limiter.report(shard, service, peer.addr(), by, now);
        }
    }
}
