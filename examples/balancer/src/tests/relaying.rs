//! Bytes between clients and upstreams, and how connections end.

use std::io;

use ringserve::testing::ClientResult;

use super::*;

/// Sends in pieces what is this client's alone, ends, and must hear the same.
async fn talks(net: &Net, addr: SocketAddr, client: u64, len: usize) -> ClientResult {
    let mut me = net.connect(addr).await?;
    let all = pattern(client, len);
    let (mut sent, mut heard) = (0, Vec::new());
    while heard.len() < all.len() {
        if sent < all.len() {
            let end = all.len().min(sent + 1 + net.random() as usize % 30_000);
            me.send(&all[sent..end]).await?;
            sent = end;
            if sent == all.len() {
                me.finish()?;
            }
        }
        while let Ok(bytes) =
            net.timeout(if sent < all.len() { Duration::ZERO } else { 999 * SECOND }, me.some()).await
        {
            let bytes = bytes?;
            if bytes.is_empty() {
                break;
            }
            heard.extend(bytes);
            assert!(all.starts_with(&heard), "client {client} heard what it did not say");
        }
        if sent == all.len() && heard.len() < all.len() {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
    }
    Ok(())
}

#[test]
fn no_byte_is_lost_or_crossed_between_clients() {
    Sim::seeds(24).faults(Faults::harmless()).run(|sim| {
        let (_echoes, running) = starts(sim, &[]);
        let addr = running.addr();
        for client in 0..6 {
            let len = (sim.random() % 100_000) as usize;
            sim.client(format!("c{client}"), async move |net| talks(&net, addr, client, len).await);
        }
        sim.run_until_done();
        sim.run_for(5 * SECOND);
        assert_eq!(running.connections(), [0, 0, 0]);
        let served: u64 = running.sums(|backend| backend.connects).iter().sum();
        assert_eq!(served, 6);
    });
}

#[test]
fn what_a_client_hears_is_its_own_whatever_breaks() {
    Sim::seeds(12).faults(Faults::all()).run(|sim| {
        let (echoes, running) = starts(sim, &["--idle-timeout", "30"]);
        let addr = running.addr();
        for client in 0..8 {
            let len = (sim.random() % 60_000) as usize;
            sim.client(format!("c{client}"), async move |net| talks(&net, addr, client, len).await);
        }
        let modes = [Mode::Echoes, Mode::Refuses, Mode::Silent];
        for _ in 0..8 {
            sim.run_for(SECOND / 4);
            echoes[sim.random() as usize % 3].mode.set(modes[sim.random() as usize % 3]);
            if sim.random().is_multiple_of(4) {
                let number = 11 + (sim.random() % 3) as u8;
                sim.reset([10, 0, 0, number].into());
            }
        }
        sim.expect_losses();
        sim.run_for(200 * SECOND);
        assert_eq!(running.connections(), [0, 0, 0], "no place is taken once all clients are gone");
    });
}

#[test]
fn bytes_are_counted_with_those_of_the_first_record() {
    Sim::seeds(5).run(|sim| {
        let (_echoes, running) = starts(sim, &["--upstream", "a.example=10.0.0.14:80"]);
        let addr = running.addr();
        sim.client("c", async move |net| talks(&net, addr, 7, 50_000).await);
        sim.run_until_done();
        sim.run_for(5 * SECOND);
        let sum = |of| running.sums(of).iter().sum::<u64>();
        let (there, back) = (sum(|backend| backend.bytes_there), sum(|backend| backend.bytes_back));
        assert_eq!((there, back), (50_000, 50_000));
    });
}

#[test]
fn upstream_that_ends_first_still_hears_the_client() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let heard = Rc::new(Cell::new(None));
        let told = heard.clone();
        sim.background("ends first", async move |net| {
            let mut listener = net.listen(ADDRS[0])?;
            loop {
                let (mut stream, told) = (listener.accept().await, told.clone());
                net.spawn(async move {
                    // A check says nothing.
                    if stream.send("bye").await.is_ok()
                        && stream.finish().is_ok()
                        && let Ok(bytes) = stream.closed().await
                        && !bytes.is_empty()
                    {
                        told.set(Some(bytes.len()));
                    }
                });
            }
        });
        let addr = Running::start(sim, &["--upstream", ADDRS[0]]).addr();
        sim.client("c", async move |net| {
            let mut me = net.connect(addr).await?;
            assert_eq!(me.closed().await?, b"bye");
            net.sleep(SECOND).await;
            me.send(pattern(1, 200_000)).await?;
            me.finish()?;
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(60 * SECOND);
        assert_eq!(heard.get(), Some(200_000));
    });
}

#[test]
fn upstream_that_breaks_resets_its_client_alone() {
    Sim::seeds(30).run(|sim| {
        let (_echoes, running) = starts(sim, &[]);
        let addr = running.addr();
        let reset = Rc::new(Cell::new(0));
        for n in 0..6 {
            let reset = reset.clone();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                echoes(&mut me).await?;
                net.sleep(10 * SECOND).await;
                match echoes(&mut me).await {
                    Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                        reset.set(reset.get() + 1)
                    }
                    ended => ended?,
                }
                Ok(())
            });
        }
        sim.run_for(5 * SECOND);
        assert_eq!(running.connections(), [2, 2, 2]);
        sim.reset([10, 0, 0, 12].into());
        sim.run_until_done();
        assert_eq!(reset.get(), 2);
        assert_eq!(running.upstream(1).broken, 2);
    });
}

#[test]
fn idle_connection_ends_and_a_busy_one_stays() {
    Sim::seeds(10).run(|sim| {
        let (_echoes, running) = starts(sim, &["--idle-timeout", "30"]);
        let addr = running.addr();
        sim.client("busy", async move |net| {
            let mut me = net.connect(addr).await?;
            for _ in 0..10 {
                echoes(&mut me).await?;
                net.sleep(20 * SECOND).await;
            }
            Ok(())
        });
        sim.client("idle", async move |net| {
            let mut me = net.connect(addr).await?;
            echoes(&mut me).await?;
            assert_eq!(net.timeout(40 * SECOND, me.closed()).await??, b"");
            Ok(())
        });
        sim.run_until_done();
    });
}
