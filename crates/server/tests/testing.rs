//! `ringserve::testing`: what it runs, what it finds, and what it says.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::testing::{Fault, Faults, Sim, TestConn};
use ringserve_server::{CloseReason, Cx, Frame, Limits, Refusal, Server, Service};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(frame);
        Ok(())
    }
}

fn lines() -> Server<Lines> {
    Server::bind("10.0.0.1:7000").framing(Lines::default())
}

/// What a test that fails says.
#[track_caller]
fn failure(test: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(test)).expect_err("the test fails");
    panic.downcast_ref::<String>().expect("it says why").clone()
}

#[test]
fn lines_come_back_with_all_faults() {
    let heard = Rc::new(Cell::new(0));
    let count = heard.clone();
    Sim::seeds(200).faults(Faults::all()).run(move |sim| {
        let addr = sim.serve(lines().shards(2), |_shard| Echo);
        for n in 0..5 {
            let count = count.clone();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                for round in 0..10 {
                    me.send(format!("hello {n} {round}\n")).await?;
                    assert_eq!(me.line().await?, Some(format!("hello {n} {round}")));
                    count.set(count.get() + 1);
                }
                me.finish()?;
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
        }
        sim.run_until_done();
    });
    assert!(heard.get() > 200 * 50 / 2, "{} of 10000", heard.get());
}
