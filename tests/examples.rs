//! The examples, talked to by the clients in `tests/clients`.

mod common;

use std::process::Command;

use common::examples::{build, client};

fn talk_to(name: &str) {
    let output = Command::new(client(name)).env("BINARY", build(name)).output().expect("bash is there");
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{why}");
}

#[test]
fn line_chat_reaches_everybody_in_a_room_whatever_their_shard() {
    talk_to("line_chat");
}

#[test]
fn graceful_shutdown_cuts_nobody_off() {
    talk_to("graceful_shutdown");
}

#[test]
fn middleware_limits_and_counts_calls_and_so_does_tower() {
    talk_to("middleware");
}
