//! The program and its operator: how it was built, what files of theirs say, and what is read and
//! written as text.

use std::fs;
use std::time::Duration;

use super::super::case::{Case, Setup, size};
use super::super::program::{Build, judge};
use super::super::{Severity, Workload, checks};
use super::{Planted, SOUND, connections, of, setup};

#[test]
fn build_is_judged_by_what_is_expected() {
    let (planted, setup) = (Planted::new(), setup());
    let machine = planted.machine();
    let of = |build: Build, expected: &Workload| {
        let mut found = Vec::new();
        judge(&build, &Case::tried(&machine, &setup, expected, || Ok(true)), &mut found);
        found.into_iter().map(|finding| (finding.severity, finding.value)).collect::<Vec<_>>()
    };
    let sound = || Build { is_debug: false, aborts: false, has_frame_pointers: None };
    let nothing = Workload::default();
    assert_eq!(of(sound(), &nothing), []);
    assert_eq!(of(Build { has_frame_pointers: Some(true), ..sound() }, &nothing), []);
    let frameless = of(Build { has_frame_pointers: Some(false), ..sound() }, &nothing);
    assert_eq!(frameless, [(Severity::Info, "without frame pointers".to_owned())]);
    let aborts = of(Build { aborts: true, ..sound() }, &nothing);
    assert_eq!(aborts, [(Severity::Warn, "abort".to_owned())]);
    let debug = |expected: &Workload| of(Build { is_debug: true, ..sound() }, expected)[0].0;
    assert_eq!((debug(&nothing), debug(&connections(10))), (Severity::Info, Severity::Warn));
}

#[test]
fn tools_that_will_not_work_are_named_beforehand() {
    let files: &[(&str, &str)] =
        &[("proc/sys/kernel/perf_event_paranoid", "4\n"), ("proc/sys/kernel/yama/ptrace_scope", "1\n")];
    let planted = Planted::new().with(files);
    fs::remove_file(planted.0.join("sys/kernel/btf/vmlinux")).unwrap();
    let found = planted.findings(&setup(), &Workload::default());
    let whats: Vec<&str> = found.iter().map(|finding| &*finding.what).collect();
    assert_eq!(whats, ["BTF of the kernel", "kernel.perf_event_paranoid", "kernel.yama.ptrace_scope"]);
    assert!(found.iter().all(|finding| finding.severity == Severity::Info));
    let root = planted.with(&[("proc/thread-self/status", "CapEff:\t000001ffffffffff\n")]);
    assert_eq!(root.findings(&setup(), &Workload::default()).len(), 1, "root has both");
}

#[test]
fn outdated_advice_is_found_with_its_file_and_line() {
    let planted = Planted::new().with(&[
        ("etc/sysctl.conf", "; old\nnet.ipv4.tcp_tw_recycle = 1\n  net/ipv4/tcp_fin_timeout=30\n"),
        (
            "etc/sysctl.d/50-web.conf",
            "-net.core.somaxconn = 128\nnet.ipv4.tcp_abort_on_overflow=1\nvm.nr_hugepages=0\n",
        ),
        ("usr/lib/sysctl.d/50-web.conf", "vm.nr_hugepages=64\n"),
        (
            "usr/lib/sysctl.d/60-net.conf",
            "net.core.rmem_max = 134217728\nnet.ipv4.tcp_wmem=4096 65536 134217728\n",
        ),
        ("usr/lib/sysctl.d/README", "net.ipv4.tcp_tw_recycle = 1\n"),
    ]);
    let found = planted.findings(&setup(), &Workload::default());
    let whats: Vec<_> = found.iter().map(|finding| (finding.severity, &*finding.what)).collect();
    assert_eq!(
        whats,
        [
            (Severity::Warn, "net.core.somaxconn in /etc/sysctl.d/50-web.conf:1"),
            (Severity::Warn, "net.ipv4.tcp_abort_on_overflow in /etc/sysctl.d/50-web.conf:2"),
            (Severity::Info, "net.core.rmem_max in /usr/lib/sysctl.d/60-net.conf:1"),
            (Severity::Info, "net.ipv4.tcp_wmem in /usr/lib/sysctl.d/60-net.conf:2"),
            (Severity::Info, "net.ipv4.tcp_tw_recycle in /etc/sysctl.conf:2"),
            (Severity::Info, "net.ipv4.tcp_fin_timeout in /etc/sysctl.conf:3"),
        ],
        "a file in /etc replaces one of its name, and what is no .conf is not read"
    );
    let files = &[("etc/sysctl.conf", "fs.file-max=1000\nfs.nr_open=1000\n")];
    let (_, line) = of("advice", files, &setup(), &Workload::default()).unwrap();
    assert!(line.contains("fs.nr_open in /etc/sysctl.conf:2"), "{line}");
}

