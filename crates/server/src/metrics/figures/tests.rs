//! Tests of figures: their counts, their lines, and faults.

use std::thread;

use super::*;

fn text(figures: &Figures) -> String {
    let mut text = String::new();
    figures.write_prometheus(&mut text);
    text
}

#[test]
fn threads_are_summed_and_what_was_counted_stays() {
    let figures = Figures::default();
    let sent = figures.counter("app_sent_total", "Sent", ["how", "to"]);
    let here = figures.gauge("app_here", "Here", []);
    let took = figures.histogram("app_took_seconds", "Took", [], &[0.5, 1.0]);
    let (mine, gauge) = (sent.with(["push", "all"]), here.with([]));
    mine.add(1);
    gauge.add(5);
    gauge.add(-2);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let (counter, gauge, histogram) = (sent.with(["push", "all"]), here.with([]), took.with([]));
                (0..1000).for_each(|_| counter.add(2));
                gauge.set(100);
                [0.25, 0.5, 0.75, 1.5, f64::NAN].iter().for_each(|value| histogram.observe(*value));
            });
        }
    });
    let found = text(&figures);
    for line in [
        "# HELP app_sent Sent\n# TYPE app_sent counter\napp_sent_total{how=\"push\",to=\"all\"} 8001\n",
        // Gauges of threads that ended hold nothing.
        "app_here 3\n",
        "app_took_seconds_sum 12.0\n",
        "app_took_seconds_count 20\n",
        "app_took_seconds_bucket{le=\"0.5\"} 8\n",
        "app_took_seconds_bucket{le=\"1.0\"} 12\n",
        "app_took_seconds_bucket{le=\"+Inf\"} 20\n",
    ] {
        assert!(found.contains(line), "{line:?} is not in {found}");
    }
    drop(gauge);
    assert!(!text(&figures).contains("app_here"));
}

#[test]
fn handle_that_is_dropped_moves_one_other_at_most() {
    let figures = Figures::default();
    let sent = figures.counter("app_sent", "Sent", []);
    let mut handles: Vec<Counter> = (0..1000).map(|_| sent.with([])).collect();
    handles.iter().for_each(|handle| handle.add(1));
    let places = |handles: &[Counter]| -> Vec<usize> {
        handles.iter().map(|handle| handle.own.cells.place.load(Ordering::Relaxed)).collect()
    };
    // From everywhere among them, also the last one.
    let mut at = 999;
    while !handles.is_empty() {
        handles.swap_remove(at);
        let (left, before) = (places(&handles), handles.len());
        at = (7 * at + 3) % before.max(1);
        assert!(left.iter().all(|place| *place < before), "{left:?}");
        if before > 0 {
            let gone = handles.swap_remove(at);
            let mut before = left;
            before.swap_remove(at);
            drop(gone);
            let moved = places(&handles).iter().zip(&before).filter(|(one, other)| one != other).count();
            assert!(moved <= 1, "{moved} were moved");
            at = (5 * at + 1) % handles.len().max(1);
        }
        assert!(text(&figures).contains("app_sent_total 1000\n"));
    }
}

#[test]
fn reader_keeps_what_there_was_when_it_began() {
    let figures = Figures::default();
    let sent = figures.counter("app_sent", "Sent", []);
    let mut handles: Vec<Counter> = (0..200).map(|_| sent.with([])).collect();
    handles.iter().for_each(|handle| handle.add(1));
    let read = lock(&sent.family.series).values().next().unwrap().clone();
    handles.drain(50..).for_each(drop);
    handles.extend((0..10).map(|_| sent.with([])));
    handles.iter().for_each(|handle| handle.add(1));
    assert_eq!(read.sum().whole, 250, "each of the first handles once, and what those count that are there");
    assert!(text(&figures).contains("app_sent_total 260\n"));
}

