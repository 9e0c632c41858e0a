//! Limits that a service sets for one connection.

use std::convert::Infallible;
use std::time::Duration;

use ringserve::framing::LengthPrefix;
use ringserve::limits::{ConnLimits, IdleActivity};
use ringserve::service::{OpenCx, Refusal};
use ringserve::{CloseReason, Cx, Frame, ServerHandle, Service};

use ringserve_tests::client::{End, frame};
use ringserve_tests::{Bounds, Client, Net, On, no_time_limits, watch};

/// Longer than any time limit that a test is about.
const LONG: Duration = Duration::from_millis(300);
const SHORT: Duration = Duration::from_millis(50);

/// Takes small frames before a login, and sets what a frame says.
struct Bounded;

impl Service for Bounded {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        let small = ConnLimits::default().frame_bytes_max(16);
        opening.set_limits(&small).map_err(|error| Refusal::new(error.to_string()))
    }

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let large = ConnLimits::default().frame_bytes_max(200_000);
        let set = match &frame[..] {
            b"login" => cx.set_limits(&large),
            b"keep alive" => cx.set_limits(&large.idle_timeout(SHORT).idle_counts(IdleActivity::Received)),
            b"patient" => cx.set_limits(&large.handler_timeout(None)),
            b"who" => cx.set_limits(&ConnLimits::default().deadline(LONG)),
            b"it is me" => {
                let set = cx.set_limits(&ConnLimits::default().deadline(LONG));
                set.and_then(|()| cx.set_limits(&ConnLimits::default().deadline(None)))
            }
            b"bad" => cx.set_limits(&large.idle_timeout(Duration::ZERO)),
            b"long" => {
                cx.sleep(LONG).await;
                Ok(())
            }
            _ => Ok(()),
        };
        match set {
            Ok(()) => cx.reply(frame),
            Err(_) => cx.reply(b"refused"),
        }
        Ok(())
    }
}

struct Lab {
    running: ServerHandle,
    net: Net,
}

impl Lab {
    fn on(on: On, bounds: Bounds) -> Lab {
        let site = on.site(bounds).framing(LengthPrefix::default());
        let net = site.net.clone();
        Lab { running: site.start(|_| Bounded).expect("the server starts"), net }
    }

    fn client(&self) -> Client {
        Client::of(self.net.connect(self.running.local_addrs()[0]).expect("the server accepts"))
    }

    fn finish(self) {
        self.running.shutdown();
        watch::ended(self.running);
    }
}

pub fn small_frames_before_a_login(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (mut stranger, mut member) = (lab.client(), lab.client());
    stranger.write(&[frame(b"hello"), frame([b'x'; 17])].concat());
    assert_eq!((stranger.recv(), stranger.end()), (b"hello".to_vec(), End::Fin));
    // What was received together with the login has the new limit.
    member.write(&[frame(b"login"), frame([b'x'; 100]), frame(vec![b'x'; 190_000])].concat());
    assert_eq!((member.recv().len(), member.recv().len(), member.recv().len()), (5, 100, 190_000));
    member.send(vec![b'x'; 200_000]);
    assert_eq!(member.end(), End::Fin);
    drop((stranger, member));
    watch::holds(&lab.running, 0);
    lab.finish();
}

pub fn idle_time_of_one_connection(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (mut other, mut alive) = (lab.client(), lab.client());
    assert_eq!(other.ask(b"hello"), b"hello");
    assert_eq!(alive.ask(b"keep alive"), b"keep alive");
    assert_eq!(alive.end(), End::Fin);
    drop(alive);
    watch::closed_for(&lab.running, CloseReason::IdleTimeout, 1);
    assert_eq!(other.ask(b"hello"), b"hello");
    lab.finish();
}

pub fn deadline_of_a_login(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (mut stranger, mut member) = (lab.client(), lab.client());
    assert_eq!(member.ask(b"it is me"), b"it is me");
    // What it says then, and limits that do not name the deadline, leave it as it is.
    stranger.write(&[frame(b"who"), frame(b"login"), frame(b"hello")].concat());
    assert_eq!((stranger.recv(), stranger.recv()), (b"who".to_vec(), b"login".to_vec()));
    assert_eq!((stranger.recv(), stranger.end()), (b"hello".to_vec(), End::Fin));
    drop(stranger);
    watch::closed_for(&lab.running, CloseReason::DeadlinePassed, 1);
    assert_eq!(member.ask(b"hello"), b"hello");
    lab.finish();
}

pub fn call_that_waits_as_long_as_it_likes(on: On) {
    let lab = Lab::on(on, no_time_limits().handler_timeout(SHORT));
    let (mut bounded, mut patient) = (lab.client(), lab.client());
    assert_eq!(patient.ask(b"patient"), b"patient");
    bounded.send(b"long");
    assert_eq!(patient.ask(b"long"), b"long");
    assert_eq!(bounded.end(), End::Fin);
    drop(bounded);
    watch::closed_for(&lab.running, CloseReason::HandlerTimeout, 1);
    lab.finish();
}

pub fn bad_limits_change_nothing(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    assert_eq!(client.ask(b"bad"), b"refused");
    // As before the login.
    client.send([b'x'; 17]);
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.finish();
}
