//! Messages between the ends of connections: their arrival, and the reasons for delays.

use std::net::IpAddr;
use std::time::Duration;

use super::{NEVER, State};
use crate::connection::Side;

fn pair(a: IpAddr, b: IpAddr) -> (IpAddr, IpAddr) {
    (a.min(b), a.max(b))
}

impl State {
    /// Sets the clock, and delivers everything that is due.
    pub(crate) fn set_now(&mut self, now: Duration) {
        assert!(now >= self.now, "time goes back from {:?} to {now:?}", self.now);
        self.now = now;
        while let Some((at, number)) = self.next_arrival()
            && at <= now
        {
            self.deliver(number);
        }
        while let Some(clients) = self.clients_connecting.first_entry()
            && *clients.key() <= now
        {
            self.wakes.extend(clients.remove());
        }
    }

    /// The next arrival, and its connection.
    fn next_arrival(&mut self) -> Option<(Duration, u32)> {
        let mut agenda = self.agenda.lock();
        while let Some((at, number)) = agenda.first().copied() {
            if self.connections.get_mut(number).and_then(|connection| connection.next_arrival()) == Some(at) {
                return Some((at, number));
            }
            agenda.pop_first();
        }
        None
    }

    fn deliver(&mut self, number: u32) {
        let notified = self.connection(number).deliver();
        for side in [Side::Client, Side::Server] {
            if notified[side as usize] {
                self.notify_end(number, side);
            }
        }
    }

    /// The time at which something arrives by itself.
    pub(crate) fn next_event_at(&mut self) -> Option<Duration> {
        let handshake = self.clients_connecting.keys().next().copied().filter(|at| *at != NEVER);
        self.next_arrival().map(|(at, _)| at).into_iter().chain(handshake).min()
    }

    pub(super) fn is_parted(&self, a: IpAddr, b: IpAddr) -> bool {
        !self.partitions.is_empty() && self.partitions.contains(&pair(a, b))
    }

    pub(crate) fn set_partition(&mut self, a: IpAddr, b: IpAddr, parted: bool) {
        if parted {
            self.partitions.insert(pair(a, b))
        } else {
            self.partitions.remove(&pair(a, b))
        };
        for (number, _) in self.connections().collect::<Vec<_>>() {
            self.hold_or_release(number);
        }
        self.retry_connects();
    }

    pub(crate) fn set_held(&mut self, number: u32, held: bool) {
        if held {
            self.held.insert(number)
        } else {
            self.held.remove(&number)
        };
        self.hold_or_release(number);
    }

    /// Holds a connection that is held manually or by a partition, and releases any other.
    fn hold_or_release(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let (client, server) = connection.addrs();
        let held = self.held.contains(&number) || self.is_parted(client.ip(), server.ip());
        self.connection(number).hold(held);
        self.deliver(number);
    }

    /// Breaks a connection between its ends.
    pub(crate) fn break_off(&mut self, number: u32) {
        if self.connections.get_mut(number).is_some() {
            self.connection(number).break_off();
            for side in [Side::Client, Side::Server] {
                self.notify_end(number, side);
            }
        }
    }
}
