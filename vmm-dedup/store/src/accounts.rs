//! What the VMs report, and host totals that do not go back when a VM ends.
//!
//! [`ServiceStats`] is a record of 64-bit numbers, so sums are taken word by word; reports are hostile input, so
//! they saturate.

use vmm_dedup_protocol::stats::ServiceStats;
use zerocopy::{FromBytes, IntoBytes};

const WORDS: usize = size_of::<ServiceStats>() / 8;

fn words(stats: &ServiceStats) -> [u64; WORDS] {
    <[u64; WORDS]>::read_from_bytes(stats.as_bytes()).expect("the record is made of 64-bit numbers")
}

fn combine(to: &mut ServiceStats, with: &ServiceStats, f: impl Fn(u64, u64) -> u64) {
    let (mut left, right) = (words(to), words(with));
    left.iter_mut().zip(right).for_each(|(a, b)| *a = f(*a, b));
    *to = ServiceStats::read_from_bytes(left.as_bytes()).expect("as above");
}

/// Sum of the gauges (and everything else) of several VMs.
pub(crate) fn sum<'a>(all: impl Iterator<Item = &'a ServiceStats>) -> ServiceStats {
    all.fold(ServiceStats::default(), |mut sum, one| {
        combine(&mut sum, one, u64::saturating_add);
        sum
    })
}

/// Adds to host totals what a VM's counters grew by since its last report. A counter that went back was reset.
pub(crate) fn accumulate(totals: &mut ServiceStats, before: &ServiceStats, now: &ServiceStats) {
    let mut growth = *now;
    combine(&mut growth, before, |now, before| {
        now.checked_sub(before).unwrap_or(now)
    });
    combine(totals, &growth, u64::saturating_add);
}

#[cfg(test)]
mod tests {
    use super::*;

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
        accumulate(&mut totals, &merges(0), &merges(u64::MAX));
        assert_eq!(totals.merges_total, u64::MAX);
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
