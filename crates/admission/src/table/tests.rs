use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::thread;

use proptest::prelude::*;
use ringserve_core::internals::Gcra;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn table(at_once: u32, rate: Option<(u32, u32)>, tracked_max: usize) -> Table {
    let rate = rate.map(|(per_second, burst)| Gcra::new(per_second, burst));
    Table::new(PrefixLimits { at_once, rate }, tracked_max, 7, true)
}

/// Prefixes with an entry, and connections that are counted in sketches.
fn tracked(table: &Table) -> (usize, usize) {
    let stats = table.stats();
    (stats.prefixes, stats.sketched)
}

fn v4(number: u32) -> Prefix {
    Prefix { bits: number.into(), kind: Kind::V4 }
}

fn prefix(text: &str, v6_bits: u8) -> Prefix {
    Prefix::of_address(text.parse().unwrap(), v6_bits)
}

#[test]
fn addresses_of_one_customer_are_one_prefix() {
    assert_eq!(prefix("2001:db8:a::1", 64), prefix("2001:db8:a::ffff:1", 64));
    assert_ne!(prefix("2001:db8:a::1", 64), prefix("2001:db8:a:1::1", 64));
    assert_eq!(prefix("2001:db8:a::1", 56), prefix("2001:db8:a:ff::1", 56));
    assert_ne!(prefix("2001:db8:a::1", 56), prefix("2001:db8:a:100::1", 56));
    assert_eq!(prefix("2001:db8:a::1", 32), prefix("2001:db8:ffff::1", 32));
    assert_ne!(prefix("10.0.0.1", 64), prefix("10.0.0.2", 64));
    assert_eq!(prefix("::ffff:10.0.0.1", 64), prefix("10.0.0.1", 64), "an IPv4 client of [::]");
    assert_eq!(prefix("64:ff9b::10.0.0.1", 64), prefix("10.0.0.1", 64), "an IPv4 client behind NAT64");
    assert_ne!(prefix("64:ff9b::10.0.0.1", 64), prefix("64:ff9b::10.0.0.2", 64));
    assert_eq!(prefix("64:ff9b:1::10.0.0.1", 64), prefix("64:ff9b:1::10.0.0.2", 64), "another prefix");
    assert_ne!(prefix("::ffff:10.0.0.1", 64), prefix("::ffff:10.0.0.2", 64));
    // The same bits, of another kind.
    let v6: IpAddr = Ipv6Addr::from(10u128 << 64).into();
    assert_eq!(Prefix::of_address(v6, 64).bits, 10);
    assert_ne!(Prefix::of_address(v6, 64), Prefix::of_user(10));
}

#[test]
fn prefix_has_its_count_and_no_more() {
    let table = table(3, None, TRACKED);
    let charges: Vec<Charge> = (0..3).map(|_| table.charge(v4(1), 0).unwrap()).collect();
    assert_eq!(table.charge(v4(1), 0), Err(Over::Count));
    assert!(table.charge(v4(2), 0).is_ok(), "another one has its own");
    table.release(charges[0], 0);
    assert!(table.charge(v4(1), 0).is_ok());
    assert_eq!(table.charge(v4(1), 0), Err(Over::Count));
    assert_eq!(tracked(&table), (2, 0));
}

#[test]
fn refusal_for_the_count_takes_nothing_of_the_rate() {
    let table = table(1, Some((1, 2)), TRACKED);
    let charge = table.charge(v4(1), 0).unwrap();
    for _ in 0..100 {
        assert_eq!(table.charge(v4(1), 0), Err(Over::Count));
    }
    table.release(charge, 0);
    let charge = table.charge(v4(1), 0).unwrap();
    table.release(charge, 0);
    assert_eq!(table.charge(v4(1), 0), Err(Over::Rate));
    let charge = table.charge(v4(1), SECOND).unwrap();
    table.release(charge, SECOND);
}

#[test]
fn prefix_without_connection_and_debt_takes_no_memory() {
    let counted = table(10, None, TRACKED);
    let charge = counted.charge(v4(1), 0).unwrap();
    assert_eq!(tracked(&counted), (1, 0));
    counted.release(charge, 0);
    assert_eq!(tracked(&counted), (0, 0));

    let rated = table(10, Some((1, 5)), TRACKED);
    let charge = rated.charge(v4(1), 0).unwrap();
    rated.release(charge, 0);
    assert_eq!(tracked(&rated), (1, 0), "its rate is remembered");
    let charge = rated.charge(v4(1), SECOND).unwrap();
    rated.release(charge, 2 * SECOND);
    assert_eq!(tracked(&rated), (0, 0), "its bucket is full again");
}

#[test]
fn crowd_that_is_gone_leaves_no_memory() {
    let table = table(10, Some((1, 5)), TRACKED);
    for number in 0..200_000 {
        let charge = table.charge(v4(number), 0).unwrap();
        table.release(charge, 0);
    }
    let crowded = table.bytes();
    assert_eq!(tracked(&table), (200_000, 0));
    // Others come later, a few for each stripe: nothing but what a sweep finds out makes room.
    for number in 0..200_000 {
        let now = 3600 * SECOND + u64::from(number) * SECOND / 100;
        let charge = table.charge(v4(1 << 30 | number), now).unwrap();
        table.release(charge, now);
    }
    let (tracked, _) = self::tracked(&table);
    assert!(tracked < 64 * 4096 && table.bytes() <= crowded, "{tracked} prefixes, {} bytes", table.bytes());
}

