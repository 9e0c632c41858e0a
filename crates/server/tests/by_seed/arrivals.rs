//! Connections that came while a shard was away: they are counted, and judged by the rate of that
//! time. And those that come to one that slept.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::Server;
use ringserve_server::admission::Admission;
use ringserve_server::framing::Lines;
use ringserve_server::testing::{Faults, Sim};

use crate::Echo;

const SECOND: Duration = Duration::from_secs(1);

/// Connects `often` times a second for twelve seconds, eight of which the shard is away, and
/// returns how many were served.
fn served(sim: &Sim, admission: Admission, often: u32) -> usize {
    let server = Server::bind("10.0.0.1:7000").admission(admission).framing(Lines::default());
    let server = sim.start(server, |_shard| Echo).unwrap();
    let (addr, count) = (server.addr(), Rc::new(Cell::new(0)));
    let counted = count.clone();
    sim.client("steady", async move |net| {
        for _ in 0..12 * often {
            let (net_of_one, count) = (net.clone(), counted.clone());
            net.spawn(async move {
                let Ok(mut me) = net_of_one.connect(addr).await else { return };
                if me.send("x\n").await.is_ok() && matches!(me.line().await, Ok(Some(line)) if line == "x") {
                    count.set(count.get() + 1);
                    net_of_one.sleep(60 * SECOND).await;
                }
            });
            net.sleep(SECOND / often).await;
        }
        net.sleep(20 * SECOND).await;
        Ok(())
    });
    sim.run_for(2 * SECOND);
    server.stall(0, 8 * SECOND);
    sim.run_until_done();
    count.get()
}

#[test]
fn rate_of_a_peer_is_not_measured_over_a_stall() {
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        assert_eq!(served(sim, Admission::default().address_rate(5, 5), 4), 48);
    });
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        assert_eq!(served(sim, Admission::default().connection_rate(5, 5), 4), 48);
    });
}

#[test]
fn number_of_a_peer_holds_behind_a_stall_too() {
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        let admission = Admission::default().address_rate(5, 5).per_address(20);
        assert_eq!(served(sim, admission, 4), 20);
    });
}

#[test]
fn no_more_come_behind_a_stall_than_in_its_time() {
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        // Five a second for twelve seconds, and five at once.
        let count = served(sim, Admission::default().address_rate(5, 5), 20);
        assert!((55..=70).contains(&count), "{count} of 240");
    });
}

/// Connects once, and sixty times at once when that is `quiet` ago. Returns how many of these were
/// served.
fn served_behind(sim: &Sim, admission: Admission, quiet: Duration) -> usize {
    let server = Server::bind("10.0.0.1:7000").admission(admission).framing(Lines::default());
    let server = sim.start(server, |_shard| Echo).unwrap();
    let (addr, count) = (server.addr(), Rc::new(Cell::new(0)));
    let counted = count.clone();
    sim.client("crowd", async move |net| {
        drop(net.connect(addr).await);
        net.sleep(quiet).await;
        for _ in 0..60 {
            let (net_of_one, count) = (net.clone(), counted.clone());
            net.spawn(async move {
                let Ok(mut me) = net_of_one.connect(addr).await else { return };
                if me.send("x\n").await.is_ok() && matches!(me.line().await, Ok(Some(line)) if line == "x") {
                    count.set(count.get() + 1);
                    net_of_one.sleep(60 * SECOND).await;
                }
            });
        }
        net.sleep(20 * SECOND).await;
        Ok(())
    });
    sim.run_until_done();
    count.get()
}

#[test]
fn shard_that_slept_lets_no_more_in_than_a_burst() {
    for quiet in [3, 9, 13, 60] {
        Sim::seeds(10).faults(Faults::none()).run(|sim| {
            let admission = Admission::default().address_rate(5, 10);
            assert_eq!(served_behind(sim, admission, quiet * SECOND), 10, "behind {quiet} s");
        });
        Sim::seeds(10).faults(Faults::none()).run(|sim| {
            let admission = Admission::default().connection_rate(5, 10);
            assert_eq!(served_behind(sim, admission, quiet * SECOND), 10, "behind {quiet} s");
        });
    }
}
