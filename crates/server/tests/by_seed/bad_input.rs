//! Errors at the start of a server or between its shards, and their outcome, by seed.

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::listen::{endpoints, tcp};
use ringserve_server::sync::{AskError, Mesh, SendError};
use ringserve_server::testing::{Faults, Sim};
use ringserve_server::{Cx, Error, Frame, Server, Service};

use crate::Echo;

const SECOND: Duration = Duration::from_secs(1);

fn at(port: u16) -> String {
    format!("10.0.0.1:{port}")
}

#[test]
fn one_listener_of_five_that_cannot_be_leaves_none_behind() {
    Sim::seeds(50).run(|sim| {
        let shards = 1 + sim.seed() as usize % 3;
        let taken = 7000 + (sim.random() % 5) as u16;
        sim.serve(Server::bind(at(taken)), |_shard| Echo);
        let five = || endpoints((7000..7005).map(|port| tcp(at(port))).collect::<Vec<_>>());
        let of_five = Server::new().shards(shards).service(five(), |_shard| Echo);
        let error = sim.start_several(of_five).unwrap_err();
        assert!(error.to_string().contains(&at(taken)), "{error}");
        // The other four are free again.
        for port in (7000..7005).filter(|port| *port != taken) {
            sim.serve(Server::bind(at(port)), |_shard| Echo);
        }
    });
}

#[test]
fn services_that_claim_one_address_are_refused_with_both_names() {
    Sim::seeds(10).run(|sim| {
        let server = Server::new()
            .service(tcp(at(7000)).name("chat"), |_shard| Echo)
            .service(tcp(at(7000)).name("admin"), |_shard| Echo);
        let error = sim.start_several(server).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Address(_) | Error::Service { .. }), "{error:?}");
        assert!(text.contains("is given twice: to the service chat and to admin"), "{text}");
        // The first one does not listen either.
        sim.serve(Server::bind(at(7000)), |_shard| Echo);
    });
}

/// Tells five seconds later what came of a message and of a question to shard 1.
struct Tells {
    mesh: Mesh<u32>,
}

impl Service for Tells {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        cx.sleep(5 * SECOND).await;
        let gone = self.mesh.try_send(1, 7) == Err(SendError::Gone(7))
            && self.mesh.send(1, 8).await == Err(SendError::Gone(8))
            && self.mesh.ask(1, 9).await == Err(AskError::Gone);
        cx.reply(if gone { "gone" } else { "there" });
        Ok(())
    }
}

#[test]
fn message_to_a_shard_that_ended_comes_back() {
    let told = Rc::new(Cell::new(0));
    let count = told.clone();
    Sim::seeds(30).faults(Faults::harmless()).run(move |sim| {
        sim.expect_losses();
        let mesh = Mesh::new();
        let server = Server::bind(at(7000)).framing(Lines::default()).shards(2);
        let server = sim.start(server, move |shard| {
            mesh.register(shard, |_from, _number| ());
            Tells { mesh: mesh.clone() }
        });
        let server = server.unwrap();
        for n in 0..4 {
            let (count, addr) = (count.clone(), server.addr());
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("tell\n").await?;
                // Those of the shard that ends are reset.
                if let Some(line) = me.line().await? {
                    assert_eq!(line, "gone");
                    count.set(count.get() + 1);
                }
                Ok(())
            });
        }
        sim.run_for(SECOND);
        server.break_driver(1);
        sim.run_until_done();
    });
    assert!(told.get() > 0, "no client was on the shard that lives");
}
