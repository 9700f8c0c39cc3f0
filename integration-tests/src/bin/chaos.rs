//! The long proof: millions of merges under guests that write all the time, and direct I/O into pages under merging.

use clap::Parser;
use std::time::{Duration, Instant};
use vmm_dedup_integration_tests::direct_io::{self, Backing};
use vmm_dedup_integration_tests::guests::Exceptions;
use vmm_dedup_integration_tests::heal_chaos::{self, Besides, Pins};
use vmm_dedup_integration_tests::swap_chaos::Swapped;
use vmm_dedup_integration_tests::{follow_chaos, guests, huge_chaos, swap_chaos, within};
use vmm_dedup_trouble::Swap;

/// Guests that write all the time, and direct I/O, while everything equal is merged. Ends with 0 if no byte was lost.
#[derive(Parser, Debug)]
struct Args {
    /// The full proof: 100,000 moves of slots with each kind of breaks, 2,000,000 merges, 1,000,000 merges and breaks under swap and 100 rounds with exceptions there, 1,000,000 splits and rebuilds of subpages, 200,000 O_DIRECT and 200,000 io_uring
    /// reads, half of them into huge pages, 100 rounds, 1,000,000 copies merged again in each of four ways.
    #[arg(long)]
    long: bool,
    /// Subpages of huge pages to split or build again.
    #[arg(long, default_value_t = 50_000)]
    conversions: u64,
    /// Copies of the kernel's to merge again, with and without devices that pin, with and without swap.
    #[arg(long, default_value_t = 20_000)]
    heals: u64,
    /// Copies are merged again only while these have pages pinned.
    #[arg(long, value_enum, value_name = "WHO")]
    pins: Option<Pins>,
    /// Copies are merged again only while they are swapped out, or only while they are not.
    #[arg(long)]
    heals_under_swap: Option<bool>,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    only: Vec<Part>,
    /// Merges to reach with guests.
    #[arg(long, default_value_t = 50_000)]
    merges: u64,
    /// Merges, and breaks, to reach while memory is paged out.
    #[arg(long, default_value_t = 20_000)]
    swapped: u64,
    /// Slots to move, with each kind of breaks.
    #[arg(long, default_value_t = 8_000)]
    moves: u64,
    /// Reads of each kind of direct I/O.
    #[arg(long, default_value_t = 5_000)]
    reads: u64,
    /// Pairs of guests that write around runs with exceptions.
    #[arg(long, default_value_t = 4)]
    rounds: u64,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Slots move under guests that read, and devices that do.
    Moves,
    /// Guests whose memory is paged out.
    Swap,
    /// O_DIRECT and io_uring.
    DirectIo,
    /// Copies are merged again.
    Heals,
    /// Runs with exceptions.
    Exceptions,
    /// Guests with small pages.
    Guests,
    /// Guests with huge pages.
    HugePages,
}

fn main() {
    let args = Args::parse();
    let runs = |part: Part| args.only.is_empty() || args.only.contains(&part);
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let (merges, swapped, conversions, reads, rounds, heals) = if args.long {
        (2_000_000, 1_000_000, 1_000_000, 100_000, 100, 1_000_000)
    } else {
        (
            args.merges,
            args.swapped,
            args.conversions,
            args.reads,
            args.rounds,
            args.heals,
        )
    };
    if runs(Part::Moves) {
        while_slots_move(if args.long { 100_000 } else { args.moves });
    }
    let size = guests::Size {
        merges,
        patience: Duration::from_secs(7200),
        common_mib: 24,
        zero_mib: 24,
    };
    if runs(Part::Swap) {
        let size_under_swap = guests::Size {
            merges: swapped,
            zero_mib: 8,
            ..size
        };
        under_swap(size_under_swap, rounds);
    }
    if runs(Part::DirectIo) {
        under_direct_io(reads);
    }
    if runs(Part::Heals) {
        heal(heals, args.pins, args.heals_under_swap);
    }
    if runs(Part::Exceptions) {
        with_exceptions(rounds);
    }
    if runs(Part::Guests) {
        with_guests(size);
    }
    if runs(Part::HugePages) {
        with_huge_pages(guests::Size {
            merges: conversions,
            ..size
        });
    }
}

fn under_direct_io(reads: u64) {
    for (name, run, backing) in [
        (
            "O_DIRECT",
            direct_io::direct as fn(u64, Backing) -> _,
            Backing::Small,
        ),
        ("io_uring fixed buffers", direct_io::uring, Backing::Small),
        ("O_DIRECT, huge pages", direct_io::direct, Backing::Huge),
        (
            "io_uring fixed buffers, huge pages",
            direct_io::uring,
            Backing::Huge,
        ),
    ] {
        let start = Instant::now();
        let out = run(reads, backing);
        println!(
            "{name}: {} reads, none lost, in {:.0} s; {} merges, {} pages refused as pinned, {} put back; {} huge pages split, {} built again",
            out.reads,
            start.elapsed().as_secs_f64(),
            out.merges,
            out.pinned,
            out.put_back,
            out.split,
            out.rebuilt
        );
    }
}

fn with_exceptions(rounds: u64) {
    let start = Instant::now();
    let outcomes: Vec<_> = (0..rounds).map(guests::exceptions).collect();
    let sum = |field: fn(&guests::Exceptions) -> u64| outcomes.iter().map(field).sum::<u64>();
    println!(
        "runs with exceptions: {rounds} rounds, {} merges, {} exceptions, {} breaks, {} writes, no wrong word, in {:.0} s",
        sum(|o| o.merges),
        sum(|o| o.exceptions),
        sum(|o| o.breaks),
        sum(|o| o.writes),
        start.elapsed().as_secs_f64()
    );
}

