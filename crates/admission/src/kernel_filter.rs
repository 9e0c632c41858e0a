//! A filter of the kernel (classic BPF) at the listeners, made of the networks that are denied by a
//! list or for a time: a denied peer's first packet is dropped before there is a connection,
//! without privilege.
//!
//! One program serves both families, since `[::]` takes both:
//!
//! ```text
//!   version of the packet ─ 4 ─▶ source ──────────▶ binary search ─▶ drop or keep
//!                         └ 6 ─▶ source, word 0 ──▶ binary search ─▶ drop, keep, or go on with word 1, and so on
//! ```
//!
//! A program may have 4096 instructions, so of a longer list the widest networks are taken, after
//! those that are denied for a time. The server refuses the rest. The program is made again when a
//! list changed, or a time began or ended.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use ipnet::IpNet;
use ringserve_base::clock::Clock;
use ringserve_base::lines::{info, warn};
use ringserve_core::Time;
use ringserve_drivers::guarded;
use ringserve_drivers::{Listener, ListenerFilter};
use socket2::SockFilter;

use super::lists::Networks;
use super::ranges::{Range, merged, range};
use super::shard::Limiters;
use super::timed::Until;
use super::{IpList, Limiter};

/// The longest program that the kernel takes (`BPF_MAXINSNS`).
const INSTRUCTIONS_MAX: usize = 4096;

/// Networks of which a program is tried at most: a single one takes more than one instruction,
/// unless it lies beside others.
const NETWORKS_MAX: usize = 2 * INSTRUCTIONS_MAX;

/// The offset of the network header, whatever precedes it (`SKF_NET_OFF`).
const NETWORK_HEADER: u32 = 0xfff0_0000;

/// The offset of the source address in that header.
const V4_SOURCE: u32 = 12;
const V6_SOURCE: u32 = 8;

/// Segments that one block searches: conditional jumps reach 255 instructions.
const BLOCK: usize = 250;

/// Opcodes of `linux/filter.h`.
const LOAD_BYTE: u16 = 0x30;
const LOAD_WORD: u16 = 0x20;
const SHIFT_RIGHT: u16 = 0x74;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER_EQUAL: u16 = 0x35;
const RETURN: u16 = 0x06;

/// The return value of a program: how much of the packet is kept.
const KEEP: u32 = u32::MAX;
const DROP: u32 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    code: u16,
    if_true: u8,
    if_false: u8,
    k: u32,
}

impl Instruction {
    fn new(code: u16, k: u32) -> Instruction {
        Instruction { code, if_true: 0, if_false: 0, k }
    }

    fn jump(code: u16, k: u32, if_true: usize, if_false: usize) -> Instruction {
        debug_assert!(if_true <= 255 && if_false <= 255, "a jump is too far");
        Instruction { code, if_true: if_true as u8, if_false: if_false as u8, k }
    }
}

/// The verdict on sources whose word is in a segment.
enum Outcome {
    Keep,
    Drop,
    /// The next word decides, by these ranges.
    Next(Vec<Range>),
}

/// A word's values from this one to the next segment.
type Segment = (u32, Outcome);

/// `ranges` without `holes`; both in order.
fn without(ranges: Vec<Range>, holes: &[Range]) -> Vec<Range> {
    let mut left = Vec::new();
    for (mut first, last) in ranges {
        let mut is_over = false;
        let from = holes.partition_point(|(_, end)| *end < first);
        for &(start, end) in holes[from..].iter().take_while(|(start, _)| *start <= last) {
            if start > first {
                left.push((first, start - 1));
            }
            is_over = end >= last;
            if is_over {
                break;
            }
            first = end + 1;
        }
        if !is_over {
            left.push((first, last));
        }
    }
    left
}

/// Segments of the first of `words` words.
fn segments(ranges: &[Range], words: u32) -> Vec<Segment> {
    let shift = 32 * (words - 1);
    let below = (1u128 << shift) - 1;
    let mut segments: Vec<Segment> = vec![(0, Outcome::Keep)];
    // The first value that no segment has.
    let mut next: u64 = 0;
    let mut add = |first: u64, last: u64, outcome: Outcome| {
        match (segments.last_mut(), outcome) {
            // Several ranges begin with one word.
            (Some((start, Outcome::Next(rest))), Outcome::Next(more))
                if u64::from(*start) == first && next == first + 1 =>
            {
                rest.extend(more);
                return;
            }
            (_, outcome) => {
                if first == 0 {
                    segments.clear();
                } else if first > next && next > 0 {
                    segments.push((next as u32, Outcome::Keep));
                }
                segments.push((first as u32, outcome));
            }
        }
        next = last + 1;
    };
    for &(first, last) in ranges {
        let (mut from, mut to) = ((first >> shift) as u64, (last >> shift) as u64);
        let (first_rest, last_rest) = (first & below, last & below);
        let (is_cut, is_cut_behind) = (first_rest != 0, last_rest != below);
        if from == to && (is_cut || is_cut_behind) {
            add(from, from, Outcome::Next(vec![(first_rest, last_rest)]));
            continue;
        }
        if is_cut {
            add(from, from, Outcome::Next(vec![(first_rest, below)]));
            from += 1;
        }
        if is_cut_behind {
            to -= 1;
        }
        if from <= to {
            add(from, to, Outcome::Drop);
        }
        if is_cut_behind {
            add(to + 1, to + 1, Outcome::Next(vec![(0, last_rest)]));
        }
    }
    if next > 0 && next <= u64::from(u32::MAX) {
        segments.push((next as u32, Outcome::Keep));
    }
    segments
}

