//! What `top` shows: the figures of all stores, computed from two looks at each.

use super::pressure::Pressure;
use std::path::Path;
use std::time::{Duration, Instant};
use vmm_dedup_host::account;
use vmm_dedup_host::registry::Record;
use vmm_dedup_host::silence::Silence;
use vmm_dedup_host::store::command_line;
use vmm_dedup_host::units::natural_order;
use vmm_dedup_host::view::{HostView, StoreView};
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::observer::Vm;
use vmm_dedup_protocol::stats::ServiceStats;

/// One look at a store.
#[derive(Debug)]
pub(crate) struct StoreSample {
    /// Where it listens: its name here.
    pub(crate) socket: String,
    pub(crate) domain: String,
    /// What it said of itself when it started.
    pub(crate) record: Option<Record>,
    /// What it says, or why nothing.
    pub(crate) account: Result<(StoreStats, Vec<Vm>), Silence>,
}

/// One look at the host.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) at: Instant,
    pub(crate) stores: Vec<StoreSample>,
    pub(crate) pressure: Option<Pressure>,
}

impl Sample {
    /// A look that was just taken.
    pub(crate) fn of(host: HostView) -> Self {
        let store = |store: StoreView| StoreSample {
            domain: store.domain().unwrap_or("?").to_owned(),
            socket: store.socket.display().to_string(),
            record: store.record,
            account: store.account.map_err(|(silence, _)| silence),
        };
        Self {
            at: Instant::now(),
            stores: host.stores.into_iter().map(store).collect(),
            pressure: Pressure::of_host(),
        }
    }

    /// A look that found no store any more.
    pub(crate) fn of_nothing() -> Self {
        Self {
            at: Instant::now(),
            stores: Vec::new(),
            pressure: Pressure::of_host(),
        }
    }
}

/// A VM in the table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) domain: String,
    /// What the service does, or why there is none.
    pub(crate) state: String,
    /// How long ago its last pass ended.
    pub(crate) passed: Option<Duration>,
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
    /// Settings of the service.
    pub(crate) cpu_percent: u64,
    pub(crate) pass_period_ms: u64,
    pub(crate) stop_target_us: u64,
    /// Nothing without managed breaks.
    pub(crate) reserve_pages: u64,
    /// Whether there is a service, which has settings.
    pub(crate) served: bool,
    /// Whether all of this is of now: its store answers.
    pub(crate) fresh: bool,
}

/// The host's figures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Host {
    /// Stores that answer: without one nothing is known.
    pub(crate) answering: usize,
    pub(crate) services: usize,
    pub(crate) refused: usize,
    pub(crate) saved_net: i64,
    pub(crate) pages_shared: u64,
    pub(crate) pages_sharing: u64,
    pub(crate) resident_bytes: u64,
    /// What stores may hold.
    pub(crate) limit_bytes: u64,
    pub(crate) merges: f64,
    pub(crate) breaks: f64,
    pub(crate) waits: f64,
    /// Cores that services use.
    pub(crate) cpu: f64,
    /// Cores that stores use.
    pub(crate) store_cpu: f64,
}

/// A store as far as it is known.
#[derive(Debug)]
struct Store {
    socket: String,
    domain: String,
    record: Option<Record>,
    /// What starts it again, since it is gone.
    start: String,
    /// What it said last, and when.
    last: Option<(Instant, StoreStats, Vec<Vm>)>,
    rows: Vec<Row>,
    store_cpu: f64,
    /// Since when it says nothing, and why.
    silent: Option<(Instant, Silence)>,
}

/// A store that says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Silent<'a> {
    pub(crate) socket: &'a str,
    /// For how long.
    pub(crate) time: Duration,
    /// It never answered, so that it may be so for longer.
    pub(crate) at_least: bool,
    /// Why.
    pub(crate) silence: Silence,
    /// What starts it again; nothing unless it is gone.
    pub(crate) start: &'a str,
}

/// All stores that were seen since the start. One that ends stays, with its last figures: that is when somebody looks.
#[derive(Debug, Default)]
pub(crate) struct Stores(Vec<Store>);

/// How a VM is of whose store nothing is heard: words that the column has room for.
fn state_under(silence: Silence) -> &'static str {
    match silence {
        Silence::Gone => "store gone",
        Silence::Hangs => "store hung",
        Silence::NoAccess => "no access",
        Silence::Strange => "no store",
    }
}