fn with_guests(size: guests::Size) {
    let start = Instant::now();
    let out = guests::chaos(size);
    println!(
        "guests: {} merges, {} breaks, {} put back, {} writes, {} wrong words, in {:.0} s; stops p50 {} us, p99 {} us, max {} us",
        out.merges,
        out.breaks,
        out.mismatches,
        out.writes,
        out.errors,
        start.elapsed().as_secs_f64(),
        out.stop.quantile_us(0.5),
        out.stop.quantile_us(0.99),
        out.stop.max_ns / 1000
    );
}

fn with_huge_pages(size: guests::Size) {
    let start = Instant::now();
    let out = huge_chaos::chaos(size);
    println!(
        "huge pages: {} subpages split or built again, {} huge pages built, {} merges, {} breaks, {} writes, {} wrong words, in {:.0} s; building p50 {} us, p99 {} us, max {} us",
        out.conversions,
        out.rebuilt,
        out.merges,
        out.breaks,
        out.writes,
        out.errors,
        start.elapsed().as_secs_f64(),
        out.rebuild.quantile_us(0.5),
        out.rebuild.quantile_us(0.99),
        out.rebuild.max_ns / 1000
    );
}

/// Copies that are merged again under fire. Ends the process if a word was lost.
fn heal(heals: u64, only_pins: Option<Pins>, only_swap: Option<bool>) {
    let ways = [Pins::Devices, Pins::Calls].into_iter();
    let ways = ways.flat_map(|pins| [(pins, false), (pins, true)]);
    let wanted = |(pins, swap): &(Pins, bool)| {
        only_pins.is_none_or(|only| only == *pins) && only_swap.is_none_or(|only| only == *swap)
    };
    for (pins, swap) in ways.filter(wanted) {
        let _swap = match swap.then(Swap::on).transpose() {
            Ok(swap) => swap,
            Err(reason) => {
                println!("SKIPPED: no swap: {reason}");
                continue;
            }
        };
        let start = Instant::now();
        let besides = Besides {
            swap,
            ..Besides::default()
        };
        let out = heal_chaos::chaos(heals, within(Duration::from_secs(7200)), pins, besides);
        println!(
            "heals, {pins:?}, swap {swap}: {} heals, {} pinned, {} wanted, {} writes, {} reads, {} bytes spliced, {} wrong words, in {:.0} s; stalls p50 {} us, p99 {} us, max {} us",
            out.heals,
            out.pinned,
            out.wanted,
            out.writes,
            out.reads,
            out.spliced,
            out.wrong,
            start.elapsed().as_secs_f64(),
            out.stall.quantile_us(0.5),
            out.stall.quantile_us(0.99),
            out.stall.max_ns / 1000
        );
        assert!(out.wrong == 0, "words were lost");
        assert!(out.heals >= heals, "only {} heals in time", out.heals);
    }
}

/// Guests whose memory is paged out. Ends the process if something did not happen.
fn under_swap(size: guests::Size, rounds: u64) {
    // For each merge a tenth of what the short form asks for, so that rebuilding and sampling do not set the time.
    let least = swap_chaos::AtLeast {
        rebuilt: (size.merges / 12_500).max(8),
        samples: (size.merges / 250).max(400),
        within: size.patience,
    };
    let start = Instant::now();
    let swap = match Swap::on() {
        Ok(swap) => swap,
        Err(reason) => return println!("SKIPPED: no swap: {reason}"),
    };
    let Swapped {
        outcome: out,
        pages_out,
        pages_in,
    } = swap_chaos::chaos(size, least, &swap);
    println!(
        "swap: {} merges, {} breaks, {} put back, {} huge pages built, {} samples, {} writes, {} wrong words, {pages_out} pages swapped out, {pages_in} in, in {:.0} s; stops p50 {} us, p99 {} us, max {} us",
        out.merges,
        out.breaks,
        out.mismatches,
        out.rebuilt,
        out.samples,
        out.writes,
        out.errors,
        start.elapsed().as_secs_f64(),
        out.stop.quantile_us(0.5),
        out.stop.quantile_us(0.99),
        out.stop.max_ns / 1000
    );
    assert!(out.rebuilt >= least.rebuilt, "few huge pages were built");
    assert!(out.samples >= least.samples, "little was sampled");
    let start = Instant::now();
    let rounds: Vec<_> = (0..rounds)
        .map(|seed| swap_chaos::exceptions(seed, &swap))
        .collect();
    let sum = |field: fn(&Swapped<Exceptions>) -> u64| rounds.iter().map(field).sum::<u64>();
    println!(
        "swap, runs with exceptions: {} rounds, {} merges, {} exceptions, {} breaks, {} writes, no wrong word, {} pages swapped out, {} in, in {:.0} s",
        rounds.len(),
        sum(|round| round.outcome.merges),
        sum(|round| round.outcome.exceptions),
        sum(|round| round.outcome.breaks),
        sum(|round| round.outcome.writes),
        sum(|round| round.pages_out),
        sum(|round| round.pages_in),
        start.elapsed().as_secs_f64()
    );
}

fn while_slots_move(moves: u64) {
    for (name, breaks) in [
        ("kernel", follow_chaos::KERNEL),
        ("managed", follow_chaos::MANAGED),
    ] {
        let start = Instant::now();
        let out = follow_chaos::chaos(moves, within(Duration::from_secs(7200)), breaks);
        println!(
            "moves, {name} breaks: {} slots moved, {} segments gone, {} writes, {} pages written to a file, {} kept in pipes, {} wrong, in {:.0} s",
            out.moves,
            out.retired,
            out.writes,
            out.direct,
            out.kept,
            out.wrong,
            start.elapsed().as_secs_f64()
        );
        assert_eq!(out.wrong, 0, "bytes were lost");
    }
}
