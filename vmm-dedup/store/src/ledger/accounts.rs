//! What the VMs report, and host totals that do not go back when a VM ends.
//!
//! [`ServiceStats`] is a record of 64-bit numbers, so sums are taken word by word. Reports are hostile input: what cannot be is not
//! counted, and no false report keeps what others report later from being seen.

use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::message::StoreStats;
use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::{FromBytes, IntoBytes};

const WORDS: usize = size_of::<ServiceStats>() / 8;

/// More than a number of a VM grows by from one report to the next, or than a gauge has: 64 TiB, 19 hours of CPU time.
const BELIEVED: u64 = 1 << 46;

/// Totals begin anew here, which those who draw them take for a restart: beyond, a double does not count by ones.
const WRAP: u64 = 1 << 53;

fn words(stats: &ServiceStats) -> [u64; WORDS] {
    <[u64; WORDS]>::read_from_bytes(stats.as_bytes()).expect("the record is made of 64-bit numbers")
}

fn combine(to: &mut ServiceStats, with: &ServiceStats, f: impl Fn(u64, u64) -> u64) {
    let (mut left, right) = (words(to), words(with));
    left.iter_mut().zip(right).for_each(|(a, b)| *a = f(*a, b));
    *to = ServiceStats::read_from_bytes(left.as_bytes()).expect("as above");
}

/// A number, if it can be.
fn believed(n: u64) -> u64 {
    if n <= BELIEVED { n } else { 0 }
}

/// Sum of the gauges (and everything else) of several VMs.
pub(crate) fn sum<'a>(all: impl Iterator<Item = &'a ServiceStats>) -> ServiceStats {
    all.fold(ServiceStats::default(), |mut sum, one| {
        combine(&mut sum, one, |sum, one| sum.saturating_add(believed(one)));
        sum
    })
}

/// Adds to host totals what a VM's counters grew by since its last report. A counter that went back was reset; of one that grew by
/// more than can be, nothing is added.
pub(crate) fn accumulate(totals: &mut ServiceStats, before: &ServiceStats, now: &ServiceStats) {
    let mut growth = *now;
    combine(&mut growth, before, |now, before| {
        now.checked_sub(before).unwrap_or(now)
    });
    combine(totals, &growth, |total, growth| (total + believed(growth)) % WRAP);
}

/// What a service takes of the host beside what it tells: heap that the allocator keeps from one pass to the next (two thirds
/// of it), stacks and kernel stacks of threads, page tables. Measured: what processes with guests of 128 MiB had more after
/// their first merging, 1.6 MiB each, less what they told of and [`VIEW`].
const SERVICE_BYTES: u64 = 1200 << 10;
/// A service's view of the store takes one byte of page tables for so many of the store: 8 bytes a page.
const VIEW: u64 = PAGE_SIZE as u64 / 8;

/// Bytes of the host that a service takes and does not tell of.
fn untold(store_resident: u64) -> u64 {
    SERVICE_BYTES + store_resident / VIEW
}

/// Pages of guests that hold no memory of their own: shared, zero, or packed.
fn pages_spared(vm: &ServiceStats) -> i128 {
    let pages = [vm.pages_mapped, vm.pages_zero, vm.packing.pages];
    pages.into_iter().map(i128::from).sum()
}

/// Net bytes that sharing and packing save on the host. `gauges`: the sum over `vms` VMs; `resident` and `metadata`: of the store.
pub(crate) fn saved_net(gauges: &ServiceStats, vms: usize, resident: u64, metadata: u64) -> i64 {
    let spared = pages_spared(gauges) * PAGE_SIZE as i128;
    let of_services = [gauges.metadata_bytes, gauges.vma_bytes, gauges.packing.bytes];
    let of_services: i128 = of_services.into_iter().map(i128::from).sum();
    let untold = i128::from(untold(resident)) * vms as i128;
    clamp(spared - of_services - untold - i128::from(resident) - i128::from(metadata))
}

/// Pages of a VM that lie in the store: mapped into the guest, or, where the store shares securely, only kept there for it.
fn pages_of_store(vm: &ServiceStats, secure: bool) -> u64 {
    let kept = if secure { vm.packing.pages } else { 0 };
    vm.pages_mapped.saturating_add(kept)
}

/// What each VM bears of the store's own memory: in proportion to the pages of the store that it maps. So the savings
/// of all VMs add up to the host's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    store_bytes: u64,
    /// Of each service.
    untold: u64,
    mapped: u64,
    vms: u64,
    secure: bool,
}

