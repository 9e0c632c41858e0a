//! What hardly any seed of the simulator meets. Everything else about a shard is tested there.

mod connect;
mod drain;
mod held;
mod rate;
mod timers;
mod work;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use ringserve_buf::{Lease, Pool, PoolConfig};

use super::{Event, Next, Parked, Quota, Shard};
use crate::framing::LengthPrefix;
use crate::{
    Address, Batch, CloseHow, CloseReason, Completion, ConnId, Limits, Op, Payload, SendEnd, Socket, Time,
    Wait,
};

type Tested = Shard<(), LengthPrefix>;

fn at(seconds: u64) -> Time {
    Time::ZERO + Duration::from_secs(seconds)
}

/// A shard with one connection.
fn with_connection(limits: Limits) -> (Tested, ConnId) {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard = Shard::new(limits, 1, 1, LengthPrefix::default(), pool, ());
    shard.begin_turn(Time::ZERO, 0);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: None });
    let Some(Event::Accepted { socket, .. }) = shard.next_event() else { panic!("a connection") };
    let id = shard.admit(socket, None, 0, ()).unwrap();
    shard.opened(id);
    shard.end_turn();
    shard.take_ops().for_each(drop);
    (shard, id)
}

fn receive_later(shard: &mut Tested, id: ConnId, bytes: &[u8]) {
    shard.complete(Completion::Received { id, lease: Lease::copy_of(bytes) });
}

fn receive(shard: &mut Tested, id: ConnId, bytes: &[u8]) {
    receive_later(shard, id, bytes);
    if shard.take_frames().is_some() {
        assert!(matches!(shard.next_frame(id), Next::Nothing), "a frame");
    }
}

/// Frames handed out to each connection, in order, until it has none for now.
fn frames_of(shard: &mut Tested, id: ConnId, handed: &mut Vec<ConnId>) {
    while let Next::Frame(..) = shard.next_frame(id) {
        handed.push(id);
    }
}

/// A shard with `count` connections, each of which may be handed frames.
fn with_connections(count: usize, limits: Limits) -> (Tested, Vec<ConnId>) {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard: Tested = Shard::new(limits, count, 1, LengthPrefix::default(), pool, ());
    shard.begin_turn(Time::ZERO, count);
    let ids = (0..count as u64).map(|number| {
        shard.complete(Completion::Accepted { listener: 0, socket: Socket(number), peer: None });
        let Some(Event::Accepted { socket, .. }) = shard.next_event() else { panic!("a connection") };
        let id = shard.admit(socket, None, 0, ()).unwrap();
        shard.opened(id);
        id
    });
    let ids = ids.collect();
    shard.end_turn();
    shard.take_ops().for_each(drop);
    (shard, ids)
}

fn empty_frames(count: usize) -> Vec<u8> {
    vec![0; 4 * count]
}
