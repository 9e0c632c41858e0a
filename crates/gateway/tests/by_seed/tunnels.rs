//! Connections that become tunnels, and those that must not.

use ringserve::upstream::PoolLimits;

use super::*;

const ASKS: &str = "GET /ws HTTP/1.1\r\nhost: a.b\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
const SWITCHES: &str = "HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";

fn tunnels(upstream: &HttpUpstream) -> Routes {
    routes([("/ws", Route::to(upstream).upgrades(["websocket"])), ("/*", Route::to(upstream))])
}

#[test]
fn bytes_pass_both_ways_behind_the_answer_of_101() {
    Sim::seeds(30).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], |_, _| Act::Echo(format!("{SWITCHES}first")));
        start(sim, &tunnels(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            // Bytes right behind the head wait for the answer too.
            me.send(format!("{ASKS}second")).await?;
            let head = head(&mut me).await?.expect("a head");
            assert!(head[0].contains("101"), "{head:?}");
            assert!(head.contains(&"upgrade: websocket".to_owned()), "{head:?}");
            assert_eq!(me.exactly(11).await?, b"firstsecond");
            for round in 0..10 {
                me.send(format!("{round}")).await?;
                assert_eq!(me.exactly(1).await?, format!("{round}").as_bytes());
            }
            me.finish()?;
            assert!(me.closed().await?.is_empty());
            let seen = backend.last();
            assert_eq!(
                (seen.field("upgrade"), seen.field("connection")),
                (Some("websocket"), Some("upgrade"))
            );
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn nothing_raw_passes_before_the_upstream_switched() {
    Sim::seeds(20).run(|sim| {
        let backend =
            Backend::start(sim, ADDRS[0], |seen, _| Act::After(SECOND, Box::new(says_its_target(seen, 0))));
        start(sim, &tunnels(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            me.send(format!("{ASKS}{}", get("/ws/hidden"))).await?;
            let answer = answer(&mut me).await?;
            assert_eq!((answer.status, answer.text().as_str()), (200, "/ws"));
            net.sleep(5 * SECOND).await;
            // The upstream went on with HTTP: what stood behind the request is another one, and
            // seen as one.
            for seen in backend.seen.borrow().iter() {
                assert!(seen.field("via").is_some() && seen.body.is_empty(), "{seen:?}");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn switch_that_nobody_asked_for_is_502() {
    Sim::seeds(10).run(|sim| {
        Backend::start(sim, ADDRS[0], |seen, _| {
            let to = if seen.head[0].contains("other") { "h2c" } else { "websocket" };
            Act::Echo(format!("HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: {to}\r\n\r\nraw"))
        });
        let web = upstream(1);
        start(sim, &routes([("/other", Route::to(&web).upgrades(["websocket"])), ("/*", Route::to(&web))]));
        sim.client("one", async move |net| {
            for request in [get("/"), ASKS.into(), ASKS.replace("/ws", "/other"), post("/", "x")] {
                let mut me = net.connect(FRONT).await?;
                let answer = ask(&mut me, &request).await?;
                assert_eq!(answer.status, 502, "{request}");
                assert!(!answer.text().contains("raw"));
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn tunnel_that_breaks_on_one_side_breaks_on_the_other() {
    Sim::seeds(20).run(|sim| {
        Backend::start(sim, ADDRS[0], |_, _| Act::SendAndReset(format!("{SWITCHES}half")));
        start(sim, &tunnels(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            me.send(ASKS).await?;
            head(&mut me).await?.expect("a head");
            assert!(me.closed().await.is_err(), "an end that looks like a whole");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn refused_switch_is_an_answer_like_others() {
    Sim::seeds(10).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        start(sim, &tunnels(&upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, ASKS).await?.text(), "/ws");
            assert_eq!(ask(&mut me, get("/a")).await?.text(), "/a");
            // h2c is never asked for.
            let h2c = "GET /b HTTP/1.1\r\nhost: a.b\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n\r\n";
            assert_eq!(ask(&mut me, h2c).await?.text(), "/b");
            let seen = backend.last();
            assert_eq!((seen.field("upgrade"), seen.field("http2-settings")), (None, None));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn idle_tunnels_leave_connections_to_requests() {
    Sim::seeds(5).run(|sim| {
        Backend::start(sim, ADDRS[0], |seen, at| match seen.field("upgrade") {
            Some(_) => Act::Echo(SWITCHES.into()),
            None => says_its_target(seen, at),
        });
        let pool = PoolLimits::default().connections_max(1);
        let web = HttpUpstream::new(Upstream::new("web", [ADDRS[0]]).pool(pool)).tunnels_max(3);
        start(sim, &tunnels(&web));
        sim.client("one", async move |net| {
            let mut all = Vec::new();
            for _ in 0..3 {
                let mut me = net.connect(FRONT).await?;
                assert_eq!(ask(&mut me, ASKS).await?.status, 101);
                all.push(me);
            }
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, get("/a")).await?.text(), "/a");
            assert_eq!(ask(&mut me, ASKS).await?.status, 503);
            drop(all);
            net.sleep(SECOND).await;
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, ASKS).await?.status, 101);
            Ok(())
        });
        sim.run_until_done();
    });
}
