use std::sync::Arc;

use ringserve_base::clock::Clock;
use ringserve_base::peer::Peer;
use ringserve_core::{Address, ConnId};

use super::internals::{Journal, Limiters, ShardAdmission};
use super::*;

fn checked(admission: &Admission) -> Result<(Option<Limiter>, Option<ServerRate>), String> {
    admission.check(false, 1000, (7, true)).map_err(|error| error.to_string())
}

fn refused(admission: Admission) -> String {
    checked(&admission).unwrap_err()
}

fn list(text: &str) -> IpList {
    text.parse().unwrap()
}

/// A clock that is there now, and goes on.
fn clock_at(now: Time) -> Clock {
    Clock::of_age(Duration::from_nanos(now.as_nanos()))
}

fn at(limiter: &Limiter, address: &str) -> Result<Option<Charge>, RefusedBy> {
    limiter.let_in(Source::Address(address.parse().unwrap()), Time::ZERO)
}

#[test]
fn settings_that_cannot_hold_are_refused_with_the_fix() {
    let base = Admission::default;
    for (admission, start) in [
        (base().per_address(0), "per_address is 0, which lets no peer in; set 1 at least"),
        (base().per_address(1001), "per_address is 1001, and the server has 1000 connections in all"),
        (base().address_rate(0, 1), "the rate of address_rate is 0; it must be 1 to 1000000"),
        (base().address_rate(1, 0), "the burst of address_rate is 0; it must be 1 to 1000000"),
        (base().accept_rate(1_000_001, 1), "the rate of accept_rate is 1000001; it must be 1 to 1000000"),
        (base().slow_start(Duration::from_secs(1)), "slow_start is 1s, and there is no accept_rate"),
        (
            base().accept_rate(1, 1).slow_start(Duration::from_secs(3601)),
            "slow_start is 3601s; it must be at most 3600s",
        ),
        (
            base().accept_rate(10, 1).address_rate(11, 1),
            "address_rate is 11 a second, and accept_rate lets 10 in",
        ),
        (base().per_address(1).ipv6_prefix(31), "ipv6_prefix is 31; it must be 32 to 64 bits"),
        (base().per_address(1).ipv6_prefix(65), "ipv6_prefix is 65; it must be 32 to 64 bits"),
        (base().ipv6_prefix(56), "ipv6_prefix is set, and neither per_address nor address_rate is"),
        (
            base().per_address(1).tracked_max(1023),
            "tracked_max is 1023; it must be 1024 to 67108864 prefixes",
        ),
        (base().connections_max(0), "connections_max is 0, which lets no peer in"),
        (base().connections_max(1001), "connections_max is 1001, and the server has 1000 connections in all"),
        (
            base().connections_max(10).per_address(11),
            "per_address is 11, and connections_max lets 10 in of all addresses together",
        ),
        (base().connection_rate(0, 1), "the rate of connection_rate is 0"),
        (
            base().connection_rate(5, 1).address_rate(6, 1),
            "address_rate is 6 a second, and connection_rate is 5",
        ),
        (
            base().connection_rate(6, 1).accept_rate(5, 1),
            "connection_rate is 6 a second, and accept_rate is 5",
        ),
        (base().tracked_max(2000), "tracked_max is set, and neither per_address nor address_rate is"),
        (Admission::default().without_kernel_filter(), "without_kernel_filter is set, and nothing else"),
        (base().deny(list("10.0.0.0/8\n::/0")), "the list: ::/0 denies every peer of its family"),
        (base().deny(IpList::file("/nonexistent/deny.txt")), "/nonexistent/deny.txt: it cannot be read"),
        (base().allow(IpList::file("/nonexistent/allow.txt")), "/nonexistent/allow.txt: it cannot be read"),
    ] {
        let error = refused(admission);
        assert!(error.starts_with(start), "{error}");
    }
    let of_one_service = base().accept_rate(1, 1).check(true, 1000, (7, true)).unwrap_err();
    assert!(of_one_service.to_string().starts_with("accept_rate holds for all services together"));
    assert!(checked(&base().allow(list("0.0.0.0/0"))).is_ok(), "all may be allowed");
}

