//! Each check on machines that are planted in a directory, on both sides of its threshold.

mod texts;

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ringserve_core::Time;
use ringserve_drivers::SetupError;

use super::case::{Case, Lived, Rings, Setup};
use super::{Finding, LOOKS_EVERY, Past, Severity, Workload, diagnose};
use crate::machine::files::MachineFiles;
use crate::machine::{CpuTicks, MachineStats, read_of};

/// A machine in a directory of the test's, sound but for what is planted.
struct Planted(PathBuf);

const SOUND: &[(&str, &str)] = &[
    ("proc/sys/kernel/osrelease", "6.18.4-test\n"),
    ("proc/self/limits", LIMITS),
    ("proc/thread-self/status", "Name:\tapp\nCapEff:\t0000000000000000\n"),
    ("proc/self/cgroup", "0::/app\n"),
    ("proc/meminfo", "MemTotal:  33554432 kB\nMemAvailable:  16777216 kB\n"),
    ("proc/sys/net/core/somaxconn", "4096\n"),
    ("proc/sys/net/core/netdev_max_backlog", "1000\n"),
    ("proc/sys/net/ipv4/tcp_max_syn_backlog", "2048\n"),
    ("proc/sys/net/ipv4/tcp_syncookies", "1\n"),
    ("proc/sys/net/ipv4/tcp_mem", "100000\t200000\t300000\n"),
    ("proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304\n"),
    ("proc/sys/net/ipv4/tcp_max_orphans", "131072\n"),
    ("proc/sys/net/ipv4/tcp_max_tw_buckets", "131072\n"),
    ("proc/sys/net/ipv4/tcp_migrate_req", "1\n"),
    ("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n"),
    ("proc/sys/net/ipv4/tcp_tw_reuse", "2\n"),
    ("proc/sys/net/netfilter/nf_conntrack_max", "262144\n"),
    ("proc/sys/net/netfilter/nf_conntrack_count", "10\n"),
    ("proc/sys/kernel/perf_event_paranoid", "2\n"),
    ("proc/net/sockstat", "sockets: used 25\nTCP: inuse 1 orphan 0 tw 0 alloc 1 mem 102\n"),
    ("proc/net/netstat", "TcpExt: SyncookiesSent ListenDrops PruneCalled\nTcpExt: 0 0 0\n"),
    ("proc/net/softnet_stat", "0622556d 00000000 00000000 00000000\n"),
    ("proc/stat", "cpu  1000 0 1000 8000 0 0 0 10 0 0\n"),
    ("proc/pressure/cpu", "some avg10=1.00 avg60=0.00 avg300=0.00 total=1\n"),
    ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
    ("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm \n"),
    ("sys/devices/system/node/node0/cpulist", "0-3\n"),
    ("sys/devices/system/node/possible", "0\n"),
    ("sys/kernel/btf/vmlinux", "BTF"),
    ("etc/sysctl.d/10-ok.conf", "# net.ipv4.tcp_tw_recycle = 1\nkernel.panic = 10\n"),
];

const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     \n\
Max open files            1024                 20000                files     \n\
Max locked memory         8388608              8388608              bytes     \n\
Max address space         unlimited            unlimited            bytes     \n";

impl Planted {
    fn new() -> Planted {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ringserve-doctor-{}-{number}", std::process::id());
        Planted(std::env::temp_dir().join(name)).with(SOUND)
    }

