//! Which upstream a client gets.

use std::io;

use super::*;

#[test]
fn connections_are_even_over_all_shards() {
    Sim::seeds(15).faults(Faults::harmless()).run(|sim| {
        let (echoing, running) = starts(sim, &[]);
        let addr = running.addr();
        let stay = Rc::new(Cell::new(0));
        for n in 0..30 {
            let stay = stay.clone();
            sim.client(format!("c{n}"), async move |net| {
                net.sleep(Duration::from_millis(net.random() % 3000)).await;
                let mut me = net.connect(addr).await?;
                echoes(&mut me).await?;
                stay.set(stay.get() + 1);
                // Those that leave make room which those that come take.
                net.sleep(if n % 2 == 0 { 60 * SECOND } else { 200 * SECOND }).await;
                Ok(())
            });
        }
        assert!(sim.run_until(50 * SECOND, || stay.get() == 30), "all are served");
        assert_eq!(running.connections(), [10, 10, 10]);
        let heard: Vec<_> = echoing.iter().map(|echo| echo.now.get()).collect();
        assert_eq!(heard, [10, 10, 10], "what is counted is what is there");
        sim.run_for(80 * SECOND);
        assert_eq!(running.connections().iter().sum::<u64>(), 15);
        for n in 0..15 {
            sim.client(format!("d{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                echoes(&mut me).await?;
                net.sleep(60 * SECOND).await;
                Ok(())
            });
        }
        sim.run_for(20 * SECOND);
        assert_eq!(running.connections(), [10, 10, 10], "of those that stayed and those that came");
        sim.run_until_done();
    });
}

#[test]
fn refusing_upstream_costs_no_client() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let (echoing, running) = starts(sim, &["--check-interval", "5"]);
        let addr = running.addr();
        echoing[0].mode.set(Mode::Refuses);
        sim.run_for(SECOND);
        for n in 0..9 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                echoes(&mut me).await?;
                net.sleep(20 * SECOND).await;
                Ok(())
            });
        }
        sim.run_until_done();
        let (failed, retries) =
            (running.upstream(0).connects_failed, running.balancer.upstream.stats().retries);
        assert!(failed > 0 && failed == retries, "{failed} failed, {retries} retries");
        assert_eq!(running.balancer.upstream.stats().refused, 0);
    });
}

#[test]
fn stalled_upstream_is_given_up_after_the_connect_timeout() {
    Sim::seeds(30).run(|sim| {
        let (_echoes, running) = starts(sim, &["--connect-timeout", "3", "--check-interval", "100"]);
        let addr = running.addr();
        sim.run_for(SECOND);
        sim.partition(HOST.into(), [10, 0, 0, 11].into());
        for n in 0..6 {
            sim.client(format!("c{n}"), async move |net| {
                let begun = net.now();
                let mut me = net.connect(addr).await?;
                echoes(&mut me).await?;
                assert!(net.now() - begun < 4 * SECOND, "{:?}", net.now() - begun);
                net.sleep(10 * SECOND).await;
                Ok(())
            });
        }
        sim.run_until_done();
        assert!(running.upstream(0).connects_failed > 0);
    });
}

#[test]
fn client_that_leaves_before_it_is_served_leaves_its_place() {
    Sim::seeds(20).run(|sim| {
        let (_echoes, running) = starts(sim, &["--connect-timeout", "60", "--check-interval", "100"]);
        let addr = running.addr();
        (11..14).for_each(|last| sim.partition(HOST.into(), [10, 0, 0, last].into()));
        for n in 0..6 {
            sim.client(format!("c{n}"), async move |net| {
                let me = net.connect(addr).await?;
                net.sleep(5 * SECOND).await;
                me.reset();
                Ok(())
            });
        }
        sim.run_for(4 * SECOND);
        assert_eq!(running.connections(), [2, 2, 2], "a place is taken before its upstream is there");
        sim.run_until_done();
        sim.run_for(SECOND);
        assert_eq!(running.connections(), [0, 0, 0]);
    });
}

#[test]
fn client_for_which_there_is_no_upstream_is_closed() {
    Sim::seeds(20).run(|sim| {
        let (echoing, running) = starts(sim, &[]);
        let addr = running.addr();
        echoing.iter().for_each(|echo| echo.mode.set(Mode::Refuses));
        sim.run_for(SECOND);
        for wait in [0, 20] {
            sim.client(format!("c{wait}"), async move |net| {
                net.sleep(wait * SECOND).await;
                assert_eq!(net.connect(addr).await?.closed().await?, b"");
                Ok(())
            });
        }
        sim.run_until_done();
        let tried: u64 = running.sums(|backend| backend.connects_failed).iter().sum();
        assert_eq!(
            (tried, running.balancer.upstream.stats().refused),
            (3, 2),
            "those that are down are not tried"
        );
    });
}