#[test]
fn admission_that_asks_nothing_makes_no_limits() {
    assert!(matches!(checked(&Admission::default()), Ok((None, None))));
    let (limiter, rate) = checked(&Admission::default().accept_rate(5, 5)).unwrap();
    assert!(limiter.is_none() && rate.is_some());
    let (limiter, _) = checked(&Admission::default().deny(list("10.0.0.0/8"))).unwrap();
    assert!(!limiter.unwrap().counts(), "a list counts nothing");
}

#[test]
fn allow_list_beats_every_limit() {
    let admission = Admission::default()
        .per_address(1)
        .address_rate(1, 1)
        .deny(list("10.0.0.0/8 192.0.2.0/24"))
        .allow(list("10.1.0.0/16 198.51.100.1"));
    let limiter = checked(&admission).unwrap().0.unwrap();
    assert_eq!(at(&limiter, "10.0.0.1"), Err(RefusedBy::DenyList));
    assert_eq!(at(&limiter, "::ffff:192.0.2.9"), Err(RefusedBy::DenyList));
    for _ in 0..10 {
        assert_eq!(at(&limiter, "10.1.0.1"), Ok(None));
        assert_eq!(at(&limiter, "198.51.100.1"), Ok(None));
    }
    let charge = at(&limiter, "198.51.100.2").unwrap().unwrap();
    assert_eq!(at(&limiter, "198.51.100.2"), Err(RefusedBy::AddressCount));
    limiter.release(charge, Time::ZERO);
    assert_eq!(at(&limiter, "198.51.100.2"), Err(RefusedBy::AddressRate));
    assert_eq!(limiter.stats(), AdmissionStats { prefixes: 1, connections: 0, sketched: 0 });
}

#[test]
fn refusal_for_all_peers_charges_no_address() {
    let admission = Admission::default().per_address(2).connections_max(3).allow(list("192.0.2.1"));
    let limiter = checked(&admission).unwrap().0.unwrap();
    let held: Vec<_> =
        ["10.0.0.1", "10.0.0.1", "10.0.0.2"].map(|of| at(&limiter, of).unwrap().unwrap()).into();
    assert_eq!(at(&limiter, "10.0.0.3"), Err(RefusedBy::ConnectionCount));
    assert_eq!(at(&limiter, "192.0.2.1"), Ok(None), "an allowed peer counts for nothing");
    assert_eq!(limiter.stats(), AdmissionStats { prefixes: 2, connections: 3, sketched: 0 });
    held.into_iter().for_each(|charge| limiter.release(charge, Time::ZERO));
    assert_eq!((limiter.stats(), limiter.total.live()), (AdmissionStats::default(), 0));
    // Without a limit of an address nothing is tracked.
    let limiter = checked(&Admission::default().connection_rate(1, 2)).unwrap().0.unwrap();
    let held = [at(&limiter, "10.0.0.1").unwrap().unwrap(), at(&limiter, "10.0.0.2").unwrap().unwrap()];
    assert_eq!(at(&limiter, "10.0.0.3"), Err(RefusedBy::ConnectionRate));
    held.into_iter().for_each(|charge| limiter.release(charge, Time::ZERO));
    assert_eq!(limiter.total.live(), 0);
}

#[test]
fn limits_refuse_in_the_order_of_the_guide() {
    let admission = Admission::default().connections_max(2).connection_rate(1, 2);
    let admission = admission.per_address(1).address_rate(1, 2).deny(list("192.0.2.0/24"));
    let limiter = checked(&admission).unwrap().0.unwrap();
    // All of them refuse, and then one less each time.
    let held = ["10.0.0.1", "10.0.0.2"].map(|of| at(&limiter, of).unwrap().unwrap());
    assert_eq!(at(&limiter, "192.0.2.1"), Err(RefusedBy::DenyList));
    assert_eq!(at(&limiter, "10.0.0.1"), Err(RefusedBy::ConnectionCount));
    let [first, second] = held;
    limiter.release(second, Time::ZERO);
    assert_eq!(at(&limiter, "10.0.0.1"), Err(RefusedBy::ConnectionRate));
    // The rates of two seconds later let two in.
    let later = Time::from_nanos(2_000_000_000);
    let at_once = limiter.let_in(Source::Address("10.0.0.1".parse().unwrap()), later);
    assert_eq!(at_once, Err(RefusedBy::AddressCount));
    limiter.release(first, later);
}

