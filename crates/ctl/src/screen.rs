//! A report as one screen, which is drawn on a terminal or printed as text.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph};
use ringserve_report::{Phase, Report, Severity, ShardReport, Stage, State, UpstreamReport};

use crate::admission::{line_of_change, line_of_limits, line_of_rate};
use crate::lists::line_of;
use crate::text::{bytes, count, percent, plain, seconds};

/// Width of a shard's figures, which follow its bar.
const FIGURES: usize = 62;

/// The most lines of the sentence about the cause.
const CAUSE_MAX: usize = 4;

/// The most rows of a list.
const LIST_MAX: usize = 10;

/// Limits, and changes of them, that are shown: most servers have one `Admission`.
const LIMITS_MAX: usize = 3;

const DIM: Style = Style::new().fg(Color::DarkGray);
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// Draws a report; `trouble` is the reason why there is no newer one.
pub fn draw(frame: &mut Frame<'_>, report: &Report, place: &str, trouble: Option<&str>) {
    let area = frame.area();
    let blocks = [
        ("", head(report, place, trouble)),
        ("funnel", funnel(report, area.width)),
        ("shards", shards(report, area)),
        ("last second, and how long things take", rates(report)),
        ("closes", closes(report)),
        ("who is let in", admission(report)),
        ("largest outboxes", outboxes(report)),
        ("stalls", stalls(report)),
        ("doctor", findings(report)),
    ];
    let blocks: Vec<_> = blocks.into_iter().filter(|(_, lines)| !lines.is_empty()).collect();
    let heights = blocks
        .iter()
        .map(|(title, lines)| Constraint::Length(lines.len() as u16 + u16::from(!title.is_empty())));
    let areas: Vec<Rect> = Layout::vertical(heights.chain([Constraint::Min(0)])).split(area).to_vec();
    for ((title, lines), area) in blocks.into_iter().zip(areas) {
        let block = match title {
            "" => Block::new(),
            title => Block::new()
                .borders(Borders::TOP)
                .border_style(DIM)
                .title(Span::styled(format!(" {title} "), BOLD)),
        };
        frame.render_widget(Paragraph::new(lines).block(block), area);
    }
}

fn head(report: &Report, place: &str, trouble: Option<&str>) -> Vec<Line<'static>> {
    let server = &report.server;
    let phase = match server.phase {
        Phase::Starting => Span::styled("starting", Color::Yellow),
        Phase::Serving => Span::styled("serving", Color::Green),
        Phase::Draining => Span::styled("DRAINING", Color::Yellow),
        _ => Span::raw("unknown"),
    };
    let memory =
        server.memory_bytes.map(|memory| format!(", {}B resident", bytes(memory))).unwrap_or_default();
    let first = vec![
        Span::styled(format!("{} {}", plain(&server.program), server.pid), BOLD),
        Span::raw(format!(" at {place}: ")),
        phase,
        Span::raw(format!(" for {}", seconds(server.uptime_seconds))),
    ];
    let second = format!(
        "{} of {} connections{memory}; ringserve {} on {}",
        server.connections,
        server.connections_max,
        plain(&server.version),
        plain(&server.driver)
    );
    let mut lines = vec![Line::from(first), Line::raw(second)];
    if let Some(overload) = report.overload.as_ref().filter(|overload| overload.stage > 0) {
        let text = format!(
            "overload stage {} ({}): {}; {} requests shed since the start",
            overload.stage,
            plain(&overload.name),
            plain(&overload.cause),
            overload.shed_total
        );
        lines.push(Line::styled(text, Color::Red));
    }
    lines.extend(report.upstreams.iter().filter_map(upstream));
    if let Some(trouble) = trouble {
        lines.push(Line::styled(plain(trouble), Color::Red));
    }
    lines
}

/// A group of other servers of which some are out.
fn upstream(of: &UpstreamReport) -> Option<Line<'static>> {
    let out: Vec<String> = of
        .backends
        .iter()
        .filter(|backend| !matches!(&*backend.condition, "up" | "unknown"))
        .map(|backend| format!("{} {}", plain(&backend.name), plain(&backend.condition)))
        .collect();
    let (count, left) = (of.backends.len(), of.backends.len() - out.len());
    let text =
        format!("upstream {}: {left} of {count} servers may be asked: {}", plain(&of.name), out.join(", "));
    (!out.is_empty()).then(|| Line::styled(text, if left == 0 { Color::Red } else { Color::Yellow }))
}

