//! The examples, talked to by the clients in `tests/clients`.

use std::process::Command;

use ringserve_tests::examples::{build, client};

fn talk_to(name: &str) {
    talk_to_with(name, &[]);
}

fn talk_to_with(name: &str, args: &[&str]) {
    let mut client = Command::new(client(name));
    let output = client.args(args).env("BINARY", build(name)).output().expect("bash is there");
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{why}");
}

#[test]
fn chat_reaches_each_member_of_a_room_on_any_shard() {
    talk_to("chat");
}

#[test]
fn tokio_inside_uses_what_needs_a_runtime_on_either_host() {
    talk_to("tokio_inside");
    if cfg!(feature = "runtime-tokio-uring") {
        talk_to_with("tokio_inside", &["--runtime", "tokio-uring"]);
    }
}

#[test]
fn graceful_shutdown_cuts_no_peer_off() {
    talk_to("graceful_shutdown");
}

#[test]
fn middleware_limits_and_counts_calls_and_so_does_tower() {
    talk_to("middleware");
}

#[test]
fn smtp_keeps_what_smtplib_and_swaks_send() {
    talk_to("smtp");
}