#[test]
fn charge_that_is_not_kept_is_taken_back() {
    let limiter = checked(&Admission::default().per_address(1).connections_max(1)).unwrap().0.unwrap();
    let (limiter, addr) = (Arc::new(limiter), Address::Ip(([10, 0, 0, 9], 7000).into()));
    let limiters = Limiters::of([(Some(&limiter), &addr, false, true)].into_iter());
    let mut admission = ShardAdmission::new(limiters, 1).expect("there are limits");
    let peer = Peer::new(Some("192.0.2.7:1".parse().unwrap()), 0);
    let counted = || (limiter.stats().connections, limiter.total.live());
    let let_in = |admission: &ShardAdmission| {
        admission.let_in(&peer, (Time::ZERO, Time::ZERO)).map(|guard| guard.expect("it counts"))
    };
    let guard = let_in(&admission).unwrap();
    assert_eq!((counted(), let_in(&admission).err()), ((1, 1), Some(RefusedBy::ConnectionCount)));
    drop(guard);
    assert_eq!(counted(), (0, 0));
    let (guard, id) = (let_in(&admission).unwrap(), ConnId::from_bits(1));
    assert!(admission.keep(id, guard));
    assert_eq!(counted(), (1, 1), "it is kept");
    admission.ended(id, 0, Time::ZERO);
    assert_eq!(counted(), (0, 0));
}

#[test]
fn limits_that_are_changed_hold_from_then_on() {
    let limiter = Arc::new(checked(&Admission::default().adjustable()).unwrap().0.unwrap());
    let addr = Address::Ip(([10, 0, 0, 9], 7000).into());
    let limiters = Limiters::of([(Some(&limiter), &addr, false, true)].into_iter());
    let journal = Arc::new(Journal::default());
    let control = |now: Time| AdmissionControl::new(&limiters, None, journal.clone(), clock_at(now));
    let first = at(&limiter, "10.0.0.1").unwrap().unwrap();
    let second = at(&limiter, "10.0.0.1").unwrap().unwrap();
    control(Time::ZERO).set_per_address(Some(2)).unwrap();
    assert_eq!(at(&limiter, "10.0.0.1"), Err(RefusedBy::AddressCount), "those that were there count");
    control(Time::ZERO).set_per_address(None).unwrap();
    control(Time::ZERO).set_connections_max(Some(2)).unwrap();
    assert_eq!(at(&limiter, "10.0.0.2"), Err(RefusedBy::ConnectionCount));
    control(Time::ZERO).set_connections_max(None).unwrap();
    control(Time::ZERO).set_address_rate(Some((1, 1))).unwrap();
    let third = at(&limiter, "10.0.0.1").unwrap().unwrap();
    assert_eq!(at(&limiter, "10.0.0.1"), Err(RefusedBy::AddressRate));
    control(Time::ZERO).set_address_rate(Some((1, 2))).unwrap();
    let fourth = at(&limiter, "10.0.0.1").unwrap().unwrap();
    control(Time::ZERO).deny(&list("10.0.0.0/8"), Duration::from_secs(5)).unwrap();
    control(Time::ZERO).allow(&list("10.0.0.7"), Duration::from_secs(9)).unwrap();
    assert_eq!((at(&limiter, "10.0.0.1"), at(&limiter, "10.0.0.7")), (Err(RefusedBy::DenyList), Ok(None)));
    assert_eq!(control(Time::ZERO).settings()[0].timed.len(), 2);
    assert_eq!(control(Time::from_nanos(6_000_000_000)).settings()[0].timed.len(), 1);
    assert_eq!(control(Time::ZERO).forget(&list("10.0.0.0/8 10.0.0.9")), Ok(1));
    [first, second, third, fourth].into_iter().for_each(|charge| limiter.release(charge, Time::ZERO));
    assert_eq!((limiter.stats().connections, limiter.total.live()), (0, 0));
    let changes = control(Time::ZERO).changes();
    let expected =
        ["per_address is 2", "per_address is off", "connections_max is 2", "connections_max is off"];
    assert!(changes.iter().zip(expected).all(|(change, expected)| change.what == expected), "{changes:?}");
    assert_eq!(changes[6].what, "10.0.0.0/8 denied for 5s");
}