#[test]
fn drained_upstream_keeps_its_clients_and_gets_no_more() {
    Sim::seeds(15).faults(Faults::harmless()).run(|sim| {
        let (_echoes, running) = starts(sim, &[]);
        let addr = running.addr();
        for (name, after) in [("early", 0), ("late", 30), ("last", 90)] {
            for n in 0..6 {
                sim.client(format!("{name}{n}"), async move |net| {
                    net.sleep(after * SECOND).await;
                    let mut me = net.connect(addr).await?;
                    for _ in 0..5 {
                        echoes(&mut me).await?;
                        net.sleep(10 * SECOND).await;
                    }
                    Ok(())
                });
            }
        }
        sim.run_for(20 * SECOND);
        assert_eq!(running.connections(), [2, 2, 2]);
        running.balancer.upstream.drain(ADDRS[1]);
        sim.run_for(25 * SECOND);
        let [one, two, three] = running.connections()[..] else { panic!() };
        assert_eq!((one + three, two), (10, 2));
        sim.run_for(40 * SECOND);
        assert!(running.connections().iter().sum::<u64>() <= 6, "the early ones are gone");
        running.balancer.upstream.undrain(ADDRS[1]);
        sim.run_for(30 * SECOND);
        assert_eq!(running.connections(), [2, 2, 2]);
        sim.run_until_done();
    });
}

/// A ClientHello with this name, in one record.
fn client_hello(name: &str) -> Vec<u8> {
    fn sized(bytes: usize, body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32).to_be_bytes()[4 - bytes..], body].concat()
    }
    let server_name = sized(2, &[&[0][..], &sized(2, name.as_bytes())].concat());
    let extensions = [
        [&[0, 0][..], &sized(2, &server_name)].concat(),
        // Algorithms for signatures, groups and versions: what a hello has to have.
        [&[0, 13][..], &sized(2, &sized(2, &[4, 3]))].concat(),
        [&[0, 10][..], &sized(2, &sized(2, &[0, 29]))].concat(),
        [&[0, 43][..], &sized(2, &sized(1, &[3, 4]))].concat(),
    ];
    let hello =
        [&[3, 3][..], &[7; 32], &[0], &sized(2, &[0x13, 1]), &[1, 0], &sized(2, &extensions.concat())]
            .concat();
    let handshake = [&[1][..], &sized(3, &hello)].concat();
    [&[22, 3, 1][..], &sized(2, &handshake)].concat()
}

#[test]
fn name_in_the_first_record_decides() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let places = ["A.example,b.example=10.0.0.11:80", "*=10.0.0.12:80", "10.0.0.13:80"];
        let echoing = ADDRS.map(|addr| Echo::start(sim, addr));
        let options = places.iter().flat_map(|place| ["--upstream", *place]).collect::<Vec<_>>();
        let addr = Running::start(sim, &options).addr();
        let hellos = [
            (client_hello("a.example"), 0),
            (client_hello("B.Example"), 0),
            (client_hello("c.example"), 2),
            (b"GET / HTTP/1.1\r\n\r\n".to_vec(), 2),
        ];
        for (n, (hello, wanted)) in hellos.into_iter().enumerate() {
            let echoing = echoing.clone();
            sim.client(format!("c{n}"), async move |net| {
                net.sleep(60 * n as u32 * SECOND).await;
                let mut me = net.connect(addr).await?;
                // In pieces as the network has them.
                let (first, rest) = hello.split_at(net.random() as usize % hello.len());
                me.send(first).await?;
                net.sleep(SECOND).await;
                me.send(rest).await?;
                assert_eq!(me.exactly(hello.len()).await?, hello);
                let now: Vec<_> = echoing.iter().map(|echo| echo.now.get()).collect();
                assert_eq!(now.iter().position(|now| *now == 1), Some(wanted), "{now:?}");
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

#[test]
fn client_that_never_ends_its_first_record_is_closed() {
    Sim::seeds(10).run(|sim| {
        let addr = Running::start(sim, &["--upstream", "a.example=10.0.0.11:80"]).addr();
        sim.client("slow", async move |net| {
            let mut me = net.connect(addr).await?;
            let hello = client_hello("a.example");
            for byte in &hello[..hello.len() - 1] {
                if me.send([*byte]).await.is_err() {
                    break;
                }
                net.sleep(SECOND / 5).await;
            }
            match net.timeout(SECOND, me.closed()).await? {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
            }
            assert!(net.now() < 40 * SECOND);
            Ok(())
        });
        sim.run_until_done();
    });
}
