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
        (base().tracked_max(2000), "tracked_max is set, and neither per_address nor address_rate is"),
        (base().without_kernel_filter(), "without_kernel_filter is set, and there is no deny list"),
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
fn users_and_addresses_count_apart() {
    let limiter = checked(&Admission::default().per_address(1)).unwrap().0.unwrap();
    let user = |uid| limiter.let_in(Source::User(uid), Time::ZERO);
    assert!(user(1000).is_ok() && user(1001).is_ok() && at(&limiter, "0.0.3.232").is_ok());
    assert_eq!(user(1000), Err(RefusedBy::AddressCount));
}

#[test]
fn all_shards_together_write_ten_lines_a_second() {
    let lines = Lines::default();
    let in_second =
        |second: u64| (0..100).filter(|_| lines.allows(Time::from_nanos(second * 1_000_000_000 + 5))).count();
    assert_eq!([in_second(0), in_second(1), in_second(1), in_second(9)], [10, 10, 0, 10]);
    assert_eq!(in_second(8), 0, "a shard whose turn began before");
}