#[test]
fn control_that_is_kept_goes_by_the_time_of_each_call() {
    let limiter = Arc::new(checked(&Admission::default().adjustable()).unwrap().0.unwrap());
    let addr = Address::Ip(([10, 0, 0, 9], 7000).into());
    let limiters = Limiters::of([(Some(&limiter), &addr, false, true)].into_iter());
    let time = ringserve_base::clock::VirtualTime::start();
    let clock = Clock::Simulated { time: time.clone(), age: Duration::ZERO };
    let control = AdmissionControl::new(&limiters, None, Arc::default(), clock.clone());
    let let_in = || {
        let source = Source::Address("10.0.0.1".parse().unwrap());
        limiter.let_in(source, clock.now()).map(|charge| limiter.release(charge.unwrap(), clock.now()))
    };
    time.set(Duration::from_secs(3600));
    control.deny(&list("10.0.0.0/8"), Duration::from_secs(600)).unwrap();
    assert_eq!(let_in(), Err(RefusedBy::DenyList));
    assert_eq!(control.changes()[0].at, clock.now());
    time.set(Duration::from_secs(3600 + 500));
    assert_eq!(control.settings()[0].timed[0].left, Duration::from_secs(100));
    time.set(Duration::from_secs(3600 + 600));
    assert_eq!((let_in(), control.settings()[0].timed.len()), (Ok(()), 0));
}

#[test]
fn changes_that_cannot_hold_are_refused_and_change_nothing() {
    let limiter = Arc::new(checked(&Admission::default().deny(list("192.0.2.0/24"))).unwrap().0.unwrap());
    let addr = Address::Ip(([10, 0, 0, 9], 7000).into());
    let journal = Arc::new(Journal::default());
    let of =
        |limiters: &Limiters| AdmissionControl::new(limiters, None, journal.clone(), clock_at(Time::ZERO));
    let control = of(&Limiters::of([(Some(&limiter), &addr, false, true)].into_iter()));
    let minute = Duration::from_secs(60);
    fn refused<T: fmt::Debug>(result: Result<T, AdmissionError>, start: &str) {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with(start), "{error}");
    }
    refused(
        control.deny(&list("0.0.0.0/0"), minute),
        "0.0.0.0/0 denies every peer of its family; write it twice",
    );
    refused(control.deny(&list(""), minute), "there is no network in the list");
    refused(control.deny(&list("10.0.0.1"), Duration::ZERO), "the time is 0ns; it must be 1 s to 30 days");
    refused(control.deny(&list("10.0.0.1"), Duration::MAX), "the time is");
    let gone = IpList::file("/nonexistent/deny.txt");
    refused(control.deny(&gone, minute), "/nonexistent/deny.txt: it cannot be read");
    refused(control.allow(&gone, minute), "/nonexistent/deny.txt: it cannot be read");
    refused(control.forget(&gone), "/nonexistent/deny.txt: it cannot be read");
    refused(control.set_per_address(Some(0)), "per_address is 0, which lets no peer in");
    refused(control.set_per_address(Some(5)), "per_address cannot be changed: nothing is counted for it");
    refused(control.set_address_rate(Some((0, 1))), "the rate of address_rate is 0");
    refused(control.set_connections_max(Some(1)), "connections_max cannot be changed");
    refused(control.set_connection_rate(Some((1, 1))), "connection_rate cannot be changed");
    refused(control.set_accept_rate(5, 5), "the server has no accept_rate");
    refused(of(&Limiters::default()).deny(&list("10.0.0.1"), minute), "the server has no admission");
    assert!(control.changes().is_empty() && !limiter.timed.has_some());
    // Networks for a time need no count.
    control.deny(&list("10.0.0.1, 10.0.0.2 10.0.0.3 10.0.0.4"), minute).unwrap();
    assert_eq!(control.changes()[0].what, "10.0.0.1/32, 10.0.0.2/32, 10.0.0.3/32 and 1 more denied for 60s");
}

