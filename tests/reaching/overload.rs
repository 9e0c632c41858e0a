//! The load of a server as its watchdog sees it, and the consequences.

use std::convert::Infallible;
use std::net::TcpStream;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::limits::ServerLimits;
use ringserve::overload::{Load, Overload};
use ringserve::{Cx, Frame, Service};
use ringserve_tests::{On, SOON, eventually, no_time_limits};

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        cx.reply_parts([cx.load().as_str().as_bytes(), b" ", &line]);
        Ok(())
    }
}

#[test]
fn full_table_is_told_until_connections_end() {
    let overload = Overload::default().calm_after(Duration::from_millis(50));
    let limits = ServerLimits::default().connections_max(20);
    let server = On::default().server(no_time_limits()).server_limits(limits).overload(overload);
    let server = server.framing(Lines::default()).start(|_shard| Echo).expect("the server starts");
    assert_eq!(server.control().load(), Load::Calm);
    let clients: Vec<_> = (0..20).map(|_| TcpStream::connect(server.local_addrs()[0]).unwrap()).collect();
    eventually("the load is that of a full table", SOON, || server.control().load() == Load::Full);
    let worst = server.control().shard_loads().into_iter().max_by_key(|of| of.load).unwrap();
    assert_eq!((worst.cause, worst.shed_share), (Some("accept_paused"), 0.0), "{worst:?}");
    drop(clients);
    eventually("the server is calm again", SOON, || server.control().load() == Load::Calm);
    assert_eq!(server.control().shard_loads()[0].cause, None);
    ringserve_tests::finish(server);
}
