//! All interleavings of a small world, on the code that the server runs: two services, two slots, one store.
//!
//! Rule proved, in every state: **no slot is free or rewritten while a living process maps it or is about to**
//! (has found it and not yet mapped it).
//!
//! The store takes one message at a time from first-in-first-out channels, at any later moment. Services read the
//! epoch, look up, map, drop, send, lose their socket (what was on the way is lost), go on working without it,
//! connect again, say goodbye, and die. The store settles (advances the epoch, frees) at a moment of its own, so that services
//! see the index between a removal and the epoch's advance. In one world the two slots are a series.

use crate::ledger::epochs::{Epoch, MemberId};
use crate::ledger::lifetime::Lifetime;
use crate::ledger::slots::SlotState;
use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use vmm_dedup_protocol::Slot;

const SLOTS: usize = 2;
const SERVICES: usize = 2;

/// How far the world goes: bounds that keep the number of states finite.
#[derive(Clone, Copy)]
struct Bounds {
    publications: u8,
    messages: u8,
    reconnections: u8,
    /// Both slots are one series.
    series: bool,
    goodbyes: bool,
}

/// What is done wrong on purpose, to see that the check can fail.
#[derive(Clone, Copy, PartialEq)]
enum Mistake {
    None,
    /// Slots are freed as soon as nobody references them.
    NoEpochWait,
    /// A broken connection's references are dropped while its process lives.
    NoOrphans,
    /// A broken connection keeps its references, but does not hold back the reuse of other slots.
    OrphansForgetEpoch,
    /// A series is found in the index after it has ended.
    SeriesStays,
    /// A service says goodbye and still maps a slot.
    FalseGoodbye,
}

/// Which content a slot has: counts publications.
type Generation = u8;

#[derive(Clone, Hash)]
struct Service {
    member: MemberId,
    alive: bool,
    connected: bool,
    /// It has said goodbye, and looks nothing up until it connects again.
    leaving: bool,
    /// The epoch of the batch that is being collected.
    epoch: Option<Epoch>,
    found: Option<(usize, Generation)>,
    mapped: [Option<Generation>; SLOTS],
    /// Mapped over an earlier connection: its orphan accounts for them.
    legacy: [Option<Generation>; SLOTS],
    deltas: [i32; SLOTS],
    /// Batches, and `None` for a goodbye.
    channel: VecDeque<Option<(Epoch, [i32; SLOTS])>>,
}

#[derive(Clone, Hash)]
struct World {
    lifetime: Lifetime,
    generation: [Generation; SLOTS],
    services: [Service; SERVICES],
    orphans: Vec<(MemberId, usize)>,
    published: u8,
    sent: u8,
    reconnected: u8,
}

fn slot(n: usize) -> Slot {
    Slot::try_new(u32::try_from(n).unwrap()).unwrap()
}

impl World {
    fn new() -> Self {
        let mut lifetime = Lifetime::new(1);
        let services = [MemberId(1), MemberId(2)].map(|member| {
            lifetime.join(member);
            Service {
                member,
                alive: true,
                connected: true,
                leaving: false,
                epoch: None,
                found: None,
                mapped: [None; SLOTS],
                legacy: [None; SLOTS],
                deltas: [0; SLOTS],
                channel: VecDeque::new(),
            }
        });
        let (orphans, generation) = (Vec::new(), [0; SLOTS]);
        Self {
            lifetime,
            generation,
            services,
            orphans,
            published: 0,
            sent: 0,
            reconnected: 0,
        }
    }

    fn state(&self, n: usize) -> SlotState {
        self.lifetime.slots().state(slot(n))
    }

    /// The rule.
    fn holds(&self) -> bool {
        let safe =
            |n: usize, generation| self.state(n) != SlotState::Free && self.generation[n] == generation;
        self.services.iter().filter(|s| s.alive).all(|service| {
            let mapped = service.mapped.iter().chain(&service.legacy).enumerate();
            mapped
                .filter_map(|(n, g)| Some((n % SLOTS, (*g)?)))
                .chain(service.found)
                .all(|(n, g)| safe(n, g))
        })
    }

