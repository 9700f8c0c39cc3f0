//! Metrics, encoded from the state when they are asked for.
//!
//! Host series have no VM label (`vmmdedup_merges_total`); the same per VM are named `vmmdedup_vm_*{vm="..."}` and
//! vanish with the VM. Host counters are kept by the store, so they do not go back then. Names that KSM has mean
//! what KSM's mean.

use crate::ledger::accounts;
use crate::ledger::allocator::Counts;
use crate::requests::exchange::ExchangeCounters;
use crate::requests::peers::PeerCounters;
use crate::state::{Shared, State, lock};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeLabelSet, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::borrow::Cow;
use std::fmt::{Error, Write};
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::refusal::Reason;
use vmm_dedup_protocol::stats::{BUCKETS, Histogram, ServiceStats};

mod fields;
mod per_vm;
mod pressure;
use fields::{COUNTERS, GAUGES, LABELLED};

/// The registry behind /metrics.
pub(crate) fn registry(shared: Shared) -> Registry {
    let domain = lock(&shared).config.domain.clone();
    let labels = [(Cow::Borrowed("domain"), Cow::Owned(domain))];
    let mut registry = Registry::with_prefix_and_labels("vmmdedup", labels.into_iter());
    registry.register_collector(Box::new(StateCollector(shared)));
    registry
}

#[derive(Debug)]
struct StateCollector(Shared);

/// What one scrape shows.
struct Snapshot {
    store: StoreStats,
    exchange: ExchangeCounters,
    peers: PeerCounters,
    huge_pages: u64,
    vms: Vec<(String, ServiceStats)>,
    /// Name, pages and reason of those without a service.
    refused: Vec<(String, u64, Reason)>,
    gauges: ServiceStats,
    totals: ServiceStats,
    orphans: (u64, u64),
    connections: u64,
    slots: Counts,
    segments: u64,
    started: f64,
}

impl Snapshot {
    fn of(state: &State) -> Self {
        let (statistics, segments) = (state.statistics(), state.exchange.pool.segments());
        let services = state.peers.services();
        let vms: Vec<_> = services
            .map(|(id, _, s)| (s.name.clone(), statistics.vm(id, s)))
            .collect();
        let started = state
            .started
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let refused = state
            .peers
            .refused()
            .map(|vm| (vm.name.clone(), vm.pages, vm.refusal.reason));
        Self {
            refused: refused.collect(),
            store: statistics.store(),
            exchange: state.exchange.counters,
            peers: state.peers.counters,
            huge_pages: state.exchange.pool.collapsed(),
            gauges: accounts::sum(vms.iter().map(|(_, stats)| stats)),
            vms,
            totals: state.totals,
            orphans: statistics.orphans(),
            connections: state.peers.len() as u64,
            slots: segments.allocator().counts(),
            segments: segments.count(),
            started: started.as_secs_f64(),
        }
    }
}

#[allow(clippy::cast_precision_loss)] // metrics are doubles
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[allow(clippy::cast_precision_loss)] // metrics are doubles
fn cores(percent: u64) -> f64 {
    percent as f64 / 100.0
}

/// Writes series one family after the other.
struct Writer<'a>(DescriptorEncoder<'a>);

impl Writer<'_> {
    fn family(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        kind: MetricType,
        write: impl FnOnce(MetricEncoder<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        write(self.0.encode_descriptor(name, help, unit, kind)?)
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.family(name, help, None, MetricType::Gauge, |mut m| {
            m.encode_gauge(&value)
        })
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.family(name, help, None, MetricType::Counter, |mut m| {
            count(&mut m, value)
        })
    }

    fn bytes(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.family(name, help, Some(&Unit::Bytes), MetricType::Gauge, |mut m| {
            m.encode_gauge(&value)
        })
    }
}

fn count(metric: &mut MetricEncoder<'_>, value: impl EncodeCounterValue) -> Result<(), Error> {
    metric.encode_counter::<NoLabelSet, _, u64>(&value, None)
}

