use std::cell::RefCell;
use std::net::IpAddr;

use proptest::prelude::*;
use ringserve_base::random::Random;

use super::*;
use crate::IpList;

/// The verdict of the kernel on a packet.
fn keeps(program: &[Instruction], packet: &[u8]) -> bool {
    let (mut value, mut at) = (0u32, 0);
    let place = |k: u32| (k - NETWORK_HEADER) as usize;
    loop {
        let Instruction { code, if_true, if_false, k } = program[at];
        let jumps = |is_true: bool| usize::from(if is_true { if_true } else { if_false });
        at += 1;
        match code {
            LOAD_BYTE => value = packet[place(k)].into(),
            LOAD_WORD => value = u32::from_be_bytes(packet[place(k)..][..4].try_into().unwrap()),
            SHIFT_RIGHT => value >>= k,
            JUMP => at += k as usize,
            JUMP_EQUAL => at += jumps(value == k),
            JUMP_GREATER_EQUAL => at += jumps(value >= k),
            RETURN => return k == KEEP,
            _ => panic!("{code:#x} is no instruction"),
        }
    }
}

/// The network header of a first packet from there.
fn packet(source: IpAddr) -> Vec<u8> {
    let (version, at, octets) = match source {
        IpAddr::V4(source) => (0x45, 12, source.octets().to_vec()),
        IpAddr::V6(source) => (0x60, 8, source.octets().to_vec()),
    };
    let mut packet = vec![0xAA; 40];
    packet[0] = version;
    packet[at..at + octets.len()].copy_from_slice(&octets);
    packet
}

fn denied(deny: &str, allow: &str) -> Denied {
    let [deny, allow] = [deny, allow].map(|list| list.parse::<IpList>().unwrap().networks());
    Denied::new(Some(&deny), Some(&allow), &[])
}

fn whole(deny: &str, allow: &str) -> Vec<Instruction> {
    let denied = denied(deny, allow);
    denied.program(denied.networks.len())
}

#[test]
fn networks_for_a_time_come_first_and_allowed_ones_are_stronger() {
    let [deny, allow, now, later] = ["10.0.0.0/8", "10.1.0.0/16", "192.0.2.7 10.9.0.0/16", "10.9.9.0/24"]
        .map(|list| list.parse::<IpList>().unwrap().networks());
    let until = |allows| Until { at: Time::from_nanos(1), allows };
    let timed = now.iter().map(|network| (network, until(false)));
    let timed: Vec<_> = timed.chain(later.iter().map(|network| (network, until(true)))).collect();
    let denied = Denied::new(Some(&deny), Some(&allow), &timed);
    let first =
        ["10.9.0.0/16", "192.0.2.7/32", "10.0.0.0/8"].map(|network| network.parse::<IpNet>().unwrap());
    assert_eq!(denied.networks, first, "the widest one of the list comes behind a single address");
    let keeps = |count: usize, source: &str| keeps(&denied.program(count), &packet(source.parse().unwrap()));
    assert!(!keeps(2, "192.0.2.7") && !keeps(2, "10.9.1.1") && keeps(2, "10.2.0.1"));
    assert!(!keeps(3, "10.2.0.1") && keeps(3, "10.1.0.1") && keeps(3, "10.9.9.1"));
    // No list at all.
    let denied = Denied::new(None, None, &timed);
    assert_eq!(denied.networks, first[..2]);
    assert!(Denied::new(None, None, &[]).program(0).is_empty());
}

#[test]
fn denied_sources_are_dropped_and_allowed_ones_kept() {
    let deny = "10.0.0.0/8 192.0.2.7 2001:db8::/32 fd00::1 fd00:0:0:1::/64 255.255.255.255 0.0.0.0/32";
    let program = whole(deny, "10.1.0.0/16 2001:db8:1::/48");
    for (source, is_kept) in [
        ("10.0.0.1", false),
        ("10.0.255.255", false),
        ("10.1.0.0", true),
        ("10.1.255.255", true),
        ("10.2.0.0", false),
        ("9.255.255.255", true),
        ("11.0.0.0", true),
        ("192.0.2.6", true),
        ("192.0.2.7", false),
        ("192.0.2.8", true),
        ("0.0.0.0", false),
        ("0.0.0.1", true),
        ("255.255.255.255", false),
        ("255.255.255.254", true),
        ("2001:db8::1", false),
        ("2001:db8:1::1", true),
        ("2001:db8:2::", false),
        ("2001:db9::", true),
        ("2001:db7:ffff::", true),
        ("fd00::1", false),
        ("fd00::2", true),
        ("fd00::", true),
        ("fd00:0:0:1::7", false),
        ("fd00:0:0:2::", true),
        ("::1", true),
        ("ffff::", true),
    ] {
        assert_eq!(keeps(&program, &packet(source.parse().unwrap())), is_kept, "{source}");
    }
    let mut other = packet("10.0.0.1".parse().unwrap());
    other[0] = 0x55;
    assert!(keeps(&program, &other), "a packet of neither version is kept");
}