impl Stores {
    /// Takes another look.
    pub(crate) fn update(&mut self, sample: Sample) {
        for store in &mut self.0 {
            if !sample.stores.iter().any(|now| now.socket == store.socket) {
                store.say_nothing(sample.at, Silence::Gone);
            }
        }
        for now in sample.stores {
            let at = match self.0.iter().position(|store| store.socket == now.socket) {
                Some(at) => at,
                None => {
                    self.0.push(Store::new(&now));
                    self.0.len() - 1
                }
            };
            match now.account {
                Ok((stats, vms)) => {
                    self.0[at].record = now.record;
                    self.0[at].say(sample.at, now.domain, stats, vms);
                }
                Err(silence) => self.0[at].say_nothing(sample.at, silence),
            }
        }
    }

    /// All VMs, those of stores that say nothing as they were.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let rows = |store: &Store| {
            let silent = store.silent;
            let rows = store.rows.clone().into_iter();
            rows.map(move |row| match silent {
                None => row,
                Some((_, silence)) => Row {
                    state: state_under(silence).to_owned(),
                    fresh: false,
                    merges: 0.0,
                    breaks: 0.0,
                    cpu: 0.0,
                    waits: 0.0,
                    ..row
                },
            })
        };
        self.0.iter().flat_map(rows).collect()
    }

    /// The sums of the stores that answer.
    pub(crate) fn host(&self) -> Host {
        let mut host = Host::default();
        for store in self.0.iter().filter(|store| store.silent.is_none()) {
            let Some((_, stats, vms)) = &store.last else {
                continue;
            };
            let refused = vms.iter().filter(|vm| vm.reason.is_some()).count();
            let sum = |of: fn(&Row) -> f64| store.rows.iter().map(of).sum::<f64>();
            host.answering += 1;
            host.refused += refused;
            host.services += vms.len() - refused;
            host.saved_net = host.saved_net.saturating_add(account::saved_net(stats));
            host.pages_shared = host.pages_shared.saturating_add(stats.pages_shared);
            host.pages_sharing = host.pages_sharing.saturating_add(stats.pages_sharing);
            host.resident_bytes = host.resident_bytes.saturating_add(stats.resident_bytes);
            host.limit_bytes = host.limit_bytes.saturating_add(account::limit_bytes(stats));
            host.merges += sum(|row| row.merges);
            host.breaks += sum(|row| row.breaks);
            host.waits += sum(|row| row.waits);
            host.cpu += sum(|row| row.cpu);
            host.store_cpu += store.store_cpu;
        }
        host
    }

    /// How many of those that answer share securely.
    pub(crate) fn secure(&self) -> usize {
        let answering = self.0.iter().filter(|store| store.silent.is_none());
        let secure = |store: &&Store| {
            store
                .last
                .as_ref()
                .is_some_and(|(_, stats, _)| account::is_secure(stats))
        };
        answering.filter(secure).count()
    }

    /// Where the stores are that have no room.
    pub(crate) fn full(&self) -> impl Iterator<Item = &str> {
        let answering = self.0.iter().filter(|store| store.silent.is_none());
        answering.filter_map(|store| {
            let (_, stats, _) = store.last.as_ref()?;
            account::is_full(stats).then_some(store.socket.as_str())
        })
    }

    /// Where the stores are, for the title.
    pub(crate) fn place(&self) -> String {
        match &self.0[..] {
            [only] => only.socket.clone(),
            stores => format!("{} stores", stores.len()),
        }
    }

    /// Whether VMs are of more than one domain.
    pub(crate) fn many(&self) -> bool {
        self.0.len() > 1
    }

    /// Stores that say nothing, and why.
    pub(crate) fn silent(&self, now: Instant) -> Vec<Silent<'_>> {
        let silent = self.0.iter().filter_map(|store| {
            let (since, silence) = store.silent?;
            Some(Silent {
                socket: &store.socket,
                time: now.saturating_duration_since(since),
                at_least: store.last.is_none(),
                silence,
                start: &store.start,
            })
        });
        silent.collect()
    }
}

impl Store {
    fn new(sample: &StoreSample) -> Self {
        Self {
            socket: sample.socket.clone(),
            domain: sample.domain.clone(),
            record: sample.record.clone(),
            start: String::new(),
            last: None,
            rows: Vec::new(),
            store_cpu: 0.0,
            silent: None,
        }
    }

    fn say_nothing(&mut self, at: Instant, silence: Silence) {
        let since = self.silent.map_or(at, |(since, _)| since);
        let was_gone = matches!(self.silent, Some((_, Silence::Gone)));
        if silence == Silence::Gone && !was_gone {
            self.start = command_line(Path::new(&self.socket), self.record.as_ref());
        }
        self.silent = Some((since, silence));
    }

