//! `compare` measures every server at every piece of work, and writes the results.

use std::fs;
use std::process::Command;

#[test]
fn a_report_has_every_server_and_a_chart_for_each_piece_of_work() {
    let out = std::env::temp_dir().join(format!("ringserve-compare-{}", std::process::id()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringserve-bench"));
    let works = ["lockstep-50", "echo-50", "open-60", "firehose", "churn"];
    command.args(["compare", "--rounds", "1", "--seconds", "0.1", "--works", &works.join(",")]);
    command.arg("--rivals").arg(out.join("none")).arg("--out").arg(&out);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report = fs::read_to_string(out.join("report.md")).unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).starts_with(&report), "it is printed too");
    assert!(said.contains("left out, since they are not in"), "{said}");
    for work in works {
        let section =
            report.split(&format!("\n## {work}: ")).nth(1).expect(work).split("\n## ").next().unwrap();
        for server in ["ringserve", "ringserve-epoll", "limit-uring", "limit-epoll"] {
            assert!(section.contains(&format!("\n| {server} |")), "{work}: no {server} in\n{section}");
        }
        let chart = fs::read_to_string(out.join(format!("{work}.svg"))).unwrap();
        assert!(chart.contains("<svg") && chart.contains("limit-epoll"), "{work}");
    }
    let json: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("report.json")).unwrap()).unwrap();
    assert_eq!(json.as_array().unwrap().len(), works.len());
    fs::remove_dir_all(out).unwrap();
}
