//! The deny list as a filter of the kernel, on both drivers.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use ringserve::admission::{Admission, IpList, RefusedBy};
use ringserve::server::Driver;
use ringserve::stats::AcceptQueueStats;
use ringserve::{Server, ServerHandle};
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::limited::{
    connect_from, drivers, ended, greeted, greets, hears_hello, refused_by, try_to_greet,
};
use ringserve_tests::proc_net::listen_overflows;
use ringserve_tests::{EndOf, SOON, eventually};

/// A denied peer receives nothing for longer than any handshake on loopback takes.
const SILENCE: Duration = Duration::from_millis(300);

/// A list in a file that is replaced, and removed with the test.
struct Listed(PathBuf);

impl Listed {
    fn new(name: &str, text: &str) -> Listed {
        let file = std::env::temp_dir().join(format!("ringserve-{name}-{}.txt", std::process::id()));
        let listed = Listed(file);
        listed.replace(text);
        listed
    }

    fn replace(&self, text: &str) {
        let new = self.0.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, &self.0).unwrap();
    }

    fn deny(&self) -> Admission {
        Admission::default().deny(IpList::file(&self.0))
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn denied_source_hears_nothing_and_others_are_served() {
    for driver in drivers() {
        for addr in ["127.0.0.1:0", "[::]:0"] {
            let before = listen_overflows();
            let list = "127.0.9.0/24\n2001:db8::/32".parse().unwrap();
            let allow = "127.0.9.9".parse().unwrap();
            let running = greets(driver, addr, 2, Admission::default().deny(list).allow(allow));
            let addr = ([127, 0, 0, 1], running.local_addrs()[0].port()).into();
            assert!(connect_from("127.0.9.1", addr, SILENCE).is_none());
            for source in ["127.0.8.1", "127.0.10.1", "127.0.9.9"] {
                assert!(greeted(source, addr).is_some(), "{source}");
            }
            refused_by(&running, RefusedBy::DenyList, 0);
            let queues = running.accept_queues();
            let sum = |of: fn(&AcceptQueueStats) -> Option<u64>| queues.iter().filter_map(of).sum::<u64>();
            assert!(sum(|queue| queue.dropped) > 0, "the gauge counts what the filter drops");
            // A queue of another test may be full, and drops then count as losses.
            if listen_overflows() == before {
                assert_eq!(sum(|queue| queue.lost), 0, "no queue was full");
            }
            ended(running);
        }
    }
}

#[test]
fn filter_of_a_dual_stack_drops_each_family_by_its_networks() {
    for driver in drivers() {
        for (denied, let_in) in [("::1", "127.0.9.1"), ("127.0.9.1", "::1")] {
            let running = greets(driver, "[::]:0", 2, Admission::default().deny(denied.parse().unwrap()));
            let port = running.local_addrs()[0].port();
            let to = |source: &str| -> SocketAddr {
                let loopback = if source == "::1" { "[::1]" } else { "127.0.0.1" };
                format!("{loopback}:{port}").parse().unwrap()
            };
            assert!(connect_from(denied, to(denied), SILENCE).is_none(), "{denied} hears nothing");
            assert!(greeted(let_in, to(let_in)).is_some(), "{let_in} is served");
            refused_by(&running, RefusedBy::DenyList, 0);
            ended(running);
        }
    }
}

#[test]
fn filter_holds_at_each_server_of_a_shared_port() {
    for driver in drivers() {
        let start = |addr: &str| {
            let deny = Admission::default().deny("127.0.9.0/24".parse().unwrap());
            try_to_greet(Server::bind(addr).share_port(true), driver, 2, deny).unwrap()
        };
        let first = start("127.0.0.1:0");
        let addr = first.local_addrs()[0];
        let second = start(&addr.to_string());
        // Each source may meet another of the four listeners.
        let sources = |network: u8| (1..=16).map(move |n| format!("127.0.{network}.{n}"));
        let is_silent = |source: String| connect_from(&source, addr, SILENCE / 4).is_none();
        assert!(sources(9).all(is_silent), "no listener answers a denied source");
        assert!(sources(8).all(|source| greeted(&source, addr).is_some()), "and all answer the others");
        let accepted = |server: &ServerHandle| server.stats_now().counters.accepted;
        assert!(accepted(&first) > 0 && accepted(&second) > 0, "both were met");
        ended(first);
        assert!(connect_from("127.0.9.1", addr, SILENCE).is_none() && greeted("127.0.8.1", addr).is_some());
        refused_by(&second, RefusedBy::DenyList, 0);
        ended(second);
    }
}

#[test]
fn list_is_replaced_under_load_and_no_allowed_peer_is_lost() {
    for driver in drivers() {
        let listed = Listed::new(&format!("replaced-{driver}"), "127.0.9.0/24");
        let running = greets(driver, "127.0.0.1:0", 2, listed.deny());
        let addr = running.local_addrs()[0];
        let stop = AtomicBool::new(false);
        let served = thread::scope(|scope| {
            let load = scope.spawn(|| {
                let mut served = 0;
                while !stop.load(SeqCst) {
                    let stream = greeted("127.0.1.1", addr).expect("an allowed peer is served");
                    drop(stream);
                    served += 1;
                }
                served
            });
            let _end = EndOf(&stop);
            let is_denied = |source| connect_from(source, addr, SILENCE).is_none();
            assert!(is_denied("127.0.9.1") && !is_denied("127.0.8.1"));
            listed.replace("127.0.8.0/24");
            eventually("the new list holds", SOON, || is_denied("127.0.8.1"));
            assert!(!is_denied("127.0.9.1"));
            listed.replace("");
            eventually("an empty list denies no peer", SOON, || !is_denied("127.0.8.1"));
            stop.store(true, SeqCst);
            load.join().unwrap()
        });
        assert!(served > 0);
        ended(running);
    }
}

#[test]
fn networks_are_filtered_for_their_time() {
    // Dropped packets can only be detected by waiting, so they wait together.
    thread::scope(|scope| {
        for driver in drivers() {
            // One server with a list, and one that only counts: it has no filter until it needs
            // one.
            scope.spawn(move || filters_for_a_time(driver, Admission::default().deny(list("127.0.7.0/24"))));
            scope.spawn(move || filters_for_a_time(driver, Admission::default().adjustable()));
        }
    });
}

fn filters_for_a_time(driver: Driver, admission: Admission) {
    let running = greets(driver, "127.0.0.1:0", 2, admission);
    let (addr, admission) = (running.local_addrs()[0], running.control().admission());
    let had_list = !greets_from("127.0.7.1", addr);
    let held = greeted("127.0.9.1", addr).unwrap();
    // The server refuses them at once, and the kernel soon.
    admission.deny(&list("127.0.9.0/24"), Duration::from_secs(3600)).unwrap();
    assert!(!greets_from("127.0.9.1", addr));
    eventually("the kernel drops its packets", SOON, || is_silent("127.0.9.1", addr));
    assert!(greets_from("127.0.8.1", addr), "others are served");
    assert_eq!(greets_from("127.0.7.1", addr), !had_list, "and the list holds as before");
    writeln!(&held, "still there").unwrap();
    let mut line = String::new();
    BufReader::new(&held).read_line(&mut line).unwrap();
    assert_eq!(line, "still there\n");
    // Allowing has precedence, even over the list.
    admission.allow(&list("127.0.9.9 127.0.7.7"), Duration::from_secs(3600)).unwrap();
    for allowed in ["127.0.9.9", "127.0.7.7"] {
        eventually("an allowed peer is let through", SOON, || greets_from(allowed, addr));
    }
    assert!(is_silent("127.0.9.1", addr));
    admission.forget(&list("127.0.9.0/24")).unwrap();
    eventually("a network is forgotten", SOON, || greets_from("127.0.9.1", addr));
    // A time that ends by itself.
    admission.deny(&list("127.0.6.0/24"), Duration::from_secs(2)).unwrap();
    eventually("the kernel has it", SOON, || is_silent("127.0.6.1", addr));
    eventually("its time is over", SOON, || greets_from("127.0.6.1", addr));
    assert_eq!(greets_from("127.0.7.1", addr), !had_list);
    ended(running);
}

fn list(text: &str) -> IpList {
    text.parse().unwrap()
}

/// True if the kernel answers no packet from there.
fn is_silent(source: &str, addr: SocketAddr) -> bool {
    connect_from(source, addr, SILENCE).is_none()
}

fn greets_from(source: &str, addr: SocketAddr) -> bool {
    connect_from(source, addr, SILENCE).is_some_and(hears_hello)
}

#[test]
fn server_refuses_what_the_program_has_no_room_for() {
    for driver in drivers() {
        // More than a program can hold, the widest ones first.
        let mut networks: Vec<String> = (0..3000).map(|n| format!("10.{}.{}.1", n / 256, n % 256)).collect();
        networks.push("127.0.9.0/24".to_owned());
        networks.push("127.0.8.1".to_owned());
        let list = networks.join("\n").parse().unwrap();
        let running = greets(driver, "127.0.0.1:0", 1, Admission::default().deny(list));
        let addr = running.local_addrs()[0];
        assert!(connect_from("127.0.9.1", addr, SILENCE).is_none(), "the kernel has it");
        assert!(greeted("127.0.8.1", addr).is_none(), "the server has it");
        refused_by(&running, RefusedBy::DenyList, 1);
        assert!(greeted("127.0.8.2", addr).is_some());
        ended(running);
    }
}

/// The child, in a separate network where a socket may have little memory in addition to its
/// buffers.
#[test]
#[ignore = "the child process of another test here, which starts it; alone: RINGSERVE_TEST_CHILD=1 unshare -rn sh -c 'ip link set lo up; cargo test -p ringserve-tests --test accepting kernel_filter::child_has_little_memory -- --exact --ignored --nocapture'"]
fn child_has_little_memory() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    if fs::write("/proc/sys/net/core/optmem_max", "8192").is_err() {
        // The setting is for the whole machine before Linux 6.8.
        return println!("\nserved");
    }
    let mut networks: Vec<String> = (0..1500).map(|n| format!("10.{}.{}.1", n / 256, n % 256)).collect();
    networks.push("127.0.9.0/24".to_owned());
    let list = networks.join("\n").parse().unwrap();
    let running = greets(drivers()[0], "127.0.0.1:0", 1, Admission::default().deny(list));
    let addr = running.local_addrs()[0];
    assert!(connect_from("127.0.9.1", addr, SILENCE).is_none(), "the widest one fits");
    assert!(greeted("127.0.8.1", addr).is_some());
    ended(running);
    println!("\nserved");
}

#[test]
fn program_is_cut_where_the_kernel_has_little_memory_for_it() {
    match Process::start_in_own_network(child_has_little_memory) {
        Some(mut child) => {
            let line = child.line_after("");
            let mut lines = vec![line];
            while lines.last().is_some_and(|line| line != "served") {
                lines.push(child.line_after(""));
            }
            let told = lines.iter().filter(|line| line.contains("raise net.core.optmem_max")).count();
            let is_old = !lines.iter().any(|line| line.contains("listening on"));
            assert!(told == 1 || is_old, "{lines:#?}");
        }
        None => println!("no separate network can be made here"),
    }
}
