//! The series of the host: sums over its VMs, which do not go back when a VM goes.

use crate::metrics::fields::{self, COUNTERS, GAUGES, LABELLED};
use crate::metrics::snapshot::Snapshot;
use crate::metrics::writer::{Writer, cores, count, histogram, seconds};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt::Error;
use vmm_dedup_protocol::refusal::Reason;

pub(super) fn write(w: &mut Writer<'_>, s: &Snapshot) -> Result<(), Error> {
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
