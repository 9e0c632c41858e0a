//! Scripted peers: the actions of the other end of each connection, and what it must receive.

use super::State;
use crate::bytes::{self, AnyFraming};
use crate::faults::Fault;
use crate::plan::{MS, NEVER, Plan};
use crate::rng::Rng;
use crate::sock::{End, Peer, Place, Sock, excuse};

/// Draws a peer and its script.
pub fn draw(rng: &mut Rng, plan: &Plan, tag: usize, hit: &mut impl FnMut(Fault)) -> Sock {
    let odd = |rng: &mut Rng| rng.below(16) < plan.odd_peers;
    let peer = Peer {
        next_at: if rng.one_in(2) { rng.below(4 * MS) } else { rng.below(200 * MS) },
        kicked: false,
        gap: rng.spread(1000, plan.gap_max),
        send_max: if odd(rng) { rng.range(1, 4) as usize } else { rng.spread(16, 16_384) as usize },
        read_max: if odd(rng) { rng.range(1, 16) as usize } else { rng.spread(64, 16_384) as usize },
        reads_from: 0,
        window: if rng.one_in(3) { 1 } else { rng.range(1, 64) as usize },
        end: End::Fin,
        crawls: None,
        answers: if rng.one_in(2) { rng.spread(1, 40) as usize } else { 0 },
        saw_end: false,
        finished: false,
    };
    let listener = rng.below(u64::from(plan.listeners)) as u16;
    let mut sock = Sock::new(tag, listener, peer);
    let silent = odd(rng) && rng.one_in(2);
    let frames = if silent { 0 } else { rng.range(1, plan.frames_max as u64) };
    for _ in 0..frames {
        let len = if rng.one_in(4) { plan.payload_max } else { plan.payload_max.min(64) };
        let len = rng.spread(0, len as u64) as usize;
        let len = if plan.framing.head() == 0 { len.max(1) } else { len };
        sock.script(plan.framing, len);
        // A few bytes at a time would make a long stream take forever.
        if sock.wire.len() > 400 * sock.peer.send_max {
            break;
        }
    }
    let peer = &mut sock.peer;
    if peer.send_max <= 4 {
        peer.gap = peer.gap.min(MS);
        hit(Fault::PeerTrickles);
    }
    if peer.read_max <= 16 {
        peer.gap = peer.gap.min(MS);
        hit(Fault::PeerSipsBytes);
    }
    if let Some(gap) = plan.dawdles.filter(|_| rng.one_in(2)) {
        peer.gap = gap;
        hit(Fault::PeerDawdles);
    }
    if silent {
        hit(Fault::PeerSilent);
    }
    if odd(rng) {
        if rng.one_in(3) {
            peer.reads_from = NEVER;
            hit(Fault::PeerNeverReads);
        } else {
            peer.reads_from = peer.next_at + rng.spread(MS, 1500 * MS);
            hit(Fault::PeerStalls);
        }
    }
    if odd(rng) {
        draw_end(rng, plan, &mut sock, hit);
    }
    if !sock.frames.is_empty() && rng.below(16) < plan.crawlers {
        let frame = rng.range(0, sock.frames.len() as u64 - 1) as usize;
        let (start, end) =
            (frame.checked_sub(1).map_or(0, |last| sock.frames[last].end), sock.frames[frame].end);
        let from = rng.range(start as u64 + 1, end as u64) as usize;
        let gap = rng.spread(100, 6000) * MS;
        sock.peer.crawls = Some((from, rng.spread(1, 64) as usize, gap));
        // A long stream at this pace would take forever.
        if sock.wire.len() > from + 400 && !sock.may(excuse::GARBAGE) {
            let last = sock.frames.iter().position(|frame| frame.end > from + 400).unwrap_or(frame);
            sock.frames.truncate(last + 1);
            sock.wire.truncate(sock.frames[last].end);
            sock.peer.end = End::Fin;
        }
        hit(Fault::PeerCrawls);
    }
    sock
}

fn draw_end(rng: &mut Rng, plan: &Plan, sock: &mut Sock, hit: &mut impl FnMut(Fault)) {
    sock.peer.end = match rng.below(7) {
        0 => {
            hit(Fault::PeerResets);
            End::Reset(rng.below(sock.wire.len() as u64 + 1) as usize)
        }
        1 => {
            hit(Fault::PeerHalfCloses);
            End::HalfClose
        }
        2 if !matches!(plan.framing, AnyFraming::Raw) => {
            let from = sock.wire.len();
            plan.framing.write(&mut sock.wire, bytes::payload(sock.tag, sock.frames.len(), 8));
            let keep = rng.range(1, (sock.wire.len() - from) as u64 - 1) as usize;
            sock.wire.truncate(from + keep);
            hit(Fault::PeerMidFrame);
            End::HalfClose
        }
        3 if !matches!(plan.framing, AnyFraming::Raw | AnyFraming::Length(1, _)) => {
            let max = plan.limits.frame_bytes_max;
            match plan.framing {
                AnyFraming::Length(..) => plan.framing.write_length(&mut sock.wire, max as u64),
                _ => sock.wire.extend_from_slice(&vec![b'x'; max + 1]),
            }
            sock.excuses |= excuse::GARBAGE;
            hit(Fault::PeerGarbage);
            if rng.one_in(2) { End::Wait } else { End::HalfClose }
        }
        4 | 5 => {
            hit(Fault::PeerIdles);
            End::Wait
        }
        _ => {
            hit(Fault::PeerIgnoresEnd);
            End::Ignore
        }
    };
}