#[test]
fn full_table_forgets_no_live_count_and_bounds_its_memory() {
    let max = 64 * 100;
    let table = table(2, None, max);
    let live: Vec<(u32, Charge)> =
        (0..20_000).map(|number| (number, table.charge(v4(number), 0).unwrap())).collect();
    let (tracked, sketched) = self::tracked(&table);
    assert!(tracked <= max && tracked + sketched == 20_000, "{tracked} tracked, {sketched} in sketches");
    assert!(table.bytes() < (max * 33 + 64 * (64 << 10)), "{} bytes", table.bytes());
    // Each has one; those in sketches may be taken to have more, those with entries exactly one
    // more.
    let mut second = Vec::new();
    for &(number, charge) in &live {
        match table.charge(v4(number), 0) {
            Ok(charge) => second.push(charge),
            Err(over) => assert!(over == Over::Count && charge.place == Place::Sketch),
        }
        assert_eq!(table.charge(v4(number), 0), Err(Over::Count), "a third one of {number}");
    }
    live.iter().for_each(|(_, charge)| table.release(*charge, 0));
    second.iter().for_each(|charge| table.release(*charge, 0));
    assert_eq!(table.stats(), AdmissionStats::default());
    assert!(table.stripes.iter().all(|Stripe(stripe)| stripe.lock().unwrap().sketch.is_none()));
}

#[test]
fn prefix_that_moves_from_the_sketch_keeps_its_limit() {
    // One entry a stripe.
    let table = table(2, Some((1, 10)), 64);
    let hash = |number: u32| table.hash(v4(number)) >> 48 & 63;
    let neighbour = (1..).find(|number| hash(*number) == hash(0)).unwrap();
    let first = table.charge(v4(0), 0).unwrap();
    let sketched = table.charge(v4(neighbour), 0).unwrap();
    assert_eq!((first.place, sketched.place), (Place::Table, Place::Sketch));
    // The first one is gone, and its bucket full: the stripe has room.
    let later = 60 * SECOND;
    table.release(first, later);
    let second = table.charge(v4(neighbour), later).unwrap();
    assert_eq!(second.place, Place::Table);
    assert_eq!(table.charge(v4(neighbour), later), Err(Over::Count));
    table.release(sketched, later);
    let third = table.charge(v4(neighbour), later).unwrap();
    table.release(second, later);
    table.release(third, later);
}

#[test]
fn memory_of_a_tracked_prefix_is_at_most_48_bytes() {
    let table = table(10, None, TRACKED);
    for number in 0..TRACKED as u32 {
        let _stays = table.charge(v4(number), 0).unwrap();
    }
    let (tracked, sketched) = self::tracked(&table);
    // Stripes are full at slightly different times.
    assert!(tracked > TRACKED * 98 / 100, "{tracked} tracked");
    let without_sketches = table.bytes() - 64 * (64 << 10);
    println!("{} bytes for each of {tracked} prefixes, {sketched} in sketches", without_sketches / tracked);
    assert!(without_sketches / tracked <= 48);
}

#[test]
fn shards_count_together() {
    let table = table(1000, None, TRACKED);
    let charged: usize = thread::scope(|scope| {
        let shard = || {
            let mut charges = Vec::new();
            for n in 0..5000 {
                match table.charge(v4(n % 3), 0) {
                    Ok(charge) => charges.push(charge),
                    Err(over) => assert_eq!(over, Over::Count),
                }
                if n % 7 == 0
                    && let Some(charge) = charges.pop()
                {
                    table.release(charge, 0);
                }
            }
            charges.len()
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(shard)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    // Connections of the last round fill what was taken back before.
    assert!(charged <= 3000 && charged > 2900, "{charged}");
}

/// An action of a table on a prefix.
#[derive(Clone, Debug)]
enum Deed {
    Charge(u32),
    /// Takes one of the connections back, by a number.
    Release(usize),
    Passes(u64),
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let deed = prop_oneof![
        6 => (0..6u32).prop_map(Deed::Charge),
        3 => any::<usize>().prop_map(Deed::Release),
        2 => prop_oneof![0..SECOND / 2, 0..20 * SECOND].prop_map(Deed::Passes),
    ];
    prop::collection::vec(deed, 1..400)
}

proptest! {
    /// Against times of all that was let in: nothing beyond a limit, and nothing refused below it.
    #[test]
    fn nothing_is_let_in_above_a_limit_or_refused_below(
        deeds in deeds(),
        at_once in 1..8u32,
        rate in prop::option::of((1..5u32, 1..6u32)),
    ) {
        let table = table(at_once, rate, TRACKED);
        let (mut now, mut live) = (SECOND, Vec::<(u32, Charge)>::new());
        let mut times: HashMap<u32, Vec<u64>> = HashMap::new();
        for deed in deeds {
            match deed {
                Deed::Passes(time) => now += time,
                Deed::Release(which) if live.is_empty() => _ = which,
                Deed::Release(which) => {
                    let (_, charge) = live.swap_remove(which % live.len());
                    table.release(charge, now);
                }
                Deed::Charge(number) => {
                    let count = live.iter().filter(|(of, _)| *of == number).count() as u32;
                    let times = times.entry(number).or_default();
                    // Over in some window that ends now: more than burst + rate * length. Intervals
                    // are rounded up.
                    let is_over = rate.is_some_and(|(per_second, burst)| {
                        let interval = SECOND.div_ceil(u64::from(per_second));
                        let window = |(n, from): (usize, &u64)| {
                            let let_in = (times.len() - n + 1) as u64;
                            let_in > u64::from(burst) + (now - from) / interval
                        };
                        times.iter().enumerate().any(window)
                    });
                    let expected = if count >= at_once {
                        Err(Over::Count)
                    } else if is_over {
                        Err(Over::Rate)
                    } else {
                        Ok(())
                    };
                    let charged = table.charge(v4(number), now);
                    prop_assert_eq!(charged.map(drop), expected);
                    if let Ok(charge) = charged {
                        times.push(now);
                        live.push((number, charge));
                    }
                }
            }
        }
    }
}