impl Shares {
    /// `gauges`: the sum over `vms` VMs.
    pub(crate) fn of(store: &StoreStats, gauges: &ServiceStats, vms: usize) -> Self {
        Self {
            store_bytes: store.resident_bytes.saturating_add(store.metadata_bytes),
            untold: untold(store.resident_bytes),
            mapped: pages_of_store(gauges, store.secure != 0),
            vms: vms as u64,
            secure: store.secure != 0,
        }
    }

    /// Net bytes that a VM saves.
    pub(crate) fn saved_net(&self, vm: &ServiceStats) -> i64 {
        let page = PAGE_SIZE as i128;
        let (part, whole) = match self.mapped {
            0 => (1, self.vms.max(1)),
            mapped => (pages_of_store(vm, self.secure), mapped),
        };
        let store = i128::from(self.store_bytes) * i128::from(part) / i128::from(whole);
        let spared = pages_spared(vm) * page;
        let of_service = [vm.metadata_bytes, vm.vma_bytes, vm.packing.bytes, self.untold];
        clamp(spared - store - of_service.into_iter().map(i128::from).sum::<i128>())
    }
}

/// As near as 64 bits come.
fn clamp(bytes: i128) -> i64 {
    i64::try_from(bytes).unwrap_or(if bytes < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_savings_of_all_vms_add_up_and_hostile_ones_do_not_overflow() {
        let store = StoreStats {
            resident_bytes: 10 * 4096,
            metadata_bytes: 1000,
            ..StoreStats::default()
        };
        let vm = |mapped, zero| ServiceStats {
            pages_mapped: mapped,
            pages_zero: zero,
            metadata_bytes: 100,
            ..ServiceStats::default()
        };
        let vms = [vm(30, 0), vm(10, 5)];
        let shares = Shares::of(&store, &sum(vms.iter()), 2);
        let net = vms.map(|vm| shares.saved_net(&vm));
        // Of the page tables there are 80 bytes.
        let own = SERVICE_BYTES.cast_signed() + 80 + 100;
        assert_eq!(net, [30 * 4096 - own - 31_470, 15 * 4096 - own - 10_490]);
        let all = saved_net(&sum(vms.iter()), 2, store.resident_bytes, store.metadata_bytes);
        assert_eq!(net[0] + net[1], all);
        let all = vm(u64::MAX, u64::MAX);
        assert_eq!(Shares::of(&store, &all, 1).saved_net(&all), i64::MAX);
        let idle = Shares::of(&store, &vm(0, 0), 2);
        assert_eq!(idle.saved_net(&vm(0, 0)), -own - 20_980);
    }

    fn merges(n: u64) -> ServiceStats {
        ServiceStats {
            merges_total: n,
            ..ServiceStats::default()
        }
    }

    #[test]
    fn totals_survive_the_end_of_a_vm_and_resets() {
        let mut totals = ServiceStats::default();
        accumulate(&mut totals, &merges(0), &merges(10));
        accumulate(&mut totals, &merges(10), &merges(15));
        accumulate(&mut totals, &merges(15), &merges(2));
        assert_eq!(totals.merges_total, 17);
    }

    #[test]
    fn what_cannot_be_is_not_counted_and_what_comes_later_is() {
        let mut totals = ServiceStats::default();
        accumulate(&mut totals, &merges(0), &merges(u64::MAX));
        accumulate(&mut totals, &merges(5), &merges(7));
        assert_eq!(totals.merges_total, 2);
        assert_eq!(sum([merges(u64::MAX), merges(3)].iter()).merges_total, 3);
        // Many lies that can be, each by itself.
        let lies = WRAP / BELIEVED * 3 / 2;
        (0..lies).for_each(|_| accumulate(&mut totals, &merges(0), &merges(BELIEVED)));
        let before = totals.merges_total;
        accumulate(&mut totals, &merges(7), &merges(8));
        assert!(totals.merges_total < WRAP);
        assert_eq!(totals.merges_total, before + 1);
    }

    #[test]
    fn sums_cover_every_field() {
        let mut one = merges(1);
        one.cpu_ns.break_ = 5;
        one.break_latency.max_ns = 7;
        let sum = sum([one, one].iter());
        assert_eq!(
            (sum.merges_total, sum.cpu_ns.break_, sum.break_latency.max_ns),
            (2, 10, 14)
        );
    }
}
