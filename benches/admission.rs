//! The cost of the limits on addresses for an accept and its close: a table of a million prefixes,
//! and lists of 100 000 networks.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use criterion::{Bencher, Criterion, criterion_group, criterion_main};
use ringserve::admission::{Admission, IpList};
use ringserve::time::Time;
use ringserve_server::internals::{Counted, Door};
use rustix::time::{ClockId, clock_gettime};

const PREFIXES: u32 = 1_000_000;
const NETWORKS: u32 = 100_000;

/// Maps each number to another one, in no order.
fn mixed(number: u32) -> u32 {
    number.wrapping_mul(0x9E37_79B1) ^ 0x5bd1_e995
}

/// An address in a quarter of all; networks are in another one.
fn address(number: u32) -> IpAddr {
    Ipv4Addr::from(mixed(number) >> 2).into()
}

fn customer(number: u32) -> IpAddr {
    Ipv6Addr::from(0x2001_0db8u128 << 96 | u128::from(mixed(number)) << 64 | 7).into()
}

fn networks() -> IpList {
    let network = |number| format!("{}/{}\n", Ipv4Addr::from(mixed(number) | 0xc000_0000), 20 + number % 13);
    (0..NETWORKS).map(network).collect::<String>().parse().expect("networks")
}

fn now(nanos: u64) -> Time {
    Time::from_nanos(nanos)
}

/// A door with the million addresses, each of which holds a connection.
fn crowded(admission: &Admission, of: fn(u32) -> IpAddr) -> (Door, Vec<Counted>) {
    let door = Door::new(admission).expect("it asks something");
    let hold = |number| door.let_in(of(number), now(0)).expect("the first one");
    let held = (0..PREFIXES).map(hold).collect();
    println!("{:?}", door.stats());
    (door, held)
}

/// Measures the time for which this thread ran: others may have the CPU meanwhile.
fn by_cpu_time(bencher: &mut Bencher<'_>, mut each: impl FnMut()) {
    let ran = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    bencher.iter_custom(|times| {
        let began = ran();
        (0..times).for_each(|_| each());
        ran() - began
    });
}

fn accept_and_close(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("admission");
    group.measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    let count = Admission::default().per_address(100).tracked_max(2 * PREFIXES as usize);
    let full = count.clone().address_rate(1000, 1000).deny(networks()).allow(networks());
    for (name, admission, of) in [
        ("count alone, IPv4", &count, address as fn(u32) -> IpAddr),
        ("count, rate and two lists, IPv4", &full, address),
        ("count, rate and two lists, IPv6", &full, customer),
    ] {
        let (door, held) = crowded(admission, of);
        let (mut number, mut time) = (0u32, 0);
        group.bench_function(format!("accept and close of a known prefix: {name}"), |bencher| {
            by_cpu_time(bencher, || {
                (number, time) = (number.wrapping_add(7919) % PREFIXES, time + 1000);
                if let Ok(counted) = door.let_in(black_box(of(number)), now(time)) {
                    door.ended(counted, now(time));
                }
            });
        });
        group.bench_function(format!("accept and close of a new prefix: {name}"), |bencher| {
            by_cpu_time(bencher, || {
                (number, time) = (number.wrapping_add(1) % PREFIXES, time + 1000);
                if let Ok(counted) = door.let_in(black_box(of(PREFIXES + number)), now(time)) {
                    door.ended(counted, now(time));
                }
            });
        });
        held.into_iter().for_each(|counted| door.ended(counted, now(time)));
    }
    let denied = Door::new(&Admission::default().deny(networks())).expect("a list");
    let mut number = 0;
    group.bench_function("refuse by a list of 100 000 networks", |bencher| {
        by_cpu_time(bencher, || {
            number = (number + 7919) % NETWORKS;
            let address = Ipv4Addr::from(mixed(number) | 0xc000_0000).into();
            black_box(denied.let_in(address, now(0)).is_err());
        });
    });
    group.finish();
}

criterion_group!(benches, accept_and_close);
criterion_main!(benches);
