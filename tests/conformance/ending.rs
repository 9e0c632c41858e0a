//! Ends, by the peer and by the service.

use std::convert::Infallible;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringserve::framing::LengthPrefix;
use ringserve::service::CloseCx;
use ringserve::stats::Account;
use ringserve::{CloseReason, Cx, Frame, Service};

use ringserve_tests::client::{End, frame, frames};
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order, pattern, watch};

/// Echoes, and keeps the accounts of connections that ended.
struct Billing(Arc<Mutex<Vec<Account>>>);

impl Service for Billing {
    type Session = ();
    type Error = Infallible;

    const ACCOUNTS: bool = true;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(frame);
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, ()>) {
        self.0.lock().unwrap().extend(closed.account());
    }
}

pub fn account_at_the_end(on: On) {
    let site = on.site(no_time_limits()).framing(LengthPrefix::default());
    let (net, accounts) = (site.net.clone(), Arc::new(Mutex::new(Vec::new())));
    let for_shards = accounts.clone();
    let running = site.start(move |_| Billing(for_shards.clone())).expect("the server starts");
    let mut client = Client::of(net.connect(running.local_addrs()[0]).expect("the server accepts"));
    // Small ones, and one that needs several receives and sends.
    for len in [0, 10, 100_000] {
        client.send(pattern(len));
        assert_eq!(client.recv().len(), len);
    }
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    watch::ended({
        running.shutdown();
        running
    });
    let accounts = accounts.lock().unwrap();
    let [account] = accounts[..] else { panic!("{accounts:?}") };
    assert_eq!((account.frames_received, account.frames_sent), (3, 3));
    assert_eq!((account.bytes_received, account.bytes_sent), (100_022, 100_022));
}

pub fn half_closed_after_a_request(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.send(order::echo(""));
    client.finish_writing();
    assert_eq!((client.recv(), client.end()), (order::echo(""), End::Fin));
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

pub fn half_closed_with_much_queued(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client_with_small_window();
    client.write(&[frame(order::replies(100, 100_000)), frame(order::echo("last"))].concat());
    client.finish_writing();
    (0..100).for_each(|_| assert!(client.recv() == pattern(100_000)));
    assert_eq!((client.recv(), client.end()), (order::echo("last"), End::Fin));
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

pub fn half_closed_in_the_middle_of_a_frame(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(order::echo("")), frame(order::echo(""))[..3].to_vec()].concat());
    client.finish_writing();
    assert_eq!((client.recv(), client.end()), (order::echo(""), End::Fin));
    lab.closed_for(CloseReason::PeerClosedMidFrame, 1);
    lab.finish();
}

pub fn half_closed_without_a_word(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

pub fn fin_comes_after_all_bytes(on: On) {
    let lab = Lab::on(on, no_time_limits().linger_timeout(SOON));
    let mut client = lab.client_with_small_window();
    client.write(&[frame(order::replies(100, 100_000)), frame(order::close())].concat());
    let (wire, end) = client.read_to_end();
    assert_eq!((frames(&wire).len(), end), (101, End::Fin));
    drop(client);
    lab.closed_for(CloseReason::Closed, 1);
    lab.holds(0);
    lab.finish();
}

pub fn bytes_after_a_close_destroy_no_reply(on: On) {
    let lab = Lab::on(on, no_time_limits().linger_timeout(SOON));
    let mut client = lab.client_with_small_window();
    client.write(&[frame(order::replies(5, 20_000)), frame(order::close())].concat());
    lab.closed_for(CloseReason::Closed, 1);
    // The kernel holds most of the replies still.
    client.write(&[0; 500_000]);
    let (wire, end) = client.read_to_end();
    assert_eq!((frames(&wire).len(), end), (6, End::Fin));
    drop(client);
    lab.holds(0);
    lab.finish();
}

pub fn a_peer_that_stays_is_let_go(on: On) {
    let lab = Lab::on(on, no_time_limits().linger_timeout(Duration::from_millis(50)));
    let mut client = lab.client();
    assert_eq!((client.ask(order::close()), client.end()), (b"bye".to_vec(), End::Fin));
    lab.holds(0);
    lab.closed_for(CloseReason::Closed, 1);
    lab.finish();
}

pub fn reset_while_idle(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.echoes("");
    client.reset();
    lab.closed_for(CloseReason::PeerReset, 1);
    lab.holds(0);
    lab.finish();
}

pub fn reset_in_the_middle_of_a_frame(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.write(&frame(order::echo_of(100_000))[..60_000]);
    eventually("it arrives", SOON, || lab.stats().counters.bytes_received == 60_000);
    client.reset();
    lab.closed_for(CloseReason::PeerReset, 1);
    lab.finish();
}

pub fn reset_with_replies_queued(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client_with_small_window();
    client.send(order::replies(100, 100_000));
    assert!(client.recv() == pattern(100_000));
    client.reset();
    lab.closed_for(CloseReason::PeerReset, 1);
    lab.holds(0);
    lab.finish();
}

pub fn reset_while_a_call_waits(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.send(order::gate(""));
    lab.parked(1);
    client.reset();
    lab.closed_for(CloseReason::PeerReset, 1);
    assert_eq!(lab.shared.dropped.load(SeqCst), 1);
    lab.finish();
}

/// A close with bytes unread is a reset, by the rules of TCP.
pub fn closed_with_replies_unread(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client_with_small_window();
    client.send(order::replies(100, 100_000));
    assert!(client.recv() == pattern(100_000));
    drop(client);
    lab.closed_for(CloseReason::PeerReset, 1);
    lab.finish();
}

pub fn aborted_by_the_service(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.send(order::abort());
    assert_eq!(client.end(), End::Reset);
    lab.closed_for(CloseReason::Aborted, 1);
    lab.finish();
}

pub fn closed_twice(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    assert_eq!(client.ask(order::name("target")), b"named");
    let mut other = lab.client();
    // The second wish finds it closing, the third one gone.
    other.write(&frame(order::close_named("target")).repeat(3));
    (0..3).for_each(|_| assert_eq!(other.recv(), b"closed"));
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::Closed, 1);
    lab.finish();
}
