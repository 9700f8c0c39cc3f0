//! The series of single VMs. They vanish with their VM.

use crate::ledger::accounts;
use crate::metrics::fields::{self, COUNTERS, GAUGES, LABELLED};
use crate::metrics::snapshot::Snapshot;
use crate::metrics::writer::{Writer, cores, count, histogram, seconds};
use crate::requests::peers::STATE_REFUSED;
use prometheus_client::encoding::MetricEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt::Error;
use vmm_dedup_protocol::stats::{STATES, ServiceStats};

pub(super) fn write(w: &mut Writer<'_>, s: &Snapshot) -> Result<(), Error> {
    accounts(w, s)?;
    state(w, s)
}

/// A family with what `write` says of each VM that has a service.
fn per_vm(
    w: &mut Writer<'_>,
    (name, help, unit): (&str, &str, Option<&Unit>),
    kind: MetricType,
    s: &Snapshot,
    write: impl Fn(&mut MetricEncoder<'_>, &str, &ServiceStats) -> Result<(), Error>,
) -> Result<(), Error> {
    w.family(&format!("vm_{name}"), help, unit, kind, |mut m| {
        s.vms.iter().try_for_each(|(vm, stats)| write(&mut m, vm, stats))
    })
}

fn accounts(w: &mut Writer<'_>, s: &Snapshot) -> Result<(), Error> {
    if s.vms.is_empty() {
        return Ok(());
    }
    for field in GAUGES {
        let name = (field.name, field.help, field.unit.as_ref());
        per_vm(w, name, MetricType::Gauge, s, |m, vm, stats| {
            m.encode_family(&[("vm", vm)])?.encode_gauge(&(field.get)(stats))
        })?;
    }
    for field in COUNTERS {
        let name = (field.name, field.help, field.unit.as_ref());
        per_vm(w, name, MetricType::Counter, s, |m, vm, stats| {
            count(&mut m.encode_family(&[("vm", vm)])?, (field.get)(stats))
        })?;
    }
    for family in LABELLED {
        let name = (family.name, family.help, family.unit.as_ref());
        per_vm(w, name, MetricType::Counter, s, |m, vm, stats| {
            family.series.iter().try_for_each(|(value, get)| {
                let labels = [("vm", vm), (family.label, *value)];
                count(&mut m.encode_family(&labels)?, get(stats))
            })
        })?;
    }
    let name = ("cpu", "CPU time of the service", Some(&Unit::Seconds));
    per_vm(w, name, MetricType::Counter, s, |m, vm, stats| {
        let mut stages = fields::stages(&stats.cpu_ns).into_iter();
        stages.try_for_each(|(stage, ns)| {
            count(
                &mut m.encode_family(&[("vm", vm), ("stage", stage)])?,
                seconds(ns),
            )
        })
    })?;
    for (name, help, get) in fields::HISTOGRAMS {
        let name = (*name, *help, Some(&Unit::Seconds));
        per_vm(w, name, MetricType::Histogram, s, |m, vm, stats| {
            histogram(m, &[("vm", vm)], get(stats))
        })?;
    }
    let help = "What sharing saves, less the service's bookkeeping and the VM's part of the store, by the pages it maps";
    let shares = accounts::Shares::of(&s.store, &s.gauges, s.vms.len());
    let name = ("saved_net", help, Some(&Unit::Bytes));
    per_vm(w, name, MetricType::Gauge, s, |m, vm, stats| {
        m.encode_family(&[("vm", vm)])?
            .encode_gauge(&shares.saved_net(stats))
    })?;
    let name = ("cpu_budget_cores", "CPU time that the service may use", None);
    per_vm(w, name, MetricType::Gauge, s, |m, vm, stats| {
        m.encode_family(&[("vm", vm)])?
            .encode_gauge(&cores(stats.cpu_percent))
    })?;
    let name = (
        "pass_period",
        "Time from one pass to the next",
        Some(&Unit::Seconds),
    );
    per_vm(w, name, MetricType::Gauge, s, |m, vm, stats| {
        let time = seconds(stats.pass_period_ms.saturating_mul(1_000_000));
        m.encode_family(&[("vm", vm)])?.encode_gauge(&time)
    })?;
    let help = "How long the pages of a merge window should be away at most";
    let name = ("stop_target", help, Some(&Unit::Seconds));
    per_vm(w, name, MetricType::Gauge, s, |m, vm, stats| {
        let time = seconds(stats.stop_target_us.saturating_mul(1000));
        m.encode_family(&[("vm", vm)])?.encode_gauge(&time)
    })?;
    let name = (
        "last_pass_timestamp",
        "End of the last pass, Unix time",
        Some(&Unit::Seconds),
    );
    per_vm(w, name, MetricType::Gauge, s, |m, vm, stats| {
        m.encode_family(&[("vm", vm)])?
            .encode_gauge(&s.times.unix(stats.last_pass_ms))
    })?;
    let help = "What looks for twins for the service, and what verifies pages that it took";
    let name = ("engine", help, None);
    per_vm(w, name, MetricType::Info, s, |m, vm, stats| {
        let (search, verify) = (stats.search.text(), stats.verify.text());
        m.encode_info(&[("vm", vm), ("search", &search), ("verify", &verify)])
    })?;
    let name = ("use_source", "What tells which memory is used", None);
    per_vm(w, name, MetricType::Info, s, |m, vm, stats| {
        m.encode_info(&[("vm", vm), ("source", stats.use_source_name())])
    })?;
    let name = ("agent", "Whether the guest's agent is heard", None);
    per_vm(w, name, MetricType::Info, s, |m, vm, stats| {
        m.encode_info(&[("vm", vm), ("state", stats.hints.agent_name())])
    })
}

/// What there is of refused VMs as well.
fn state(w: &mut Writer<'_>, s: &Snapshot) -> Result<(), Error> {
    let services = s.vms.iter().map(|(vm, stats)| (vm.as_str(), stats.state));
    let refused = s.refused.iter().map(|(vm, ..)| (vm.as_str(), STATE_REFUSED));
    let states: Vec<(&str, u64)> = services.chain(refused).collect();
    if states.is_empty() {
        return Ok(());
    }
    let help = "1 for the state that the VM is in";
    w.family("vm_state", help, None, MetricType::Gauge, |mut m| {
        for (vm, current) in states {
            for (number, state) in (0u64..).zip(STATES) {
                m.encode_family(&[("vm", vm), ("state", state)])?
                    .encode_gauge(&u64::from(current == number))?;
            }
        }
        Ok(())
    })?;
    if s.refused.is_empty() {
        return Ok(());
    }
    let help = "VMs that are not deduplicated, and why";
    w.family("vm_refused", help, None, MetricType::Info, |mut m| {
        for (vm, _, reason) in &s.refused {
            m.encode_info(&[("vm", vm.as_str()), ("reason", reason.label())])?;
        }
        Ok(())
    })?;
    let help = "Guest pages of a VM that is not deduplicated";
    w.family("vm_refused_pages", help, None, MetricType::Gauge, |mut m| {
        for (vm, pages, _) in &s.refused {
            m.encode_family(&[("vm", vm.as_str())])?.encode_gauge(pages)?;
        }
        Ok(())
    })
}
