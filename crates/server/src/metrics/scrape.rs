//! A scrape: the server's metrics with those of the program's collectors, in the format that the
//! scraper takes.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use ringserve_base::guard::guard;
use ringserve_base::lines::{error, info};
use ringserve_drivers::guarded;

use super::Metrics;
use super::families::Families;
use super::figures::line_names;
use crate::shard::remote::control::ServerControl;

/// Bytes of the metrics of the program at most, all collectors together.
pub(crate) const COLLECTED_BYTES_MAX: usize = 2 << 20;

/// A format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exposition {
    OpenMetrics,
    /// The older text of Prometheus.
    Text,
}

impl Exposition {
    /// The one that a header `Accept` prefers: OpenMetrics where it takes both alike or says
    /// nothing, the text where it takes neither.
    pub(crate) fn accepted<'a>(values: impl IntoIterator<Item = &'a str>) -> Exposition {
        let ranges: Vec<(String, f32)> =
            values.into_iter().flat_map(|value| value.split(',')).filter_map(media_range).collect();
        if ranges.is_empty() {
            return Exposition::OpenMetrics;
        }
        // The closest range decides, and of several as close the one with the most weight.
        let weight = |names: [&str; 3]| {
            let of = |name: &str| {
                ranges.iter().filter(|(range, _)| range == name).map(|(_, q)| *q).reduce(f32::max)
            };
            names.into_iter().find_map(of).unwrap_or(0.0)
        };
        let open = weight(["application/openmetrics-text", "application/*", "*/*"]);
        let text = weight(["text/plain", "text/*", "*/*"]);
        if open > 0.0 && open >= text { Exposition::OpenMetrics } else { Exposition::Text }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Exposition::OpenMetrics => Metrics::CONTENT_TYPE,
            Exposition::Text => Metrics::TEXT_CONTENT_TYPE,
        }
    }
}

/// A range of media types in lower case, with its weight.
fn media_range(text: &str) -> Option<(String, f32)> {
    let mut parts = text.split(';').map(str::trim);
    let range = parts.next().filter(|range| !range.is_empty())?.to_ascii_lowercase();
    let weight = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
    let weight = weight.map_or(1.0, |weight| weight.trim().parse().unwrap_or(0.0));
    Some((range, weight))
}

/// The collectors of a program.
#[derive(Debug, Default)]
pub(crate) struct Collectors {
    each: Vec<ProgramCollector>,
}

#[derive(Debug)]
struct ProgramCollector {
    registry: Registry,
    /// The log has it that it is left out.
    is_told: AtomicBool,
}

impl Collectors {
    pub(crate) fn add(&mut self, collector: Box<dyn Collector>) {
        let mut registry = Registry::default();
        registry.register_collector(collector);
        self.each.push(ProgramCollector { registry, is_told: AtomicBool::new(false) });
    }

    pub(crate) fn len(&self) -> usize {
        self.each.len()
    }

    /// The text of all collectors, after that of the server; `None` if there are none. One that
    /// panics, has a name that is there already or says too much is left out: what it does must not
    /// hide what all others say. Returns how many were.
    pub(crate) fn collect(&self, of_server: &str) -> (String, usize) {
        let mut names: HashSet<String> = names(of_server).collect();
        let (mut all, mut left_out) = (String::new(), 0);
        for (number, of) in self.each.iter().enumerate() {
            let mut text = String::new();
            let encoded = guard(|| text::encode_registry(&mut text, &of.registry));
            let fault = match encoded {
                Err(panicked) => Some(format!("it panicked: {}", panicked.message())),
                Ok(Err(_)) => Some("it failed".to_owned()),
                Ok(Ok(())) if all.len() + text.len() > COLLECTED_BYTES_MAX => {
                    Some(format!("all together would have more than {COLLECTED_BYTES_MAX} bytes"))
                }
                Ok(Ok(())) => clash(&text, &names),
            };
            let was_told = of.is_told.swap(fault.is_some(), Ordering::Relaxed);
            match fault {
                Some(fault) => {
                    left_out += 1;
                    if !was_told {
                        guarded(|| {
                            error!("collector {number} of the program is left out of the metrics: {fault}")
                        });
                    }
                }
                None => {
                    if was_told {
                        guarded(|| info!("collector {number} of the program is in the metrics again"));
                    }
                    names.extend(self::names(&text));
                    all.push_str(&text);
                }
            }
        }
        (all, left_out)
    }
}

/// The names that begin the lines of a text, and those of its families.
fn names(text: &str) -> impl Iterator<Item = String> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.flat_map(|(name, kind)| line_names(name, kind))
}

fn clash(text: &str, known: &HashSet<String>) -> Option<String> {
    let mut own = HashSet::new();
    let twice = names(text).find(|name| known.contains(name) || !own.insert(name.clone()))?;
    Some(format!("there is another figure with the name {twice}"))
}

/// The whole answer to a scrape: the text of the server, with what was collected of the program.
pub(crate) fn scrape(of_server: String, collected: Option<(String, usize)>, format: Exposition) -> String {
    let mut text = of_server;
    if let Some((of_program, left_out)) = collected {
        text.push_str(&of_program);
        text.push_str(&left_out_line(left_out));
    }
    match format {
        Exposition::OpenMetrics => text + "# EOF\n",
        Exposition::Text => older_text(&text),
    }
}

/// The text of the server alone.
pub(crate) fn of_server(server: &ServerControl) -> String {
    let mut text = String::new();
    server.metrics().write_families(&mut text);
    text
}

