//! A shard's way through its table for an inspection, a page in a turn.
//!
//! ```text
//!   inspecting ──▶ Letter::Inspect ──▶ step: a page ──▶ more? the shard's own next letter
//!                                           │
//!                                           └─ the end: what is kept is looked at once more, and answered
//! ```
//!
//! Between two pages the walk is a letter in the shard's inbox: so it keeps the shard from
//! sleeping, ends with the shard, and costs a turn without one nothing.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use ringserve_core::{ConnFigures, ConnId, Observer, Shard};

use super::asked::{Asked, Found};
use super::query::{ConnInfo, InspectionSums, Query};
use crate::stats::ServiceNames;

/// The name of connections that the server made.
const UPSTREAM: &str = "upstream";

/// A shard's part of an inspection.
pub(crate) struct Walk {
    query: Query,
    shard: usize,
    /// The first slot of the next page.
    next: u32,
    /// The least of those with most is on top. Of equal ones that in the lower slot is more.
    kept: BinaryHeap<Reverse<(u64, Reverse<u32>, ConnId)>>,
    sums: InspectionSums,
    asked: Arc<Asked>,
}

impl Walk {
    /// True if the one who asked no longer takes an answer.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.asked.is_abandoned()
    }

    pub(crate) fn new(query: &Query, shard: usize, asked: Arc<Asked>) -> Walk {
        Walk {
            query: query.clone(),
            shard,
            next: 0,
            kept: BinaryHeap::new(),
            sums: InspectionSums::default(),
            asked,
        }
    }

    /// On the shard: looks at a page, and answers behind the last one. True if there is more.
    pub(crate) fn step<O: Observer>(&mut self, core: &Shard<O>, names: &ServiceNames) -> bool {
        if self.asked.is_abandoned() {
            return false;
        }
        let end = core.slots_used().min(self.next + self.query.page);
        for slot in self.next..end {
            if let Some(found) = core.figures_at(slot, self.query.by.figure(), self.query.calling) {
                let ConnFigures { id, value, outbox_bytes, is_held_back, calls } = found;
                let (connections, outbox_bytes) = (1, outbox_bytes as u64);
                let (held_back, calls) = (u64::from(is_held_back), u64::from(calls));
                self.sums.add(InspectionSums { connections, outbox_bytes, held_back, calls });
                self.keep(id, value);
            }
        }
        self.next = end;
        if end < core.slots_used() {
            return true;
        }
        let kept = std::mem::take(&mut self.kept).into_iter();
        let seen = kept.filter_map(|Reverse((_, _, id))| self.info(core, names, id));
        self.asked.came(self.shard, Found { connections: seen.collect(), sums: self.sums });
        false
    }

    fn keep(&mut self, id: ConnId, value: u64) {
        let entry = Reverse((value, Reverse(id.slot()), id));
        if self.kept.len() < self.query.limit {
            self.kept.push(entry);
        } else if let Some(mut least) = self.kept.peek_mut()
            && entry < *least
        {
            *least = entry;
        }
    }

    /// `None` for a connection that ended since.
    fn info<O: Observer>(&self, core: &Shard<O>, names: &ServiceNames, id: ConnId) -> Option<ConnInfo> {
        let view = core.view(id).filter(|view| !self.query.calling || view.calls > 0)?;
        let service = names.name(view.lane);
        let account = view.account.as_ref();
        Some(ConnInfo {
            id,
            shard: self.shard,
            listener: service.map(|_| usize::from(view.listener)),
            service: service.cloned().unwrap_or_else(|| UPSTREAM.into()),
            peer: view.peer,
            age: view.age,
            idle: view.idle,
            outbox_bytes: view.outbox_bytes,
            bytes_in: account.map(|account| account.bytes_received),
            bytes_out: account.map(|account| account.bytes_sent),
            frames_in: account.map(|account| account.frames_received),
            frames_out: account.map(|account| account.frames_sent),
            state: view.state,
            calls: view.calls.into(),
            oldest_call: view.oldest_call,
        })
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        self.asked.left();
    }
}
