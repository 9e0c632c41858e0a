//! The masks of the frames that a client of WebSocket sends.

use std::hash::{BuildHasher, RandomState};

use crate::shard::face::handle::Shard;

/// The source of the masks. No server can foresee them, as RFC 6455, 10.3 wants it: each is the
/// hash of a number by a key of the system's. In a simulation the seed decides them.
pub(super) struct Masks {
    keys: Option<RandomState>,
    shard: Shard,
    count: u64,
}

impl Masks {
    pub(super) fn new(shard: &Shard) -> Masks {
        let is_simulated = shard.timers().clock().is_simulated();
        Masks { keys: (!is_simulated).then(RandomState::new), shard: shard.clone(), count: 0 }
    }

    fn number(&mut self) -> u64 {
        self.count += 1;
        match &self.keys {
            Some(keys) => keys.hash_one(self.count),
            None => self.shard.random(),
        }
    }

    /// For the request.
    pub(super) fn key(&mut self) -> [u8; 16] {
        let both = u128::from(self.number()) << 64 | u128::from(self.number());
        both.to_ne_bytes()
    }

    /// For a frame.
    pub(super) fn next(&mut self) -> [u8; 4] {
        // Half of it says nothing of the other half.
        (self.number() as u32).to_ne_bytes()
    }
}
