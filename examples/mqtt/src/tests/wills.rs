//! Wills, and how a broker learns that a client is lost.

use super::*;

/// A client that receives all wills.
async fn heir(net: &Net, addr: SocketAddr) -> io::Result<Client> {
    let (mut heir, _) = Hello::new(5, "heir").connects(net, addr).await?;
    heir.subscribes(&[("wills/#", 1)]).await?;
    // Retained messages that come between are sent twice.
    net.sleep(SECOND).await;
    Ok(heir)
}

#[test]
fn will_is_published_where_a_client_is_lost_and_nowhere_else() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let version = if sim.seed().is_multiple_of(2) { 4 } else { 5 };
        sim.client("all", async move |net| {
            let mut heir = heir(&net, addr).await?;
            for (n, flags) in [(0, 0), (1, 8), (2, 0x28), (3, 0), (4, 0), (5, 0)] {
                if n == 5 && version == 4 {
                    continue;
                }
                let hello = Hello::new(version, &n.to_string()).will(flags, &format!("wills/{n}"), "lost");
                let (mut me, _) = hello.connects(&net, addr).await?;
                match n {
                    0 => me.stream.reset(),
                    1 => drop(me),
                    2 => {
                        me.stream.finish()?;
                        me.stream.closed().await?;
                    }
                    // What breaks the protocol is no goodbye.
                    3 => {
                        me.stream.send([0x20, 0]).await?;
                        let _ = me.stream.closed().await;
                    }
                    4 => me.disconnects().await?,
                    // Disconnect with the will.
                    _ => {
                        me.stream.send([0xE0, 1, 4]).await?;
                        me.stream.closed().await?;
                    }
                }
                if n != 4 {
                    let heard = heir.hears().await?;
                    assert_eq!((&*heard.topic, heard.qos), (&*format!("wills/{n}"), flags >> 3 & 1));
                }
            }
            net.sleep(10 * SECOND).await;
            heir.pings().await?;
            assert_eq!(heir.unread, [], "one that said goodbye has none");
            heir.subscribes(&[("wills/2", 0)]).await?;
            assert!(heir.hears().await?.retain);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn will_of_a_connection_that_is_taken_over_is_published() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let mut heir = heir(&net, addr).await?;
            let hello = Hello::new(5, "ann").kept();
            let first = hello.clone().will(0, "wills/ann", "first").connects(&net, addr).await?;
            let (me, is_present) = hello.clone().will(0, "wills/ann", "second").connects(&net, addr).await?;
            assert!(is_present);
            assert_eq!(heir.hears().await?.payload, "first");
            drop(first);
            net.sleep(SECOND).await;
            heir.pings().await?;
            assert_eq!(heir.unread, [], "the end of the first connection is none of the second one");
            me.stream.reset();
            assert_eq!(heir.hears().await?.payload, "second");
            // It was published once, though the session goes on, and ends by a clean start.
            let _me = Hello::new(5, "ann").connects(&net, addr).await?;
            net.sleep(SECOND).await;
            heir.pings().await?;
            assert_eq!(heir.unread, []);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn silent_client_is_lost_after_one_and_a_half_of_its_keep_alive() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let mut heir = heir(&net, addr).await?;
            let keep_alive = 10 + (net.random() % 100) as u16;
            let hello = Hello { keep_alive, ..Hello::new(4, "ann").will(0, "wills/ann", "lost") };
            let (mut me, _) = hello.connects(&net, addr).await?;
            me.subscribes(&[("news", 0)]).await?;
            // What it is sent does not keep it.
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            let clock = net.clone();
            net.spawn(async move {
                while writer.publishes(0, "news", "x").await.is_ok() && clock.now() < 800 * SECOND {
                    clock.sleep(3 * SECOND).await;
                }
            });
            let mut silent = net.now();
            for _ in 0..5 {
                net.sleep(u32::from(keep_alive) * SECOND).await;
                // The answer may take a while, where the shard does not run.
                silent = net.now();
                me.pings().await?;
            }
            assert_eq!(heir.hears().await?.payload, "lost");
            let waited = (net.now() - silent).as_secs_f64() / f64::from(keep_alive);
            // The clock of a shard may stand still for a while.
            assert!(waited > 1.49 && waited < 1.6 + 60.0 / f64::from(keep_alive), "{waited} keep-alives");
            Ok(())
        });
        sim.client("patient", async move |net| {
            // Without a keep-alive it stays for as long as it likes.
            let (mut me, _) = Hello::new(4, "patient").connects(&net, addr).await?;
            net.sleep(20_000 * SECOND).await;
            me.pings().await?;
            Ok(())
        });
        sim.run_until_done();
    });
}