#[test]
fn network_that_one_limiter_cannot_hold_is_denied_at_none() {
    let limiter = || Arc::new(checked(&Admission::default().adjustable()).unwrap().0.unwrap());
    let (first, last) = (limiter(), limiter());
    let addr = Address::Ip(([10, 0, 0, 9], 7000).into());
    let both = [(Some(&first), &addr, false, true), (Some(&last), &addr, false, true)];
    let limiters = Limiters::of(both.into_iter());
    let journal = Arc::new(Journal::default());
    let control = AdmissionControl::new(&limiters, None, journal, clock_at(Time::ZERO));
    let minute = Duration::from_secs(60);
    let many: String =
        (0..10_000_u32).map(|n| format!("{}\n", std::net::Ipv4Addr::from(0x0b00_0000 | n))).collect();
    control.clone().at(&limiters, 1).deny(&list(&many), minute).unwrap();
    for change in [AdmissionControl::deny, AdmissionControl::allow] {
        let error = change(&control, &list("192.0.2.0/24"), minute).unwrap_err().to_string();
        assert!(error.starts_with("there would be 10001 networks"), "{error}");
        assert!(control.settings()[0].timed.is_empty(), "the first one could");
        assert_eq!((control.settings()[1].timed.len(), control.changes().len()), (10_000, 1));
    }
    assert!(at(&first, "192.0.2.1").is_ok() && at(&last, "192.0.2.1").is_ok());
    control.forget(&list("11.0.0.0")).unwrap();
    control.deny(&list("192.0.2.0/24"), minute).unwrap();
    assert_eq!([&first, &last].map(|of| at(of, "192.0.2.1").err()), [Some(RefusedBy::DenyList); 2]);
}

#[test]
fn list_that_is_a_file_is_read_when_it_is_denied() {
    let limiter = Arc::new(checked(&Admission::default().adjustable()).unwrap().0.unwrap());
    let addr = Address::Ip(([10, 0, 0, 9], 7000).into());
    let limiters = Limiters::of([(Some(&limiter), &addr, false, true)].into_iter());
    let control = AdmissionControl::new(&limiters, None, Arc::default(), clock_at(Time::ZERO));
    let file = std::env::temp_dir().join(format!("ringserve-denied-{}.txt", std::process::id()));
    std::fs::write(&file, "10.0.0.0/8 ; one\n192.0.2.7\n").unwrap();
    let denied = control.deny(&IpList::file(&file), Duration::from_secs(60));
    std::fs::write(&file, "10.0.0.0/8\nbinary\n").unwrap();
    let wrong = control.allow(&IpList::file(&file), Duration::from_secs(60));
    std::fs::remove_file(&file).unwrap();
    assert!(denied.is_ok());
    assert!(wrong.unwrap_err().to_string().contains("line 2: \"binary\" is neither"));
    assert_eq!(["10.0.0.1", "192.0.2.7"].map(|of| at(&limiter, of).err()), [Some(RefusedBy::DenyList); 2]);
}

