//! Outgoing connections: refused, established at some time, or never answered.

use ringserve_core::{Address, ConnId};
use ringserve_drivers::kernel::{Kind, RawCqe};
use ringserve_simkernel::ring::{Operation, find};

use super::State;
use crate::faults::{Arm, Fault};
use crate::plan::NEVER;
use crate::sock::Place;

/// The answer of an upstream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// Time of the answer.
    due: u64,
    /// 0, or an `errno`.
    errno: i32,
}

/// The number of the upstream with this address.
fn tag_of(address: &Address) -> usize {
    let addr = address.as_ip().expect("only IP addresses are connected to");
    usize::from(addr.port()) - 1024
}

impl State {
    /// The longest time that a connect may take, including the resolution of the shard's clock.
    fn connect_ends(&self, since: u64) -> u64 {
        let limit = self.plan.server_limits.connect_timeout.map_or(NEVER, |limit| limit.as_nanos() as u64);
        since.saturating_add(limit)
    }

    pub(super) fn open_socket(&mut self, address: &Address) -> Result<i32, i32> {
        let tag = tag_of(address);
        assert_eq!(self.socks[tag].place, Place::Nowhere, "upstream {tag} is connected to twice");
        if self.strikes(Fault::SocketFails) {
            self.socks[tag].place = Place::Closed;
            return Err(self.rng.pick(&[libc::EMFILE, libc::ENFILE, libc::ENOBUFS]));
        }
        Ok(self.open_descriptor(tag))
    }

    pub(super) fn connect_to(&mut self, id: ConnId, address: &Address) {
        let done = |res| RawCqe::new(Kind::Connect.with(id.bits()), res, 0);
        let Some(tag) = self.ring.files.get(id) else {
            return self.post(done(-libc::EBADF), Arm::ConnectError);
        };
        assert_eq!(tag, tag_of(address), "{id} connects to another than its socket was made for");
        let never =
            self.plan.server_limits.connect_timeout.is_some() && self.strikes(Fault::ConnectUnanswered);
        let refused = self.strikes(Fault::ConnectRefused);
        let soon = self.rng.one_in(2);
        let due = match () {
            () if never => NEVER,
            () if soon => self.now,
            () => self.now + self.rng.spread(10_000, self.plan.late_max),
        };
        let errno = if refused {
            self.rng.pick(&[libc::ECONNREFUSED, libc::ECONNRESET, libc::ENETUNREACH])
        } else {
            0
        };
        self.ring.connects.push(Operation::new(id, tag, Answer { due, errno }));
    }

    /// Posts the answers of upstreams.
    pub(super) fn work_connects(&mut self) {
        let mut index = 0;
        while let Some(connect) = self.ring.connects.get_mut(index) {
            let was_ending = connect.cancels.is_ending();
            if connect.cancels.check() {
                self.end_connect(index, libc::ECANCELED);
            } else if !was_ending && connect.of.due <= self.now {
                let errno = connect.of.errno;
                self.end_connect(index, errno);
            } else {
                index += 1;
            }
        }
    }

    /// Ends a connect that a cancel found, with the answer of its upstream if the two `raced`.
    pub(super) fn stop_connect(&mut self, id: ConnId, raced: bool) {
        if let Some(index) = find(&self.ring.connects, id) {
            let errno = if raced { self.ring.connects[index].of.errno } else { libc::ECANCELED };
            self.end_connect(index, errno);
        }
    }

    fn end_connect(&mut self, index: usize, errno: i32) {
        let Operation { id, file: tag, .. } = self.ring.connects.swap_remove(index);
        let arm = match errno {
            0 => Arm::Connected,
            libc::ECANCELED => Arm::ConnectCanceled,
            _ => Arm::ConnectError,
        };
        if errno == 0 {
            self.socks[tag].connected = true;
            self.active.push(tag);
            self.kick(tag);
        }
        self.post(RawCqe::new(Kind::Connect.with(id.bits()), -errno, 0), arm);
    }

    /// Time of the next upstream's answer.
    pub(super) fn next_connect(&self) -> u64 {
        self.ring.connects.iter().map(|connect| connect.of.due).min().unwrap_or(NEVER)
    }

    /// True if an enter would end a connect.
    pub(super) fn has_connected(&self) -> bool {
        self.ring.connects.iter().any(|connect| connect.of.due <= self.now || connect.cancels.is_ending())
    }

    /// Panics if a connect that takes too long is not given up. `late` is how late a shard that has
    /// caught up may notice.
    pub(super) fn check_connects(&self, now: u64, late: u64) {
        for connect in self.ring.connects.iter().filter(|connect| !connect.cancels.is_ending()) {
            let ends = self.connect_ends(self.socks[connect.file].opened_at).max(self.catches_up_until);
            assert!(
                now <= ends.saturating_add(late),
                "connection {} is not there, and the shard waits for it for ever",
                connect.file
            );
        }
    }

    /// True if a connection that is not established has taken as long as it may.
    pub(super) fn connect_is_over(&self, tag: usize, now: u64, early: u64) -> bool {
        now + early >= self.connect_ends(self.socks[tag].opened_at)
    }
}
