//! The drill names causes that it plants in servers of this build. All ten take half a minute: `ringserve-ctl drill`.

use std::process::Command;

fn drill(arguments: &[&str]) -> (i32, String) {
    let done =
        Command::new(env!("CARGO_BIN_EXE_ringserve-ctl")).arg("drill").args(arguments).output().unwrap();
    (done.status.code().unwrap(), String::from_utf8(done.stdout).unwrap())
}

#[test]
fn planted_causes_are_named_at_their_stage() {
    let (code, table) =
        drill(&["--only", "table", "--only", "descriptors", "--only", "lock", "--within", "60"]);
    assert_eq!(code, 0, "{table}");
    for line in ["table        table", "descriptors  table", "lock         handler", "3 of 3 causes named"] {
        assert!(table.contains(line), "{line:?} is in\n{table}");
    }
}

#[test]
fn cause_that_is_not_named_in_time_is_wrong() {
    // A call that waits is red after two seconds.
    let (code, json) = drill(&["--json", "--only", "slow", "--within", "0.1"]);
    assert_eq!(code, 1, "{json}");
    assert!(json.contains("\"expected\": \"handler\"") && json.contains("no stage is red"), "{json}");
}
