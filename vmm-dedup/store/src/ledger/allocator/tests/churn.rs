//! What churn costs: VMs whose slots are replaced round by round.
//!
//! `cargo test -p vmm-dedup-store churn -- --nocapture` prints slots in memory for each in use, and slots moved.

use super::*;

/// Most slots of a piece, as in the store.
const PIECE: u32 = 512;

/// What a VM replaces at once.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// So many slots that were published together.
    Extents(usize),
    /// Single slots anywhere.
    Single,
}

/// A host with its VMs.
struct Host {
    allocator: Allocator,
    /// The extents of each VM: slots in the order in which they were published.
    vms: Vec<Vec<Vec<Slot>>>,
    random: u64,
    moved: u64,
}

impl Host {
    fn new() -> Self {
        Self {
            allocator: Allocator::new(MAX_SLOTS, false),
            vms: Vec::new(),
            random: 1,
            moved: 0,
        }
    }

    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % below as u64).unwrap()
    }

    /// A VM with so many slots in extents of this size.
    fn start_vm(&mut self, slots: usize, kind: Kind) {
        self.vms.push(Vec::new());
        let vm = self.vms.len() - 1;
        self.publish(vm, slots, kind);
    }

    fn publish(&mut self, vm: usize, mut slots: usize, kind: Kind) {
        let extent = match kind {
            Kind::Extents(slots) => slots,
            Kind::Single => 16,
        };
        while slots > 0 {
            let mut wanted = u32::try_from(slots.min(extent)).unwrap();
            slots -= wanted as usize;
            let mut all = Vec::new();
            while wanted > 0 {
                let run = allocate(&mut self.allocator, wanted, Purpose::New).unwrap();
                wanted -= run.len;
                all.extend(run.slots());
            }
            match kind {
                Kind::Extents(_) => self.vms[vm].push(all),
                Kind::Single => self.vms[vm].extend(all.into_iter().map(|slot| vec![slot])),
            }
        }
    }

    fn retire(&mut self, retired: Option<u32>) {
        if let Some(number) = retired {
            self.allocator.release(number);
        }
    }

    /// Nobody has so many slots any more. The first `stable` extents of the VM stay.
    fn drop_slots(&mut self, vm: usize, slots: usize, stable: usize) {
        let mut dropped = 0;
        while dropped < slots {
            let at = stable + self.random(self.vms[vm].len() - stable);
            for slot in self.vms[vm].swap_remove(at) {
                dropped += 1;
                let retired = self.allocator.bury(slot);
                self.retire(retired);
            }
        }
    }

    fn stop_vm(&mut self) {
        for slot in self.vms.pop().unwrap().into_iter().flatten() {
            let retired = self.allocator.bury(slot);
            self.retire(retired);
        }
    }

    /// Moves what there is to move; all services follow.
    fn evacuate(&mut self) {
        self.retire_idle();
        while let Some(number) = self.allocator.begin_evacuation() {
            let (mut moves, mut from) = (HashMap::new(), 0);
            while let Some(piece) = self.allocator.next_piece(number, from, PIECE) {
                let slots = piece.run.slots();
                let live: Vec<Slot> = slots.filter(|slot| self.allocator.is_used(*slot)).collect();
                let (mut rest, mut at) = (piece.run.len, 0);
                while rest > 0 {
                    let run = allocate(&mut self.allocator, rest, Purpose::Survivors).unwrap();
                    rest -= run.len;
                    for new in run.slots() {
                        let old = piece.run.first.checked_add_in_segment(at).unwrap();
                        at += 1;
                        if live.contains(&old) {
                            moves.insert(old, new);
                        } else {
                            assert_eq!(self.allocator.give_back(new), None);
                        }
                    }
                }
                from = piece.run.first.number() % SLOTS_PER_SEGMENT + piece.run.len;
            }
            self.moved += moves.len() as u64;
            for slot in self.vms.iter_mut().flatten().flatten() {
                *slot = moves.get(slot).copied().unwrap_or(*slot);
            }
            for old in moves.into_keys() {
                let retired = self.allocator.bury(old);
                self.retire(retired);
            }
        }
    }

    fn retire_idle(&mut self) {
        while let Some(number) = self.allocator.retire_idle() {
            self.allocator.release(number);
        }
    }

    fn in_use(&self) -> u64 {
        self.vms.iter().flatten().map(|extent| extent.len() as u64).sum()
    }

    /// The rule: resident slots are at most 1.15 times those in use, and 8 MiB.
    fn check(&self) {
        let counts = self.allocator.counts();
        assert_eq!(counts.leaving, Tally::default());
        assert_eq!(counts.staying.used, self.in_use());
        let (resident, used) = (counts.staying.resident(), counts.staying.used);
        assert!(
            resident * 100 <= used * 115 + 2048 * 100,
            "{resident} resident, {used} in use"
        );
    }

    /// Resident slots divided by those in use.
    #[allow(clippy::cast_precision_loss)]
    fn ratio(&self) -> f64 {
        self.allocator.counts().staying.resident() as f64 / self.in_use().max(1) as f64
    }
}

