//! What `top` shows, computed from two looks at a store.

use super::pressure::Pressure;
use std::time::Instant;
use vmm_dedup_host::account;
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::observer::Vm;
use vmm_dedup_protocol::stats::ServiceStats;

/// One look.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) at: Instant,
    pub(crate) store: StoreStats,
    pub(crate) vms: Vec<Vm>,
    pub(crate) pressure: Option<Pressure>,
}

/// A VM in the table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// What the service does, or why there is none.
    pub(crate) state: String,
    pub(crate) saved_net: i64,
    /// Bytes that map pages of the store or the zero page.
    pub(crate) shared: u64,
    /// A second.
    pub(crate) merges: f64,
    /// A second.
    pub(crate) breaks: f64,
    /// Cores in use.
    pub(crate) cpu: f64,
    /// Writers that had to wait for the reserve, a second.
    pub(crate) waits: f64,
}

/// The host's line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Host {
    pub(crate) services: usize,
    pub(crate) refused: usize,
    pub(crate) saved_net: i64,
    pub(crate) pages_shared: u64,
    pub(crate) pages_sharing: u64,
    pub(crate) merges: f64,
    pub(crate) breaks: f64,
    pub(crate) waits: f64,
    /// Cores that services use.
    pub(crate) cpu: f64,
    /// Cores that the store uses.
    pub(crate) store_cpu: f64,
}

fn merges(stats: &ServiceStats) -> u64 {
    stats.merges_total.saturating_add(stats.zero_merges_total)
}

/// Rows in the order of the store's list, and the host's figures. Rates are those between the two looks; a VM that was
/// not there before has none yet.
pub(crate) fn rows(before: Option<&Sample>, now: &Sample) -> (Host, Vec<Row>) {
    let elapsed = before.map_or(1.0, |b| (now.at - b.at).as_secs_f64()).max(1e-3);
    let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / elapsed;
    let rows: Vec<Row> = now
        .vms
        .iter()
        .map(|vm| {
            let same = |old: &&Vm| (&old.name, old.pid) == (&vm.name, vm.pid);
            let old = before.and_then(|b| b.vms.iter().find(same)).unwrap_or(vm);
            let (old, new) = (&old.stats, &vm.stats);
            Row {
                name: vm.name.clone(),
                state: vm
                    .reason
                    .map_or(account::state_name(new.state), |reason| reason.label())
                    .to_owned(),
                saved_net: vm.saved_net_bytes,
                shared: new
                    .pages_mapped
                    .saturating_add(new.pages_zero)
                    .saturating_mul(4096),
                merges: rate(merges(old), merges(new)),
                breaks: rate(old.breaks_total(), new.breaks_total()),
                cpu: rate(old.cpu_ns.total(), new.cpu_ns.total()) / 1e9,
                waits: rate(old.reserve_waits_total, new.reserve_waits_total),
            }
        })
        .collect();
    let sum = |of: fn(&Row) -> f64| rows.iter().map(of).sum();
    let refused = now.vms.iter().filter(|vm| vm.reason.is_some()).count();
    let host = Host {
        services: rows.len() - refused,
        refused,
        saved_net: account::saved_net(&now.store),
        pages_shared: now.store.pages_shared,
        pages_sharing: now.store.pages_sharing,
        merges: sum(|r| r.merges),
        breaks: sum(|r| r.breaks),
        waits: sum(|r| r.waits),
        cpu: sum(|r| r.cpu),
        store_cpu: rate(before.unwrap_or(now).store.cpu_ns, now.store.cpu_ns) / 1e9,
    };
    (host, rows)
}

/// A column to sort by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Name,
    State,
    Saved,
    Shared,
    Merges,
    Breaks,
    Cpu,
    Waits,
}

impl Column {
    pub(crate) const ALL: [Self; 8] = [
        Self::Name,
        Self::State,
        Self::Saved,
        Self::Shared,
        Self::Merges,
        Self::Breaks,
        Self::Cpu,
        Self::Waits,
    ];

