//! Inspections of servers, compared with the calls of their services: each connection that lived
//! all the while is in the answer, none that had ended before is, and none is there twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ringserve_server::inspect::{By, ConnInfo, ConnState, Inspection, Query};
use ringserve_server::time::Time;
use ringserve_server::{ConnId, ServerControl, Shard};

use super::cover::Cover;
use super::plan::OUTCOME_WITHIN;
use crate::rng::Rng;

/// The most inspections by a shard.
const INSPECTIONS: u64 = 6;

/// More connections than a server of a seed has.
const ALL: usize = 1000;

/// The connections of a server, of both its services.
#[derive(Clone, Default)]
pub struct Registry(Arc<Mutex<BTreeMap<(usize, ConnId), Life>>>);

#[derive(Clone, Copy, Debug)]
struct Life {
    began: Time,
    ended: Option<Time>,
}

/// A connection from its `open` to its `close`.
#[derive(Default)]
pub struct Known(Option<(Registry, Shard, ConnId)>);

impl Known {
    /// Notes that its service received its end.
    pub fn end(&self) {
        let Some((registry, shard, id)) = &self.0 else { return };
        if let Some(life) = registry.lives().get_mut(&(shard.index(), *id)) {
            life.ended = life.ended.or(Some(shard.now()));
        }
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        self.end();
    }
}

impl Registry {
    fn lives(&self) -> MutexGuard<'_, BTreeMap<(usize, ConnId), Life>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the service admitted a connection.
    pub fn opened(&self, shard: &Shard, id: ConnId) -> Known {
        let life = Life { began: shard.now(), ended: None };
        let before = self.lives().insert((shard.index(), id), life);
        assert!(before.is_none(), "{id} is the name of two connections");
        Known(Some((self.clone(), shard.clone(), id)))
    }

    /// Makes a shard inspect its server at random times.
    pub fn begin(&self, shard: &Shard, seed: Option<u64>, cover: &Cover) {
        let Some(seed) = seed else { return };
        let (registry, cover, here) = (self.clone(), cover.clone(), shard.clone());
        let mut rng = Rng::new(seed ^ (shard.index() as u64) << 32);
        shard.spawn(async move {
            for _ in 0..rng.below(INSPECTIONS) {
                here.sleep(Duration::from_micros(rng.spread(1, 20_000_000))).await;
                registry.inspect(&here, &mut rng, &cover).await;
            }
        });
    }

    async fn inspect(&self, shard: &Shard, rng: &mut Rng, cover: &Cover) {
        let calling = rng.one_in(3);
        let limit = rng.pick(&[1, 3, ALL, ALL]);
        let mut query = if calling { Query::calls_waiting() } else { Query::connections() };
        let mut by = By::OldestCall;
        if !calling {
            by = rng.pick(&[By::Outbox, By::Idle, By::BytesIn, By::Age, By::OldestCall]);
            query = query.by(by);
        }
        let page = rng.pick(&[1, 2, 4096]);
        let asked_at = shard.now();
        let inspecting = shard.server().inspecting(query.limit(limit).page(page));
        if rng.one_in(8) {
            cover.count("inspect", "given up");
            return;
        }
        let done = shard.timeout(OUTCOME_WITHIN, inspecting.done()).await;
        done.expect("each shard answers or ends");
        let answer = inspecting.answer();
        self.check(shard.server(), asked_at, calling, by, limit, &answer, cover);
    }

    #[expect(clippy::too_many_arguments, reason = "each is a part of one question")]
    fn check(
        &self,
        server: &ServerControl,
        asked_at: Time,
        calling: bool,
        by: By,
        limit: usize,
        answer: &Inspection,
        cover: &Cover,
    ) {
        for shard in &answer.silent_shards {
            let lives = server.close_connection(*shard, ConnId::from_bits(u64::MAX));
            assert!(!lives, "shard {shard} lives, and is silent");
            cover.count("inspect", "silent shard");
        }
        let found = &answer.connections;
        assert!(found.len() <= limit, "{} connections, and {limit} were asked for", found.len());
        let names: BTreeSet<_> = found.iter().map(|conn| (conn.shard, conn.id)).collect();
        assert_eq!(names.len(), found.len(), "a connection is there twice: {found:?}");
        let sorted = found.is_sorted_by(|one, next| figure(one, by) >= figure(next, by));
        assert!(sorted, "they are not in the order of {by:?}: {found:?}");
        let lives = self.lives();
        for conn in found {
            cover.count("inspect", conn.state);
            assert!(!calling || conn.calls > 0, "no call waits: {conn:?}");
            let is_served = matches!(
                conn.state,
                ConnState::Open | ConnState::Calling | ConnState::Paused | ConnState::HeldBack
            );
            match lives.get(&(conn.shard, conn.id)) {
                Some(life) => {
                    assert!(life.ended.is_none_or(|ended| ended >= asked_at), "it had ended: {conn:?}");
                }
                // The server opened it, or no service has admitted it yet.
                None => assert!(conn.listener.is_none() || !is_served, "no service knows it: {conn:?}"),
            }
        }
        // With a small limit, those with most may have ended before the answer.
        if calling || limit < ALL {
            return;
        }
        for ((shard, id), life) in lives.iter() {
            let lived = life.began < asked_at && life.ended.is_none();
            assert!(
                !lived || answer.silent_shards.contains(shard) || names.contains(&(*shard, *id)),
                "{id} of shard {shard} lives, and is not in the answer: {life:?}, asked at {asked_at:?}, {found:?}"
            );
        }
    }
}

fn figure(conn: &ConnInfo, by: By) -> u128 {
    match by {
        By::Outbox => conn.outbox_bytes as u128,
        By::Idle => conn.idle.as_nanos(),
        By::BytesIn => conn.bytes_in.unwrap_or(0).into(),
        By::Age => conn.age.as_nanos(),
        _ => conn.oldest_call.unwrap_or_default().as_nanos(),
    }
}