fn left_out_line(left_out: usize) -> String {
    #[derive(Debug)]
    struct LeftOut(u64);
    impl Collector for LeftOut {
        fn encode(&self, to: prometheus_client::encoding::DescriptorEncoder<'_>) -> std::fmt::Result {
            let what = "Collectors of the program that are not in this scrape: the log has why";
            Families::new(to, "ringserve_").gauges("collectors_left_out", what, None, [(Vec::new(), self.0)])
        }
    }
    let (mut text, mut registry) = (String::new(), Registry::default());
    registry.register_collector(Box::new(LeftOut(left_out as u64)));
    let _ = text::encode_registry(&mut text, &registry);
    text
}

/// OpenMetrics as the older text: a counter's family has the name of its lines, kinds have their
/// older names, and what that text does not have, such as exemplars, is left out.
pub(crate) fn older_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (ending, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                kind => ("", kind),
            };
            if let Some((_, help)) = help.take().filter(|(of, _)| *of == name) {
                text += &format!("# HELP {name}{ending} {}\n", help.replace("\\\"", "\""));
            }
            text += &format!("# TYPE {name}{ending} {kind}\n");
        } else if !line.starts_with('#') {
            text += without_exemplar(line);
            text.push('\n');
        }
    }
    text
}

/// A line of a value without its exemplar, which stands after a `#` outside of the labels.
fn without_exemplar(line: &str) -> &str {
    let (mut is_quoted, mut is_escaped) = (false, false);
    let end = line.find(|c: char| {
        let ends = c == '#' && !is_quoted;
        is_quoted ^= c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        ends
    });
    end.map_or(line, |end| line[..end].trim_end())
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
    use prometheus_client::metrics::counter::ConstCounter;

    use super::*;

    #[test]
    fn format_is_that_which_is_accepted() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                          application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,\
                          text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        let older = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;q=0.7,text/plain;version=0.0.4;q=0.3";
        for (accept, found) in [
            ("", Exposition::OpenMetrics),
            ("*/*", Exposition::OpenMetrics),
            (prometheus, Exposition::OpenMetrics),
            ("application/openmetrics-text", Exposition::OpenMetrics),
            ("APPLICATION/OpenMetrics-Text; version=1.0.0", Exposition::OpenMetrics),
            ("text/html, */*;q=0.8", Exposition::OpenMetrics),
            (older, Exposition::Text),
            ("text/plain", Exposition::Text),
            ("text/plain;version=0.0.4;q=1,*/*;q=0.1", Exposition::Text),
            ("text/plain, application/openmetrics-text;q=0.9", Exposition::Text),
            ("text/plain;q=0.1, application/openmetrics-text;q=0", Exposition::Text),
            ("text/*, application/openmetrics-text;q=nonsense", Exposition::Text),
            ("application/json", Exposition::Text),
        ] {
            assert_eq!(
                Exposition::accepted([accept].into_iter().filter(|text| !text.is_empty())),
                found,
                "{accept}"
            );
        }
        assert_eq!(Exposition::accepted(["text/plain;q=0.2", "application/*"]), Exposition::OpenMetrics);
    }

    #[test]
    fn older_text_has_names_and_kinds_of_its_own() {
        let text = older_text(
            "# HELP a_bytes Say \\\"a\\\".\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{b=\"x # {y\\\"z\\\" # \"} 7 # {id=\"1\"} 0.5\n\
             # HELP c C.\n# TYPE c unknown\nc 1\n# TYPE d gauge\nd 2.5\n# HELP e E.\n# TYPE e info\ne_info{v=\"1\"} 1\n# EOF\n",
        );
        assert_eq!(
            text,
            "# HELP a_bytes_total Say \"a\".\n# TYPE a_bytes_total counter\na_bytes_total{b=\"x # {y\\\"z\\\" # \"} 7\n\
             # HELP c C.\n# TYPE c untyped\nc 1\n# TYPE d gauge\nd 2.5\n# HELP e_info E.\n# TYPE e_info gauge\ne_info{v=\"1\"} 1\n"
        );
    }

    /// Has a counter of this name, or panics.
    #[derive(Debug)]
    struct Named(&'static str);

    impl Collector for Named {
        fn encode(&self, mut to: DescriptorEncoder<'_>) -> std::fmt::Result {
            assert_ne!(self.0, "panics", "planted");
            let counter = ConstCounter::new(1u64);
            counter.encode(to.encode_descriptor(self.0, "Help", None, counter.metric_type())?)
        }
    }

    #[test]
    fn collector_that_panics_or_clashes_is_left_out_alone() {
        let of_server = "# TYPE ringserve_turns counter\nringserve_turns_total 1\n";
        let collected = |names: &[&'static str]| {
            let mut collectors = Collectors::default();
            names.iter().for_each(|name| collectors.add(Box::new(Named(name))));
            let (text, left_out) = collectors.collect(of_server);
            let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
            (families.map(str::to_owned).collect::<Vec<_>>(), left_out)
        };
        assert_eq!(collected(&["a", "panics", "b"]), (vec!["a".to_owned(), "b".to_owned()], 1));
        assert_eq!(collected(&["a", "a", "ringserve_turns"]), (vec!["a".to_owned()], 2));
        assert_eq!(
            collected(&["a", "a_total", "b_total", "b"]),
            (vec!["a".to_owned(), "b_total".to_owned()], 2)
        );
        assert_eq!(collected(&[]), (vec![], 0));
    }
}
