//! Giving memory back once a storm of connections is over.

use alloc::vec::Vec;

use crate::connection::State;
use crate::shard::Shard;
use crate::{Observer, Op};

/// The most connections whose receives are stopped: stopping and arming a thousand takes a
/// millisecond or two.
const RESTARTED_MAX: usize = 1024;

impl<O: Observer> Shard<O> {
    /// Frees what is kept for the next use, and stops every receive, which is armed again once it
    /// has ended: between the two [`Driver::give_back`](crate::Driver::give_back) finds none armed.
    /// Call it before [`end`](Shard::end), when the shard is quiet.
    pub fn give_back(&mut self) {
        self.shared.drop_spare();
        self.blocks.drop_kept();
        self.events.shrink_to_fit();
        self.runnable.shrink_to_fit();
        self.served.shrink_to_fit();
        self.scratch.shrink_to_fit();
        self.fired = Vec::new();
        if self.conns.len() > RESTARTED_MAX {
            return;
        }
        for index in 0..self.conns.used() {
            let Some(id) = self.conns.id_at(index) else { continue };
            let Some(conn) = self.conns.get_mut(id) else { continue };
            // A closing connection only waits for its peer's end, and would take this for it.
            if conn.state != State::Closing && conn.receive.stop() {
                self.ops.push(Op::ReceiveStop { id });
            }
        }
    }
}