fn style_of(state: State) -> (&'static str, Style) {
    match state {
        State::Calm => ("ok", Color::Green.into()),
        State::Warn => ("WARN", Color::Yellow.into()),
        State::Lost => ("LOST", Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)),
        _ => ("?", DIM),
    }
}

fn funnel(report: &Report, width: u16) -> Vec<Line<'static>> {
    let window = seconds(report.server.window_seconds);
    let header = format!(
        "     {:<13}{:>9} {:>9}  {:<13}{:>12} {:>11}",
        "stage",
        "now",
        "of",
        "",
        format!("lost in {window}"),
        "since start"
    );
    let mut lines = vec![Line::styled(header, DIM)];
    let line = |stage: &Stage| {
        let (word, style) = style_of(stage.state);
        // Bytes are the only figure in other steps.
        let figure = |value: u64| if stage.unit == "bytes" { bytes(value) } else { count(value as f64) };
        let capacity = stage.capacity.map_or_else(String::new, figure);
        let text = format!(
            "{:<13}{:>9} {capacity:>9}  {:<13}{:>12} {:>11}",
            stage.name.as_str(),
            figure(stage.now),
            plain(&stage.unit),
            count(stage.lost_recently as f64),
            count(stage.lost_total as f64)
        );
        Line::from(vec![Span::styled(format!("{word:<5}"), style), Span::raw(text)])
    };
    lines.extend(report.funnel.iter().map(line));
    if let Some(cause) = report.cause() {
        let (_, style) = style_of(cause.state);
        let text = format!("cause: {}: {}", cause.name, plain(&cause.why));
        lines.extend(
            wrapped(&text, width.into()).into_iter().take(CAUSE_MAX).map(|line| Line::styled(line, style)),
        );
    }
    lines
}

/// Breaks words into lines of this width.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().expect("there is a line");
        if !last.is_empty() && last.chars().count() + 1 + word.chars().count() > width {
            lines.push(format!("       {word}"));
        } else {
            let space = if last.is_empty() { "" } else { " " };
            *last = format!("{last}{space}{word}");
        }
    }
    lines
}

/// A bar: busy, starved, asleep.
fn bar(shard: &ShardReport, width: usize) -> [Span<'static>; 3] {
    let cells = |share: f64| ((share.clamp(0.0, 1.0) * width as f64).round() as usize).min(width);
    let busy = cells(shard.busy);
    let starved = cells(shard.starved).min(width - busy);
    [
        Span::styled("#".repeat(busy), Color::Green),
        Span::styled("!".repeat(starved), Color::Red),
        Span::styled(".".repeat(width - busy - starved), DIM),
    ]
}

fn shards(report: &Report, area: Rect) -> Vec<Line<'static>> {
    // A third of the screen; if there are more shards, the busiest are shown.
    let room = usize::from(area.height / 3).max(2);
    let mut shown: Vec<&ShardReport> = report.shards.iter().collect();
    let hidden = shown.len().saturating_sub(room);
    if hidden > 0 {
        shown.sort_by(|one, other| {
            let load =
                |shard: &ShardReport| shard.stalled_seconds.unwrap_or(0.0) + shard.busy + shard.starved;
            load(other).total_cmp(&load(one))
        });
        shown.truncate(room);
    }
    let width = usize::from(area.width).saturating_sub(FIGURES).clamp(10, 100);
    let line = |shard: &ShardReport| {
        let [busy, starved, asleep] = bar(shard, width);
        let mut spans =
            vec![Span::raw(format!("{:>4} [", shard.shard)), busy, starved, asleep, Span::raw("] ")];
        if let Some(stalled) = shard.stalled_seconds {
            let style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
            spans.push(Span::styled(format!("{:<28}", format!("STALLED for {}", seconds(stalled))), style));
        } else if shard.stale {
            spans.push(Span::styled(format!("{:<28}", "does not answer"), Color::Yellow));
        } else {
            let text = format!("{:>5} busy, {:>5} starved", percent(shard.busy), percent(shard.starved));
            spans.push(Span::raw(format!("{text:<28}")));
        }
        let open = shard.connections.map_or_else(|| "-".to_owned(), |open| open.to_string());
        spans.push(Span::raw(format!("{open:>9} open {:>6} wait", shard.accept_queue)));
        Line::from(spans)
    };
    let mut lines: Vec<Line<'static>> = shown.into_iter().map(line).collect();
    if hidden > 0 {
        lines.push(Line::styled(format!("     {hidden} more, less busy"), DIM));
    }
    lines
}