/// Finds the outcome of the source's word at `offset`, the first of `words`.
fn search(ranges: &[Range], words: u32, offset: u32) -> Vec<Instruction> {
    let mut program = vec![Instruction::new(LOAD_WORD, NETWORK_HEADER + offset)];
    program.extend(choose(&segments(ranges, words), words, offset));
    program
}

fn choose(segments: &[Segment], words: u32, offset: u32) -> Vec<Instruction> {
    let ends = |(_, outcome): &Segment| !matches!(outcome, Outcome::Next(_));
    if segments.len() <= BLOCK && segments.iter().all(ends) {
        return block(segments);
    }
    if let [(_, Outcome::Next(ranges))] = segments {
        return search(ranges, words - 1, offset + 4);
    }
    let (low, high) = segments.split_at(segments.len() / 2);
    let (first, low, high) = (high[0].0, choose(low, words, offset), choose(high, words, offset));
    let mut program = match low.len() {
        near @ ..=255 => vec![Instruction::jump(JUMP_GREATER_EQUAL, first, near, 0)],
        far => vec![Instruction::jump(JUMP_GREATER_EQUAL, first, 0, 1), Instruction::new(JUMP, far as u32)],
    };
    program.extend(low);
    program.extend(high);
    program
}

/// Segments that keep or drop, with one return for each of both after the search.
fn block(segments: &[Segment]) -> Vec<Instruction> {
    fn place(segments: &[Segment], keep: usize, program: &mut Vec<Instruction>) -> usize {
        if let [(_, outcome)] = segments {
            return if matches!(outcome, Outcome::Drop) { keep + 1 } else { keep };
        }
        let at = program.len();
        let (low, high) = segments.split_at(segments.len() / 2);
        program.push(Instruction::new(JUMP_GREATER_EQUAL, high[0].0));
        let low = place(low, keep, program);
        let high = place(high, keep, program);
        program[at] = Instruction::jump(JUMP_GREATER_EQUAL, program[at].k, high - at - 1, low - at - 1);
        at
    }
    if let [(_, outcome)] = segments {
        return vec![Instruction::new(RETURN, if matches!(outcome, Outcome::Drop) { DROP } else { KEEP })];
    }
    let mut program = Vec::new();
    place(segments, segments.len() - 1, &mut program);
    program.extend([KEEP, DROP].map(|value| Instruction::new(RETURN, value)));
    program
}

/// Drops what comes from these ranges; empty if there is none.
fn program(v4: &[Range], v6: &[Range]) -> Vec<Instruction> {
    if v4.is_empty() && v6.is_empty() {
        return Vec::new();
    }
    let (v4, v6) = (search(v4, 1, V4_SOURCE), search(v6, 4, V6_SOURCE));
    let mut program = vec![
        Instruction::new(LOAD_BYTE, NETWORK_HEADER),
        Instruction::new(SHIFT_RIGHT, 4),
        // Whatever is neither is kept.
        Instruction::jump(JUMP_EQUAL, 6, 0, 1),
        Instruction::new(JUMP, v4.len() as u32 + 2),
        Instruction::jump(JUMP_EQUAL, 4, 1, 0),
        Instruction::new(RETURN, KEEP),
    ];
    program.extend(v4);
    program.extend(v6);
    program
}

/// Networks that are denied: those for a time, then a list's, the widest ones of each first. A
/// network of IPv6 has the size of one of IPv4 with half of its bits.
struct Denied {
    networks: Vec<IpNet>,
    allowed: [Vec<Range>; 2],
}

impl Denied {
    /// A network that is allowed for a time is kept, whatever denies it.
    fn new(deny: Option<&Networks>, allow: Option<&Networks>, timed: &[(IpNet, Until)]) -> Denied {
        let timed_that = |allows: bool| {
            timed.iter().filter(move |(_, until)| until.allows == allows).map(|(network, _)| *network)
        };
        let width = |network: &IpNet| match network {
            IpNet::V4(network) => 2 * u32::from(network.prefix_len()),
            IpNet::V6(network) => u32::from(network.prefix_len()),
        };
        let mut networks: Vec<IpNet> = timed_that(false).collect();
        networks.sort_by_key(width);
        let mut listed: Vec<IpNet> = deny.into_iter().flat_map(Networks::iter).collect();
        listed.sort_by_key(width);
        networks.extend(listed);
        let allowed = allow.into_iter().flat_map(Networks::iter).chain(timed_that(true));
        let (v4, v6): (Vec<IpNet>, Vec<IpNet>) = allowed.partition(|network| matches!(network, IpNet::V4(_)));
        let allowed = [v4, v6].map(|networks| merged(networks.iter().map(range).collect()));
        Denied { networks, allowed }
    }

