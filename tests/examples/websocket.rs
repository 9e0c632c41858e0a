//! An echo of messages, by the cases of Autobahn.

use std::convert::Infallible;
use std::fs;
use std::process::Command;

use ringserve::websocket::{Message, Messages, WebSocket, WsCx};
use ringserve::ws;
use ringserve_tests::examples::client;
use ringserve_tests::{On, no_time_limits};

struct Echo;

impl WebSocket for Echo {
    type Session = ();
    type Error = Infallible;

    async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Infallible> {
        cx.send(message);
        Ok(())
    }
}

/// Without the groups that take long: of limits, and of compression. `tests/clients/websocket` has
/// all of them.
#[test]
fn cases_of_autobahn_come_to_what_is_expected() {
    // `kosoku` is a package of Python.
    if Command::new("kosoku").arg("--help").output().is_err() {
        eprintln!("skipped: kosoku is not installed; tests/clients/websocket installs it");
        return;
    }
    let server = On::default().server(no_time_limits()).websocket().framing(Messages::binary());
    let running = server.start(|_shard| ws(Echo)).expect("the server starts");
    let report = std::env::temp_dir().join(format!("ringserve-cases-{}", std::process::id()));
    let mut kosoku = Command::new("kosoku");
    kosoku.args(["-m", "fuzzingclient", &running.local_addrs()[0].to_string(), "-p", "8", "-o"]).arg(&report);
    let ran = kosoku.args(["-x", "9.*", "-x", "12.*", "-x", "13.*"]).output().expect("kosoku runs");
    let mut compare = Command::new("python3");
    compare.arg(client("websocket_cases.py")).arg(report.join("index.json")).arg(client("websocket_cases"));
    let compared = compare.args(["messages", "247"]).output().expect("python3 is there");
    fs::remove_dir_all(&report).ok();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(compared.status.success(), "{}{}", said(&compared.stderr), said(&ran.stderr));
    ringserve_tests::finish(running);
}
