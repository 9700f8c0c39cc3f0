//! The short form of the long proof (`make chaos`).

use std::time::Duration;
use vmm_dedup_integration_tests::direct_io::{self, Backing};
use vmm_dedup_integration_tests::follow_chaos;
use vmm_dedup_integration_tests::heal_chaos::{self, Besides, Pins};
use vmm_dedup_integration_tests::huge::HUGE_PAGES;
use vmm_dedup_integration_tests::huge_pages_or_skip;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::{guests, huge_chaos, need_kvm, need_userfaultfd, swap_chaos, within};

#[test]
fn guests_that_write_all_the_time_lose_nothing() {
    need_kvm!();
    let size = guests::Size {
        merges: 60_000,
        patience: Duration::from_secs(240),
        common_mib: 8,
        zero_mib: 8,
    };
    let out = guests::chaos(size);
    assert!(out.breaks > 0, "nothing was broken: {out:?}");
    eprintln!(
        "{} merges, stops p99 {} us, max {} us",
        out.merges,
        out.stop.quantile_us(0.99),
        out.stop.max_ns / 1000
    );
}

#[test]
fn guests_that_write_around_exceptions_lose_nothing() {
    need_kvm!();
    for seed in 0..2 {
        let out = guests::exceptions(seed);
        assert!(out.exceptions > 0 && out.breaks > 0, "{out:?}");
        eprintln!(
            "{} merges, {} exceptions, {} breaks, {} mappings",
            out.merges, out.exceptions, out.breaks, out.vmas
        );
    }
}

#[test]
fn guests_lose_nothing_while_huge_pages_are_split_and_built_again() {
    need_kvm!();
    let size = guests::Size {
        merges: 512 * 100,
        patience: Duration::from_secs(240),
        common_mib: 8,
        zero_mib: 8,
    };
    let out = huge_chaos::chaos(size);
    assert!(out.rebuilt > 0, "no huge page was built again: {out:?}");
    eprintln!(
        "{} subpages split or built again, {} huge pages built, p99 {} us",
        out.conversions,
        out.rebuilt,
        out.rebuild.quantile_us(0.99)
    );
}

/// Swap under fire: guest, scratch and store memory is paged out all the time.
#[test]
fn guests_lose_nothing_while_their_memory_is_swapped_out() {
    need_kvm!();
    let swap = vmm_dedup_trouble::swap_or_skip!();
    let size = guests::Size {
        merges: 10_000,
        patience: Duration::from_secs(240),
        common_mib: 8,
        zero_mib: 4,
    };
    // Half of what six seconds bring on two cores.
    let least = swap_chaos::AtLeast {
        rebuilt: 20,
        samples: 400,
        within: size.patience,
    };
    let out = swap_chaos::chaos(size, least, &swap);
    assert!(
        out.pages_out > 0 && out.pages_in > 0,
        "nothing was swapped: {out:?}"
    );
    let (rebuilt, samples) = (out.outcome.rebuilt, out.outcome.samples);
    assert!(rebuilt >= least.rebuilt && samples >= least.samples, "{out:?}");
    eprintln!(
        "{} merges, {} breaks, {} huge pages built, {} samples, {} pages swapped out, {} in, stops p99 {} us",
        out.outcome.merges,
        out.outcome.breaks,
        out.outcome.rebuilt,
        out.outcome.samples,
        out.pages_out,
        out.pages_in,
        out.outcome.stop.quantile_us(0.99)
    );
}

#[test]
fn guests_that_write_around_exceptions_lose_nothing_while_their_memory_is_swapped_out() {
    need_kvm!();
    let swap = vmm_dedup_trouble::swap_or_skip!();
    let out = swap_chaos::exceptions(0, &swap);
    assert!(
        out.pages_out > 0 && out.pages_in > 0,
        "nothing was swapped: {out:?}"
    );
    assert!(out.outcome.exceptions > 0 && out.outcome.breaks > 0, "{out:?}");
    eprintln!(
        "{} merges, {} exceptions, {} breaks, {} pages swapped out, {} in",
        out.outcome.merges, out.outcome.exceptions, out.outcome.breaks, out.pages_out, out.pages_in
    );
}