impl State {
    /// Lets every peer act whose time has come, and finds the next one's time.
    pub fn act_peers(&mut self) {
        if self.now < self.peers_at {
            return;
        }
        let mut index = 0;
        while index < self.active.len() {
            let tag = self.active[index];
            if self.socks[tag].peer.next_at <= self.now {
                self.act(tag);
            }
            if self.socks[tag].peer.finished {
                self.active.swap_remove(index);
            } else {
                index += 1;
            }
        }
        self.peers_at = self.active.iter().map(|tag| self.socks[*tag].peer.next_at).min().unwrap_or(NEVER);
    }

    /// Makes a peer that waits act on a change.
    pub fn kick(&mut self, tag: usize) {
        let pace = self.pace(tag);
        let peer = &mut self.socks[tag].peer;
        if peer.kicked || peer.finished {
            return;
        }
        peer.kicked = true;
        let soon = self.now + self.rng.below(pace);
        peer.next_at = peer.next_at.min(soon);
        self.peers_at = self.peers_at.min(peer.next_at);
    }

    fn act(&mut self, tag: usize) {
        let now = self.now;
        self.socks[tag].peer.kicked = false;
        self.socks[tag].peer.next_at = NEVER;
        match self.socks[tag].place {
            Place::Nowhere => return self.connect(tag),
            _ if !self.socks[tag].connected => return,
            // Its SYN may have been dropped; its bytes wait for its place in the backlog.
            Place::Backlog | Place::Descriptor | Place::Table | Place::Closed => {}
        }
        let moved = self.peer_reads(tag) | self.peer_answers(tag) | self.peer_sends(tag);
        self.peer_ends(tag);
        let pace = self.pace(tag);
        let sock = &mut self.socks[tag];
        if sock.peer.finished {
            return;
        }
        if moved {
            sock.peer.next_at = now + self.rng.below(pace) + 1;
        } else if sock.peer.reads_from > now && sock.peer.ever_reads() {
            sock.peer.next_at = sock.peer.reads_from;
        } else if sock.peer.end == End::Ignore && sock.ended.is_some() && !sock.server_closed {
            // It keeps sending for a while, so that its input has to be discarded.
            if sock.wire.len() < sock.sent + 64 && sock.wire.len() < 20_000 {
                sock.wire.extend_from_slice(&[b'?'; 64]);
            }
            sock.peer.next_at = now + sock.peer.gap.max(MS / 5);
        }
    }

    /// The most nanoseconds between two actions of a peer.
    fn pace(&self, tag: usize) -> u64 {
        let sock = &self.socks[tag];
        match sock.peer.crawls {
            Some((from, _, gap)) if sock.sent >= from => gap,
            _ => sock.peer.gap,
        }
    }

    /// True if it has seen a heartbeat, and answers with a frame.
    fn peer_answers(&mut self, tag: usize) -> bool {
        let framing = self.plan.framing;
        let sock = &mut self.socks[tag];
        if sock.pings.front().is_none_or(|end| *end > sock.delivered) {
            return false;
        }
        sock.pings.pop_front();
        // A peer in the middle of a frame, or at the end of its script, does not answer.
        let between =
            sock.sent == sock.wire.len() && sock.frames.last().map_or(0, |last| last.end) == sock.sent;
        let able = between && !sock.reset && !sock.peer_fin && !sock.peer.saw_end && !sock.server_fin;
        if !able || sock.peer.answers == 0 || matches!(sock.peer.end, End::HalfClose | End::Reset(_)) {
            self.cover.fault(Fault::PeerMute);
            return false;
        }
        sock.peer.answers -= 1;
        sock.script(framing, 5.min(self.plan.payload_max));
        self.cover.fault(Fault::PeerAnswers);
        true
    }

    pub(super) fn connect(&mut self, tag: usize) {
        let listener = usize::from(self.socks[tag].listener);
        if self.listeners[listener].closed || self.listeners[listener].gone {
            self.socks[tag].peer.finished = true;
        } else if self.listeners[listener].backlog.len() < self.plan.backlog {
            self.listeners[listener].backlog.push_back(tag);
            self.listeners[listener].owes |= self.plan.adopted && self.ring.accepts[listener].is_some();
            self.socks[tag].place = Place::Backlog;
            self.socks[tag].peer.next_at = self.now + self.rng.below(self.socks[tag].peer.gap) + 1;
            self.log(|| format!("peer {tag} connects"));
        } else {
            // The SYN is dropped, and sent again later.
            self.listeners[listener].refused.push_back(tag);
        }
    }