    /// Rates are those between the two looks; a VM that was not there before has none yet, and nor has a store that was away.
    fn say(&mut self, at: Instant, domain: String, stats: StoreStats, vms: Vec<Vm>) {
        let before = self.last.take().filter(|_| self.silent.is_none());
        let elapsed = before
            .as_ref()
            .map_or(1.0, |(then, ..)| (at - *then).as_secs_f64())
            .max(1e-3);
        let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / elapsed;
        let row = |vm: &Vm| {
            let same = |old: &&Vm| (&old.name, old.pid) == (&vm.name, vm.pid);
            let old = before
                .as_ref()
                .and_then(|(_, _, vms)| vms.iter().find(same))
                .unwrap_or(vm);
            let (old, new) = (&old.stats, &vm.stats);
            Row {
                name: vm.name.clone(),
                domain: domain.clone(),
                state: account::condition(vm).to_owned(),
                passed: account::last_pass(vm),
                saved_net: vm.saved_net_bytes,
                shared: account::shared_bytes(new),
                merges: rate(merges(old), merges(new)),
                breaks: rate(old.breaks_total(), new.breaks_total()),
                cpu: rate(old.cpu_ns.total(), new.cpu_ns.total()) / 1e9,
                waits: rate(old.reserve_waits_total, new.reserve_waits_total),
                cpu_percent: new.cpu_percent,
                pass_period_ms: new.pass_period_ms,
                stop_target_us: new.stop_target_us,
                reserve_pages: new.reserve_target,
                served: vm.reason.is_none(),
                fresh: true,
            }
        };
        self.rows = vms.iter().map(row).collect();
        let old_cpu = before.as_ref().map_or(stats.cpu_ns, |(_, stats, _)| stats.cpu_ns);
        self.store_cpu = rate(old_cpu, stats.cpu_ns) / 1e9;
        (self.domain, self.silent) = (domain, None);
        self.last = Some((at, stats, vms));
    }
}

fn merges(stats: &ServiceStats) -> u64 {
    stats.merges_total.saturating_add(stats.zero_merges_total)
}

/// A column to sort by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Name,
    Domain,
    State,
    Passed,
    Saved,
    Shared,
    Merges,
    Breaks,
    Cpu,
    Waits,
    Budget,
    Period,
    StopTarget,
    Reserve,
}

impl Column {
    pub(crate) const ALL: [Self; 14] = [
        Self::Name,
        Self::Domain,
        Self::State,
        Self::Passed,
        Self::Saved,
        Self::Shared,
        Self::Merges,
        Self::Breaks,
        Self::Cpu,
        Self::Waits,
        Self::Budget,
        Self::Period,
        Self::StopTarget,
        Self::Reserve,
    ];

    /// The column so many places to the right among those that are shown.
    pub(crate) fn moved(self, by: isize, shown: &[Self]) -> Self {
        let at = shown.iter().position(|c| *c == self).unwrap_or(0);
        let to = at.saturating_add_signed(by).min(shown.len().saturating_sub(1));
        shown.get(to).copied().unwrap_or(self)
    }

