//! Signals to servers whose factories wait for a future.

use std::future::pending;
use std::time::Duration;

use ringserve::factory::from_future;
use ringserve::framing::LengthPrefix;
use ringserve::limits::ServerLimits;
use ringserve::server::Runtime;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::{On, Puppet, SOON, eventually, no_time_limits};
use rustix::process::Signal;

fn serves(runtime: Runtime) {
    let server = On::default().server(no_time_limits()).runtime(runtime).shards(2);
    let ended = server.framing(LengthPrefix::default()).serve(|shard| {
        let shard = shard.clone();
        from_future(async move {
            if shard.index() == 1 {
                println!("\nthe factory waits");
                pending::<()>().await;
            }
            Puppet::new(Default::default())
        })
    });
    println!("\nserve returned {ended:?}");
}

/// The child: the future of its factory waits without end.
#[test]
#[ignore = "the child process of `sigterm_ends_a_server_whose_factory_awaits`; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes starts::child_awaits -- --exact --ignored --nocapture"]
fn child_awaits() {
    if is_child() {
        serves(Runtime::Own);
    }
}

/// Does the same inside a tokio runtime.
#[test]
#[ignore = "the child process of `sigterm_ends_a_server_whose_factory_awaits`; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes starts::child_awaits_on_tokio -- --exact --ignored --nocapture"]
fn child_awaits_on_tokio() {
    if is_child() {
        serves(Runtime::Tokio);
    }
}

/// The child: a start that takes longer than 10 s, with its log.
#[test]
#[ignore = "the child process of `factory_that_hangs_is_named_in_the_log_once`; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes starts::child_hangs -- --exact --ignored --nocapture"]
fn child_hangs() {
    if !is_child() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout).init();
    let limits = ServerLimits::default().start_timeout(Duration::from_millis(10_200));
    let server = On::default().server(no_time_limits()).server_limits(limits).shards(2);
    let ended = server.framing(LengthPrefix::default()).serve(|shard| {
        let index = shard.index();
        from_future(async move {
            if index == 1 {
                pending::<()>().await;
            }
            Puppet::new(Default::default())
        })
    });
    println!("\nserve returned {ended:?}");
}

fn ends_by(mut process: Process, signal: Signal) {
    process.line_after("the factory waits");
    process.signal(signal);
    assert_eq!(process.line_after("serve returned "), "Ok(())");
    eventually("the process ends", SOON, || process.child.try_wait().unwrap().is_some());
    assert!(process.child.wait().unwrap().success());
}

#[test]
fn sigterm_ends_a_server_whose_factory_awaits() {
    ends_by(Process::start(child_awaits), Signal::TERM);
    ends_by(Process::start(child_awaits), Signal::INT);
    ends_by(Process::start(child_awaits_on_tokio), Signal::TERM);
}

#[test]
fn factory_that_hangs_is_named_in_the_log_once() {
    let mut process = Process::start(child_hangs);
    let explained = process.line_after("still starting after 10s: waiting for the factory of ");
    assert!(explained.ends_with(" on shard 1"), "{explained}");
    assert!(
        process
            .line_after("serve returned ")
            .starts_with("Err(the factory for shard 1 was not done within 10.2s")
    );
}