#[test]
fn series_have_a_bound() {
    let figures = Figures::default().series_max(2);
    let by_topic = figures.counter("app_by_topic", "By topic", ["topic"]);
    for (topic, count) in [("a", 1), ("b", 2), ("c", 4), ("d", 8), ("a", 16)] {
        by_topic.with([topic]).add(count);
    }
    let found = text(&figures);
    let lines: Vec<&str> = found.lines().filter(|line| line.starts_with("app_by_topic_total")).collect();
    assert_eq!(
        lines,
        [
            "app_by_topic_total{topic=\"a\"} 17",
            "app_by_topic_total{topic=\"b\"} 2",
            "app_by_topic_total{topic=\"other\"} 12"
        ]
    );
}

#[test]
fn values_are_cut_and_escaped() {
    let figures = Figures::default();
    let gauges = figures.gauge("app_x", "X", ["of"]);
    let (long, odd) = (gauges.with([&"ä".repeat(100)]), gauges.with(["a\"b\nc\\"]));
    long.set(1);
    odd.set(-2);
    let found = text(&figures);
    assert!(found.contains(&format!("app_x{{of=\"{}\"}} 1\n", "ä".repeat(64))), "{found}");
    assert!(found.contains("app_x{of=\"a\\\"b\\nc\\\\\"} -2\n"), "{found}");
}

#[test]
fn same_registration_is_the_same_and_another_one_a_fault() {
    let figures = Figures::default();
    let first = figures.counter("app_a", "A", ["b"]);
    let again = figures.counter("app_a", "A", ["b"]);
    first.with(["x"]).add(1);
    again.with(["x"]).add(1);
    assert_eq!(figures.check(), Ok(()));
    assert!(text(&figures).contains("app_a_total{b=\"x\"} 2\n"));
    let clash = figures.gauge("app_a", "A", ["b"]);
    clash.with(["x"]).set(7);
    let error = figures.check().unwrap_err().to_string();
    assert!(
        error.contains("\"app_a\" is there twice: as a counter") && error.contains("as a gauge"),
        "{error}"
    );
    assert!(!text(&figures).contains('7'), "it is not shown");
}

#[test]
fn what_cannot_be_shown_is_a_fault() {
    let of = |register: &dyn Fn(&Figures)| {
        let figures = Figures::default();
        figures.histogram("app_h", "H", [], &SECONDS);
        register(&figures);
        figures.check().err().map(|error| error.to_string()).unwrap_or_default()
    };
    for (said, found) in [
        ("no name", of(&|figures| _ = figures.counter("1app", "A", []))),
        ("no name", of(&|figures| _ = figures.counter("app-a", "A", []))),
        ("no name", of(&|figures| _ = figures.counter("", "A", []))),
        ("ringserve_", of(&|figures| _ = figures.gauge("ringserve_app", "A", []))),
        ("process_", of(&|figures| _ = figures.gauge("process_app", "A", []))),
        ("no name of one", of(&|figures| _ = figures.gauge("app", "A", ["a:b"]))),
        ("no name of one", of(&|figures| _ = figures.gauge("app", "A", ["__a"]))),
        ("label le", of(&|figures| _ = figures.gauge("app", "A", ["le"]))),
        ("twice", of(&|figures| _ = figures.gauge("app", "A", ["a", "a"]))),
        ("one line of help", of(&|figures| _ = figures.gauge("app", "A\nB", []))),
        ("do not rise", of(&|figures| _ = figures.histogram("app", "A", [], &[1.0, 1.0]))),
        ("do not rise", of(&|figures| _ = figures.histogram("app", "A", [], &[1.0, f64::INFINITY]))),
        ("65 buckets", of(&|figures| _ = figures.histogram("app", "A", [], &[0.0; 65]))),
        ("same name as \"app_h\"", of(&|figures| _ = figures.gauge("app_h_count", "A", []))),
        ("is there twice", of(&|figures| _ = figures.histogram("app_h", "H", [], &[1.0]))),
    ] {
        assert!(found.contains(said), "{said:?} is not in {found:?}");
    }
    assert_eq!(of(&|figures| _ = figures.counter("app:a_b1_total", "A", ["a1"])), "");
}

#[test]
fn family_without_a_series_is_not_shown() {
    let figures = Figures::default();
    let _ = figures.counter("app_a", "A", []);
    assert_eq!(text(&figures), "# EOF\n");
}