    /// Sorts: texts up, numbers down, or the other way round if `reversed`; equal ones by name.
    pub(crate) fn sort(self, rows: &mut [Row], reversed: bool) {
        rows.sort_by(|a, b| {
            let order = match self {
                Self::Name => natural_order(&a.name, &b.name),
                Self::Domain => a.domain.cmp(&b.domain),
                Self::State => a.state.cmp(&b.state),
                Self::Passed => b.passed.cmp(&a.passed),
                Self::Saved => b.saved_net.cmp(&a.saved_net),
                Self::Shared => b.shared.cmp(&a.shared),
                Self::Merges => b.merges.total_cmp(&a.merges),
                Self::Breaks => b.breaks.total_cmp(&a.breaks),
                Self::Cpu => b.cpu.total_cmp(&a.cpu),
                Self::Waits => b.waits.total_cmp(&a.waits),
                Self::Budget => b.cpu_percent.cmp(&a.cpu_percent),
                Self::Period => b.pass_period_ms.cmp(&a.pass_period_ms),
                Self::StopTarget => b.stop_target_us.cmp(&a.stop_target_us),
                Self::Reserve => b.reserve_pages.cmp(&a.reserve_pages),
            };
            let order = if reversed { order.reverse() } else { order };
            order.then_with(|| natural_order(&a.name, &b.name))
        });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::time::Duration;
    use vmm_dedup_host::registry::Access;
    use vmm_dedup_protocol::refusal::Reason;
    use zerocopy::FromZeros;

    pub(crate) fn vm(name: &str, mapped: u64, broken: u64) -> Vm {
        Vm {
            name: name.into(),
            // No process has this number: how it is does not count.
            pid: u64::MAX,
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

    pub(crate) fn store(socket: &str, account: Result<Vec<Vm>, Silence>) -> StoreSample {
        StoreSample {
            socket: socket.into(),
            domain: "default".into(),
            record: Some(Record {
                socket: socket.into(),
                domain: "default".into(),
                pid: 1,
                metrics: None,
                max_mib: Some(8),
                ordered: false,
                secure: false,
                access: Access::default(),
                started: 1,
                version: "0".into(),
            }),
            account: account.map(|vms| (StoreStats::new_zeroed(), vms)),
        }
    }

    pub(crate) fn sample(at: Instant, stores: Vec<StoreSample>) -> Sample {
        Sample {
            at,
            stores,
            pressure: None,
        }
    }

    #[test]
    fn rates_are_differences_over_time_and_new_or_restarted_vms_have_none() {
        let start = Instant::now();
        let mut stores = Stores::default();
        let vms = vec![vm("a", 1, 100), vm("b", 1, 100)];
        stores.update(sample(start, vec![store("s", Ok(vms))]));
        let later = start + Duration::from_secs(2);
        let vms = vec![vm("a", 1, 150), vm("b", 1, 30), vm("c", 1, 40), refused("d")];
        stores.update(sample(later, vec![store("s", Ok(vms))]));
        let (host, rows) = (stores.host(), stores.rows());
        let breaks: Vec<f64> = rows.iter().map(|r| r.breaks).collect();
        assert_eq!(breaks, [25.0, 0.0, 0.0, 0.0]);
        assert!((rows[0].cpu - 0.025).abs() < 1e-9);
        assert_eq!((host.services, host.refused, host.breaks), (3, 1, 25.0));
        assert_eq!(rows[3].state, "vfio");
    }

    #[test]
    fn the_column_has_room_for_each_state_under_a_silent_store() {
        let (_, width, _) = super::super::columns::about(Column::State);
        for silence in [Silence::Gone, Silence::Hangs, Silence::NoAccess, Silence::Strange] {
            assert!(state_under(silence).len() <= usize::from(width), "{silence:?}");
        }
    }

    #[test]
    fn a_store_that_goes_keeps_its_last_figures_and_one_that_comes_back_has_no_rates_yet() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut stores = Stores::default();
        let both = |a: Result<Vec<Vm>, Silence>| vec![store("a", a), store("b", Ok(vec![vm("y", 2, 0)]))];
        stores.update(sample(at(0), both(Ok(vec![vm("x", 1, 100)]))));
        stores.update(sample(at(2), both(Err(Silence::Hangs))));
        // It has ended in order: it is not listed any more.
        stores.update(sample(at(4), vec![store("b", Ok(vec![vm("y", 2, 0)]))]));
        let rows = stores.rows();
        assert_eq!(
            (rows[0].state.as_str(), rows[0].saved_net, rows[0].fresh),
            ("store gone", 4096, false)
        );
        let start = "vmm-dedup store --socket a --domain default --max-mib 8 --metrics none";
        let (socket, time, silence) = ("a", Duration::from_secs(7), Silence::Gone);
        assert_eq!(
            stores.silent(at(9)),
            [Silent {
                socket,
                time,
                at_least: false,
                silence,
                start
            }]
        );
        assert_eq!(stores.host().services, 1);
        stores.update(sample(at(9), both(Ok(vec![vm("x", 1, 900)]))));
        let rows = stores.rows();
        assert_eq!((rows[0].state.as_str(), rows[0].breaks), ("running", 0.0));
        assert_eq!(stores.silent(at(9)), []);
    }

    #[test]
    fn since_when_a_store_is_silent_that_never_answered_is_not_known() {
        let start = Instant::now();
        let mut stores = Stores::default();
        let hangs = || vec![store("a", Err(Silence::Hangs))];
        stores.update(sample(start, hangs()));
        let silent = |stores: &Stores| {
            let silent = stores.silent(start + Duration::from_secs(5));
            silent.iter().map(|store| store.at_least).collect::<Vec<bool>>()
        };
        assert_eq!(silent(&stores), [true]);
        stores.update(sample(start, vec![store("a", Ok(Vec::new()))]));
        stores.update(sample(start, hangs()));
        assert_eq!(silent(&stores), [false]);
    }

    #[test]
    fn numbers_sort_down_and_names_up() {
        let mut stores = Stores::default();
        let vms = vec![vm("b", 5, 0), vm("a", 5, 0), vm("c", 9, 0)];
        stores.update(sample(Instant::now(), vec![store("s", Ok(vms))]));
        let order = |column: Column, reversed| -> String {
            let mut rows = stores.rows();
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
        let shown = [Column::Name, Column::State, Column::Waits];
        assert_eq!(Column::Name.moved(-1, &shown), Column::Name);
        assert_eq!(Column::Name.moved(1, &shown), Column::State);
        assert_eq!(Column::Waits.moved(1, &shown), Column::Waits);
        assert_eq!(Column::Cpu.moved(1, &shown), Column::State);
    }
}
