//! Connections as an inspection finds them, and peers that do not take what they asked for.

use std::net::SocketAddr;
use std::time::Duration;

use ringserve::CloseReason;
use ringserve::framing::LengthPrefix;
use ringserve::inspect::{By, ConnInfo, ConnState, Inspection, Query};
use ringserve_tests::client::End;
use ringserve_tests::openmetrics::parse;
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order};

fn inspect(lab: &Lab, query: Query) -> Vec<ConnInfo> {
    let Inspection { connections, silent_shards, .. } = lab.running.control().inspect(query.within(SOON));
    assert!(silent_shards.is_empty(), "{silent_shards:?} do not answer");
    connections
}

/// Ages are known to 17 ms, so what is to be older than another thing is older by this.
const OLDER: Duration = Duration::from_millis(60);

/// Waits until the server knows something of a peer for long enough to tell it from what comes
/// next.
fn ages(lab: &Lab, peer: SocketAddr, of: impl Fn(&ConnInfo) -> Option<Duration>, by: Duration) {
    let is_old = |conn: &ConnInfo| conn.peer == Some(peer) && of(conn).is_some_and(|age| age >= by);
    eventually("it is old enough", SOON, || inspect(lab, Query::connections()).iter().any(is_old));
}

pub fn largest_outboxes_come_first(on: On) {
    let lab = Lab::of(on.site(no_time_limits()).shards(2).framing(LengthPrefix::default()));
    let mut calm: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    calm.iter_mut().for_each(|client| client.echoes("x"));
    let slow = [12 << 20, 20 << 20, 16 << 20].map(|bytes| {
        let mut client = lab.client_with_small_window();
        client.send(order::replies(bytes >> 18, 1 << 18));
        client
    });
    let by_outbox = || inspect(&lab, Query::connections().by(By::Outbox).limit(2));
    let [_, most, next] = slow.each_ref().map(Client::local_addr);
    let is = |found: &[ConnInfo]| found.iter().map(|conn| conn.peer).eq([Some(most), Some(next)]);
    eventually("the largest two are found", SOON, || is(&by_outbox()));
    let found = by_outbox();
    assert!(found[0].outbox_bytes > found[1].outbox_bytes && found[1].outbox_bytes > 8 << 20, "{found:?}");
    assert!(found.iter().all(|conn| conn.state == ConnState::HeldBack), "{found:?}");
    let sums = lab.running.control().inspect(Query::connections().limit(1).within(SOON)).sums;
    assert_eq!((sums.connections, sums.held_back, sums.calls), (23, 3, 0), "{sums:?}");
    assert!(sums.outbox_bytes as usize >= found[0].outbox_bytes + found[1].outbox_bytes, "{sums:?}");
    let all = inspect(&lab, Query::connections().limit(100));
    assert_eq!(all.len(), 23);
    let name = lab.addr().to_string();
    assert!(all.iter().all(|conn| *conn.service == *name && conn.listener == Some(0)), "{all:?}");
    assert_eq!(all.iter().filter(|conn| conn.outbox_bytes == 0).count(), 20, "{all:?}");
    drop(slow);
    lab.abort();
}

pub fn oldest_calls_come_first(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut clients: Vec<Client> = (0..5).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes("x"));
    assert!(inspect(&lab, Query::calls_waiting()).is_empty());
    for (calls, client) in clients[1..4].iter_mut().enumerate() {
        client.send(order::gate("text"));
        lab.parked(calls as u64 + 1);
        ages(&lab, client.local_addr(), |conn| conn.oldest_call, OLDER);
    }
    let found = inspect(&lab, Query::calls_waiting());
    let peers: Vec<_> = found.iter().map(|conn| conn.peer.expect("it has one")).collect();
    assert_eq!(peers, [1, 2, 3].map(|at: usize| clients[at].local_addr()), "{found:?}");
    for (conn, least) in found.iter().zip([3, 2, 1]) {
        let waits = conn.oldest_call.expect("a call waits");
        assert!(waits >= least * OLDER && waits < SOON, "{conn:?}");
        assert_eq!((conn.state, conn.calls), (ConnState::Calling, 1));
        assert!(conn.age >= waits, "{conn:?}");
    }
    let first = lab.running.control().inspect(Query::calls_waiting().limit(1).within(SOON));
    assert_eq!((first.connections.len(), first.sums.connections, first.sums.calls), (1, 3, 3));
    lab.shared.gate.open();
    clients[1..4].iter_mut().for_each(|client| assert_eq!(client.recv(), order::gate("text")));
    assert!(inspect(&lab, Query::calls_waiting()).is_empty(), "they are done");
    drop(clients);
    lab.finish();
}