    fn with(self, files: &[(&str, &str)]) -> Planted {
        for (path, text) in files {
            let place = self.0.join(path);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, text).unwrap();
        }
        self
    }

    fn machine(&self) -> MachineFiles {
        MachineFiles::below(&self.0).noting()
    }

    fn findings(&self, setup: &Setup, expected: &Workload) -> Vec<Finding> {
        let machine = self.machine();
        let mut found = diagnose(&Case::tried(&machine, setup, expected, || Ok(true)));
        // The build is that of the tests.
        found.retain(|finding| finding.check != "build");
        found
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn setup() -> Setup {
    Setup {
        shards: 2,
        rings: Rings::Untried,
        pinned: true,
        share_port: false,
        backlog: 4096,
        one_queue: false,
        unsent_bytes_max: Some(128 << 10),
        incoming_cpu: false,
        ends_silent: true,
        upstreams_max: 1024,
        connections: None,
    }
}

fn connections(count: u64) -> Workload {
    Workload::default().connections(count)
}

fn accepts(count: u64) -> Workload {
    Workload::default().accepts_per_second(count)
}

/// The findings of one check: severity, value and what is needed.
#[track_caller]
fn of(check: &str, files: &[(&str, &str)], setup: &Setup, expected: &Workload) -> Option<(Severity, String)> {
    let found = Planted::new().with(files).findings(setup, expected);
    let mut its = found.into_iter().filter(|finding| finding.check == check);
    let first = its.next();
    assert_eq!(its.next(), None, "{check} says one thing");
    first.map(|finding| (finding.severity, finding.to_string()))
}

/// The check says nothing of the first case, and has a line of this severity with these words of
/// the second.
#[track_caller]
fn both_sides(
    check: &str,
    (fine, fine_setup, fine_expected): (&[(&str, &str)], &Setup, &Workload),
    (bad, bad_setup, bad_expected): (&[(&str, &str)], &Setup, &Workload),
    severity: Severity,
    words: &[&str],
) {
    assert_eq!(of(check, fine, fine_setup, fine_expected), None, "{check} is fine");
    let (found, line) = of(check, bad, bad_setup, bad_expected).unwrap_or_else(|| panic!("{check} is found"));
    assert_eq!(found, severity, "{line}");
    for word in words {
        assert!(line.contains(word), "{word:?} is in {line:?}");
    }
}

#[test]
fn sound_machine_has_no_finding() {
    let expected = connections(30_000).accepts_per_second(9_000).upstreams(20_000);
    assert_eq!(Planted::new().findings(&setup(), &expected), []);
    assert_eq!(Planted::new().findings(&setup(), &Workload::default()), []);
}

#[test]
fn machine_without_any_file_was_not_checked() {
    let nothing = Planted(std::env::temp_dir().join("ringserve-doctor-of-nothing"));
    let found = nothing.findings(&setup(), &connections(1_000_000).accepts_per_second(20_000));
    let above: Vec<_> = found.iter().filter(|finding| finding.severity > Severity::NotChecked).collect();
    assert!(above.is_empty(), "{above:?}");
    let missing: Vec<&str> = found
        .iter()
        .filter(|finding| finding.severity == Severity::NotChecked)
        .map(|finding| finding.check)
        .collect();
    for check in
        ["descriptors", "accept_queue", "conntrack", "tcp_memory", "memory", "packets", "clock", "cpu_steal"]
    {
        assert!(missing.contains(&check), "{check} passed: {missing:?}");
    }
    let descriptors = found.iter().find(|finding| finding.check == "descriptors").unwrap().to_string();
    assert_eq!(
        descriptors,
        "descriptors was not checked: /proc/self/limits is not readable: /proc is not mounted; do: mount it, or let the \
         container have it: /proc is not mounted"
    );
}

/// A file that is there and cannot be read. The tests may run as root, whom no mode keeps out: so
/// it is a directory.
#[test]
fn check_whose_file_is_refused_is_no_pass() {
    let refuse = |path: &str| {
        let planted = Planted::new();
        fs::remove_file(planted.0.join(path)).unwrap();
        fs::create_dir(planted.0.join(path)).unwrap();
        let expected = connections(30_000).accepts_per_second(9_000);
        let found = planted.findings(&setup(), &expected);
        assert!(found.iter().all(|finding| finding.severity == Severity::NotChecked), "{found:?}");
        assert!(found.iter().all(|finding| finding.what == format!("/{path}")), "{found:?}");
        found.iter().map(|finding| finding.check).collect::<Vec<_>>()
    };
    assert_eq!(refuse("proc/self/limits"), ["descriptors", "locked_memory", "socket_memory", "memory"]);
    assert_eq!(refuse("proc/net/sockstat"), ["tcp_memory", "orphans", "time_wait"]);
    assert_eq!(refuse("proc/net/softnet_stat"), ["packets"]);
    assert_eq!(refuse("proc/pressure/cpu"), ["cpu_pressure"]);
    assert_eq!(refuse("proc/stat"), ["cpu_steal"]);
    // What is not there is of a feature that the kernel lacks.
    let planted = Planted::new();
    fs::remove_file(planted.0.join("proc/pressure/cpu")).unwrap();
    assert_eq!(planted.findings(&setup(), &Workload::default()), []);
}

#[test]
fn unusable_rings_are_named_with_their_fix() {
    let (planted, setup, expected) = (Planted::new(), setup(), Workload::default());
    let machine = planted.machine();
    let of = |trial| {
        let found = diagnose(&Case::tried(&machine, &setup, &expected, trial));
        let finding = found.into_iter().find(|finding| finding.check == "io_uring");
        finding.map(|finding| (finding.severity, finding.value, finding.fix))
    };
    assert_eq!(of(|| Ok(true)), None);
    let (severity, value, _) = of(|| Ok(false)).unwrap();
    assert_eq!((severity, value.contains("Linux 6.18")), (Severity::Info, true));
    let (severity, value, fix) = of(|| Err(SetupError::Disabled(2))).unwrap();
    assert!(severity == Severity::Warn && value.contains("kernel.io_uring_disabled is 2"), "{value}");
    assert_eq!(fix, "sysctl -w kernel.io_uring_disabled=0");
    // Where they are not wanted they are not tried.
    let epoll = Setup { rings: Rings::Epoll, ..setup.clone() };
    let case = Case::tried(&machine, &epoll, &expected, || panic!("a trial"));
    assert!(diagnose(&case).iter().all(|finding| finding.check != "io_uring"));
}

#[test]
fn rings_of_this_machine_accept_or_the_cause_is_named() {
    let (machine, setup, expected) = (MachineFiles::here(), setup(), Workload::default());
    match Case::new(&machine, &setup, &expected).rings {
        Ok(rings) => assert!(matches!(rings, Rings::Tables | Rings::Descriptors)),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[test]
fn descriptors_of_a_table_are_those_of_the_largest_shard() {
    // 20 000 are allowed; 1024 upstreams and 64 others have their part.
    let most = 2 * (20_000 - 1024 - 64);
    both_sides(
        "descriptors",
        (&[], &setup(), &connections(most)),
        (&[], &setup(), &connections(most + 1)),
        Severity::Error,
        &["RLIMIT_NOFILE is 20000", "needed: 20001 = 37825 connections / 2 shards + 1024", "take 3 shards"],
    );
    let epoll = Setup { rings: Rings::Epoll, ..setup() };
    both_sides(
        "descriptors",
        (&[], &epoll, &connections(20_000 - 128)),
        (&[("proc/sys/fs/nr_open", "20000\n")], &epoll, &connections(20_000 - 127)),
        Severity::Error,
        &[
            "needed: 20001 = 19873 connections + 64 × 2 shards",
            "sysctl -w fs.nr_open=20001",
            "LimitNOFILE=20001",
        ],
    );
    // As many shards as the measured run with 1 500 000 connections needed.
    let (_, line) = of("descriptors", &[], &setup(), &connections(1_000_000)).unwrap();
    assert!(line.contains("take 53 shards"), "{line}");
    assert_eq!(of("descriptors", &[], &setup(), &Workload::default()), None, "no number is expected");
    let planned = Setup { connections: Some(1_000_000), ..setup() };
    assert!(of("descriptors", &[], &planned, &Workload::default()).is_some(), "the program says one");
}

#[test]
fn table_of_a_ring_has_a_million_entries_at_most() {
    let unlimited = LIMITS.replace("1024                 20000", "unlimited            unlimited");
    let files: &[(&str, &str)] = &[("proc/self/limits", &unlimited)];
    let most = 2 * ((1 << 20) - 1024 - 64);
    both_sides(
        "descriptors",
        (files, &setup(), &connections(most)),
        (files, &setup(), &connections(most + 1)),
        Severity::Error,
        &["take 3 shards"],
    );
}

#[test]
fn locked_memory_is_200_kib_a_ring_without_privilege() {
    let shards = |shards| Setup { shards, ..setup() };
    // 8 MiB hold 40.96 of them.
    both_sides(
        "locked_memory",
        (&[], &shards(40), &Workload::default()),
        (&[], &shards(41), &Workload::default()),
        Severity::Error,
        &["RLIMIT_MEMLOCK is 8 MiB", "41 shards × 200 KiB", "ulimit -l 8200", "or 40 shards"],
    );
    let root = [("proc/thread-self/status", "CapEff:\t000001ffffffffff\n")];
    assert_eq!(of("locked_memory", &root, &shards(1000), &Workload::default()), None);
    let epoll = Setup { rings: Rings::Epoll, ..shards(1000) };
    assert_eq!(of("locked_memory", &[], &epoll, &Workload::default()), None);
}

#[test]
fn accept_queue_is_the_accepts_of_the_longest_stall() {
    both_sides(
        "accept_queue",
        (&[], &setup(), &accepts(2 * 40_960)),
        (&[], &setup(), &accepts(2 * 40_960 + 20)),
        Severity::Warn,
        &[
            "4096",
            "4097 = 81940 accepts per second / 2 queues × 100ms",
            "net.core.somaxconn=4097",
            "backlog(4097)",
        ],
    );
    // The lower one of the two is named and raised.
    let low = [("proc/sys/net/core/somaxconn", "128\n")];
    both_sides(
        "accept_queue",
        (&low, &setup(), &accepts(2560)),
        (&low, &setup(), &accepts(2580)),
        Severity::Warn,
        &["128 (net.core.somaxconn)", "do: `sysctl -w net.core.somaxconn=129` ("],
    );
    let short = Setup { backlog: 64, ..setup() };
    let (_, line) = of("accept_queue", &[], &short, &accepts(2560)).unwrap();
    assert!(line.contains("64 (SocketOptions::backlog)"), "{line}");
    assert!(line.contains("do: SocketOptions::backlog(128) ("), "{line}");
    let one = Setup { one_queue: true, ..setup() };
    assert!(of("accept_queue", &[], &one, &accepts(50_000)).is_some(), "all shards accept from one queue");
    let stall = accepts(2 * 40_960).longest_stall(Duration::from_millis(200));
    assert!(of("accept_queue", &[], &setup(), &stall).is_some());
}

#[test]
fn queue_of_handshakes_loses_options_or_peers() {
    let files = [("proc/sys/net/ipv4/tcp_max_syn_backlog", "1000\n")];
    both_sides(
        "syn_backlog",
        (&files, &setup(), &accepts(5000)),
        (&files, &setup(), &accepts(5005)),
        Severity::Info,
        &["is 1000, needed: 1001 = 5005 accepts per second × 200ms", "and no peers"],
    );
    let files = [files[0], ("proc/sys/net/ipv4/tcp_syncookies", "0\n")];
    both_sides(
        "syn_backlog",
        (&files, &setup(), &accepts(3750)),
        (&files, &setup(), &accepts(3755)),
        Severity::Warn,
        &["drops first packets", "tcp_max_syn_backlog=1024"],
    );
}

#[test]
fn conntrack_is_bad_from_four_fifths_and_below_connections() {
    let table = |count: &'static str| [("proc/sys/net/netfilter/nf_conntrack_count", count)];
    both_sides(
        "conntrack",
        (&table("209715\n"), &setup(), &Workload::default()),
        (&table("209716\n"), &setup(), &Workload::default()),
        Severity::Error,
        &["262144, of which 209716 are used (80 %)", "nf_conntrack_max=419432", "notrack"],
    );
    both_sides(
        "conntrack",
        (&[], &setup(), &connections(218_453)),
        (&[], &setup(), &connections(218_455)),
        Severity::Error,
        &["needed: 262146 = 218455 connections × 1.2"],
    );
    let (severity, line) = of("conntrack", &table("0\n"), &setup(), &connections(300_000)).unwrap();
    assert!(severity == Severity::Warn && line.contains("no connection is tracked now"), "{line}");
}

#[test]
fn socket_memory_of_the_kernel_is_bad_near_its_mark() {
    let mem = |pages: u32| format!("TCP: inuse 1 orphan 0 tw 0 alloc 1 mem {pages}\n");
    both_sides(
        "tcp_memory",
        (&[("proc/net/sockstat", &mem(139_999))], &setup(), &Workload::default()),
        (&[("proc/net/sockstat", &mem(140_000))], &setup(), &Workload::default()),
        Severity::Error,
        &["546 MiB, 70 % of the mark", "less than 70 % of 781 MiB"],
    );
}

#[test]
fn send_buffers_of_all_peers_are_compared_with_memory() {
    // 254 KiB each of 16 GiB.
    both_sides(
        "socket_memory",
        (&[], &setup(), &connections(66_052)),
        (&[], &setup(), &connections(66_053)),
        Severity::Info,
        &["66053 connections × 254 KiB", "16384 MiB (MemAvailable)"],
    );
    let unbounded = Setup { unsent_bytes_max: None, ..setup() };
    both_sides(
        "socket_memory",
        (&[], &unbounded, &connections(4096)),
        (&[], &unbounded, &connections(4097)),
        Severity::Warn,
        &["4097 connections × 4 MiB (net.ipv4.tcp_wmem)", "not_sent_bytes_max(128 << 10)"],
    );
}

#[test]
fn memory_of_idle_connections_has_a_fifth_to_spare() {
    // 4051 bytes and a fifth of 100 MiB.
    let files = [("sys/fs/cgroup/app/memory.max", "104857600\n")];
    both_sides(
        "memory",
        (&files, &setup(), &connections(21_570)),
        (&files, &setup(), &connections(21_571)),
        Severity::Error,
        &[
            "100 MiB (memory.max of the control group /app)",
            "21571 connections × (251 + session 0 + socket 3800",
        ],
    );
    let large = connections(21_570).session_bytes(100);
    assert!(of("memory", &files, &setup(), &large).is_some());
}

#[test]
fn drain_of_all_connections_fits_the_tables_of_the_kernel() {
    both_sides(
        "orphans",
        (&[], &setup(), &connections(131_072)),
        (&[], &setup(), &connections(131_073)),
        Severity::Warn,
        &["131072, of which 0 are taken", "tcp_max_orphans=262144"],
    );
    both_sides(
        "time_wait",
        (&[], &setup(), &connections(131_072)),
        (&[], &setup(), &connections(131_073)),
        Severity::Info,
        &["tcp_max_tw_buckets=262144"],
    );
}

#[test]
fn shared_port_wants_handshakes_handed_over() {
    let shared = Setup { share_port: true, ..setup() };
    let off = [("proc/sys/net/ipv4/tcp_migrate_req", "0\n")];
    both_sides(
        "tcp_migrate_req",
        (&[], &shared, &Workload::default()),
        (&off, &shared, &Workload::default()),
        Severity::Warn,
        &["is 0, needed: 1", "`sysctl -w net.ipv4.tcp_migrate_req=1`"],
    );
    assert_eq!(of("tcp_migrate_req", &off, &setup(), &Workload::default()), None, "it is not shared");
}

#[test]
fn totals_are_findings_where_they_grow() {
    let planted = Planted::new();
    let before = read_of(&planted.machine());
    let planted = planted.with(&[
        ("proc/net/softnet_stat", "0622556d 00000449 00000000 00000000\n0484fac4 00000001 0000002a 0\n"),
        (
            "proc/net/dev",
            "Inter-| Receive\n face |bytes packets errs drop\n  eth0: 9 9 9 1098\n    lo: 9 9 9 2\n",
        ),
        ("proc/net/netstat", "TcpExt: SyncookiesSent ListenDrops PruneCalled\nTcpExt: 7 0 0\n"),
        ("proc/stat", "cpu  1900 0 1040 8000 0 0 0 70 0 0\n"),
    ]);
    let (machine, setup, expected) = (planted.machine(), setup(), Workload::default());
    let of = |case: Case<'_>| {
        let found = diagnose(&case).into_iter().filter(|finding| finding.check != "build");
        found.map(|finding| (finding.check, finding.severity, finding.value)).collect::<Vec<_>>()
    };
    let case = || Case::tried(&machine, &setup, &expected, || Ok(true));
    let grew = of(case().since(before.clone()));
    let names: Vec<_> = grew.iter().map(|(check, severity, _)| (*check, *severity)).collect();
    assert_eq!(
        names,
        [("syn_backlog", Severity::Warn), ("packets", Severity::Warn), ("cpu_steal", Severity::Warn)]
    );
    assert!(grew[0].2.contains("7 SYN cookies") && grew[1].2.contains("dropped 1098 packets"), "{grew:?}");
    assert_eq!(grew[2].2, "6 %");
    // Devices of this network namespace dropped nothing meanwhile: the packets were another one's.
    let others = MachineStats { device_drops: 1100, ..before.clone() };
    assert!(
        of(case().since(others))
            .iter()
            .all(|(_, severity, value)| { *severity < Severity::Warn || !value.contains("1098 packets") })
    );
    // Since the boot they are history.
    let (check, severity, value) = of(case()).remove(0);
    assert_eq!(
        (check, severity, &*value),
        ("packets", Severity::Info, "1098 since the boot, and does not grow now")
    );
    assert_eq!(of(case().since(read_of(&machine))).len(), 1, "nothing grows any more");
}

#[test]
fn total_that_rests_is_a_finding_for_two_looks() {
    let host = |dropped| MachineStats {
        packets_dropped: dropped,
        cpu: Some(CpuTicks::default()),
        ..MachineStats::default()
    };
    let at = |seconds| Time::ZERO + Duration::from_secs(seconds);
    let mut past = Past::new(host(5));
    let mut before = |seconds, now: &MachineStats| past.before(at(seconds), now).packets_dropped;
    let minute = LOOKS_EVERY.as_secs();
    // It grew to 7, which each look of this minute tells, and rests.
    assert_eq!([before(1, &host(7)), before(minute, &host(7)), before(minute + 1, &host(7))], [5; 3]);
    assert_eq!(before(2 * minute, &host(7)), 7);
    // A look that found nothing is no look.
    assert_eq!(before(3 * minute, &MachineStats::default()), 7);
    assert_eq!(before(4 * minute, &host(9)), 7);
    assert_eq!(before(50 * minute, &host(9)), 9);
}

#[test]
fn lost_first_packets_and_an_uneven_spread_are_told_of_a_server() {
    let (planted, setup, expected) = (Planted::new(), setup(), accepts(1000));
    let machine = planted.machine();
    let of = |lived: Lived| {
        let found = diagnose(&Case::tried(&machine, &setup, &expected, || Ok(true)).of_server(lived));
        let found = found.into_iter().filter(|finding| finding.check != "build");
        found.map(|finding| (finding.check, finding.severity)).collect::<Vec<_>>()
    };
    assert_eq!(of(Lived { skew: Some(1.4), opened: 5000, ..Lived::default() }), []);
    assert_eq!(
        of(Lived { skew: Some(1.9), opened: 999, ..Lived::default() }),
        [],
        "few connections are uneven by chance"
    );
    let uneven = Lived { skew: Some(1.6), opened: 1000, ..Lived::default() };
    assert_eq!(of(uneven), [("receive_queues", Severity::Info)]);
    let lost = Lived { queue_lost: 1, queue_worst: "most at 0.0.0.0:7000".into(), ..Lived::default() };
    assert_eq!(of(lost), [("accept_queue", Severity::Warn)]);
    let stalled = Lived { longest_stall: Some(Duration::from_secs(9)), ..Lived::default() };
    assert_eq!(of(stalled), [("accept_queue", Severity::Warn)], "a stall that was seen counts");
    let crowd = Lived { connections: 100_000, ..Lived::default() };
    assert!(of(crowd).contains(&("descriptors", Severity::Error)), "those that are there are expected");
}

#[test]
fn receive_queues_matter_where_connections_follow_their_packets() {
    let card = |cpus: &'static str| {
        [
            ("sys/class/net/eth0/device/vendor", "0x1af4\n"),
            ("sys/class/net/eth0/queues/rx-0/rps_cpus", cpus),
            ("sys/class/net/lo/queues/rx-0/rps_cpus", "0\n"),
        ]
    };
    let steered = Setup { incoming_cpu: true, ..setup() };
    both_sides(
        "receive_queues",
        (&card("00000003\n"), &steered, &Workload::default()),
        (&card("00000000\n"), &steered, &Workload::default()),
        Severity::Info,
        &["packets of eth0 is 1, needed: 2", "ethtool -L eth0 combined 2"],
    );
    assert_eq!(of("receive_queues", &card("0\n"), &setup(), &Workload::default()), None);
}

#[test]
fn upstreams_of_one_address_have_a_port_each() {
    both_sides(
        "local_ports",
        (&[], &setup(), &Workload::default().upstreams(28_232)),
        (&[], &setup(), &Workload::default().upstreams(28_233)),
        Severity::Warn,
        &["32768 to 60999, 28232 ports", "EADDRNOTAVAIL"],
    );
}

#[test]
fn server_that_never_ends_silent_peers_is_told_of() {
    let silent = Setup { ends_silent: false, ..setup() };
    both_sides(
        "keep_alive",
        (&[], &setup(), &Workload::default()),
        (&[], &silent, &Workload::default()),
        Severity::Warn,
        &["stay for ever"],
    );
}

#[test]
fn clock_that_asks_a_device_is_named_with_a_faster_one() {
    let clock =
        |name: &'static str| [("sys/devices/system/clocksource/clocksource0/current_clocksource", name)];
    for fast in ["tsc\n", "kvm-clock\n", "arch_sys_counter\n", "hyperv_clocksource_tsc_page\n"] {
        assert_eq!(of("clock", &clock(fast), &setup(), &Workload::default()), None, "{fast}");
    }
    for slow in ["hpet\n", "acpi_pm\n"] {
        let (severity, line) = of("clock", &clock(slow), &setup(), &Workload::default()).unwrap();
        assert!(severity == Severity::Warn && line.contains("echo tsc > /sys/devices"), "{line}");
    }
}

#[test]
fn quota_is_compared_with_shards_and_with_its_periods() {
    let quota = |cpus: &'static str| [("sys/fs/cgroup/app/cpu.max", cpus)];
    both_sides(
        "cpu_quota",
        (&quota("200000 100000\n"), &setup(), &Workload::default()),
        (&quota("190000 100000\n"), &setup(), &Workload::default()),
        Severity::Warn,
        &["1.9 CPUs", "needed: 2", "Server::shards(1)"],
    );
    assert_eq!(of("cpu_quota", &quota("max 100000\n"), &setup(), &Workload::default()), None);
    let one = Setup { shards: 1, ..setup() };
    assert_eq!(
        of("cpu_quota", &quota("20000 100000\n"), &one, &Workload::default()),
        None,
        "there is no smaller server"
    );
    let stat = |throttled: u32| format!("nr_periods 1000\nnr_throttled {throttled}\nthrottled_usec 50000\n");
    let files = |stat| [quota("200000 100000\n")[0], ("sys/fs/cgroup/app/cpu.stat", stat)];
    both_sides(
        "cpu_throttled",
        (&files(&stat(10)), &setup(), &Workload::default()),
        (&files(&stat(11)), &setup(), &Workload::default()),
        Severity::Warn,
        &["11 of 1000 periods (1 %)", "for 50 ms"],
    );
    let first = [
        ("proc/self/cgroup", "3:cpu,cpuacct:/app\n"),
        ("sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us", "50000\n"),
        ("sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us", "50000\n"),
    ];
    let (_, line) = of("cpu_quota", &first, &setup(), &Workload::default()).unwrap();
    assert!(line.contains("is 1.0 CPUs"), "{line}");
}

#[test]
fn stolen_time_and_waits_for_cpus_have_a_bound() {
    let stat = |stolen: &'static str| [("proc/stat", stolen)];
    both_sides(
        "cpu_steal",
        (&stat("cpu  95 0 0 0 0 0 0 5 0 0\n"), &setup(), &Workload::default()),
        (&stat("cpu  94 0 0 0 0 0 0 6 0 0\n"), &setup(), &Workload::default()),
        Severity::Warn,
        &["6 %"],
    );
    let psi = |some: &'static str| [("proc/pressure/cpu", some)];
    let free = Setup { pinned: false, ..setup() };
    both_sides(
        "cpu_pressure",
        (&psi("some avg10=20.00 avg60=0.00\nfull avg10=99.0\n"), &free, &Workload::default()),
        (&psi("some avg10=20.01 avg60=0.00\nfull avg10=0.0\n"), &setup(), &Workload::default()),
        Severity::Warn,
        &["20 % of the last 10 s", "pinned ones cannot move", "Server::pin(false)"],
    );
}

#[test]
fn several_nodes_want_pinned_shards() {
    let nodes = [("sys/devices/system/node/node1/cpulist", "4-7\n")];
    let free = Setup { pinned: false, ..setup() };
    assert_eq!(of("numa", &[], &free, &Workload::default()), None, "one node");
    both_sides(
        "numa",
        (&nodes, &setup(), &Workload::default()),
        (&nodes, &free, &Workload::default()),
        Severity::Info,
        &["2, and the shards are not pinned"],
    );
}
