//! Calls that wait for a scarce thing for too long, in simulations by seed.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::middleware::ConcurrencyLimit;
use ringserve_server::overload::{Load, Shed};
use ringserve_server::testing::Sim;
use ringserve_server::{Cx, Frame, Server, Service};

/// A service whose calls need 4 ms of a resource of which there is one. Lines that begin with "!"
/// are served in any case.
#[derive(Clone, Default)]
struct Scarce {
    served: Rc<Cell<u64>>,
    shed: Rc<Cell<u64>>,
    asked_twice: Rc<Cell<bool>>,
}

const WORK: Duration = Duration::from_millis(4);

impl Service for Scarce {
    type Session = Cell<u32>;
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, Cell<u32>>, line: Frame) -> Result<(), Infallible> {
        cx.sleep(WORK).await;
        self.served.set(self.served.get() + 1);
        cx.session().set(0);
        cx.reply(line);
        Ok(())
    }

    fn shed(&self, cx: &Cx<'_, Cell<u32>>, line: &Frame, load: Load) -> Shed {
        assert!(load >= Load::Shedding);
        if line.starts_with(b"!") {
            // Once of its share of all frames, and once for its wait.
            cx.session().set(cx.session().get() + 1);
            self.asked_twice.set(self.asked_twice.get() || cx.session().get() > 2);
            return Shed::Serve;
        }
        self.shed.set(self.shed.get() + 1);
        cx.reply("busy");
        Shed::Answered
    }
}

/// When each asked, and how long it waited.
type Waits = Vec<(Duration, Duration)>;

/// Clients that ask once each, one after the other each `every`. Returns how long those had to wait
/// that were served, and those that were not.
fn ask_each(
    sim: &Sim,
    name: &'static str,
    clients: u32,
    every: Duration,
    line: &'static str,
) -> Rc<RefCell<[Waits; 2]>> {
    let waits = Rc::new(RefCell::new([Vec::new(), Vec::new()]));
    for n in 0..clients {
        let waits = waits.clone();
        sim.client(format!("{name}{n}"), async move |net| {
            net.sleep(every * n).await;
            let mut me = net.connect("10.0.0.1:7000").await?;
            let began = net.now();
            me.send(format!("{line}\n")).await?;
            let answer = me.line().await?.expect("an answer");
            assert!(answer == line || answer == "busy");
            waits.borrow_mut()[usize::from(answer == "busy")].push((began, net.now() - began));
            Ok(())
        });
    }
    waits
}

/// The longest wait of those that asked after `from`.
fn worst(waits: &Waits, from: Duration) -> Duration {
    waits.iter().filter(|(at, _)| *at >= from).map(|(_, wait)| *wait).max().unwrap_or_default()
}

#[test]
fn calls_that_waited_too_long_are_shed_and_the_rest_is_fresh() {
    Sim::seeds(10).run(|sim| {
        let scarce = Scarce::default();
        let made = scarce.clone();
        let server = Server::bind("10.0.0.1:7000").framing(Lines::default());
        let shed_after = 5 * WORK;
        let running = sim
            .start(server, move |_shard| ConcurrencyLimit::new(made.clone(), 1).shed_after(shed_after))
            .expect("the server starts");
        // Four times what it can do, for two seconds; and some that it has to serve, which wait for
        // no more than those before them.
        let storm = ask_each(sim, "storm", 2000, WORK / 4, "work");
        let urgent = ask_each(sim, "urgent", 20, Duration::from_millis(100), "!work");
        sim.run_until_done();
        let (storm, urgent) = (storm.borrow(), urgent.borrow());
        let (served, busy) = (&storm[0], &storm[1]);
        // Nine tenths of what it can do in two seconds, of calls that take up to a millisecond
        // longer than they ask for.
        assert!(scarce.served.get() >= 360, "{}", scarce.served.get());
        assert!(served.len() as u64 + 20 == scarce.served.get() && busy.len() as u64 == scarce.shed.get());
        // It takes two intervals at most to see that the queue stands. A line that came later is
        // fresh, or soon answered as late.
        let begun = 2 * 10 * shed_after;
        assert!(worst(served, begun) <= shed_after + 4 * WORK, "{:?}", worst(served, begun));
        let fresh = || served.iter().filter(|(at, _)| *at >= begun).map(|(_, wait)| *wait);
        let mean = fresh().sum::<Duration>() / fresh().count().max(1) as u32;
        assert!(mean <= shed_after / 2, "the last one goes first: {mean:?}");
        assert!(worst(busy, begun) <= shed_after + 4 * WORK, "{:?}", worst(busy, begun));
        assert!(urgent[1].is_empty() && !scarce.asked_twice.get());
        assert!(worst(&urgent[0], begun) <= shed_after + 6 * WORK, "{:?}", worst(&urgent[0], begun));
        assert_eq!(running.stats().counters.frames_shed, scarce.shed.get());
        // After the storm, as many as it can do.
        let shed = scarce.shed.get();
        let calm = ask_each(sim, "calm", 100, WORK + Duration::from_millis(2), "work");
        sim.run_until_done();
        assert_eq!((calm.borrow()[0].len(), scarce.shed.get()), (100, shed));
    });
}

#[test]
fn calls_wait_in_their_order_until_the_shard_sheds() {
    Sim::seeds(20).run(|sim| {
        let scarce = Scarce::default();
        let made = scarce.clone();
        let server = Server::bind("10.0.0.1:7000").framing(Lines::default());
        let running = sim
            .start(server, move |_shard| ConcurrencyLimit::new(made.clone(), 1))
            .expect("the server starts");
        // No share of them is shed by itself, and the shard has time.
        let crowd = ask_each(sim, "crowd", 100, WORK / 4, "work");
        sim.run_for(Duration::from_millis(200));
        assert_eq!((scarce.shed.get(), crowd.borrow()[1].len()), (0, 0));
        running.set_load(Load::Shedding, 0.0);
        sim.run_for(Duration::from_millis(30));
        let shed = scarce.shed.get();
        assert!(shed >= 20, "{shed}");
        running.set_load(Load::Calm, 0.0);
        sim.run_until_done();
        assert_eq!(scarce.served.get() + scarce.shed.get(), 100);
    });
}