    /// The column so many places to the right.
    pub(crate) fn moved(self, by: isize) -> Self {
        let at = Self::ALL.iter().position(|c| *c == self).unwrap_or(0);
        Self::ALL[at.saturating_add_signed(by).min(Self::ALL.len() - 1)]
    }

    /// Sorts: texts up, numbers down, or the other way round if `reversed`; equal ones by name.
    pub(crate) fn sort(self, rows: &mut [Row], reversed: bool) {
        rows.sort_by(|a, b| {
            let order = match self {
                Self::Name => a.name.cmp(&b.name),
                Self::State => a.state.cmp(&b.state),
                Self::Saved => b.saved_net.cmp(&a.saved_net),
                Self::Shared => b.shared.cmp(&a.shared),
                Self::Merges => b.merges.total_cmp(&a.merges),
                Self::Breaks => b.breaks.total_cmp(&a.breaks),
                Self::Cpu => b.cpu.total_cmp(&a.cpu),
                Self::Waits => b.waits.total_cmp(&a.waits),
            };
            let order = if reversed { order.reverse() } else { order };
            order.then_with(|| a.name.cmp(&b.name))
        });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::time::Duration;
    use vmm_dedup_protocol::refusal::Reason;
    use zerocopy::FromZeros;

    pub(crate) fn vm(name: &str, mapped: u64, broken: u64) -> Vm {
        Vm {
            name: name.into(),
            pid: 1,
            reason: None,
            saved_net_bytes: mapped.cast_signed() * 4096,
            stats: ServiceStats {
                pages_mapped: mapped,
                breaks_kernel_total: broken,
                cpu_ns: vmm_dedup_protocol::stats::CpuNs {
                    hash: broken * 1_000_000,
                    ..Default::default()
                },
                ..Default::default()
            },
        }
    }

    pub(crate) fn refused(name: &str) -> Vm {
        Vm {
            reason: Some(Reason::Vfio),
            ..vm(name, 0, 0)
        }
    }

    pub(crate) fn sample(at: Instant, vms: Vec<Vm>) -> Sample {
        Sample {
            at,
            store: StoreStats::new_zeroed(),
            vms,
            pressure: None,
        }
    }

    #[test]
    fn rates_are_differences_over_time_and_new_or_restarted_vms_have_none() {
        let start = Instant::now();
        let before = sample(start, vec![vm("a", 1, 100), vm("b", 1, 100)]);
        let later = start + Duration::from_secs(2);
        let now = sample(
            later,
            vec![vm("a", 1, 150), vm("b", 1, 30), vm("c", 1, 40), refused("d")],
        );
        let (host, rows) = rows(Some(&before), &now);
        let breaks: Vec<f64> = rows.iter().map(|r| r.breaks).collect();
        assert_eq!(breaks, [25.0, 0.0, 0.0, 0.0]);
        assert!((rows[0].cpu - 0.025).abs() < 1e-9);
        assert_eq!((host.services, host.refused, host.breaks), (3, 1, 25.0));
        assert_eq!(rows[3].state, "vfio");
    }

    #[test]
    fn numbers_sort_down_and_names_up() {
        let now = sample(Instant::now(), vec![vm("b", 5, 0), vm("a", 5, 0), vm("c", 9, 0)]);
        let order = |column: Column, reversed| -> String {
            let (_, mut rows) = rows(None, &now);
            column.sort(&mut rows, reversed);
            rows.into_iter().map(|r| r.name).collect()
        };
        assert_eq!(order(Column::Name, false), "abc");
        assert_eq!(order(Column::Name, true), "cba");
        assert_eq!(order(Column::Saved, false), "cab");
        assert_eq!(order(Column::Saved, true), "abc");
        assert_eq!(order(Column::Cpu, false), "abc");
    }

    #[test]
    fn columns_end_at_the_edges() {
        assert_eq!(Column::Name.moved(-1), Column::Name);
        assert_eq!(Column::Name.moved(1), Column::State);
        assert_eq!(Column::Waits.moved(1), Column::Waits);
    }
}