#[test]
fn link_to_the_one_file_is_read_once() {
    let planted = Planted::new().with(&[("etc/sysctl.conf", "net.ipv4.tcp_tw_recycle = 1\n")]);
    std::os::unix::fs::symlink("../sysctl.conf", planted.0.join("etc/sysctl.d/99-sysctl.conf")).unwrap();
    let found = planted.findings(&setup(), &Workload::default());
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].what, "net.ipv4.tcp_tw_recycle in /etc/sysctl.d/99-sysctl.conf:1");
}

#[test]
fn garbage_in_any_file_is_no_finding_above_info() {
    for text in
        ["", "\n", "\0\0", "many", "-1", "18446744073709551615", "TCP: mem", "some avg10=inf", "a=b=c\n="]
    {
        let files: Vec<_> = SOUND.iter().map(|(path, _)| (*path, text)).collect();
        let expected = connections(1000).accepts_per_second(1000);
        let found = Planted::new().with(&files).findings(&setup(), &expected);
        let not_sysctls = found.iter().filter(|finding| finding.severity > Severity::Info);
        // Of tables that are as large as numbers get all is used.
        let is_full = text.starts_with("184");
        assert!(is_full || not_sysctls.count() == 0, "{text:?}: {found:?}");
    }
}

#[test]
fn every_finding_has_all_parts_and_the_name_of_a_check() {
    let planted = Planted::new().with(&[
        ("etc/sysctl.conf", "net.ipv4.tcp_tw_recycle = 1\n"),
        ("proc/sys/net/core/somaxconn", "8\n"),
        ("proc/pressure/cpu", "some avg10=90\n"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"),
    ]);
    let unbounded = Setup { unsent_bytes_max: None, share_port: true, ends_silent: false, ..setup() };
    let expected = connections(10_000_000).accepts_per_second(1_000_000).upstreams(100_000);
    let found = planted.findings(&unbounded, &expected);
    assert!(found.len() > 10, "{found:?}");
    let names: Vec<&str> = checks().collect();
    for finding in found {
        assert!(names.contains(&finding.check), "{finding:?}");
        let line = finding.to_string();
        let parts = [&finding.what, &finding.value, &finding.needed, &finding.otherwise, &finding.fix];
        assert!(parts.iter().all(|part| !part.is_empty() && line.contains(part.as_str())), "{finding:?}");
        assert!(!line.contains('\n') && line.len() < 600, "{line}");
    }
}

#[test]
fn expectations_are_read_from_text() {
    let expected: Workload =
        "connections=1_000_000, accepts=20000,stall=50,round_trip=80,session=200,upstreams=9"
            .parse()
            .unwrap();
    let same = connections(1_000_000)
        .accepts_per_second(20_000)
        .longest_stall(Duration::from_millis(50))
        .round_trip(Duration::from_millis(80))
        .session_bytes(200)
        .upstreams(9);
    assert_eq!(expected, same);
    assert_eq!(same.to_string().parse(), Ok(same));
    assert_eq!(Workload::default().to_string(), "");
    assert_eq!("".parse(), Ok(Workload::default()));
    let error = |text: &str| text.parse::<Workload>().unwrap_err();
    assert!(error("connections").contains("\"connections\" is no name with a number"));
    assert!(error("connections=many").contains("connections=many"));
    assert!(error("conections=1").contains("\"conections=1\" cannot be expected; there are connections,"));
}

#[test]
fn sizes_are_written_as_people_read_them() {
    let texts = [0, 1023, 1024, 1536, 145_408, 10 << 20, (1 << 30) + (1 << 29), 3 << 40].map(size);
    assert_eq!(
        texts,
        ["0 bytes", "1023 bytes", "1 KiB", "1.5 KiB", "142 KiB", "10 MiB", "1.5 GiB", "3072 GiB"]
    );
}