    /// All states one step away.
    fn successors(&self, bounds: Bounds, mistake: Mistake) -> Vec<World> {
        let mut all = Vec::new();
        for i in 0..SERVICES {
            self.service_steps(i, bounds, mistake, &mut all);
            self.store_steps(i, bounds, mistake, &mut all);
        }
        self.step(
            &mut all,
            self.lifetime.is_pending() || self.lifetime.slots().limbo() > 0,
            |w| {
                w.lifetime.advance();
                match mistake {
                    Mistake::NoEpochWait => w.lifetime.reclaim_without_waiting(),
                    _ => w.lifetime.reclaim(|_| ()),
                }
            },
        );
        all
    }

    fn step(&self, all: &mut Vec<World>, enabled: bool, act: impl FnOnce(&mut World)) {
        if enabled {
            let mut next = self.clone();
            act(&mut next);
            all.push(next);
        }
    }

    fn service_steps(&self, i: usize, bounds: Bounds, mistake: Mistake, all: &mut Vec<World>) {
        let me = &self.services[i];
        if !me.alive {
            return;
        }
        self.step(all, me.epoch.is_none(), |w| {
            w.services[i].epoch = Some(w.lifetime.epochs().current())
        });
        for n in 0..SLOTS {
            let stays = mistake == Mistake::SeriesStays && self.published > 0;
            let visible = stays || self.lifetime.is_found(slot(n));
            let can_look = me.epoch.is_some() && me.found.is_none() && me.mapped[n].is_none() && !me.leaving;
            self.step(all, visible && can_look, |w| {
                w.services[i].found = Some((n, w.generation[n]))
            });
            self.step(all, me.mapped[n].is_some(), |w| {
                w.services[i].mapped[n] = None;
                w.services[i].deltas[n] -= 1;
            });
            self.step(all, me.legacy[n].is_some(), |w| w.services[i].legacy[n] = None);
        }
        if let Some((n, generation)) = me.found {
            self.step(all, true, |w| {
                w.services[i].found = None;
                w.services[i].mapped[n] = Some(generation);
                w.services[i].deltas[n] += 1;
            });
        }
        if let Some(epoch) = me.epoch {
            let can_send = me.connected && !me.leaving && me.found.is_none() && self.sent < bounds.messages;
            self.step(all, can_send, |w| {
                let deltas = std::mem::take(&mut w.services[i].deltas);
                w.services[i].epoch = None;
                w.services[i].channel.push_back(Some((epoch, deltas)));
                w.sent += 1;
            });
        }
        let can_leave = bounds.goodbyes && me.connected && !me.leaving && me.found.is_none();
        let maps_nothing = me.mapped == [None; SLOTS] || mistake == Mistake::FalseGoodbye;
        self.step(all, can_leave && maps_nothing, |w| {
            w.services[i].leaving = true;
            w.services[i].channel.push_back(None);
        });
        self.step(all, true, |w| {
            w.services[i].alive = false;
            w.services[i].found = None;
        });
        self.step(
            all,
            !me.connected && self.reconnected < bounds.reconnections,
            |w| {
                w.reconnected += 1;
                let member = MemberId(10 + u16::from(w.reconnected));
                w.lifetime.join(member);
                let me = &mut w.services[i];
                for n in 0..SLOTS {
                    me.legacy[n] = me.legacy[n].or(me.mapped[n].take());
                }
                (me.member, me.connected, me.leaving) = (member, true, false);
                (me.epoch, me.found) = (None, None);
                me.deltas = [0; SLOTS];
            },
        );
    }

