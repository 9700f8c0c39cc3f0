//! All interleavings of a small world, on the code that the server runs: one or two services, two or three slots, one
//! store.
//!
//! Rules proved, in every state:
//!
//! - **No slot is free or holds another page while a member that can tell maps it or is about to** (has found it and not yet mapped it).
//! - **What a member tells concerns the slot that it found**, also if that is read later; and no member that keeps the rules is accused.
//! - **What a process has told that it maps is counted as long as the process lives and maps it**, also if its connection broke: its orphan
//!   references a slot that holds that page, be it another one by now.
//! - Where a page has moved, the old slot is not found, and the new one is live and holds the same.
//!
//! A slot stands for a segment of its own: publishing to it once it is free means that its number was given to another one, with another
//! file. Nothing is said of the bytes of slots that a process maps without having been able to tell: they are what they were when it
//! compared them, since no file's slot is written again ([`crate::ledger::lifetime`]), whatever its number names.
//!
//! The store takes one message at a time from first-in-first-out channels, at any later moment. Services read the
//! epoch, look up, map, drop, send, lose their socket (what was on the way is lost), go on working without it,
//! follow pages that have moved, connect again, take earlier memberships over, say goodbye, and die. The store moves pages at any moment. It settles
//! (advances the epoch, frees) at a moment of its own, so that services see the index between a removal and the epoch's
//! advance. In one world two slots are a series.

use crate::ledger::epochs::{Epoch, MemberId};
use crate::ledger::lifetime::Lifetime;
use crate::ledger::slots::SlotState;
use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use vmm_dedup_protocol::Slot;

const SLOTS: usize = 3;
const SERVICES: usize = 2;

/// How far the world goes: bounds that keep the number of states finite.
#[derive(Clone, Copy)]
struct Bounds {
    services: usize,
    slots: usize,
    publications: u8,
    messages: u8,
    reconnections: u8,
    moves: u8,
    /// The first two slots are one series.
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
    /// A member that is slow does not keep slots from being freed, and is heard all the same.
    SlowIsForgotten,
    /// A service that connects again tells of what it mapped before.
    ToldAnew,
    /// A series is found in the index after it has ended.
    SeriesStays,
    /// A service says goodbye and still maps a slot.
    FalseGoodbye,
    /// A service reports a batch between reading where a page has moved and mapping it.
    ForwardsAreNotPending,
    /// A service takes an earlier membership over while it still maps what it found over that.
    EarlyTakeOver,
}

/// Which content a slot has: counts publications.
type Generation = u8;

/// A slot that a service is about to map.
#[derive(Clone, Copy, Hash)]
struct FoundSlot {
    slot: usize,
    generation: Generation,
    /// In the place of this one, whose page has moved.
    over: Option<usize>,
}

#[derive(Clone, Hash)]
struct Service {
    member: MemberId,
    alive: bool,
    connected: bool,
    /// It has said goodbye, and looks nothing up until it connects again.
    leaving: bool,
    /// The epoch of the batch that is being collected.
    epoch: Option<Epoch>,
    found: Option<FoundSlot>,
    mapped: [Option<Generation>; SLOTS],
    /// Once the connection is broken: whether the store was told of what is mapped.
    told: [bool; SLOTS],
    /// Mapped and told over an earlier connection: its orphan accounts for them.
    legacy: [Option<Generation>; SLOTS],
    deltas: [Told; SLOTS],
    channel: VecDeque<Record>,
}

/// A change of references, and to what; that is 0 if there is none.
#[derive(Clone, Copy, Default, Hash)]
struct Told {
    delta: i32,
    generation: Generation,
}

impl Told {
    fn change(&mut self, delta: i32, generation: Generation) {
        self.delta += delta;
        self.generation = if self.delta == 0 { 0 } else { generation };
    }
}

/// What a service sends.
#[derive(Clone, Copy, Hash)]
enum Record {
    Batch(Epoch, [Told; SLOTS]),
    /// All memberships that it had before.
    TakeOver,
    Goodbye,
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
    moved: u8,
    /// A member told of a slot that holds another page than the one it found, or was accused.
    confused: bool,
}

fn slot(n: usize) -> Slot {
    Slot::try_new(u32::try_from(n).unwrap()).unwrap()
}

