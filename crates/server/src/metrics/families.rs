//! Lines of metrics: each name with its head, then its values.

use std::fmt::{self, Write};
use std::time::Duration;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use crate::histogram::HistogramSum;

/// The labels of a value.
pub(super) type Labels = Vec<(&'static str, String)>;

pub(super) fn label(name: &'static str, value: impl ToString) -> Labels {
    vec![(name, value.to_string())]
}

/// Writes metrics of one name after the other.
pub(super) struct Families<'a> {
    to: DescriptorEncoder<'a>,
    /// Before each name.
    prefix: &'static str,
}

impl<'a> Families<'a> {
    pub(super) fn new(to: DescriptorEncoder<'a>, prefix: &'static str) -> Families<'a> {
        Families { to, prefix }
    }

    fn family(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        kind: MetricType,
        write: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let (mut full, mut sentence) = (String::new(), String::new());
        write!(full, "{}{name}", self.prefix)?;
        write!(sentence, "{help}.")?;
        let mut encoder = self.to.encode_descriptor(&full, &sentence, unit, kind)?;
        write(&mut encoder)
    }

    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.counters(name, help, None, [(Vec::new(), value)])
    }

    pub(super) fn counters<V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        values: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        let none = None::<&prometheus_client::metrics::exemplar::Exemplar<NoLabelSet, f64>>;
        self.family(name, help, unit, MetricType::Counter, |encoder| {
            values.into_iter().try_for_each(|(labels, value)| match labels.is_empty() {
                true => encoder.encode_counter(&value, none),
                false => encoder.encode_family(&labels)?.encode_counter(&value, none),
            })
        })
    }

    pub(super) fn gauges<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        values: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        self.family(name, help, unit, MetricType::Gauge, |encoder| {
            values.into_iter().try_for_each(|(labels, value)| match labels.is_empty() {
                true => encoder.encode_gauge(&value),
                false => encoder.encode_family(&labels)?.encode_gauge(&value),
            })
        })
    }

    pub(super) fn histogram(
        &mut self,
        name: &str,
        help: &str,
        of: &HistogramSum,
        from: Duration,
    ) -> fmt::Result {
        self.family(name, help, Some(&Unit::Seconds), MetricType::Histogram, |encoder| {
            encoder.encode_histogram::<NoLabelSet>(of.seconds(), of.count(), &of.buckets(from), None)
        })
    }

    /// Several, each with its labels, in buckets of an octave.
    pub(super) fn histograms(
        &mut self,
        name: &str,
        help: &str,
        each: &[(Labels, HistogramSum)],
    ) -> fmt::Result {
        self.family(name, help, Some(&Unit::Seconds), MetricType::Histogram, |encoder| {
            each.iter().try_for_each(|(labels, of)| {
                let mut encoder = encoder.encode_family(labels)?;
                encoder.encode_histogram::<NoLabelSet>(of.seconds(), of.count(), &of.octaves(), None)
            })
        })
    }
}