fn rates(report: &Report) -> Vec<Line<'static>> {
    let rates = &report.rates;
    let first = format!(
        "accepts {}  closes {}  frames {}  in {}B  out {}B  turns {}  system calls {}",
        count(rates.accepts_per_second),
        count(rates.closes_per_second),
        count(rates.frames_per_second),
        bytes(rates.received_bytes_per_second as u64),
        bytes(rates.sent_bytes_per_second as u64),
        count(rates.turns_per_second),
        count(rates.system_calls_per_second),
    );
    let times = &report.times;
    let all = [
        ("turn", times.turn),
        ("call", times.call),
        ("first frame", times.first_frame),
        ("send stall", times.send_stall),
    ];
    let known = all.into_iter().filter(|(_, quantiles)| quantiles.count > 0);
    let text = |(name, of): (&str, ringserve_report::Quantiles)| {
        format!("{name} {} / {} / {}", seconds(of.p50), seconds(of.p99), seconds(of.max))
    };
    let second: Vec<String> = known.map(text).collect();
    let mut lines = vec![Line::raw(first)];
    if !second.is_empty() {
        lines.push(Line::from(vec![
            Span::raw(second.join("   ")),
            Span::styled("   (median / p99 / most)", DIM),
        ]));
    }
    lines
}

fn closes(report: &Report) -> Vec<Line<'static>> {
    let mut closes: Vec<_> = report.closes.iter().collect();
    closes.sort_by_key(|close| std::cmp::Reverse((close.recently, close.total)));
    let text = |close: &&ringserve_report::Close| {
        let recently = if close.recently > 0 { format!(" (+{})", close.recently) } else { String::new() };
        format!("{} {}{recently}", plain(&close.reason), count(close.total as f64))
    };
    let texts: Vec<String> = closes.iter().take(LIST_MAX).map(text).collect();
    if texts.is_empty() { Vec::new() } else { vec![Line::raw(texts.join("   "))] }
}

/// The current limits, and the last changes, the newest first. Empty for a server that limits no
/// peer.
fn admission(report: &Report) -> Vec<Line<'static>> {
    let Some(admission) = &report.admission else { return Vec::new() };
    let mut lines: Vec<String> = admission.accept_rate.map(line_of_rate).into_iter().collect();
    for limits in admission.limits.iter().take(LIMITS_MAX) {
        let networks = match limits.networks_total {
            0 => String::new(),
            many => format!(", {many} networks denied or allowed for a time"),
        };
        lines.push(line_of_limits(limits) + &networks);
    }
    let changes = admission.changes.iter().rev().take(LIMITS_MAX);
    lines.extend(changes.map(|change| format!("changed {}", line_of_change(change))));
    lines.into_iter().map(Line::raw).collect()
}

fn outboxes(report: &Report) -> Vec<Line<'static>> {
    let full = report.outboxes.iter().filter(|of| of.outbox_bytes > 0);
    let line = |of: &ringserve_report::Connection| {
        Line::raw(format!(
            "{:>8}  {:<12} {:<24} {:<14} idle {}",
            bytes(of.outbox_bytes),
            plain(&of.id),
            plain(&of.peer),
            plain(&of.service),
            seconds(of.idle_seconds)
        ))
    };
    let mut lines: Vec<Line<'static>> = full.take(LIST_MAX / 2).map(line).collect();
    if !report.silent_shards.is_empty() {
        let text = format!("shards {:?} do not answer: a handler blocks them", report.silent_shards);
        lines.push(Line::styled(text, Color::Yellow));
    }
    lines
}

fn stalls(report: &Report) -> Vec<Line<'static>> {
    let last = report.stalls.iter().rev().take(LIST_MAX / 2);
    let line = |stall: &ringserve_report::Stall| {
        let style = if stall.ongoing { Style::from(Color::Red) } else { Style::new() };
        Line::styled(line_of(stall), style)
    };
    last.map(line).collect()
}

fn findings(report: &Report) -> Vec<Line<'static>> {
    let mut found: Vec<_> =
        report.findings.iter().filter(|of| matches!(of.severity, Severity::Warn | Severity::Error)).collect();
    found.sort_by_key(|of| of.severity != Severity::Error);
    let line = |of: &&ringserve_report::Finding| {
        let color = if of.severity == Severity::Error { Color::Red } else { Color::Yellow };
        Line::styled(
            format!("{} is {}; needed: {}", plain(&of.what), plain(&of.value), plain(&of.needed)),
            color,
        )
    };
    found.iter().take(LIST_MAX / 2).map(line).collect()
}
