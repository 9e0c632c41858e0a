//! The server on the screen.

use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ringserve_report::Report;

use crate::args::TopOptions;
use crate::client::{Endpoint, Failure};
use crate::screen::draw;

const PATH: &str = "/report.json";

/// Time limit of an answer while keys wait.
const WITHIN: Duration = Duration::from_secs(2);

/// Shows reports until a key ends it, or one of them as text.
pub fn run(endpoint: &Endpoint, options: &TopOptions, json: bool) -> Result<u8, Failure> {
    if json {
        println!("{}", endpoint.get(PATH)?.trim_end());
        return Ok(0);
    }
    if options.once {
        let report = endpoint.get_json(PATH)?;
        print!("{}", text_of(&report, &endpoint.place().to_string(), options.width, options.height));
        return Ok(0);
    }
    // A failure before the screen is taken over is printed as a line.
    let first = endpoint.get_json(PATH)?;
    let mut terminal = ratatui::try_init().map_err(|error| {
        Failure(format!("there is no terminal ({error}): use `ringserve-ctl top --once`"))
    })?;
    let endpoint = endpoint.clone().within(WITHIN);
    let shown = show(&mut terminal, &endpoint, first, Duration::from_secs_f64(options.interval));
    ratatui::restore();
    shown.map(|()| 0)
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    endpoint: &Endpoint,
    mut report: Report,
    interval: Duration,
) -> Result<(), Failure> {
    let place = endpoint.place().to_string();
    let mut trouble: Option<String> = None;
    loop {
        terminal.draw(|frame| draw(frame, &report, &place, trouble.as_deref()))?;
        let next = Instant::now() + interval;
        loop {
            let left = next.saturating_duration_since(Instant::now());
            if left.is_zero() || !event::poll(left)? {
                break;
            }
            match event::read()? {
                Event::Key(key) if ends(key) => return Ok(()),
                Event::Resize(..) => {
                    terminal.draw(|frame| draw(frame, &report, &place, trouble.as_deref()))?;
                }
                _ => {}
            }
        }
        match endpoint.get_json(PATH) {
            Ok(newer) => (report, trouble) = (newer, None),
            Err(failure) => trouble = Some(failure.0),
        }
    }
}

fn ends(key: KeyEvent) -> bool {
    let is_break = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind != KeyEventKind::Release && (is_break || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

/// A frame as text, without the empty lines at its end.
fn text_of(report: &Report, place: &str, width: u16, height: u16) -> String {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let Ok(frame) = terminal.draw(|frame| draw(frame, report, place, None));
    let lines = lines_of(frame.buffer);
    let mut text = lines.join("\n");
    text.truncate(text.trim_end().len());
    text + "\n"
}

fn lines_of(buffer: &Buffer) -> Vec<String> {
    let area = buffer.area;
    let line = |y| (0..area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..area.height).map(line).collect()
}

#[cfg(test)]
mod tests {
    use ringserve_report::{
        Admission, AdmissionChange, AdmissionLimits, Connection, Finding, Rate, Severity, ShardReport, Stage,
        StageName, Stall, State,
    };

    use super::*;

    fn report() -> Report {
        let stage = |(name, state)| Stage { name, state, unit: "connections".into(), ..Stage::default() };
        let mut report = Report {
            funnel: StageName::ALL.map(|name| stage((name, State::Calm))).into(),
            shards: (0..3)
                .map(|shard| ShardReport {
                    shard,
                    busy: 0.5,
                    starved: 0.25,
                    connections: Some(7),
                    ..ShardReport::default()
                })
                .collect(),
            outboxes: vec![Connection {
                id: "0.17.3".into(),
                outbox_bytes: 3 << 20,
                ..Connection::default()
            }],
            stalls: vec![Stall {
                ongoing: true,
                work: "call".into(),
                cause: "lock".into(),
                ..Stall::default()
            }],
            findings: vec![Finding {
                severity: Severity::Error,
                what: "RLIMIT_NOFILE".into(),
                ..Finding::default()
            }],
            ..Report::default()
        };
        report.server.program = "app".into();
        report.server.pid = 4711;
        report
    }

    #[test]
    fn frame_has_funnel_shards_outboxes_stalls_and_findings() {
        let mut report = report();
        report.funnel[4] =
            Stage { state: State::Lost, why: "a handler blocks shard 1".into(), ..report.funnel[4].clone() };
        report.shards[1].stalled_seconds = Some(0.74);
        let text = text_of(&report, "http://127.0.0.1:9000", 120, 50);
        for words in [
            "app 4711 at http://127.0.0.1:9000",
            "ok   accept_queue",
            "LOST handler",
            "cause: handler: a handler blocks shard 1",
            "   0 [#############################!!!!!!!!!!!!!!!..............]  50 % busy,  25 % starved",
            "STALLED for 740 ms",
            "3.0M  0.17.3",
            "now  shard 0 stalled",
            "RLIMIT_NOFILE",
        ] {
            assert!(text.contains(words), "{words:?} is in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 120));
    }

    #[test]
    fn limits_are_shown_with_their_last_changes() {
        let text = text_of(&report(), "", 120, 50);
        assert!(!text.contains("let in"), "a server that limits no peer has no line: {text}");
        let change = |ago_seconds, what: &str| AdmissionChange { ago_seconds, what: what.into() };
        let changes = (1..=5).map(|n| change(60.0 - f64::from(n), &format!("per_address is {n}\x1b[2J")));
        let limits = AdmissionLimits {
            per_address: Some(5),
            connection_rate: Some(Rate { per_second: 200, burst: 50 }),
            connections: Some(7),
            networks_total: 2,
            ..AdmissionLimits::default()
        };
        let admission = Admission {
            limits: vec![limits],
            accept_rate: Some(Rate { per_second: 20_000, burst: 5000 }),
            changes: changes.collect(),
        };
        let text = text_of(&Report { admission: Some(admission), ..report() }, "", 120, 50);
        for words in [
            " who is let in ",
            "accept_rate=20000/5000 of the whole server",
            "per_address=5 address_rate=off connections_max=off connection_rate=200/50, 7 connections count, 2 networks",
            "changed 55 s ago: per_address is 5",
            "changed 57 s ago: per_address is 3",
        ] {
            assert!(text.contains(words), "{words:?} is in\n{text}");
        }
        assert!(!text.contains("per_address is 2") && !text.contains('\x1b'), "{text}");
    }

    #[test]
    fn many_shards_leave_room_and_the_busiest_are_shown() {
        let mut report = report();
        report.shards = (0..500).map(|shard| ShardReport { shard, ..ShardReport::default() }).collect();
        report.shards[333].busy = 1.0;
        let text = text_of(&report, "", 100, 40);
        assert!(text.contains(" 333 [######################################]"), "{text}");
        assert!(text.contains("487 more, less busy") && text.contains("RLIMIT_NOFILE"), "{text}");
    }

    #[test]
    fn report_of_nothing_and_hostile_text_are_drawn() {
        let mut report = Report::default();
        text_of(&report, "", 60, 20);
        report.server.program = "\u{1b}[2J\u{7}".repeat(1000);
        report.rates.accepts_per_second = f64::NAN;
        report.shards = vec![ShardReport { busy: f64::INFINITY, starved: -3.0, ..ShardReport::default() }];
        report.server.uptime_seconds = f64::MAX;
        let text = text_of(&report, "", 60, 20);
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }
}
