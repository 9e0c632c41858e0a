//! Metrics of groups of other servers, and of each server.

use std::fmt;

use prometheus_client::registry::Unit;

use super::families::{Families, Labels, label};
use crate::stats::{BackendFigures, UpstreamFigures};

/// A name, a sentence, and the figure.
type Count<T> = (&'static str, &'static str, fn(&T) -> u64);

pub(super) fn backends(to: &mut Families<'_>, groups: &[UpstreamFigures]) -> fmt::Result {
    if groups.is_empty() {
        return Ok(());
    }
    upstreams(to, groups)?;
    let counts: [Count<BackendFigures>; 6] = [
        ("backend_requests", "Requests that it was given", |backend| backend.requests),
        ("backend_answers", "Requests that it answered", |backend| backend.answers),
        ("backend_failures", "Failures that count for its ejection", |backend| backend.failures),
        ("backend_lost", "Requests without an answer when their connection ended", |backend| backend.lost),
        ("backend_unsent", "Requests that were taken back before they left", |backend| backend.unsent),
        ("backend_stray", "Connections on which something came unasked", |backend| backend.stray),
    ];
    for (name, help, of) in counts {
        to.counters(name, help, None, each(groups, of))?;
    }
    let took = each(groups, |backend| backend.answer_seconds);
    to.counters("backend_answer", "Time that its answers took together", Some(&Unit::Seconds), took)?;
    let made = each(groups, |backend| backend.connects).map(|of| with_result(of, "made"));
    let failed = each(groups, |backend| backend.connects_failed).map(|of| with_result(of, "failed"));
    to.counters("backend_connects", "Connections made to it, and failed attempts", None, made.chain(failed))?;
    let now: [Count<BackendFigures>; 4] = [
        ("backend_in_flight", "Requests that it has now", |backend| backend.in_flight),
        ("backend_connections", "Connections to it now", |backend| backend.connections),
        ("backend_idle", "Connections to it that no request uses", |backend| backend.idle),
        ("backend_usable", "1 if it may be asked", |backend| {
            u64::from(matches!(backend.condition, "up" | "unknown"))
        }),
    ];
    now.into_iter().try_for_each(|(name, help, of)| to.gauges(name, help, None, each(groups, of)))
}

/// Of each group as a whole.
fn upstreams(to: &mut Families<'_>, groups: &[UpstreamFigures]) -> fmt::Result {
    let counts: [Count<UpstreamFigures>; 3] = [
        ("upstream_retries", "Tries beyond the first one of a request", |group| group.retries),
        ("upstream_refused", "Requests for which there was no server", |group| group.refused),
        ("upstream_panics", "Choices among all servers, since too few were left", |group| group.panics),
    ];
    for (name, help, of) in counts {
        to.counters(
            name,
            help,
            None,
            groups.iter().map(|group| (label("upstream", &group.name), of(group))),
        )?;
    }
    let lookups = groups.iter().flat_map(|group| {
        let results = [("answered", group.lookups), ("failed", group.lookups_failed)];
        results.map(|(result, count)| with_result((label("upstream", &group.name), count), result))
    });
    to.counters("upstream_lookups", "Look-ups of its servers", None, lookups)
}

fn each<V>(
    groups: &[UpstreamFigures],
    of: impl Fn(&BackendFigures) -> V,
) -> impl Iterator<Item = (Labels, V)> {
    let backends = groups.iter().flat_map(|group| group.backends.iter().map(move |backend| (group, backend)));
    backends.map(move |(group, backend)| {
        let labels = vec![("upstream", group.name.clone()), ("backend", backend.name.clone())];
        (labels, of(backend))
    })
}

fn with_result<V>((mut labels, value): (Labels, V), result: &str) -> (Labels, V) {
    labels.push(("result", result.to_owned()));
    (labels, value)
}
