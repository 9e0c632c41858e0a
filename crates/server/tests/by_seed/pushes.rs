//! Pushes through handles: their order, their turns, and how many a turn carries out.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::testing::{Faults, Sim};
use ringserve_server::{ConnHandle, Cx, Frame, Limits, LocalHandle, Server, Service};

const SECOND: Duration = Duration::from_secs(1);

fn lines() -> Server<Lines> {
    Server::bind("10.0.0.1:7000").framing(Lines::default())
}

/// Gives its handle to all, or pushes to those that did: much to the first one, and then a line to
/// the second one.
#[derive(Clone, Default)]
struct Pusher(std::sync::Arc<std::sync::Mutex<Vec<ConnHandle>>>);

/// More than a shard carries out in a turn.
const BURST: usize = 5000;

impl Service for Pusher {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let mut heard = self.0.lock().unwrap();
        match &frame[..] {
            b"fill" => cx.reply(vec![b'x'; 1 << 20]),
            b"push" => {
                for _ in 0..BURST {
                    heard[0].push("x").expect("it is far below the high mark");
                }
                heard[1].push("x").expect("nothing was pushed there before");
                cx.reply("done");
            }
            _ => {
                heard.push(cx.handle());
                cx.reply("done");
            }
        }
        Ok(())
    }
}

/// A push to a peer that reads nothing leads to no completion, so nothing else brings the shard to
/// the last push. Without faults, since some of them wake a shard.
#[test]
fn pushes_beyond_what_a_turn_carries_out_need_no_other_call() {
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        let pusher = Pusher::default();
        let limits = Limits::default().first_frame_timeout(None).idle_timeout(None);
        let limits = limits.outbox_bytes_high(8 << 20).outbox_bytes_max(16 << 20);
        let addr = sim.serve(lines().limits(limits).shards(2), move |_shard| pusher.clone());
        sim.client("deaf, hearer and pusher", async move |net| {
            let (mut deaf, mut hearer) = (net.connect(addr).await?, net.connect(addr).await?);
            for stream in [&mut deaf, &mut hearer] {
                stream.send("hear\n").await?;
                assert_eq!(stream.line().await?.as_deref(), Some("done"));
            }
            deaf.send("fill\n").await?;
            net.sleep(SECOND).await;
            let mut pusher = net.connect(addr).await?;
            let began = net.now();
            pusher.send("push\n").await?;
            assert_eq!(hearer.line().await?.as_deref(), Some("x"));
            let took = net.now() - began;
            assert!(took < SECOND / 100, "the last push came after {took:?}");
            Ok(())
        });
        sim.run_until_done();
    });
}

/// Pushes to the connection that asked for it: through one kind of handle or the other.
#[derive(Default)]
struct Relay {
    is_local: bool,
    heard: RefCell<Option<(ConnHandle, LocalHandle)>>,
}

impl Service for Relay {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match (&*self.heard.borrow(), &frame[..]) {
            (Some((_, local)), b"push") if self.is_local => local.push("x").expect("its peer reads"),
            (Some((handle, _)), b"push") => handle.push("x").expect("its peer reads"),
            _ => {}
        }
        if &frame[..] == b"hear" {
            self.heard.replace(Some((cx.handle(), cx.local_handle())));
            cx.reply("x");
        }
        Ok(())
    }
}

/// The turns that a shard took for pushes by its calls, seed by seed.
fn turns_of_pushes(is_local: bool) -> Vec<u64> {
    let all = RefCell::new(Vec::new());
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        let relay = move |_: &_| Relay { is_local, ..Relay::default() };
        let server = sim.start(lines().shards(1), relay).expect("it starts");
        let addr = server.addr();
        sim.client("hearer and pusher", async move |net| {
            let (mut hearer, mut pusher) = (net.connect(addr).await?, net.connect(addr).await?);
            hearer.send("hear\n").await?;
            assert_eq!(hearer.line().await?.as_deref(), Some("x"));
            for _ in 0..50 {
                pusher.send("push\n").await?;
                assert_eq!(hearer.line().await?.as_deref(), Some("x"));
            }
            Ok(())
        });
        sim.run_until_done();
        all.borrow_mut().push(server.stats().shards[0].driver.turns);
    });
    all.into_inner()
}

#[test]
fn push_of_a_call_leads_to_no_other_turn() {
    for (turns, local) in turns_of_pushes(false).into_iter().zip(turns_of_pushes(true)) {
        assert!(turns <= local, "{turns} turns, where a handle that writes at once leads to {local}");
    }
}

/// Has a task push numbers to the connection that asks for them, some each time that it is polled.
struct Counts;

/// Together more than a shard carries out in several turns.
const NUMBERS: usize = 40_000;

impl Service for Counts {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        let handle = cx.handle();
        cx.spawn(async move {
            for number in 0..NUMBERS {
                handle.push(number.to_string()).expect("it is far below the high mark");
                if number % 4000 == 0 {
                    yields().await;
                }
            }
        });
        Ok(())
    }
}

/// Lets others go first.
async fn yields() {
    let mut has_waited = false;
    poll_fn(|task| match std::mem::replace(&mut has_waited, true) {
        true => Poll::Ready(()),
        false => {
            task.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

#[test]
fn pushes_of_many_turns_keep_their_order() {
    Sim::seeds(5).run(|sim| {
        let limits = Limits::default().outbox_bytes_high(8 << 20).outbox_bytes_max(16 << 20);
        let addr = sim.serve(lines().shards(1).limits(limits), |_shard| Counts);
        sim.client("hearer", async move |net| {
            let mut hearer = net.connect(addr).await?;
            hearer.send("go\n").await?;
            for number in 0..NUMBERS {
                assert_eq!(hearer.line().await?, Some(number.to_string()));
            }
            Ok(())
        });
        sim.run_until_done();
    });
}
