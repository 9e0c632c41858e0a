//! Orders, messages and letters of other threads, carried out in a turn.

use std::os::fd::OwnedFd;

use ringserve_base::guard::guard;
use ringserve_base::peer::Peer;
use ringserve_core::{Driver, LaneId};

use crate::shard::Core;
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::ShardLane;
use crate::shard::tasks::draining::Moment;
use crate::shard::wakes::inbox::{Command, ShardRequest};
use crate::stats::StalledWork;

/// The most letters at the beginning of a turn, and as many at its end: together 1 ms of short
/// pushes.
const LETTERS_AT_ONCE: usize = 2048;

/// The lane of the service with this number.
fn lane_of(service: usize) -> LaneId {
    LaneId::nth(service as u8)
}

/// The part of a turn that reads letters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Those that came before it.
    Begin,
    /// Those that came meanwhile.
    End,
}

/// All services as bits.
fn bits(services: usize) -> u32 {
    u32::MAX.checked_shr(u32::BITS - services as u32).unwrap_or_default()
}

impl<D: Driver<Descriptor = OwnedFd>, V: Services> ShardLane<D, V> {
    pub(crate) fn apply_orders(&mut self, core: &mut Core) {
        let command = self.parts.remote.last_command();
        if command == self.parts.command {
            return;
        }
        self.parts.command = command;
        // Tasks that wait for it.
        self.common.works(StalledWork::Waker);
        match command {
            Command::Serve => {}
            Command::Drain => {
                core.await_others(true);
                core.drain();
            }
            Command::Abort => core.abort_all(),
        }
        if command != Command::Serve {
            let shard = &self.common.shard;
            if let Err(panicked) = shard.set_draining().and(shard.end_start(false)) {
                self.common.report_panic("waker", None, &panicked);
            }
        }
    }

    /// Tells connections that end by themselves when they do so: those of each service once what
    /// had arrived was taken in.
    #[cold]
    pub(crate) fn notify_leaving(&mut self, core: &Core) {
        let ends = self.common.shard.ends();
        let moment = Moment { spread: core.drain_spread(), first: core.first_frame_time() };
        let leaves =
            |service: &usize| core.is_lane_leaving(lane_of(*service)) && !ends.leaving(*service).has_begun();
        let mut woken = Ok(());
        for service in (0..ends.count()).filter(leaves) {
            woken = woken.and(ends.leaves(service, moment));
        }
        if let Err(panicked) = woken {
            self.common.report_panic("waker", None, &panicked);
        }
    }

    /// At the end of a turn in a drain: publishes which services have no connection left here, and
    /// takes in which have none anywhere. What waits for those goes on.
    #[cold]
    pub(crate) fn step_ends(&mut self, core: &mut Core) {
        let shard = &self.common.shard;
        let (ends, remotes) = (shard.ends(), shard.server().remotes());
        let over = (0..ends.count()).filter(|service| core.is_lane_over(lane_of(*service)));
        let here = over.fold(0, |bits, service| bits | 1 << service);
        if self.parts.remote.services_end(here) {
            remotes.iter().for_each(|remote| remote.look_again());
        }
        let all = remotes.iter().fold(u32::MAX, |all, remote| all & remote.ended_services());
        // Keys, tasks and upstreams are there until the last call that may ask for them.
        let services = bits(ends.count());
        let awaits = all & services != services;
        if core.await_others(awaits) && !awaits {
            self.parts.remote.look_again();
        }
        for service in 0..ends.count() {
            if ends.after(service) & !all == 0 {
                core.drain_lane(lane_of(service));
            }
        }
        if let Err(panicked) = ends.ended(all) {
            self.common.report_panic("waker", None, &panicked);
        }
    }

    /// Handles messages of other shards and threads.
    pub(crate) fn read_messages(&mut self) {
        self.common.works(StalledWork::Message);
        let left = self.common.shard.read_mailboxes().unwrap_or_else(|panicked| {
            self.common.report_panic("message", None, &panicked);
            true
        });
        if left {
            self.parts.remote.announce_messages();
        }
    }

    /// Carries out requests to connections, of other threads and of the shard's own code, up to the
    /// room of that part of a turn.
    #[inline(never)]
    pub(crate) fn read_letters(&mut self, core: &mut Core, part: Part) {
        self.common.works(StalledWork::Message);
        let mut letters = std::mem::take(&mut self.parts.delivery.letters);
        let mut looked = part == Part::End;
        for letter in letters.drain(..LETTERS_AT_ONCE.min(letters.len())) {
            match letter {
                ShardRequest::Push { id, gate, payload, is_framed } => {
                    let bytes = ShardRequest::bytes_of(&payload);
                    // The framing encodes it, and the owner of the bytes drops them: user code. A
                    // connection that missed a frame for that is reset at the end of the turn.
                    let pushed = guard(|| match core.shared(id) {
                        Some(shared) if is_framed => shared.reply(payload.into()),
                        Some(shared) => shared.write_payload(payload.into()),
                        None => drop(payload),
                    });
                    gate.arrived(bytes);
                    if let Err(panicked) = pushed {
                        let peer = core.shared(id).map(|shared| Peer::of(shared));
                        self.common.report_panic("push", peer.map(|peer| (id, peer)), &panicked);
                    }
                }
                ShardRequest::Close { id } => {
                    if let Some(shared) = core.shared(id) {
                        shared.close();
                    }
                }
                ShardRequest::Abort { id } => {
                    if let Some(shared) = core.shared(id) {
                        shared.abort();
                    }
                }
                ShardRequest::Await { id, until, notify } => {
                    self.common.shard.awaited().wait(core.shared(id).map(|shared| &**shared), until, notify);
                }
                ShardRequest::Socket { socket, peer, listener } => {
                    let socket = self.parts.driver.take_over(socket);
                    core.take_handed_off(listener, socket, peer);
                }
                ShardRequest::Memory { held_bytes_max, receive_bytes_max } => {
                    core.bound_memory(held_bytes_max, receive_bytes_max);
                }
                ShardRequest::Inspect(mut walk) => {
                    if walk.is_abandoned() {
                        continue;
                    }
                    // One page in a turn, however many inspections there are: each of them has its
                    // page in one of the next turns.
                    let has_more = looked || walk.step(core, &self.common.names);
                    looked = true;
                    if has_more {
                        let _ = self.parts.remote.send(ShardRequest::Inspect(walk));
                    }
                }
            }
        }
        self.parts.delivery.letters = letters;
    }
}
