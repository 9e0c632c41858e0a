//! What a turn does with orders, messages and mail: what other threads want.

use std::os::fd::OwnedFd;

use ringserve_core::framing::Framing;
use ringserve_core::{Driver, Payload};

use super::inbox::{Mail, Order};
use super::state::{Core, ServiceLane};
use crate::guard::guard;
use crate::peer::Peer;
use crate::service::Service;

/// What other threads want of connections is carried out for at most this many letters in a turn: 1 ms of short pushes.
const LETTERS_IN_A_TURN: usize = 4096;

impl<S: Service, D: Driver<Descriptor = OwnedFd>, Make, Fut> ServiceLane<S, D, Make, Fut> {
    pub(super) fn apply_orders<F: Framing>(&mut self, core: &mut Core<S, F>) {
        let order = self.remote.ordered();
        if order == self.order {
            return;
        }
        self.order = order;
        match order {
            Order::Serve => {}
            Order::Drain => core.drain(),
            Order::Force => {
                core.force();
                if let Some(upstreams) = &mut self.upstreams {
                    upstreams.force();
                }
            }
        }
        if order != Order::Serve
            && let Err(panicked) = self.shard.set_draining()
        {
            self.report_panic("waker", None, &panicked);
        }
    }

    /// Tells the tasks that wait for it that the drain delay is over.
    #[cold]
    pub(super) fn notify_stopping<F: Framing>(&mut self, core: &Core<S, F>) {
        if core.has_stopped()
            && !self.shard.is_stopping()
            && let Err(panicked) = self.shard.set_stopping()
        {
            self.report_panic("waker", None, &panicked);
        }
    }

    /// What services of other shards and other threads said.
    pub(super) fn read_messages(&mut self) {
        let left = self.shard.read_mailboxes().unwrap_or_else(|panicked| {
            self.report_panic("message", None, &panicked);
            true
        });
        if left {
            self.remote.announce_messages();
        }
    }

    /// What other threads want of connections, as much as a turn has room for.
    pub(super) fn read_letters<F: Framing>(&mut self, core: &mut Core<S, F>) {
        let mut mails = std::mem::take(&mut self.post.letters);
        for mail in mails.drain(..LETTERS_IN_A_TURN.min(mails.len())) {
            match mail {
                Mail::Push { id, reach, payload } => {
                    let bytes = Mail::bytes_of(&payload);
                    // The framing encodes it, and the owner of the bytes drops them: user code. A connection that missed a
                    // frame for that is reset at the end of the turn.
                    let pushed = guard(|| {
                        if let Some(link) = self.link(core, id) {
                            link.reply(Payload::Bytes(&payload));
                        }
                        drop(payload);
                    });
                    reach.arrived(bytes);
                    if let Err(panicked) = pushed {
                        let peer = self.link(core, id).map(Peer::of);
                        self.report_panic("push", peer.map(|peer| (id, peer)), &panicked);
                    }
                }
                Mail::Close { id } => {
                    if let Some(link) = self.link(core, id) {
                        link.close();
                    }
                }
                Mail::Abort { id } => {
                    if let Some(link) = self.link(core, id) {
                        link.abort();
                    }
                }
                Mail::Socket { socket, peer, listener } => {
                    let socket = self.driver.take_over(socket);
                    core.take_handed_off(listener, socket, peer);
                }
            }
        }
        self.post.letters = mails;
    }
}
