//! What the ways of reuse cost: 8 VMs, a quarter of whose slots is replaced in each of 50 rounds.
//!
//! `cargo test -p vmm-dedup-store churn -- --nocapture` prints resident slots divided by slots in use.

use super::*;

const VMS: usize = 8;
const SLOTS_OF_A_VM: usize = 1 << 14;
const ROUNDS: u32 = 50;
/// Pages of one publication that lie together.
const RUN: usize = 16;

/// A host with its VMs.
struct Host {
    allocator: Allocator,
    /// Whether a slot was written since its segment was made: it has memory.
    resident: Vec<bool>,
    vms: Vec<Vec<Slot>>,
    random: u64,
}

impl Host {
    fn new(reuse: Reuse) -> Self {
        let mut host = Self {
            allocator: Allocator::new(MAX_SLOTS, reuse),
            resident: Vec::new(),
            vms: vec![Vec::new(); VMS],
            random: 1,
        };
        (0..VMS).for_each(|vm| host.publish(vm, SLOTS_OF_A_VM));
        host
    }

    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % below as u64).unwrap()
    }

    fn publish(&mut self, vm: usize, mut pages: usize) {
        while pages > 0 {
            let wanted = u32::try_from(pages.min(RUN)).unwrap();
            let run = allocate(&mut self.allocator, wanted).unwrap();
            for slot in run.slots() {
                let at = slot.number() as usize;
                self.resident.resize(self.resident.len().max(at + 1), false);
                self.resident[at] = true;
                self.vms[vm].push(slot);
            }
            pages -= run.len as usize;
        }
    }

    /// Nobody has these pages any more. The first `stable` ones of each VM stay.
    fn drop_pages(&mut self, vm: usize, pages: usize, stable: usize, now: Second) {
        for _ in 0..pages {
            let at = stable + self.random(self.vms[vm].len() - stable);
            let slot = self.vms[vm].swap_remove(at);
            if let Some(retired) = self.allocator.cool(slot, now) {
                let slots = SLOTS_PER_SEGMENT as usize;
                let segment = self.resident.chunks_mut(slots).nth(retired as usize);
                segment.unwrap().fill(false);
            }
        }
    }

    /// Resident slots divided by those in use.
    #[allow(clippy::cast_precision_loss)]
    fn ratio(&self) -> f64 {
        let resident = self.resident.iter().filter(|resident| **resident).count();
        resident as f64 / self.allocator.counts().used as f64
    }
}

/// Resident slots divided by those in use.
#[derive(Debug)]
struct Outcome {
    half_time: f64,
    end: f64,
}

/// A round lasts some seconds, and this many per cent of the slots stay for ever.
fn play(name: &str, reuse: Reuse, seconds: Second, stable_percent: usize) -> Outcome {
    let mut host = Host::new(reuse);
    let stable = SLOTS_OF_A_VM * stable_percent / 100;
    let replaced = (SLOTS_OF_A_VM - stable) / 4;
    let mut half_time = 0.0;
    for round in 1..=ROUNDS {
        let now = round * seconds;
        (now - seconds..now).for_each(|now| host.allocator.thaw(now));
        for vm in 0..VMS {
            host.drop_pages(vm, replaced, stable, now);
            host.publish(vm, replaced);
        }
        if round == ROUNDS / 2 {
            half_time = host.ratio();
        }
    }
    let outcome = Outcome {
        half_time,
        end: host.ratio(),
    };
    println!("{name}, rounds of {seconds} s, {stable_percent} % stay: {outcome:.2?}");
    outcome
}

/// What the rule allows, in parts of the slots in use: what is replaced within a quarantine, or the spare share.
fn allowed(reuse: Reuse, seconds: Second, replaced: f64) -> f64 {
    let rounds = f64::from((reuse.quarantine + 1).div_ceil(seconds));
    let spare = f64::from(reuse.spare_percent) / 100.0;
    // What is published in a round needs room before what it replaces is thawed, and goes where it lies together: no
    // segment is made before, but the last one may be filled.
    let segment = f64::from(SLOTS_PER_SEGMENT) / (VMS * SLOTS_OF_A_VM) as f64;
    1.0 + (replaced * rounds).max(spare + replaced) + segment
}

#[test]
fn a_store_keeps_what_a_quarantine_frees_and_the_spare_share() {
    for (seconds, stable_percent, replaced) in [(60, 0, 0.25), (600, 50, 0.125)] {
        let outcome = play("default", Reuse::default(), seconds, stable_percent);
        let allowed = allowed(Reuse::default(), seconds, replaced);
        assert!(outcome.half_time.max(outcome.end) <= allowed, "{allowed}");
    }
}

#[test]
fn a_store_that_only_retires_segments_holds_several_times_what_it_uses() {
    let never = Reuse {
        quarantine: Reuse::NEVER,
        spare_percent: 0,
    };
    let outcome = play("never", never, 60, 0);
    assert!(outcome.end > 8.0 && outcome.end < 11.0);
    let outcome = play("never", never, 60, 50);
    assert!(outcome.end > outcome.half_time + 1.0, "it goes on growing");
}

/// The table of the module's text: half a minute, so only where VMM_DEDUP_CHURN_TABLE is set.
#[test]
fn table() {
    if std::env::var_os("VMM_DEDUP_CHURN_TABLE").is_none() {
        return eprintln!("SKIPPED: set VMM_DEDUP_CHURN_TABLE for the whole table");
    }
    let way = |quarantine, spare_percent| Reuse {
        quarantine,
        spare_percent,
    };
    let ways = [
        ("30 s", way(30, 0)),
        ("300 s", way(300, 0)),
        ("default", Reuse::default()),
        ("300 s, 25 %", way(300, 25)),
        ("never", way(Reuse::NEVER, 0)),
    ];
    for stable_percent in [0, 50] {
        for (name, reuse) in ways {
            for seconds in [10, 60, 600, 3600] {
                play(name, reuse, seconds, stable_percent);
            }
        }
    }
}
