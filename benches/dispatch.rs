//! One completion to a handler and back, without a kernel: the whole path from received bytes
//! through framing, call and reply to the send operation and its completion, over a driver that
//! only moves values.
//!
//! The time is given for one frame. "decode" is the framing alone, so that a call's own cost is the
//! difference.

#[path = "support/echo.rs"]
mod echo;
#[path = "support/loopback.rs"]
mod loopback;

use std::convert::Infallible;
use std::future::poll_fn;
use std::hint::black_box;
use std::task::Poll;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ringserve::framing::{Decode, Framing, Lines, Raw};
use ringserve::{Cx, Frame, Limits, Service};

use echo::Echo;
use loopback::run;

/// Takes frames and answers nothing: the cost of a call by itself.
struct Sink;

impl Service for Sink {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        black_box(&*frame);
        Ok(())
    }
}

/// As `Sink`, with a time limit on each call.
struct Limited;

impl Service for Limited {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let done = cx.timeout(Duration::from_secs(1), async { black_box(&*frame).len() }).await;
        black_box(done.is_ok());
        Ok(())
    }
}

/// As `Sink`, with calls that wait until they are woken, which they cause themselves.
struct Parked;

impl Service for Parked {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let mut woken = false;
        poll_fn(|task| {
            if std::mem::replace(&mut woken, true) {
                return Poll::Ready(());
            }
            task.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        black_box(&*frame);
        Ok(())
    }
}

fn lines(count: usize) -> Vec<u8> {
    [[b'x'; 63].as_slice(), b"\n"].concat().repeat(count)
}

fn dispatch(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("dispatch");
    group.measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500)).sample_size(20);
    for count in [1, 16, 256] {
        let received = lines(count);
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(format!("decode {count} lines"), |bencher| {
            bencher.iter(|| {
                let mut rest = black_box(&received[..]);
                while let Ok(Decode::Frame { consumed, len, .. }) = Lines::default().decode(rest, 0) {
                    black_box(len);
                    rest = &rest[consumed..];
                }
            });
        });
        group.bench_function(format!("sink {count} lines"), |bencher| {
            bencher.iter_custom(|times| run(Sink, Lines::default(), Limits::default(), &received, times));
        });
        group.bench_function(format!("sink {count} lines, each with a deadline"), |bencher| {
            bencher.iter_custom(|times| run(Limited, Lines::default(), Limits::default(), &received, times));
        });
        group.bench_function(format!("echo {count} lines"), |bencher| {
            bencher.iter_custom(|times| run(Echo, Lines::default(), Limits::default(), &received, times));
        });
    }
    group.throughput(Throughput::Elements(1));
    // Against "sink 1 lines": parking, the waker, and being polled again in the next turn.
    group.bench_function("park and wake 1 lines", |bencher| {
        bencher.iter_custom(|times| run(Parked, Lines::default(), Limits::default(), &lines(1), times));
    });
    group.bench_function("echo 64 raw bytes", |bencher| {
        bencher.iter_custom(|times| run(Echo, Raw, Limits::default(), &[b'x'; 64], times));
    });
    group.finish();
}

criterion_group!(benches, dispatch);
criterion_main!(benches);
