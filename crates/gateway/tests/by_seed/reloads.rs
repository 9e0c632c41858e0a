//! Routes that are replaced while requests are in flight.

use ringserve::http::hyper::StatusCode;

use super::*;

#[test]
fn requests_end_by_the_routes_with_which_they_began() {
    Sim::seeds(20).run(|sim| {
        let old =
            Backend::start(sim, ADDRS[0], |_, _| Act::After(2 * SECOND, Box::new(Act::Send(ok("old")))));
        let new = Backend::start(sim, ADDRS[1], |_, _| Act::Send(ok("new")));
        let (first, second) = (upstream(1), HttpUpstream::new(Upstream::new("next", [ADDRS[1]])));
        let routes = all_to(&first);
        start(sim, &routes);
        sim.client("one", async move |net| {
            let (mut me, mut other) = (net.connect(FRONT).await?, net.connect(FRONT).await?);
            me.send(get("/")).await?;
            net.sleep(SECOND).await;
            let table = RouteTable::new().route("/*", Route::to(&second)).expect("a pattern");
            routes.replace(table).expect("it can be reached");
            assert_eq!(ask(&mut other, get("/")).await?.text(), "new");
            assert_eq!(answer(&mut me).await?.text(), "old");
            assert_eq!(ask(&mut me, get("/")).await?.text(), "new");
            assert_eq!((old.requests(), new.requests()), (1, 2));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn upstream_that_stays_keeps_its_connections() {
    Sim::seeds(10).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0], says_its_target);
        let web = upstream(1);
        let routes = all_to(&web);
        start(sim, &routes);
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for round in 0..5 {
                assert_eq!(ask(&mut me, get("/a")).await?.text(), "/a");
                let pong = Route::respond(StatusCode::OK, "text/plain".parse().unwrap(), round.to_string());
                let table = RouteTable::new()
                    .route("/*", Route::to(&web))
                    .and_then(|table| table.route("/ping", pong));
                routes.replace(table.expect("patterns")).expect("all can be reached");
                assert_eq!(ask(&mut me, get("/ping")).await?.text(), round.to_string());
            }
            assert_eq!(backend.accepted.get(), 1);
            Ok(())
        });
        sim.run_until_done();
    });
}