fn histogram(
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

impl Collector for StateCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let snapshot = Snapshot::of(&lock(&self.0));
        let mut writer = Writer(encoder);
        store(&mut writer, &snapshot)?;
        host(&mut writer, &snapshot)?;
        pressure::write(&mut writer)?;
        per_vm::write(&mut writer, &snapshot)
    }
}

fn store(w: &mut Writer<'_>, s: &Snapshot) -> Result<(), Error> {
    let (stats, peers, exchange) = (&s.store, &s.peers, &s.exchange);
    w.family(
        "build",
        "The release of the store",
        None,
        MetricType::Info,
        |mut m| m.encode_info(&[("version", env!("CARGO_PKG_VERSION"))]),
    )?;
    let help = "When the store started, Unix time";
    let unit = Some(&Unit::Seconds);
    w.family("start_time", help, unit, MetricType::Gauge, |mut m| {
        m.encode_gauge(&s.started)
    })?;
    w.gauge("pages_shared", "Pages of the store in use", stats.pages_shared)?;
    w.gauge(
        "pages_sharing",
        "References to pages of the store beyond the first of each",
        stats.pages_sharing,
    )?;
    w.gauge(
        "slots_limbo",
        "Pages without references that some VM might still map",
        stats.slots_limbo,
    )?;
    slots(w, s)?;
    w.gauge("slots_max", "Pages that the store may hold", stats.slots_max)?;
    w.bytes(
        "resident",
        "Memory of the store's pages, in use or not",
        stats.resident_bytes,
    )?;
    w.gauge("sightings", "Keys that were sighted once", stats.sightings)?;
    w.gauge("marks", "Line keys that are known to be ambiguous", stats.marks)?;
    w.bytes(
        "store_metadata",
        "Index, sightings, references and slot states of the store",
        stats.metadata_bytes,
    )?;
    let help = "What sharing saves, less all bookkeeping of store, services and kernel";
    let net = stats.saved_net_bytes.cast_signed();
    w.family(
        "saved_net",
        help,
        Some(&Unit::Bytes),
        MetricType::Gauge,
        |mut m| m.encode_gauge(&net),
    )?;
    let help = "CPU time of the store process, user and system";
    w.family(
        "store_cpu",
        help,
        Some(&Unit::Seconds),
        MetricType::Counter,
        |mut m| count(&mut m, seconds(stats.cpu_ns)),
    )?;
    w.gauge("epoch", "Current epoch of the index", stats.epoch)?;
    w.gauge("vms", "VMs connected", s.vms.len() as u64)?;
    w.gauge(
        "connections",
        "Connections, counting orphans and observers",
        s.connections,
    )?;
    w.gauge(
        "orphans",
        "Broken connections whose processes still live",
        s.orphans.0,
    )?;
    w.gauge("orphan_references", "References that orphans hold", s.orphans.1)?;
    w.counter("connections_accepted", "Connections accepted", peers.connections)?;
    w.counter(
        "malformed",
        "Connections closed because their peer broke the protocol",
        peers.malformed,
    )?;
    w.counter(
        "overflows",
        "Connections closed because their peer did not read",
        peers.overflows,
    )?;
    w.counter(
        "store_published",
        "Pages that were given a slot",
        exchange.published,
    )?;
    w.counter(
        "store_huge_pages",
        "Huge pages that guests share as a whole and that became one in memory",
        s.huge_pages,
    )?;
    w.counter(
        "unverified",
        "Pages whose content did not have the announced key",
        exchange.unverified,
    )?;
    w.counter("sightings_received", "Sightings received", exchange.sightings)?;
    w.counter(
        "withdrawals_received",
        "Withdrawals received",
        exchange.withdrawals,
    )?;
    w.counter("batches", "Batches handled", exchange.batches)
}