#[test]
fn peer_that_is_allowed_for_a_time_is_let_in_under_load() {
    let limiter = Arc::new(checked(&Admission::default().shed_reply("busy")).unwrap().0.unwrap());
    let addr = Address::Ip(([10, 0, 0, 9], 7000).into());
    let limiters = Limiters::of([(Some(&limiter), &addr, false, true)].into_iter());
    let control = AdmissionControl::new(&limiters, None, Arc::default(), clock_at(Time::ZERO));
    let shard = ShardAdmission::new(limiters.clone(), 1).unwrap();
    let hears = |from: [u8; 4], seconds: u64| {
        let peer = Peer::new(Some((from, 1).into()), 0);
        shard.words_for_load(&peer, Time::from_nanos(seconds * 1_000_000_000)).is_some()
    };
    assert!(hears([192, 0, 2, 1], 1));
    control.allow(&list("192.0.2.0/24"), Duration::from_secs(60)).unwrap();
    control.deny(&list("198.51.100.0/24"), Duration::from_secs(60)).unwrap();
    assert!(!hears([192, 0, 2, 1], 1) && hears([192, 0, 3, 1], 1) && hears([198, 51, 100, 1], 1));
    assert!(hears([192, 0, 2, 1], 100), "its time is over");
}

#[test]
fn change_tells_at_how_many_listeners_it_holds() {
    let limiter = |admission: Admission| Arc::new(checked(&admission).unwrap().0.unwrap());
    let adjustable = limiter(Admission::default().adjustable());
    let lists = limiter(Admission::default().deny(list("198.51.100.0/24")));
    let addr = Address::Ip(([10, 0, 0, 9], 7000).into());
    let each = [Some(&adjustable), Some(&lists), None, Some(&adjustable)];
    let limiters = Limiters::of(each.into_iter().map(|of| (of, &addr, false, true)));
    let rate = Arc::new(ringserve_core::AcceptRate::new(999_999, 7, Duration::ZERO));
    let all = AdmissionControl::new(&limiters, Some(rate), Arc::default(), clock_at(Time::ZERO));
    let minute = Duration::from_secs(60);
    assert_eq!(all.set_per_address(Some(5)), Ok(2));
    assert_eq!(all.set_address_rate(Some((5, 5))), Ok(2));
    assert_eq!(all.set_connections_max(None), Ok(2));
    assert_eq!(all.set_connection_rate(Some((5, 5))), Ok(2));
    assert_eq!(all.deny(&list("192.0.2.0/24"), minute), Ok(3));
    let one = all.clone().at(&limiters, 1);
    assert_eq!(one.allow(&list("192.0.2.7"), minute), Ok(1));
    assert!(one.set_per_address(Some(5)).unwrap_err().to_string().contains("nothing is counted"));
    let said: Vec<String> = all.changes().into_iter().map(|change| change.what).collect();
    assert_eq!(said[0], "per_address is 5 at 2 of 4 listeners");
    assert_eq!(
        said[4..],
        [
            "192.0.2.0/24 denied for 60s at 3 of 4 listeners",
            "192.0.2.7/32 allowed for 60s at 1 of 4 listeners"
        ]
    );
    // The rate is that of the server.
    assert!(
        one.set_accept_rate(5, 5).unwrap_err().to_string().starts_with("accept_rate holds for all listeners")
    );
    assert_eq!((all.accept_rate(), one.accept_rate()), (Some((999_999, 7)), Some((999_999, 7))));
    all.set_accept_rate(20, 3).unwrap();
    assert_eq!((all.accept_rate(), one.accept_rate()), (Some((20, 3)), Some((20, 3))));
}

#[test]
fn users_and_addresses_count_apart() {
    let limiter = checked(&Admission::default().per_address(1)).unwrap().0.unwrap();
    let user = |uid| limiter.let_in(Source::User(uid), Time::ZERO);
    assert!(user(1000).is_ok() && user(1001).is_ok() && at(&limiter, "0.0.3.232").is_ok());
    assert_eq!(user(1000), Err(RefusedBy::AddressCount));
}

#[test]
fn all_shards_together_write_ten_lines_a_second() {
    let lines = Lines::default();
    let in_second = |second: u64| {
        (0..100).filter(|_| lines.sample(Time::from_nanos(second * 1_000_000_000 + 5)).is_some()).count()
    };
    assert_eq!([in_second(0), in_second(1), in_second(1), in_second(9)], [10, 10, 0, 10]);
    assert_eq!(in_second(8), 0, "a shard whose turn began before");
    let next = Time::from_nanos(10_000_000_000);
    assert_eq!([lines.sample(next), lines.sample(next)], [Some(Some(90 + 100)), Some(None)]);
}
