//! The parts of the fast path one by one: framing, slots, outbox, timer wheel, receive buffers.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use ringserve::Frame;
use ringserve::framing::{Framing, LengthPrefix, Lines, Outbox, Payload};
use ringserve_buf::{Lease, Pool, PoolConfig};
use ringserve_core::internals::{Slots, Wheel, step_at};
use ringserve_core::{Batch, Time};

fn framing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("framing");
    group.measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    for len in [16, 64, 1024] {
        let line = [vec![b'x'; len - 1], vec![b'\n']].concat();
        group.bench_function(format!("decode a line of {len}"), |bencher| {
            bencher.iter(|| Lines::default().decode(black_box(&line), 0));
        });
    }
    let frame = [&4u32.to_be_bytes()[..], b"abcd"].concat();
    group.bench_function("decode a length", |bencher| {
        bencher.iter(|| LengthPrefix::default().decode(black_box(&frame), 0));
    });
    group.finish();
}

fn slots(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("slots");
    group.measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    let mut slots = Slots::new();
    let ids: Vec<_> = (0..10_000u64).filter_map(|n| slots.insert_with(|_| n)).collect();
    let mut next = 0;
    group.bench_function("find among 10 000", |bencher| {
        bencher.iter(|| {
            next = (next + 7919) % ids.len();
            black_box(slots.get_mut(ids[next]).is_some())
        });
    });
    group.bench_function("take and free", |bencher| {
        bencher.iter(|| {
            let id = slots.insert_with(|_| 1).expect("there is room");
            slots.remove(id)
        });
    });
    group.finish();
}

fn outbox(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("outbox");
    group.measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    let mut batch = Box::new(Batch::new());
    group.bench_function("copy 64 bytes", |bencher| {
        bencher.iter(|| {
            batch.clear();
            Outbox::new(&mut batch, true).payload(Payload::Bytes(black_box(&[7; 64])));
        });
    });
    let frame = Frame::new(Lease::from(vec![7; 16 << 10]), 0, 16 << 10);
    group.bench_function("lend 16 KiB", |bencher| {
        bencher.iter(|| {
            batch.clear();
            Outbox::new(&mut batch, true).payload(Payload::Frame(frame.clone()));
        });
    });
    group.finish();
}

fn wheel(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("wheel");
    group.measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    let mut wheel = Wheel::new();
    let in_seconds = |seconds: u64| step_at(Time::from_nanos(seconds * 1_000_000_000));
    for slot in 0..10_000 {
        wheel.set_earlier(slot, in_seconds(u64::from(slot % 600) + 30));
    }
    let mut slot = 0;
    group.bench_function("set, not earlier", |bencher| {
        bencher.iter(|| {
            slot = (slot + 7919) % 10_000;
            wheel.set_earlier(slot, in_seconds(700))
        });
    });
    group.bench_function("clear and set", |bencher| {
        bencher.iter(|| {
            slot = (slot + 7919) % 10_000;
            wheel.clear(slot);
            wheel.set_earlier(slot, in_seconds(30))
        });
    });
    group.bench_function("next deadline", |bencher| bencher.iter(|| black_box(wheel.next())));
    group.finish();
}

fn buffers(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("buffers");
    group.measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    let (_pool, mut side) = Pool::new(PoolConfig::default()).expect("the default sizes are sound");
    group.bench_function("lend, receive, free", |bencher| {
        bencher.iter(|| {
            let buffer = side.lend().expect("there is room");
            drop(black_box(side.received(buffer, 64)));
        });
    });
    group.finish();
}

criterion_group!(benches, framing, slots, outbox, wheel, buffers);
criterion_main!(benches);