/// How slots come back.
fn slots(w: &mut Writer<'_>, s: &Snapshot) -> Result<(), Error> {
    w.gauge(
        "slots_cooling",
        "Free pages of the store that are not rewritten yet, since a device may still read them",
        s.slots.cooling,
    )?;
    w.gauge(
        "slots_reusable",
        "Free pages of the store that have memory and may be rewritten",
        s.slots.reusable,
    )?;
    w.counter(
        "slots_reused",
        "Pages of the store that were rewritten where others had been",
        s.slots.reused_total,
    )?;
    let help = "How long the page had cooled that was freed last";
    w.family(
        "slot_cooled",
        help,
        Some(&Unit::Seconds),
        MetricType::Gauge,
        |mut m| m.encode_gauge(&s.slots.cooled_seconds),
    )?;
    w.gauge(
        "segments",
        "Files of the store, 128 MiB each when full",
        s.segments,
    )?;
    w.counter(
        "segments_retired",
        "Files that emptied and went, with their memory",
        s.slots.segments_retired_total,
    )
}

fn host(w: &mut Writer<'_>, s: &Snapshot) -> Result<(), Error> {
    for field in GAUGES {
        w.family(
            field.name,
            field.help,
            field.unit.as_ref(),
            MetricType::Gauge,
            |mut m| m.encode_gauge(&(field.get)(&s.gauges)),
        )?;
    }
    for field in COUNTERS {
        w.family(
            field.name,
            field.help,
            field.unit.as_ref(),
            MetricType::Counter,
            |mut m| count(&mut m, (field.get)(&s.totals)),
        )?;
    }
    for family in LABELLED {
        let unit = family.unit.as_ref();
        w.family(family.name, family.help, unit, MetricType::Counter, |mut m| {
            for (value, get) in family.series {
                count(&mut m.encode_family(&[(family.label, *value)])?, get(&s.totals))?;
            }
            if family.name == "refusals" {
                count(
                    &mut m.encode_family(&[(family.label, "store_full")])?,
                    s.exchange.refused_full,
                )?;
            }
            Ok(())
        })?;
    }
    w.family(
        "cpu",
        "CPU time of the services",
        Some(&Unit::Seconds),
        MetricType::Counter,
        |mut m| {
            for (stage, ns) in fields::stages(&s.totals.cpu_ns) {
                count(&mut m.encode_family(&[("stage", stage)])?, seconds(ns))?;
            }
            Ok(())
        },
    )?;
    let help = "CPU time that all services together may use";
    w.family("cpu_budget_cores", help, None, MetricType::Gauge, |mut m| {
        m.encode_gauge(&cores(s.gauges.cpu_percent))
    })?;
    let help = "VMs that are not deduplicated, by the reason";
    w.family("refused_vms", help, None, MetricType::Gauge, |mut m| {
        for reason in Reason::ALL {
            let n = s.refused.iter().filter(|(_, _, r)| *r == reason).count() as u64;
            m.encode_family(&[("reason", reason.label())])?.encode_gauge(&n)?;
        }
        Ok(())
    })?;
    let none: [(&str, &str); 0] = [];
    for (name, help, get) in fields::HISTOGRAMS {
        w.family(
            name,
            help,
            Some(&Unit::Seconds),
            MetricType::Histogram,
            |mut m| histogram(&mut m, &none, get(&s.totals)),
        )?;
    }
    Ok(())
}

/// OpenMetrics text as the older text format, which names counters with their suffix and has no units, no info type
/// and no end mark.
pub(crate) fn classic(openmetrics: &str) -> String {
    let mut out = String::with_capacity(openmetrics.len());
    // HELP comes before TYPE, which tells the suffix.
    let mut help: Option<(&str, &str)> = None;
    for line in openmetrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                other => ("", other),
            };
            if let Some((_, text)) = help.take().filter(|(of, _)| *of == name) {
                let _ = writeln!(out, "# HELP {name}{suffix} {text}");
            }
            let _ = writeln!(out, "# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with('#') {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_classic_format_names_counters_in_full() {
        let text = "# HELP a_seconds What.\n# TYPE a_seconds counter\n# UNIT a_seconds seconds\n\
                    a_seconds_total 1\n# HELP b That\n# TYPE b info\nb_info{v=\"1\"} 1\n# EOF\n";
        let expected = "# HELP a_seconds_total What.\n# TYPE a_seconds_total counter\na_seconds_total 1\n\
                        # HELP b_info That\n# TYPE b_info gauge\nb_info{v=\"1\"} 1\n";
        assert_eq!(classic(text), expected);
    }
}