impl World {
    fn new(services: usize) -> Self {
        let mut lifetime = Lifetime::new(1);
        let services = [MemberId(1), MemberId(2)].map(|member| {
            let alive = usize::from(member.0) <= services;
            if alive {
                lifetime.join(member, 0);
            }
            Service {
                member,
                alive,
                connected: true,
                leaving: false,
                epoch: None,
                found: None,
                mapped: [None; SLOTS],
                told: [false; SLOTS],
                legacy: [None; SLOTS],
                deltas: [Told::default(); SLOTS],
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
            moved: 0,
            confused: false,
        }
    }

    fn state(&self, n: usize) -> SlotState {
        self.lifetime.slots().state(slot(n))
    }

    /// The rules.
    fn holds(&self) -> bool {
        let safe =
            |n: usize, generation| self.state(n) != SlotState::Free && self.generation[n] == generation;
        let follows = |n: usize| {
            self.forward(n).is_none_or(|to| {
                let live = matches!(self.state(to), SlotState::Live(_));
                live && self.generation[to] == self.generation[n] && !self.lifetime.is_found(slot(n))
            })
        };
        !self.confused
            && (0..SLOTS).all(follows)
            && self.held_by_orphans_alone() == self.lifetime.held_by_orphans_alone()
            && (0..SERVICES).filter(|i| self.services[*i].alive).all(|i| {
                let service = &self.services[i];
                let (mapped, legacy) = (service.mapped.iter().enumerate(), service.legacy.iter());
                let mapped = mapped.filter_map(|(n, g)| Some((n, (*g)?)));
                let found = service.found.map(|found| (found.slot, found.generation));
                let mut can_tell_of = mapped.clone().chain(found).filter(|_| service.connected);
                let told = mapped.filter(|(n, _)| !service.connected && service.told[*n]);
                let mut counted = told.map(|(_, g)| g).chain(legacy.filter_map(|g| *g));
                can_tell_of.all(|(n, g)| safe(n, g)) && counted.all(|g| self.counts(i, g))
            })
    }

    /// Whether a member that a service was, or is, references a slot that holds a page.
    fn counts(&self, i: usize, generation: Generation) -> bool {
        let earlier = self.orphans.iter().filter(|(_, of)| *of == i).map(|(id, _)| *id);
        let mut held = earlier
            .chain([self.services[i].member])
            .filter_map(|id| self.lifetime.references(id));
        held.any(|held| (0..SLOTS).any(|n| self.generation[n] == generation && held.held(slot(n)) > 0))
    }

    /// Pages that orphans reference, and no other member, by the references of each.
    fn held_by_orphans_alone(&self) -> u64 {
        let is_orphan = |id: &MemberId| self.orphans.iter().any(|(orphan, _)| orphan == id);
        let (orphans, others): (Vec<_>, Vec<_>) = self.lifetime.members().partition(is_orphan);
        let referenced = |page: usize, by: &[MemberId]| {
            let mut all = by.iter().filter_map(|id| self.lifetime.references(*id));
            all.any(|held| (0..SLOTS).any(|n| self.forward(n).unwrap_or(n) == page && held.held(slot(n)) > 0))
        };
        let alone = |page: &usize| referenced(*page, &orphans) && !referenced(*page, &others);
        (0..SLOTS).filter(alone).count() as u64
    }

    /// Where the page of a slot has moved.
    fn forward(&self, n: usize) -> Option<usize> {
        self.lifetime.moved_to(slot(n)).map(|to| to.number() as usize)
    }

    /// As the pool: draws the consequences of what was done.
    fn settle(&mut self) {
        self.lifetime.take_changes();
    }

    /// All states one step away.
    fn successors(&self, bounds: Bounds, mistake: Mistake) -> Vec<World> {
        let mut all = Vec::new();
        for i in 0..bounds.services {
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
                    _ => w.lifetime.reclaim(),
                }
                w.settle();
            },
        );
        self.moves(bounds, &mut all);
        all
    }

    fn step(&self, all: &mut Vec<World>, enabled: bool, act: impl FnOnce(&mut World)) {
        if enabled {
            let mut next = self.clone();
            act(&mut next);
            all.push(next);
        }
    }