    /// True if it read something.
    fn peer_reads(&mut self, tag: usize) -> bool {
        let now = self.now;
        let sock = &mut self.socks[tag];
        if sock.peer.saw_end {
            return false;
        }
        if sock.reset {
            sock.peer.saw_end = true;
            self.saw_reset(tag);
            return true;
        }
        if !sock.peer.reads(now) {
            return false;
        }
        let len = sock.undelivered().min(sock.peer.read_max);
        sock.delivered += len;
        if len > 0 {
            return true;
        }
        if sock.server_fin {
            sock.peer.saw_end = true;
            self.saw_eof(tag);
            return true;
        }
        false
    }

    /// True if it sent something.
    fn peer_sends(&mut self, tag: usize) -> bool {
        let room = self.plan.socket_bytes.0;
        let sock = &mut self.socks[tag];
        if sock.reset || sock.peer_fin || sock.peer.finished {
            return false;
        }
        // It holds back frames beyond its window.
        let window = sock.peer.window;
        let end = match sock.frames.get(sock.done + window - 1) {
            Some(frame) => frame.end,
            None => sock.wire.len(),
        };
        let most = match sock.peer.crawls {
            Some((from, most, _)) if sock.sent >= from => most,
            Some((from, ..)) => sock.peer.send_max.min(from - sock.sent),
            None => sock.peer.send_max,
        };
        let len = end.saturating_sub(sock.sent).min(most).min(room - sock.unread());
        if len == 0 {
            return false;
        }
        if sock.server_closed {
            // The server's kernel answers bytes for a closed socket with RST.
            self.log(|| format!("peer {tag} sends to a closed socket"));
            sock_reset(&mut self.socks[tag]);
            return true;
        }
        sock.sent += len;
        self.log(|| format!("peer {tag} sends {len}"));
        true
    }

    fn peer_ends(&mut self, tag: usize) {
        let now = self.now;
        let sock = &mut self.socks[tag];
        let all_sent = sock.sent == sock.wire.len();
        let answered = all_sent && sock.done == sock.frames.len() && sock.delivered == sock.owed.len();
        let reset = match sock.peer.end {
            End::Reset(at) => sock.sent >= at || sock.peer.saw_end,
            _ => false,
        };
        if reset && !sock.reset {
            if sock.place == Place::Backlog {
                self.cover.fault(Fault::PeerGoneEarly);
            }
            return self.peer_resets(tag);
        }
        let fin = match sock.peer.end {
            End::Fin => answered || sock.peer.saw_end,
            End::HalfClose => all_sent || sock.peer.saw_end,
            End::Reset(_) | End::Wait => sock.peer.saw_end,
            End::Ignore => false,
        };
        // A peer that never reads has to give up at some time.
        let fin = fin || (sock.peer.end == End::Fin && all_sent && !sock.peer.ever_reads());
        if fin && !sock.peer_fin {
            sock.peer_fin = true;
            self.log(|| format!("peer {tag} sends FIN"));
        }
        let sock = &mut self.socks[tag];
        let over = sock.reset || (sock.server_closed && (!sock.peer.reads(now) || sock.peer.saw_end));
        sock.peer.finished = (sock.peer.saw_end && sock.peer_fin) || over;
    }

    /// Resets the connection, as the peer or the network does.
    pub(crate) fn peer_resets(&mut self, tag: usize) {
        let sock = &mut self.socks[tag];
        sock.excuses |= excuse::RESET;
        sock.error =
            self.rng.pick(&[libc::ECONNRESET, libc::ECONNRESET, libc::ETIMEDOUT, libc::EHOSTUNREACH]);
        sock_reset(sock);
        // Bytes that the server has not read may still be readable, or not.
        if self.rng.one_in(2) {
            sock.sent = sock.read;
        }
        sock.peer.finished = true;
        self.log(|| format!("peer {tag} resets"));
    }
}

/// Ends the connection for both sides.
pub fn sock_reset(sock: &mut Sock) {
    sock.reset = true;
    if sock.error == 0 {
        sock.error = libc::ECONNRESET;
    }
}

impl State {
    /// Lets every peer see the end of the server.
    pub fn check_peers(&mut self) {
        for tag in 0..self.socks.len() {
            let sock = &mut self.socks[tag];
            if sock.place == Place::Nowhere || sock.peer.finished || sock.peer.saw_end || !sock.connected {
                continue;
            }
            sock.peer.reads_from = 0;
            sock.peer.read_max = usize::MAX;
            assert!(sock.server_closed, "connection {tag} has no end");
            self.peer_reads(tag);
            self.peer_reads(tag);
            assert!(self.socks[tag].peer.saw_end, "peer {tag} sees no end");
        }
    }
}
