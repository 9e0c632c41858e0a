//! Admission: the checks of a shard for each new connection before its service opens it, step by
//! step, in the order of the cost.
//!
//! A step lets a connection go on, rejects it, or makes it wait. Three steps of the guide are
//! elsewhere: the filter in the kernel is before accept (`admission/kernel_filter.rs`), the accept
//! rate is the state machine's, and the last one, `Service::open`, is that of the service's lane.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ringserve_admission::internals::{ChargeGuard, ShardAdmission};
use ringserve_base::guard::guard;
use ringserve_base::peer::Peer;
use ringserve_core::{CloseReason, ConnId, RefusedBy, Socket, Time};

use crate::shard::Core;
use crate::shard::state::shard_loop::{Admit, Common};
use crate::stats::StalledWork;

/// The answer of a step.
enum Verdict {
    /// The next step is asked.
    Go,
    /// The connection is refused, after this message if it has one.
    Reject(RefusedBy, Option<Arc<[u8]>>),
    /// The socket is accepted once more at this time.
    Wait(Time),
}

/// The names of a step in `docs/guide/under_attack.md`, and its check.
type Step = (&'static [&'static str], fn(&mut Newcomer<'_>) -> Verdict);

/// The steps of a socket that was accepted.
const ON_ACCEPT: [Step; 4] = [
    (&["room for last words"], await_message),
    (&["deny list", "count, then rate of all", "count, then rate of the address"], check_limits),
    (&["`Server::admit`"], ask_program),
    (&["load"], check_load),
];

/// The steps of a client behind a proxy, whose header was read.
const ON_HEADER: [Step; 2] = [
    (&["deny list", "count, then rate of all", "count, then rate of the address"], check_client_limits),
    (&["`Server::admit`"], ask_program),
];

/// A connection under admission.
struct Newcomer<'a> {
    common: &'a mut Common,
    core: &'a mut Core,
    peer: &'a Peer,
    admit: Option<&'a Admit>,
    /// The message to it if it is rejected for the load.
    message: Option<Arc<[u8]>>,
    /// The charge of its counts, which its drop takes back.
    charge: Option<ChargeGuard>,
}

impl Newcomer<'_> {
    /// Runs the steps in their order, until one does not let the connection go on. Returns the
    /// guard of an admitted one. The charge of another one is taken back here.
    fn ask(mut self, steps: &[Step]) -> (Verdict, Option<ChargeGuard>) {
        for (_, ask) in steps {
            match ask(&mut self) {
                Verdict::Go => {}
                halt => return (halt, None),
            }
        }
        (Verdict::Go, self.charge)
    }

    /// The verdict of limits.
    fn limited(&mut self, let_in: Result<Option<ChargeGuard>, RefusedBy>) -> Verdict {
        match let_in {
            Ok(charge) => {
                self.charge = charge;
                Verdict::Go
            }
            Err(by) => self.refused(by),
        }
    }

    /// Writes the refusal to the log.
    #[cold]
    fn refused(&self, by: RefusedBy) -> Verdict {
        let Common { admission, shard, names, now, .. } = &*self.common;
        let Some(admission) = admission else { return Verdict::Reject(by, None) };
        admission.report(shard.index(), names.at(self.peer.listener_id()), self.peer, by, *now);
        Verdict::Reject(by, admission.words_for(self.peer.listener(), by))
    }
}

/// The facts of a service by which new connections are let in.
pub(crate) struct Entrance<'a> {
    /// The hook of the program.
    pub(crate) admit: Option<&'a Admit>,
    /// Its connections have accounts.
    pub(crate) keeps_accounts: bool,
    /// Makes a socket a connection with room for the session of the service.
    pub(crate) insert: fn(&mut Core, Socket, Option<SocketAddr>, u16) -> Option<ConnId>,
}