pub fn silent_peers_and_old_connections_come_first(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut clients: Vec<Client> = (0..3)
        .map(|_| {
            let mut client = lab.client();
            client.echoes("x");
            ages(&lab, client.local_addr(), |conn| Some(conn.idle), OLDER);
            client
        })
        .collect();
    let addrs: Vec<_> = clients.iter().map(Client::local_addr).collect();
    let in_order = |by, order: [usize; 3]| {
        let found = inspect(&lab, Query::connections().by(by));
        let peers: Vec<_> = found.iter().map(|conn| conn.peer.expect("it has one")).collect();
        assert_eq!(peers, order.map(|at| addrs[at]), "by {by:?}: {found:?}");
        found
    };
    let found = in_order(By::Age, [0, 1, 2]);
    assert!(found[0].age - found[2].age >= OLDER, "{found:?}");
    in_order(By::Idle, [0, 1, 2]);
    clients[0].echoes("x");
    in_order(By::Age, [0, 1, 2]);
    let found = in_order(By::Idle, [1, 2, 0]);
    assert!(found[2].age - found[2].idle >= OLDER, "{found:?}");
    assert!(found.iter().all(|conn| conn.bytes_in.is_none()), "no account is kept: {found:?}");
    drop(clients);
    lab.finish();
}

pub fn accounts_of_a_server_are_in_an_inspection(on: On) {
    let site = on.site(no_time_limits()).accounts(true).framing(LengthPrefix::default());
    let lab = Lab::of(site);
    let mut clients: Vec<Client> = (0..3).map(|_| lab.client()).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        (0..=n).for_each(|_| client.echoes("text"));
    }
    let found = inspect(&lab, Query::connections().by(By::BytesIn));
    let figures: Vec<_> = found.iter().map(|conn| (conn.bytes_in, conn.frames_in, conn.frames_out)).collect();
    // Of a 4-byte length, a byte for the order, and the text.
    let of = |frames: u64| (Some(frames * 9), Some(frames), Some(frames));
    assert_eq!(figures, [of(3), of(2), of(1)]);
    // The end of the last send may not have been heard of.
    let least = |frames: u64| (frames - 1) * 9..=frames * 9;
    for (conn, frames) in found.iter().zip([3, 2, 1]) {
        assert!(conn.bytes_out.is_some_and(|bytes| least(frames).contains(&bytes)), "{conn:?}");
    }
    drop(clients);
    lab.finish();
}

pub fn connection_is_ended_by_its_id_and_no_later_one(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let control = lab.running.control();
    let only = || {
        let found = inspect(&lab, Query::connections());
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].clone()
    };
    let mut client = lab.client();
    client.echoes("x");
    let first = only();
    assert!(control.close_connection(first.shard, first.id));
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::Closed, 1);
    drop(client);
    lab.holds(0);
    let mut client = lab.client();
    client.echoes("x");
    let second = only();
    assert_eq!(second.id.slot(), first.id.slot(), "it has the place of the first one");
    // What has ended is left alone.
    assert!(
        control.close_connection(first.shard, first.id) && control.abort_connection(first.shard, first.id)
    );
    client.echoes("x");
    assert!(control.abort_connection(second.shard, second.id));
    assert_eq!(client.end(), End::Reset);
    lab.closed_for(CloseReason::Aborted, 1);
    assert!(!control.close_connection(1, first.id), "there is no such shard");
    lab.finish();
    assert!(!control.close_connection(first.shard, first.id), "the shard ended");
    assert_eq!(control.inspect(Query::connections()).silent_shards, [0]);
}

/// Of all send stalls: how many, and how long they took.
fn stalls(lab: &Lab) -> (f64, f64) {
    let mut text = String::new();
    lab.running.metrics().write_prometheus(&mut text);
    let families = parse(&text).unwrap_or_else(|error| panic!("{error} in:\n{text}"));
    let of = |name: &str| {
        let sample = format!("ringserve_send_stall_seconds_{name}");
        families.values().find_map(|family| family.samples.get(&sample).copied()).expect("it is there")
    };
    (of("count"), of("sum"))
}

/// For how long a peer takes nothing.
const STALL: Duration = Duration::from_millis(400);

pub fn stall_of_a_send_is_counted_and_silence_is_not(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut calm = lab.client();
    // A reply has left when the next frame comes, whenever that is.
    for _ in 0..5 {
        calm.echoes("x");
        calm.hears_nothing_for(OLDER);
    }
    // And where other threads look at the outbox.
    let mut reached = lab.reached("reached");
    for _ in 0..5 {
        reached.echoes("x");
        reached.hears_nothing_for(OLDER);
    }
    assert_eq!(stalls(&lab).0, 0.0, "nothing waited for a peer");
    let mut slow = lab.client_with_small_window();
    slow.send(order::replies(64, 256 << 10));
    ages(&lab, slow.local_addr(), |conn| (conn.state == ConnState::HeldBack).then_some(conn.idle), STALL);
    for _ in 0..64 {
        assert_eq!(slow.recv().len(), 256 << 10);
    }
    eventually("it is counted", SOON, || stalls(&lab).0 >= 1.0);
    let (count, sum) = stalls(&lab);
    assert!(sum >= STALL.as_secs_f64() / 2.0 && sum < 20.0, "{count} stalls of {sum} s");
    drop((calm, reached, slow));
    lab.finish();
}