    /// The store moves a page.
    fn moves(&self, bounds: Bounds, all: &mut Vec<World>) {
        let free = (0..bounds.slots).find(|n| self.state(*n) == SlotState::Free);
        for n in 0..bounds.slots {
            let live = matches!(self.state(n), SlotState::Live(_)) && self.forward(n).is_none();
            let Some(to) = free.filter(|_| live && self.moved < bounds.moves && !self.lifetime.is_pending())
            else {
                continue;
            };
            self.step(all, true, |w| {
                w.moved += 1;
                w.generation[to] = w.generation[n];
                let listed = !w.lifetime.is_unlisted(slot(n));
                w.lifetime.relocate(slot(n), slot(to), listed);
                w.settle();
            });
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
        for n in 0..bounds.slots {
            let stays = mistake == Mistake::SeriesStays && self.published > 0;
            let visible = stays || self.lifetime.is_found(slot(n));
            let can_look = me.epoch.is_some() && me.found.is_none() && me.mapped[n].is_none() && !me.leaving;
            self.step(all, visible && can_look, |w| {
                w.services[i].found = Some(FoundSlot {
                    slot: n,
                    generation: w.generation[n],
                    over: None,
                })
            });
            // It follows a page that has moved, to a slot that holds the same.
            let to = self.forward(n).filter(|to| {
                let can_follow = me.epoch.is_some() && me.found.is_none() && !me.leaving;
                can_follow && me.mapped[*to].is_none() && me.mapped[n] == Some(self.generation[*to])
            });
            if let Some(to) = to {
                self.step(all, true, |w| {
                    w.services[i].found = Some(FoundSlot {
                        slot: to,
                        generation: w.generation[to],
                        over: Some(n),
                    })
                });
            }
            if let Some(generation) = me.mapped[n] {
                self.step(all, true, |w| {
                    (w.services[i].mapped[n], w.services[i].told[n]) = (None, false);
                    w.services[i].deltas[n].change(-1, generation);
                });
            }
            self.step(all, me.legacy[n].is_some(), |w| w.services[i].legacy[n] = None);
        }
        if let Some(found) = me.found {
            self.step(all, true, |w| {
                let me = &mut w.services[i];
                me.found = None;
                let still = found.over.is_none_or(|over| me.mapped[over].take().is_some());
                if still {
                    me.mapped[found.slot] = Some(found.generation);
                    me.deltas[found.slot].change(1, found.generation);
                    if let Some(over) = found.over {
                        me.told[over] = false;
                        me.deltas[over].change(-1, found.generation);
                    }
                }
            });
        }
        if let Some(epoch) = me.epoch {
            let pending = me
                .found
                .is_some_and(|found| mistake != Mistake::ForwardsAreNotPending || found.over.is_none());
            let can_send = me.connected && !me.leaving && !pending && self.sent < bounds.messages;
            self.step(all, can_send, |w| {
                let deltas = std::mem::take(&mut w.services[i].deltas);
                w.services[i].epoch = None;
                w.services[i].channel.push_back(Record::Batch(epoch, deltas));
                w.sent += 1;
            });
        }
        let can_leave = bounds.goodbyes && me.connected && !me.leaving && me.found.is_none();
        let maps_nothing = me.mapped == [None; SLOTS] || mistake == Mistake::FalseGoodbye;
        self.step(all, can_leave && maps_nothing, |w| {
            w.services[i].leaving = true;
            w.services[i].channel.push_back(Record::Goodbye);
        });
        let is_orphan = |(_, of): &(MemberId, usize)| *of == i;
        let has_more = me.connected && !me.leaving && self.orphans.iter().any(is_orphan);
        let told = me.channel.iter().any(|record| matches!(record, Record::TakeOver));
        let gave_up = me.legacy == [None; SLOTS] || mistake == Mistake::EarlyTakeOver;
        self.step(all, has_more && !told && gave_up, |w| {
            w.services[i].channel.push_back(Record::TakeOver);
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
                w.lifetime.join(member, 0);
                let me = &mut w.services[i];
                (me.member, me.connected, me.leaving) = (member, true, false);
                (me.epoch, me.found) = (None, None);
                me.deltas = [Told::default(); SLOTS];
                let told = std::mem::take(&mut me.told);
                for (n, told) in told.into_iter().enumerate() {
                    let mapped = me.mapped[n].filter(|_| mistake != Mistake::ToldAnew);
                    if let (Mistake::ToldAnew, Some(generation)) = (mistake, me.mapped[n]) {
                        me.deltas[n].change(1, generation);
                    } else {
                        me.mapped[n] = None;
                    }
                    me.legacy[n] = me.legacy[n].or(mapped.filter(|_| told));
                }
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
            let (epoch, deltas) = match w.services[i].channel.pop_front().unwrap() {
                Record::Batch(epoch, deltas) => (epoch, deltas),
                Record::TakeOver => {
                    let earlier = w.orphans.extract_if(.., |(_, of)| *of == i);
                    let earlier: Vec<_> = earlier.map(|(member, _)| member).collect();
                    return earlier.into_iter().for_each(|member| w.depart(member));
                }
                Record::Goodbye => {
                    w.break_off(i);
                    w.services[i].deltas = [Told::default(); SLOTS];
                    return w.depart(member);
                }
            };
            for (n, told) in deltas.into_iter().enumerate() {
                w.confused |= told.delta != 0 && told.generation != w.generation[n];
                w.confused |= w.lifetime.apply(member, slot(n), told.delta).is_err();
            }
            w.settle();
            if mistake != Mistake::SlowIsForgotten {
                w.confused |= w.lifetime.acknowledge(member, epoch).is_err();
            }
        });
        self.step(all, me.connected && mistake == Mistake::SlowIsForgotten, |w| {
            w.lifetime.lose(w.services[i].member);
        });
        // Publishing is a question and an answer: the channel is empty, and the publisher maps what it is given.
        let is_free = |n: &usize| self.state(*n) == SlotState::Free;
        let free = (0..bounds.slots).find(is_free);
        let free = free.filter(|_| !bounds.series || (0..bounds.slots).all(|n| is_free(&n)));
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
            w.break_off(i);
            w.services[i].channel.clear();
            let member = w.services[i].member;
            match mistake {
                Mistake::NoOrphans => w.depart(member),
                _ => {
                    while w.lifetime.orphan_some(member) {}
                    w.orphans.push((member, i));
                }
            }
        });
        for (at, (member, of)) in self.orphans.iter().copied().enumerate() {
            self.step(all, of == i && !me.alive, |w| {
                w.orphans.remove(at);
                w.depart(member);
            });
        }
    }

    /// The connection ends: the store knows what it was told.
    fn break_off(&mut self, i: usize) {
        let me = &mut self.services[i];
        me.connected = false;
        let references = self.lifetime.references(me.member).unwrap();
        me.told = std::array::from_fn(|n| me.mapped[n].is_some() && references.held(slot(n)) > 0);
        self.lifetime.lose(me.member);
    }

    fn depart(&mut self, member: MemberId) {
        while self.lifetime.leave_some(member) {}
        self.settle();
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
    let start = World::new(bounds.services);
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

/// A world in which nothing special happens.
const PLAIN: Bounds = Bounds {
    services: 2,
    slots: 2,
    publications: 1,
    messages: 2,
    reconnections: 0,
    moves: 0,
    series: false,
    goodbyes: false,
};

/// Worlds small enough to be walked through in seconds, each with another emphasis.
const WORLDS: [Bounds; 7] = [
    Bounds {
        services: 1,
        slots: 3,
        moves: 2,
        ..PLAIN
    },
    Bounds {
        services: 1,
        messages: 3,
        reconnections: 1,
        moves: 2,
        ..PLAIN
    },
    Bounds {
        messages: 3,
        goodbyes: true,
        ..PLAIN
    },
    Bounds { moves: 1, ..PLAIN },
    Bounds {
        goodbyes: true,
        series: true,
        ..PLAIN
    },
    Bounds {
        reconnections: 1,
        goodbyes: true,
        ..PLAIN
    },
    Bounds {
        publications: 2,
        ..PLAIN
    },
];

#[test]
fn no_slot_is_freed_while_anybody_may_tell_of_it() {
    std::thread::scope(|scope| {
        for bounds in WORLDS {
            scope.spawn(move || {
                let start = std::time::Instant::now();
                let states = explore(bounds, Mistake::None).expect("the rule holds");
                println!("{states} states in {:?}", start.elapsed());
                assert!(states > 1000, "only {states} states: the world does nothing");
            });
        }
    });
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
fn the_rule_breaks_when_a_slow_member_is_not_waited_for_and_not_cut_off() {
    assert!(is_found_out(Mistake::SlowIsForgotten));
}

#[test]
fn the_rule_breaks_when_a_service_that_connects_again_tells_of_what_it_mapped_before() {
    assert!(is_found_out(Mistake::ToldAnew));
}

#[test]
fn the_rule_breaks_when_a_series_is_found_after_its_end() {
    assert!(is_found_out(Mistake::SeriesStays));
}

#[test]
fn the_rule_breaks_when_a_service_that_maps_slots_says_goodbye() {
    assert!(is_found_out(Mistake::FalseGoodbye));
}

#[test]
fn the_rule_breaks_when_a_membership_is_taken_over_too_early() {
    assert!(is_found_out(Mistake::EarlyTakeOver));
}

#[test]
fn the_rule_breaks_when_a_forward_is_read_and_not_told() {
    assert!(is_found_out(Mistake::ForwardsAreNotPending));
}