#[test]
fn list_without_networks_has_no_program() {
    assert!(whole("", "").is_empty());
    assert!(whole("10.0.0.0/8", "0.0.0.0/0").is_empty(), "all of it is allowed");
    let everything = whole("0.0.0.0/0 ::/0", "");
    assert!(!keeps(&everything, &packet([1, 2, 3, 4].into())));
    assert!(!keeps(&everything, &packet("::1".parse().unwrap())));
}

#[test]
fn long_list_is_cut_to_its_widest_networks() {
    let random = Random::of_shard(3, 0);
    let far: Vec<u32> = (0..20_000).map(|_| random.next() as u32 | 0x4000_0000).collect();
    let mut deny: String = far.iter().map(|bits| format!("{}\n", std::net::Ipv4Addr::from(*bits))).collect();
    deny += "10.0.0.0/8\n172.16.0.0/12\n2001:db8::/32\n";
    let denied = denied(&deny, "");
    let count = denied.fitting(INSTRUCTIONS_MAX);
    let program = denied.program(count);
    println!("{count} of {} networks in {} instructions", denied.networks.len(), program.len());
    assert!(program.len() <= INSTRUCTIONS_MAX && count > 1900);
    assert!(denied.program(count + 1).len() > INSTRUCTIONS_MAX);
    for source in ["10.9.9.9", "172.16.0.1", "2001:db8::7"] {
        assert!(!keeps(&program, &packet(source.parse().unwrap())), "{source} is in a wide one");
    }
    let dropped = far.iter().filter(|bits| !keeps(&program, &packet(IpAddr::V4((**bits).into())))).count();
    assert!(dropped >= count - 3, "{dropped}");
    assert_eq!(denied.fitting(6), 0, "not even one fits");
}

#[test]
fn program_that_the_kernel_refuses_is_cut() {
    let deny: String = (0..64).map(|n| format!("10.{n}.1.0/24\n")).collect();
    let denied = denied(&deny, "");
    let lengths = RefCell::new(Vec::new());
    let takes = |most: usize| {
        lengths.borrow_mut().clear();
        set(&denied, |program| {
            lengths.borrow_mut().push(program.len());
            let too_long = program.len() > most;
            if too_long { Err(io::Error::from_raw_os_error(12)) } else { Ok(()) }
        });
        lengths.borrow().clone()
    };
    assert_eq!(takes(4096).len(), 1);
    let cut = takes(50);
    assert!(cut.len() == 3 && *cut.last().unwrap() <= 50, "{cut:?}");
    assert_eq!(takes(0).last(), Some(&0), "none at all");
}

fn network() -> impl Strategy<Value = IpNet> {
    let v4 = (any::<u32>(), 1..=32u8)
        .prop_map(|(bits, len)| ipnet::Ipv4Net::new((bits & 0x0f0f_00ff).into(), len));
    // Many share their first words.
    let bits = any::<u128>().prop_map(|bits| bits & 0x3_0000_0003_0000_0003_8000_0007);
    let v6 = (bits, 1..=128u8).prop_map(|(bits, len)| ipnet::Ipv6Net::new(bits.into(), len));
    prop_oneof![v4.prop_map(|net| net.unwrap().into()), v6.prop_map(|net| net.unwrap().into())]
}

/// The addresses at its ends, and those beside them.
fn ends(network: &IpNet) -> Vec<IpAddr> {
    let (first, last) = range(network);
    let near = [first, last, first.wrapping_sub(1), last.wrapping_add(1)];
    let address = |bits: u128| match network {
        IpNet::V4(_) => IpAddr::V4((bits as u32).into()),
        IpNet::V6(_) => IpAddr::V6(bits.into()),
    };
    near.map(address).to_vec()
}

proptest! {
    #[test]
    fn program_finds_what_a_search_finds(
        deny in prop::collection::vec(network(), 0..40),
        allow in prop::collection::vec(network(), 0..5),
    ) {
        let text = |networks: &[IpNet]| networks.iter().map(|net| format!("{}\n", net.trunc())).collect::<String>();
        let program = whole(&text(&deny), &text(&allow));
        for source in deny.iter().chain(&allow).flat_map(ends) {
            let has = |networks: &[IpNet]| networks.iter().any(|network| network.contains(&source));
            let is_kept = program.is_empty() || keeps(&program, &packet(source));
            prop_assert_eq!(is_kept, !has(&deny) || has(&allow), "{}", source);
        }
    }
}