    fn store_steps(&self, i: usize, bounds: Bounds, mistake: Mistake, all: &mut Vec<World>) {
        let me = &self.services[i];
        if self.lifetime.is_pending() {
            return;
        }
        self.step(all, me.connected && !me.channel.is_empty(), |w| {
            let member = w.services[i].member;
            let Some((epoch, deltas)) = w.services[i].channel.pop_front().unwrap() else {
                w.services[i].connected = false;
                w.services[i].deltas = [0; SLOTS];
                return w.depart(member);
            };
            for (n, delta) in deltas.into_iter().enumerate() {
                w.lifetime
                    .apply(member, slot(n), delta)
                    .expect("a service that keeps the rules is not accused");
            }
            w.lifetime.acknowledge(member, epoch).expect("likewise");
        });
        // Publishing is a question and an answer: the channel is empty, and the publisher maps what it is given.
        let is_free = |n: &usize| self.state(*n) == SlotState::Free;
        let free = (0..SLOTS).find(is_free);
        let free = free.filter(|_| !bounds.series || (0..SLOTS).all(|n| is_free(&n)));
        if let Some(n) = free {
            let idle = me.alive && me.connected && !me.leaving && me.channel.is_empty();
            let room =
                self.published < bounds.publications && me.mapped[n].is_none() && me.legacy[n].is_none();
            self.step(all, idle && room, |w| {
                let member = w.services[i].member;
                w.published += 1;
                w.services[i].mapped[n] = Some(w.published);
                if bounds.series {
                    w.lifetime.publish_series(member, slot(0), &[slot(1)]);
                    w.generation = [w.published; SLOTS];
                } else {
                    w.lifetime.publish(member, slot(n));
                    w.generation[n] = w.published;
                }
            });
        }
        // The socket ends, with the process or before it; what was not yet read is lost.
        self.step(all, me.connected, |w| {
            w.services[i].connected = false;
            w.services[i].channel.clear();
            let member = w.services[i].member;
            match mistake {
                Mistake::NoOrphans => w.depart(member),
                Mistake::OrphansForgetEpoch => {
                    w.lifetime.forget_epoch(member);
                    w.orphans.push((member, i));
                }
                _ => w.orphans.push((member, i)),
            }
        });
        for (at, (member, of)) in self.orphans.iter().copied().enumerate() {
            self.step(all, of == i && !me.alive, |w| {
                w.orphans.remove(at);
                w.depart(member);
            });
        }
    }

    fn depart(&mut self, member: MemberId) {
        while self.lifetime.leave_some(member).1 {}
    }
}

/// Walks through all states: how many there are, or `None` if the rule is broken somewhere.
fn explore(bounds: Bounds, mistake: Mistake) -> Option<usize> {
    let fingerprint = |world: &World| {
        [1u8, 2].map(|seed| {
            let mut hasher = DefaultHasher::new();
            (seed, world).hash(&mut hasher);
            hasher.finish()
        })
    };
    let start = World::new();
    let mut seen = HashSet::from([fingerprint(&start)]);
    let mut open = vec![start];
    while let Some(world) = open.pop() {
        if !world.holds() {
            return None;
        }
        open.extend(
            world
                .successors(bounds, mistake)
                .into_iter()
                .filter(|next| seen.insert(fingerprint(next))),
        );
    }
    Some(seen.len())
}

/// Worlds small enough to be walked through in seconds, each with another emphasis.
const WORLDS: [Bounds; 4] = [
    Bounds {
        publications: 2,
        messages: 2,
        reconnections: 0,
        series: false,
        goodbyes: false,
    },
    Bounds {
        publications: 1,
        messages: 3,
        reconnections: 0,
        series: false,
        goodbyes: true,
    },
    Bounds {
        publications: 1,
        messages: 2,
        reconnections: 1,
        goodbyes: true,
        series: false,
    },
    Bounds {
        publications: 1,
        messages: 2,
        reconnections: 0,
        goodbyes: true,
        series: true,
    },
];

#[test]
fn no_slot_is_reused_while_anybody_may_map_it() {
    for bounds in WORLDS {
        let start = std::time::Instant::now();
        let states = explore(bounds, Mistake::None).expect("the rule holds");
        println!("{states} states in {:?}", start.elapsed());
        assert!(states > 1000, "only {states} states: the world does nothing");
    }
}

fn is_found_out(mistake: Mistake) -> bool {
    WORLDS
        .into_iter()
        .any(|bounds| explore(bounds, mistake).is_none())
}

#[test]
fn the_rule_breaks_without_the_epoch_wait() {
    assert!(is_found_out(Mistake::NoEpochWait));
}

#[test]
fn the_rule_breaks_when_a_broken_connection_ends_its_references() {
    assert!(is_found_out(Mistake::NoOrphans));
}

#[test]
fn the_rule_breaks_when_a_broken_connection_does_not_hold_back_reuse() {
    assert!(is_found_out(Mistake::OrphansForgetEpoch));
}

#[test]
fn the_rule_breaks_when_a_series_is_found_after_its_end() {
    assert!(is_found_out(Mistake::SeriesStays));
}

#[test]
fn the_rule_breaks_when_a_service_that_maps_slots_says_goodbye() {
    assert!(is_found_out(Mistake::FalseGoodbye));
}
