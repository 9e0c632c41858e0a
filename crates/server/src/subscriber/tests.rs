use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use tracing::{error, info, info_span, warn};

use super::*;

/// Lines as they come.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines of JSON that some code logs, each without its time, which is looked at.
fn logged(code: impl FnOnce()) -> Vec<String> {
    let kept = Kept::default();
    let writer = kept.clone();
    let layer = tracing_subscriber::fmt::layer().event_format(Json).with_writer(move || writer.clone());
    tracing::subscriber::with_default(Registry::default().with(layer), code);
    let bytes = kept.0.lock().unwrap().clone();
    let text = String::from_utf8(bytes).unwrap();
    let without_time = |line: &str| {
        let (version, rest) = line.split_once("\"ts\":\"").expect("a line has its time");
        let (time, rest) = rest.split_once("\",").unwrap();
        assert!(time.len() == "2026-11-27T12:00:00.123456Z".len() && time.ends_with('Z'), "{time}");
        format!("{version}{rest}")
    };
    text.lines().map(without_time).collect()
}

#[test]
fn line_of_json_has_the_fields_of_its_event() {
    let lines = logged(|| {
        let (peer, none) = (Some(tracing::field::display("10.1.2.3:5511")), None::<u64>);
        warn!(target: "ringserve::stall", shard = 0, id = %"17.3", peer, none, cause = "lock", ratio = 0.5, is_loud = true, "a call blocks");
        info!(target: "app", v = 2, msg = "mine", level = f64::NAN, "theirs");
        info_span!("outer", a = 1)
            .in_scope(|| info_span!("inner").in_scope(|| error!(target: "app", "within")));
    });
    assert_eq!(
        lines,
        [
            r#"{"v":1,"level":"warn","target":"ringserve::stall","msg":"a call blocks","shard":0,"id":"17.3","peer":"10.1.2.3:5511","cause":"lock","ratio":0.5,"is_loud":true}"#,
            r#"{"v":1,"level":"info","target":"app","msg":"theirs","v_":2,"msg_":"mine","level_":null}"#,
            r#"{"v":1,"level":"error","target":"app","spans":["outer","inner"],"msg":"within"}"#,
        ]
    );
}

#[test]
fn bytes_of_a_stranger_stay_within_their_string() {
    let lines = logged(|| info!(target: "app", said = "\"}\n{\"v\":9\\\r\t\u{1b}[31m\u{7f}ü", "{}", "a\nb"));
    assert_eq!(
        lines,
        [r#"{"v":1,"level":"info","target":"app","msg":"a\nb","said":"\"}\n{\"v\":9\\\r\t\u001b[31m"#
            .to_owned()
            + "\u{7f}ü\"}"]
    );
}

#[test]
fn wrong_filter_is_told_and_names_of_levels_are_filters() {
    for filter in ["info", "warn,ringserve=debug", "off", "app[span]=trace"] {
        assert!(parse(filter).is_ok(), "{filter}");
    }
    assert!(parse("ringserve=loud").is_err());
}