/// Asks whether a socket that was accepted becomes a connection. Returns it if it may begin now:
/// not if it was refused or waits, and not before its PROXY header was read.
pub(crate) fn accepted(
    common: &mut Common,
    core: &mut Core,
    socket: Socket,
    peer: &Peer,
    entrance: &Entrance<'_>,
) -> Option<ConnId> {
    let newcomer = Newcomer { common, core, peer, admit: entrance.admit, message: None, charge: None };
    match newcomer.ask(&ON_ACCEPT) {
        (Verdict::Go, charge) => {
            let id = (entrance.insert)(core, socket, peer.addr(), peer.listener_id())?;
            return begins(common, core, id, peer, charge, entrance.keeps_accounts).then_some(id);
        }
        (Verdict::Reject(by, message), _) => reject(common, core, socket, peer, (by, message)),
        (Verdict::Wait(until), _) => core.postpone(socket, peer.addr(), peer.listener_id(), until),
    }
    None
}

/// Asks about a client behind a proxy, whose header was read. True if its connection may begin.
pub(crate) fn proxied(common: &mut Common, core: &mut Core, id: ConnId, admit: Option<&Admit>) -> bool {
    let Some(peer) = core.shared(id).map(|head| Peer::of(head)) else { return false };
    let newcomer = Newcomer { common, core, peer: &peer, admit, message: None, charge: None };
    match newcomer.ask(&ON_HEADER) {
        (Verdict::Go, charge) => {
            let is_kept = keep(common, id, charge);
            if !is_kept {
                core.abort(id, CloseReason::MemoryLimit);
            }
            return is_kept;
        }
        (Verdict::Reject(by, Some(message)), _) if takes_message(common, core) => {
            core.refused_with(id, by, &message);
        }
        (Verdict::Reject(by, _), _) => core.refused(id, by),
        // A connection is accepted no second time.
        (Verdict::Wait(_), _) => core.refused(id, RefusedBy::Load),
    }
    false
}

/// The message of the load, or a wait where none can be sent now: the socket is accepted once more,
/// so this comes before any step that would count it twice.
fn await_message(newcomer: &mut Newcomer<'_>) -> Verdict {
    let Newcomer { common, core, peer, .. } = newcomer;
    if !common.load.refuses() {
        return Verdict::Go;
    }
    newcomer.message = message_of_load(common, peer);
    if newcomer.message.is_some() && !has_message(common, core) {
        return Verdict::Wait(common.now + POSTPONED);
    }
    Verdict::Go
}

/// The lists, counts and rates of the server, for a peer that is no proxy.
fn check_limits(newcomer: &mut Newcomer<'_>) -> Verdict {
    let Some(admission) = &newcomer.common.admission else { return Verdict::Go };
    let let_in = admission.let_in(newcomer.peer, arrival(newcomer.common, newcomer.core));
    watch_rates(admission, newcomer.core, newcomer.peer);
    newcomer.limited(let_in)
}

/// The same for a client behind a proxy.
fn check_client_limits(newcomer: &mut Newcomer<'_>) -> Verdict {
    let Some(admission) = &newcomer.common.admission else { return Verdict::Go };
    let let_in = admission.let_client_in(newcomer.peer, arrival(newcomer.common, newcomer.core));
    watch_rates(admission, newcomer.core, newcomer.peer);
    newcomer.limited(let_in)
}

/// The hook of the program.
fn ask_program(newcomer: &mut Newcomer<'_>) -> Verdict {
    let Newcomer { common, peer, admit: Some(admit), .. } = newcomer else { return Verdict::Go };
    common.meter.snapshot.work.on_peer(StalledWork::Admit, peer.addr().into());
    match guard(|| admit(peer)) {
        Ok(true) => return Verdict::Go,
        Ok(false) => {}
        Err(panicked) => common.report_panic("admit", None, &panicked),
    }
    Verdict::Reject(RefusedBy::Admit, None)
}

/// The load: checked after all that refuses a peer for what it is, and before anything is kept.
fn check_load(newcomer: &mut Newcomer<'_>) -> Verdict {
    match newcomer.message.take() {
        Some(message) => Verdict::Reject(RefusedBy::Load, Some(message)),
        None => Verdict::Go,
    }
}