#[test]
fn direct_reads_into_pages_under_merging_arrive() {
    need_userfaultfd!();
    let out = direct_io::direct(6_400, Backing::Small);
    assert!(out.merges > 0, "nothing was merged: {out:?}");
}

#[test]
fn reads_into_pinned_buffers_arrive_and_pins_are_respected() {
    need_userfaultfd!();
    let out = direct_io::uring(6_400, Backing::Small);
    assert!(out.pinned > 0, "no pinned page was met: {out:?}");
}

#[test]
fn direct_reads_arrive_while_huge_pages_are_split_and_built_again() {
    need_userfaultfd!();
    let probe = Pages::map_huge(HUGE_PAGES);
    probe.fill(0, 1);
    huge_pages_or_skip!(&probe);
    for (name, run) in [
        ("O_DIRECT", direct_io::direct as fn(u64, Backing) -> _),
        ("io_uring", direct_io::uring),
    ] {
        let out = run(6_400, Backing::Huge);
        assert!(out.split >= 20 && out.rebuilt >= 20, "{out:?}");
        eprintln!(
            "{name}: {} reads, {} split, {} built again",
            out.reads, out.split, out.rebuilt
        );
    }
}

#[test]
fn copies_that_are_merged_again_lose_nothing() {
    need_userfaultfd!();
    for pins in [Pins::Devices, Pins::Calls] {
        let out = heal_chaos::chaos(15_000, within(Duration::from_secs(40)), pins, Besides::default());
        eprintln!("{pins:?}: {out:?}, p99 {} us", out.stall.quantile_us(0.99));
        assert!(out.wrong == 0 && out.heals >= 1000, "{out:?}");
    }
}

#[test]
fn copies_that_are_merged_again_lose_nothing_while_they_are_swapped_out() {
    need_userfaultfd!();
    let _swap = vmm_dedup_trouble::swap_or_skip!();
    let besides = Besides {
        swap: true,
        ..Besides::default()
    };
    for pins in [Pins::Devices, Pins::Calls] {
        let out = heal_chaos::chaos(5_000, within(Duration::from_secs(40)), pins, besides);
        eprintln!("{pins:?}: {out:?}, p99 {} us", out.stall.quantile_us(0.99));
        assert!(out.wrong == 0 && out.heals >= 500, "{out:?}");
    }
}

#[test]
fn copies_lose_nothing_while_the_children_that_tell_of_pins_are_killed() {
    need_userfaultfd!();
    let besides = Besides {
        kills: true,
        ..Besides::default()
    };
    let out = heal_chaos::chaos(20_000, within(Duration::from_secs(12)), Pins::Devices, besides);
    eprintln!("{out:?}");
    assert!(out.wrong == 0 && out.killed > 0, "{out:?}");
}

#[test]
fn guests_whose_copies_are_merged_again_lose_nothing() {
    need_kvm!();
    let size = guests::Size {
        merges: 20_000,
        patience: Duration::from_secs(240),
        common_mib: 8,
        zero_mib: 8,
    };
    let out = guests::heals(size);
    eprintln!("{out:?}, p99 {} us", out.stall.quantile_us(0.99));
    assert!(out.errors == 0 && out.heals >= size.merges, "{out:?}");
}

#[test]
fn copies_that_are_merged_although_they_are_pinned_lose_reads() {
    need_userfaultfd!();
    vmm_dedup::heal_blindly(true);
    let out = heal_chaos::chaos(
        u64::MAX,
        within(Duration::from_secs(60)),
        Pins::Devices,
        Besides::default(),
    );
    vmm_dedup::heal_blindly(false);
    assert!(out.wrong > 0, "the test finds nothing: {out:?}");
}

#[test]
fn pages_whose_slots_move_lose_nothing() {
    need_userfaultfd!();
    for breaks in [follow_chaos::KERNEL, follow_chaos::MANAGED] {
        let out = follow_chaos::chaos(8_000, within(Duration::from_secs(10)), breaks);
        eprintln!("{breaks:?}: {out:?}");
        assert!(out.wrong == 0 && out.moves >= 1000 && out.retired > 0, "{out:?}");
    }
}
