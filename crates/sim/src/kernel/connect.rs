//! Connections that the server makes: refused, made some time, or never answered.

use ringserve_core::{Address, ConnId};
use ringserve_drivers::kernel::{Kind, RawCqe};

use super::State;
use crate::faults::{Arm, Fault};
use crate::plan::NEVER;
use crate::sock::Place;

/// A connect in flight.
#[derive(Debug)]
pub(super) struct Connect {
    id: ConnId,
    tag: usize,
    /// When the upstream answers.
    due: u64,
    /// What it answers: 0, or an `errno`.
    errno: i32,
    /// A cancel told EALREADY: it ends by itself, after this number of looks.
    pub(super) dying: u8,
    /// Cancels that did not find it.
    missed: u8,
}

/// The upstream of that address.
fn tag_of(address: &Address) -> usize {
    let addr = address.as_ip().expect("only IP addresses are connected to");
    usize::from(addr.port()) - 1024
}

impl Connect {
    pub(super) fn is_of(&self, tag: usize) -> bool {
        self.tag == tag
    }

    /// True if a cancel did not find it, which is made again.
    pub(super) fn was_missed(&self) -> bool {
        self.missed > 0
    }
}

impl State {
    /// The longest time that a connection may take to be made, with what the shard's clock adds.
    fn connect_ends(&self, since: u64) -> u64 {
        let limit = self.plan.limits.connect_timeout.map_or(NEVER, |limit| limit.as_nanos() as u64);
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
        let Some(tag) = self.file(id) else {
            return self.post(done(-libc::EBADF), Arm::ConnectError);
        };
        assert_eq!(tag, tag_of(address), "{id} connects to another than its socket was made for");
        let never = self.plan.limits.connect_timeout.is_some() && self.strikes(Fault::ConnectUnanswered);
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
        self.connects.push(Connect { id, tag, due, errno, dying: 0, missed: 0 });
    }

    pub(super) fn cancel_connect(&mut self, id: ConnId) {
        let cancel = |res| RawCqe::new(Kind::CancelConnect.with(id.bits()), res, 0);
        let Some(index) = self.connects.iter().position(|connect| connect.id == id) else {
            return self.post_or_late(cancel(-libc::ENOENT), Arm::CancelConnectNone, Fault::CancelLate);
        };
        let missed = self.connects[index].missed;
        if self.misses(Fault::ConnectMissed, missed) {
            self.connects[index].missed += 1;
            return self.post_or_late(cancel(-libc::ENOENT), Arm::CancelConnectNone, Fault::CancelLate);
        }
        if self.strikes(Fault::CancelAlready) {
            self.connects[index].dying = self.rng.range(1, 3) as u8;
            return self.post(cancel(-libc::EALREADY), Arm::CancelConnectAlready);
        }
        let raced = self.strikes(Fault::CancelRace);
        let connect = self.connects.swap_remove(index);
        let errno = if raced { connect.errno } else { libc::ECANCELED };
        if self.rng.one_in(2) {
            self.post(cancel(0), Arm::CancelConnectDone);
            self.end_connect(connect, errno);
        } else {
            self.end_connect(connect, errno);
            self.post_or_late(cancel(0), Arm::CancelConnectDone, Fault::CancelLate);
        }
    }

    /// Posts what upstreams answered.
    pub(super) fn work_connects(&mut self) {
        let mut index = 0;
        while index < self.connects.len() {
            let connect = &mut self.connects[index];
            let dies = connect.dying > 0;
            connect.dying = connect.dying.saturating_sub(1);
            if dies && connect.dying == 0 {
                let connect = self.connects.swap_remove(index);
                self.end_connect(connect, libc::ECANCELED);
            } else if !dies && connect.due <= self.now {
                let connect = self.connects.swap_remove(index);
                let errno = connect.errno;
                self.end_connect(connect, errno);
            } else {
                index += 1;
            }
        }
    }

    fn end_connect(&mut self, connect: Connect, errno: i32) {
        let Connect { id, tag, .. } = connect;
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

    /// When the next upstream answers.
    pub(super) fn next_connect(&self) -> u64 {
        self.connects.iter().map(|connect| connect.due).min().unwrap_or(NEVER)
    }

    /// True if an enter would bring the end of a connect.
    pub(super) fn has_connected(&self) -> bool {
        self.connects.iter().any(|connect| connect.due <= self.now || connect.dying > 0)
    }

    /// A connect that takes too long is given up. `late` is how late the shard may find out.
    pub(super) fn check_connects(&self, now: u64, late: u64) {
        for connect in self.connects.iter().filter(|connect| connect.dying == 0) {
            let ends = self.connect_ends(self.socks[connect.tag].opened_at);
            assert!(
                now <= ends.saturating_add(late),
                "connection {} is not there, and the shard waits for it for ever",
                connect.tag
            );
        }
    }

    /// True if a connection that is not there yet has taken as long as it may.
    pub(super) fn connect_is_over(&self, tag: usize, now: u64, early: u64) -> bool {
        now + early >= self.connect_ends(self.socks[tag].opened_at)
    }
}