/// Begins what follows admission. True if the connection may go on at once.
fn begins(
    common: &mut Common,
    core: &mut Core,
    id: ConnId,
    peer: &Peer,
    charge: Option<ChargeGuard>,
    keeps_accounts: bool,
) -> bool {
    if !keep(common, id, charge) {
        core.abort(id, CloseReason::MemoryLimit);
        return false;
    }
    let Some(head) = core.shared(id) else { return false };
    head.set_asked(peer.asked());
    let keeps_account = keeps_accounts || common.accounted.has(core.lane_of_listener(peer.listener_id()));
    if keeps_account && !head.open_account(common.now) {
        core.abort(id, CloseReason::MemoryLimit);
        return false;
    }
    match common.proxies.at(peer.listener_id()) {
        None => return true,
        Some(trust) if trust.includes(peer.addr()) => core.await_header(id),
        // It was reset before it could be asked for its address, as some health checks are.
        Some(_) if peer.addr().is_none() => core.abort(id, CloseReason::PeerReset),
        Some(_) => {
            common.report_untrusted(peer);
            core.abort(id, CloseReason::ProxyUntrusted);
        }
    }
    false
}

/// Keeps the charge of a connection until it ends. False if there is no memory for that.
#[inline]
fn keep(common: &mut Common, id: ConnId, charge: Option<ChargeGuard>) -> bool {
    match (&mut common.admission, charge) {
        (Some(admission), Some(charge)) => admission.keep(id, charge),
        _ => true,
    }
}

/// Refuses a socket, after its message if that may be sent now.
#[cold]
fn reject(
    common: &mut Common,
    core: &mut Core,
    socket: Socket,
    peer: &Peer,
    (by, message): (RefusedBy, Option<Arc<[u8]>>),
) {
    match message {
        Some(message) if takes_message(common, core) => {
            core.refuse_with(socket, peer.addr(), peer.listener_id(), by, &message);
        }
        _ => core.refuse(socket, peer.listener_id(), by),
    }
}

/// The longest time before now in which connections may have come that a shard sees late. Those
/// that waited for longer are few: their peers gave up.
const LATE_MAX: Duration = Duration::from_secs(10);

/// The times between which a connection came that a shard sees now: as many may come in that time
/// as their rate allows, and none is refused because the shard was away meanwhile. The shard must
/// know that it was away: one that only slept saw each of them as it came.
#[inline]
fn arrival(common: &Common, core: &Core) -> (Time, Time) {
    let now = common.now;
    match core.behind_from() {
        None => (now, now),
        Some(from) if now - from <= LATE_MAX => (from, now),
        Some(_) => (Time::from_nanos(now.as_nanos() - LATE_MAX.as_nanos() as u64), now),
    }
}

/// Makes the shard note when it was away, while connections arrive at a listener with a rate. A
/// shard to which none has come for a while sleeps, and few connections come to it then.
#[inline]
fn watch_rates(admission: &ShardAdmission, core: &mut Core, peer: &Peer) {
    if admission.has_rate(peer.listener()) {
        core.watch_itself();
    }
}

/// The time for which a new connection waits that gets no message now: in that time a tenth of the
/// messages of a burst may be sent again.
const POSTPONED: Duration = Duration::from_millis(10);

/// The message to a connection that is refused for the load; `None` where there is none for that,
/// and it is let in.
#[cold]
fn message_of_load(common: &Common, peer: &Peer) -> Option<Arc<[u8]>> {
    common.admission.as_ref()?.words_for_load(peer, common.now)
}

/// True if one more connection may be refused after a message now.
fn has_message(common: &Common, core: &Core) -> bool {
    core.may_part() && common.admission.as_ref().is_some_and(|admission| admission.has_words(common.now))
}

/// The same, and counts the message.
fn takes_message(common: &mut Common, core: &Core) -> bool {
    let now = common.now;
    core.may_part() && common.admission.as_mut().is_some_and(|admission| admission.takes_words(now))
}