/// Rounds in each of which 8 VMs replace a quarter of what does not stay for ever, a percentage of their slots. Returns
/// slots moved for each that was replaced, from the second half of the rounds on.
#[allow(clippy::cast_precision_loss)]
fn play(kind: Kind, slots_of_a_vm: usize, rounds: u32, stable_percent: usize) -> f64 {
    let mut host = Host::new();
    (0..8).for_each(|_| host.start_vm(slots_of_a_vm, kind));
    let stable = host.vms[0].len() * stable_percent / 100;
    let replaced = slots_of_a_vm * (100 - stable_percent) / 400;
    let (mut before, mut worst) = (0, 0f64);
    for round in 0..rounds {
        if round == rounds / 2 {
            before = host.moved;
        }
        for vm in 0..8 {
            host.drop_slots(vm, replaced, stable);
            host.publish(vm, replaced, kind);
        }
        host.evacuate();
        host.check();
        worst = worst.max(host.ratio());
    }
    let rounds = u64::from(rounds - rounds / 2);
    let moved = (host.moved - before) as f64 / (rounds * 8 * replaced as u64) as f64;
    println!(
        "{kind:?}, {slots_of_a_vm} slots a VM, {stable_percent} % stay: resident/in use {:.3} at most, {:.3} at the end, \
         moved/replaced {moved:.2}",
        worst,
        host.ratio()
    );
    moved
}

#[test]
fn extents_that_are_replaced_cost_little_moving() {
    for stable_percent in [0, 50] {
        let moved = play(Kind::Extents(64), 1 << 14, 50, stable_percent);
        assert!(moved < 4.0, "{moved}");
    }
}

#[test]
fn single_slots_that_are_replaced_are_bounded_all_the_same() {
    for stable_percent in [0, 50] {
        let moved = play(Kind::Single, 1 << 13, 50, stable_percent);
        assert!(moved < 6.0, "{moved}");
    }
}

#[test]
fn a_store_that_is_small_stays_small() {
    play(Kind::Extents(64), 1 << 10, 50, 50);
    play(Kind::Single, 100, 50, 0);
}

#[test]
fn a_fleet_that_shrinks_takes_its_memory_along() {
    for kind in [Kind::Extents(64), Kind::Single] {
        let mut host = Host::new();
        (0..100).for_each(|_| host.start_vm(1 << 11, kind));
        // Their extents lie between each other's.
        for _ in 0..4 {
            for vm in 0..100 {
                host.drop_slots(vm, 1 << 9, 0);
                host.publish(vm, 1 << 9, kind);
            }
            host.evacuate();
        }
        let before = host.moved;
        while host.vms.len() > 5 {
            let last = host.vms.len() - 1;
            let at = host.random(last);
            host.vms.swap(at, last);
            host.stop_vm();
            if host.vms.len().is_multiple_of(10) {
                host.evacuate();
                host.check();
            }
        }
        host.evacuate();
        host.check();
        println!(
            "{kind:?}: {} moved while 95 of 100 VMs ended",
            host.moved - before
        );
        while !host.vms.is_empty() {
            host.stop_vm();
        }
        host.retire_idle();
        let counts = host.allocator.counts();
        assert_eq!(
            (counts.staying, counts.leaving),
            (Tally::default(), Tally::default())
        );
    }
}

/// A night: of a minute each, a tenth of the slots of one VM after the other.
#[test]
fn a_night_of_churn_ends_as_it_began() {
    let mut host = Host::new();
    (0..8).for_each(|_| host.start_vm(1 << 12, Kind::Extents(16)));
    for minute in 0..480 {
        let kind = if minute % 2 == 0 {
            Kind::Extents(16)
        } else {
            Kind::Single
        };
        let vm = minute % 8;
        host.drop_slots(vm, 400, 0);
        host.publish(vm, 400, kind);
        host.evacuate();
        host.check();
    }
    println!("a night: {} moved of {} replaced", host.moved, 480 * 400);
}
