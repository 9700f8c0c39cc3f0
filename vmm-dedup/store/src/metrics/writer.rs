//! Writes series, one family after the other.

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeLabelSet, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt::Error;
use vmm_dedup_protocol::stats::{BUCKETS, Histogram};

#[allow(clippy::cast_precision_loss)] // metrics are doubles
pub(super) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[allow(clippy::cast_precision_loss)] // metrics are doubles
pub(super) fn cores(percent: u64) -> f64 {
    percent as f64 / 100.0
}

/// Writes series one family after the other.
pub(super) struct Writer<'a>(pub(super) DescriptorEncoder<'a>);

impl Writer<'_> {
    pub(super) fn family(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        kind: MetricType,
        write: impl FnOnce(MetricEncoder<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        write(self.0.encode_descriptor(name, help, unit, kind)?)
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.family(name, help, None, MetricType::Gauge, |mut m| {
            m.encode_gauge(&value)
        })
    }

    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.family(name, help, None, MetricType::Counter, |mut m| {
            count(&mut m, value)
        })
    }

    pub(super) fn bytes(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.family(name, help, Some(&Unit::Bytes), MetricType::Gauge, |mut m| {
            m.encode_gauge(&value)
        })
    }
}

pub(super) fn count(metric: &mut MetricEncoder<'_>, value: impl EncodeCounterValue) -> Result<(), Error> {
    metric.encode_counter::<NoLabelSet, _, u64>(&value, None)
}

pub(super) fn histogram(
    metric: &mut MetricEncoder<'_>,
    labels: &impl EncodeLabelSet,
    from: &Histogram,
) -> Result<(), Error> {
    // The encoder adds the buckets up: hostile counts must not overflow there.
    let mut room = u64::MAX;
    #[allow(clippy::cast_precision_loss)]
    let bound = |i: usize| {
        if i + 1 == BUCKETS {
            f64::INFINITY
        } else {
            Histogram::bound_us(i) as f64 / 1e6
        }
    };
    let buckets: Vec<(f64, u64)> = (0..BUCKETS)
        .map(|i| {
            let n = from.buckets[i].min(room);
            room -= n;
            (bound(i), n)
        })
        .collect();
    let mut metric = metric.encode_family(labels)?;
    metric.encode_histogram::<NoLabelSet>(seconds(from.sum_ns), u64::MAX - room, &buckets, None)
}