    /// A program of the widest `count` of them.
    fn program(&self, count: usize) -> Vec<Instruction> {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for network in &self.networks[..count] {
            if matches!(network, IpNet::V4(_)) { &mut v4 } else { &mut v6 }.push(range(network));
        }
        let [v4_allowed, v6_allowed] = &self.allowed;
        program(&without(merged(v4), v4_allowed), &without(merged(v6), v6_allowed))
    }

    /// The number of the widest networks that fit into a program of that length.
    fn fitting(&self, instructions: usize) -> usize {
        let (mut fits, mut beyond) = (0, self.networks.len().min(NETWORKS_MAX) + 1);
        while beyond - fits > 1 {
            let middle = fits + (beyond - fits) / 2;
            match self.program(middle).len() <= instructions {
                true => fits = middle,
                false => beyond = middle,
            }
        }
        fits
    }
}

/// The filters of all listeners that may have one.
pub struct KernelFilters {
    each: Vec<Filtered>,
    clock: Clock,
}

/// The listeners of a limiter.
struct Filtered {
    limiter: Weak<Limiter>,
    listeners: Vec<ListenerFilter>,
    /// The count of changes to the networks for a time when the last program was made.
    changes: u64,
    /// When one of their times is over that the program knows of.
    stale_at: Option<Time>,
}

impl KernelFilters {
    /// Those of the listeners of all shards, each shard's in the same order.
    pub fn of(sockets: &[Vec<Listener>], limiters: &Limiters, clock: Clock) -> KernelFilters {
        let mut each: Vec<Filtered> = Vec::new();
        for listener in 0..sockets.first().map_or(0, Vec::len) {
            let at = limiters.in_front_of(listener).filter(|limiter| limiter.filters);
            let Some(limiter) = at else { continue };
            let weak = Arc::downgrade(limiter);
            let of_shards = sockets.iter().filter_map(|shard| ListenerFilter::of(&shard[listener]));
            match each.iter_mut().find(|of| of.limiter.ptr_eq(&weak)) {
                Some(filtered) => filtered.listeners.extend(of_shards),
                None => {
                    let listeners = of_shards.collect();
                    each.push(Filtered { limiter: weak, listeners, changes: 0, stale_at: None });
                }
            }
        }
        each.retain(|filtered| !filtered.listeners.is_empty());
        KernelFilters { each, clock }
    }

    /// True if there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.each.is_empty()
    }

    /// Gives the kernel what is denied now; where no list changed, only if a time began or ended.
    pub(super) fn set(&mut self, lists_changed: bool) {
        let now = self.clock.now();
        for Filtered { limiter, listeners, changes, stale_at } in &mut self.each {
            let Some(limiter) = limiter.upgrade() else { continue };
            // Before the networks are read: what changes behind it is seen the next time.
            let changed = limiter.timed.changes();
            let is_stale = changed != *changes || stale_at.is_some_and(|at| at <= now);
            let is_new = lists_changed && limiter.deny.is_some();
            if !is_stale && !is_new {
                continue;
            }
            let timed = limiter.timed.list(now);
            (*changes, *stale_at) = (changed, timed.iter().map(|(_, until)| until.at).min());
            if timed.iter().any(|(_, until)| !until.allows) {
                limiter.has_filtered.store(true, Ordering::Relaxed);
            }
            if !limiter.is_filtered() {
                continue;
            }
            let [deny, allow] =
                [&limiter.deny, &limiter.allow].map(|list| list.as_ref().map(IpList::networks));
            let denied = Denied::new(deny.as_deref(), allow.as_deref(), &timed);
            set(&denied, |program| listeners.iter().try_for_each(|listener| listener.set(program)));
        }
    }
}

/// Sets the longest program that `set` takes, and says so if that is not all.
fn set(denied: &Denied, set: impl Fn(&[SockFilter]) -> io::Result<()>) {
    let compiled = |count: usize| -> Vec<SockFilter> {
        let program = denied.program(count);
        program.iter().map(|at| SockFilter::new(at.code, at.if_true, at.if_false, at.k)).collect()
    };
    let (all, fitting) = (denied.networks.len(), denied.fitting(INSTRUCTIONS_MAX));
    let (mut count, mut refused) = (fitting, None);
    while let Err(error) = set(&compiled(count)) {
        refused.get_or_insert(error);
        if count == 0 {
            break;
        }
        count /= 2;
    }
    guarded(|| match refused {
        Some(error) => warn!(
            %error,
            "the kernel filters {count} of {all} denied networks, and the server refuses the rest: it took no program of {fitting}; \
             raise net.core.optmem_max for more"
        ),
        None if count < all => {
            info!(
                "the kernel filters the {count} widest of {all} denied networks, and the server refuses the rest"
            );
        }
        None => {}
    });
}

#[cfg(test)]
mod tests;
