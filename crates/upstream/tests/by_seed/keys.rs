//! Requests with a key, and where they meet.

use ringserve::testing::Faults;

use super::*;

/// Asks once for each of 20 keys. Returns which backend was asked for each.
fn asks_by_key(sim: &Sim, backends: &[Rc<Backend>]) -> Vec<Vec<usize>> {
    // No two rounds have the same time.
    sim.run_for(SECOND / 1000);
    let round = sim.now().as_nanos();
    for client in 0..3 {
        sim.client(format!("c{round}.{client}"), async move |net| {
            let mut me = net.connect(FRONT).await?;
            for key in 0..20 {
                let question = format!("again {round}.{client} key={key}");
                assert_eq!(asks(&mut me, &question).await?, question);
            }
            Ok(())
        });
    }
    sim.run_until_done();
    let of_key = |key: usize| {
        let asked = backends.iter().enumerate().filter(|(_, backend)| {
            let (begin, end) = (format!("again {round}."), format!(" key={key}"));
            backend.heard.borrow().keys().any(|heard| heard.starts_with(&begin) && heard.ends_with(&end))
        });
        asked.map(|(index, _)| index).collect()
    };
    (0..20).map(of_key).collect()
}

#[test]
fn equal_keys_meet_and_move_only_with_their_backend() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 4);
        let upstream = upstream(4);
        front(sim, &upstream, 3);
        let before = asks_by_key(sim, &backends);
        assert!(before.iter().all(|asked| asked.len() == 1), "{before:?}");
        assert!((0..4).all(|index| before.contains(&vec![index])), "all have some: {before:?}");
        backends[1].mode.set(Mode::Refuses);
        sim.reset(ADDRS[1].parse::<SocketAddr>().unwrap().ip());
        sim.expect_losses();
        sim.run_for(SECOND);
        // It takes some failures until it is ejected; from then on its keys meet elsewhere.
        (0..3).for_each(|_| drop(asks_by_key(sim, &backends)));
        let moved = asks_by_key(sim, &backends);
        for (before, after) in before.iter().zip(&moved) {
            assert!(after.len() == 1 && (before == after) == (*before != [1]), "{before:?} {after:?}");
        }
        backends[1].mode.set(Mode::Answers);
        sim.run_for(60 * SECOND);
        (0..2).for_each(|_| drop(asks_by_key(sim, &backends)));
        assert_eq!(asks_by_key(sim, &backends), before);
        heard_once(&backends);
    });
}
