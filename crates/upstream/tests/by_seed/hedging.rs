//! Questions that are asked of a second backend, where the first one takes longer than most.

use ringserve::testing::Faults;
use ringserve::upstream::{Balance, Hedge};

use super::*;

/// A client that asks one question after the other. Returns how many of its answers took longer
/// than half a second.
fn asks_on(sim: &Sim, name: &str, kind: &'static str, questions: u32) -> Rc<Cell<u32>> {
    let (late, name) = (Rc::new(Cell::new(0)), name.to_owned());
    let count = late.clone();
    sim.client(name.clone(), async move |net| {
        let mut me = net.connect(FRONT).await?;
        for n in 0..questions {
            let (question, begun) = (format!("{kind} {name}.{n}"), net.now());
            assert_eq!(asks(&mut me, &question).await?, question);
            count.set(count.get() + u32::from(net.now() - begun > SECOND / 2));
        }
        Ok(())
    });
    late
}

/// A front that has learned how long its backends take, of which one becomes slow then. Returns how
/// many were asked twice so far.
fn slowed(sim: &Sim, upstream: &Upstream) -> (Vec<Rc<Backend>>, u64) {
    let backends = backends(sim, 3);
    backends.iter().for_each(|backend| backend.mode.set(Mode::Slow(SECOND / 100)));
    front(sim, upstream, 1);
    asks_on(sim, "learns", "again", 300);
    sim.run_until_done();
    let hedges = upstream.stats().hedges;
    assert!(hedges <= 40, "few are later than 95 of 100: {hedges} of 300");
    backends[0].mode.set(Mode::Slow(2 * SECOND));
    (backends, hedges)
}

fn in_turn() -> Upstream {
    upstream(3).balance(Balance::RoundRobin).ejection(false)
}

#[test]
fn late_answer_is_had_from_a_second_backend() {
    Sim::seeds(6).run(|sim| {
        let upstream = in_turn().hedge(Hedge::default().budget_of(100));
        let (_backends, before) = slowed(sim, &upstream);
        // A second's requests before the first late one.
        let late = asks_on(sim, "c", "again", 60);
        sim.run_until_done();
        let hedges = upstream.stats().hedges - before;
        assert!((10..=45).contains(&hedges), "a third of 60 meets the slow one: {hedges}");
        assert!(late.get() <= 3, "{} late", late.get());
        sim.run_for(5 * SECOND);
        assert_eq!(sum(&upstream, |backend| backend.in_flight), 0);
        assert_eq!(upstream.stats().refused, 0);
    });
}

#[test]
fn second_backends_are_asked_within_their_budget() {
    Sim::seeds(6).run(|sim| {
        let upstream = in_turn().hedge(Hedge::default());
        let (_backends, before) = slowed(sim, &upstream);
        for client in 0..20 {
            asks_on(sim, &format!("c{client}"), "again", 40);
        }
        sim.run_until_done();
        let hedges = upstream.stats().hedges - before;
        assert!((1..=40 + 10).contains(&hedges), "{hedges} of 800");
    });
}

#[test]
fn question_that_is_asked_once_has_no_second_backend() {
    Sim::seeds(6).faults(Faults::harmless()).run(|sim| {
        let upstream = in_turn().hedge(Hedge::default().budget_of(100));
        let (backends, before) = slowed(sim, &upstream);
        asks_on(sim, "c", "once", 30);
        sim.run_until_done();
        assert_eq!(upstream.stats().hedges, before);
        heard_once(&backends);
    });
}
