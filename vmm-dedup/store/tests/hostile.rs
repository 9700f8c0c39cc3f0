//! A hostile service against a live store, with an exact oracle.
//!
//! One connection sends random batches, publications and garbage. A simple model of the whole store (hash maps, no
//! index, no segments) predicts every answer it gets, including the end of the connection. A second, well-behaved
//! connection goes through a scripted exchange in between; the model predicts every answer it gets, too, and it
//! compares the content of its slots each time. In the end nothing of the hostile one may be left.

mod support;

use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};
use support::{Client, Server, connected_by_another_process, eventually, page, stats};
use vmm_dedup_protocol::message::{
    Ask, Kind, Message, NO_SLOT, RefDelta, aligned_buffer, encode, encode_batch,
};
use vmm_dedup_protocol::{SEGMENT_BYTES, Slot, socket};
use zerocopy::IntoBytes;

const GOOD: usize = 0;
const EVIL: usize = 1;

#[derive(Clone, Debug)]
enum Action {
    /// Keys as (whether whole-page, number); epochs as an offset from the current one; a slot out of range is one.
    Batch {
        epoch: i64,
        sightings: Vec<(bool, u64)>,
        withdrawals: Vec<(bool, u64)>,
        /// Seeds of pages whose line keys are said to be ambiguous.
        ambiguous: Vec<u64>,
        refs: Vec<(u32, i32)>,
    },
    /// Pages by seed, each with the key that is announced and a gap.
    Publish(Vec<(u64, Announced, u16)>),
    Report(Vec<u8>),
    /// A record of a valid header, of this kind, with an arbitrary body.
    Record(u16, Vec<u8>),
    Garbage(Vec<u8>),
}

/// What a page is announced as.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Announced {
    Line,
    Full,
    Other,
}

fn announcements() -> impl Strategy<Value = Announced> {
    prop_oneof![3 => Just(Announced::Line), 3 => Just(Announced::Full), 1 => Just(Announced::Other)]
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let keys = || proptest::collection::vec((any::<bool>(), 0u64..12), 0..6);
    let refs = prop_oneof![
        4 => Just(Vec::new()),
        1 => proptest::collection::vec((0u32..4, -1i32..3), 1..3),
    ];
    let epoch = prop_oneof![60 => Just(0i64), 10 => Just(i64::MIN), 1 => -1i64..3];
    let batch = (
        epoch,
        keys(),
        keys(),
        proptest::collection::vec(1000u64..1006, 0..2),
        refs,
    )
        .prop_map(|(epoch, sightings, withdrawals, ambiguous, refs)| Action::Batch {
            epoch,
            sightings,
            withdrawals,
            ambiguous,
            refs,
        });
    let bytes = || proptest::collection::vec(any::<u8>(), 0..80);
    let action = prop_oneof![
        40 => batch,
        20 => proptest::collection::vec((1000u64..1006, announcements(), 0u16..8), 0..5).prop_map(Action::Publish),
        4 => proptest::collection::vec(any::<u8>(), 8).prop_map(Action::Report),
        1 => (0u16..24, bytes()).prop_map(|(kind, body)| Action::Record(kind, body)),
        1 => bytes().prop_map(Action::Garbage),
    ];
    proptest::collection::vec(action, 1..40)
}

/// What the store should know.
#[derive(Default)]
struct Model {
    epoch: u64,
    acknowledged: [u64; 2],
    refs: [HashMap<u32, i64>; 2],
    /// Slots out of the index, since which epoch.
    limbo: HashMap<u32, u64>,
    content: HashMap<u32, u64>,
    sighted: HashMap<u64, usize>,
    /// Line keys in the index: slots below, and whether they are marked.
    lines: HashMap<u64, (u32, bool)>,
    /// Slots that are found by their hashes.
    hashed: HashSet<u32>,
    asked: Vec<u64>,
    /// What the hostile one was asked for and did not publish.
    declined: HashSet<u64>,
}

/// What a connection should see.
#[derive(Debug, PartialEq)]
enum Expected {
    Reply(Vec<u32>),
    End,
}

struct Keys {
    line: u64,
    full: u64,
}

impl Model {
    fn total(&self, slot: u32) -> i64 {
        self.refs.iter().filter_map(|r| r.get(&slot)).sum()
    }

    fn live(&self) -> Vec<u32> {
        self.content
            .keys()
            .copied()
            .filter(|s| self.total(*s) > 0)
            .collect()
    }

    fn full_keys(&self, keys: &impl Fn(u64) -> Keys) -> HashSet<u64> {
        self.live()
            .into_iter()
            .filter(|slot| self.hashed.contains(slot))
            .map(|slot| keys(self.content[&slot]).full)
            .collect()
    }

    /// Advances the epoch if slots left the index, and frees.
    fn settle(&mut self, dropped: bool) {
        self.epoch += u64::from(dropped);
        let quiescent = self.acknowledged[GOOD].min(self.acknowledged[EVIL]);
        self.limbo.retain(|slot, epoch| {
            let stays = *epoch > quiescent;
            if !stays {
                self.content.remove(slot);
            }
            stays
        });
    }

    #[allow(clippy::too_many_arguments)]
    fn batch(
        &mut self,
        who: usize,
        epoch: u64,
        sightings: &[u64],
        withdrawals: &[u64],
        ambiguous: &[u64],
        refs: &[(u32, i32)],
        keys: &impl Fn(u64) -> Keys,
    ) -> Expected {
        if who == EVIL {
            for key in std::mem::take(&mut self.asked) {
                self.sighted.remove(&key);
                self.declined.insert(key);
            }
        }
        let (slots, mut asks) = (self.full_keys(keys), Vec::new());
        for (at, key) in sightings.iter().enumerate() {
            let full = key >> 47 != 0;
            if (full && slots.contains(key)) || (!full && self.lines.contains_key(key)) {
                asks.push(Ask::LookUp.of(u32::try_from(at).unwrap()));
                continue;
            }
            if !self.sighted.contains_key(key) {
                self.sighted.insert(*key, who);
            } else if !(self.asked.contains(key) || who == EVIL && self.declined.contains(key)) {
                self.asked.push(*key);
                asks.push(Ask::Publish.of(u32::try_from(at).unwrap()));
            }
        }
        for key in withdrawals {
            if self.sighted.get(key) == Some(&who) {
                self.sighted.remove(key);
            }
        }
        for line in ambiguous {
            self.mark(*line, keys);
        }
        let mut dropped = false;
        let mut net = BTreeMap::new();
        for (slot, delta) in refs {
            *net.entry(*slot).or_insert(0) += i64::from(*delta);
        }
        for (slot, delta) in &net {
            let (held, total) = (self.refs[who].get(slot).copied().unwrap_or(0), self.total(*slot));
            let new = held + delta;
            if new < 0 || (*delta > 0 && !self.content.contains_key(slot)) {
                self.settle(dropped);
                return Expected::End;
            }
            self.refs[who].insert(*slot, new);
            if *delta < 0 && total + delta == 0 {
                self.limbo.insert(*slot, self.epoch + 1);
                self.go(*slot, keys(self.content[slot]).line);
                dropped = true;
            }
            if *delta > 0 && self.limbo.remove(slot).is_some() {
                self.enter(*slot, keys(self.content[slot]).line);
            }
        }
        let end = epoch > self.epoch || (epoch != 0 && epoch < self.acknowledged[who]);
        if !end {
            self.acknowledged[who] = self.acknowledged[who].max(epoch);
        }
        self.settle(dropped);
        if end { Expected::End } else { Expected::Reply(asks) }
    }

    fn enter(&mut self, slot: u32, line: u64) {
        let (count, marked) = self.lines.entry(line).or_insert((0, false));
        *count += 1;
        if *marked {
            self.hashed.insert(slot);
        }
        self.sighted.remove(&line);
    }

    fn mark(&mut self, line: u64, keys: &impl Fn(u64) -> Keys) {
        if let Some((_, marked)) = self.lines.get_mut(&line) {
            *marked = true;
            let slots = self.live().into_iter();
            let below: Vec<u32> = slots
                .filter(|slot| keys(self.content[slot]).line == line)
                .collect();
            self.hashed.extend(below);
        }
    }

    /// A slot leaves the index.
    fn go(&mut self, slot: u32, line: u64) {
        self.hashed.remove(&slot);
        let (count, _) = self.lines.get_mut(&line).unwrap();
        *count -= 1;
        if *count == 0 {
            self.lines.remove(&line);
        }
    }

    /// Takes over which new slots the store chose, and checks the choice.
    fn publish(
        &mut self,
        who: usize,
        pages: &[(u64, Announced, u16)],
        got: &[u32],
        keys: &impl Fn(u64) -> Keys,
    ) {
        assert_eq!(pages.len(), got.len());
        for ((seed, announced, _), slot) in pages.iter().zip(got) {
            let Keys { line, full } = keys(*seed);
            match announced {
                Announced::Line => self.asked.retain(|key| *key != line),
                Announced::Full => self.asked.retain(|key| *key != full),
                Announced::Other => {
                    assert_eq!(*slot, NO_SLOT);
                    continue;
                }
            }
            // Two, if one came back from limbo after the page had been published anew.
            let mut there = self.live();
            there.retain(|slot| self.content[slot] == *seed);
            if !there.is_empty() {
                assert!(there.contains(slot), "{seed} got {slot}, and is in {there:?}");
            } else {
                assert!(self.content.insert(*slot, *seed).is_none(), "{slot} was not free");
                self.enter(*slot, line);
            }
            *self.refs[who].entry(*slot).or_insert(0) += 1;
            if *announced == Announced::Full {
                self.mark(line, keys);
                self.sighted.remove(&full);
            }
        }
    }

    fn leave(&mut self, who: usize, keys: &impl Fn(u64) -> Keys) {
        if who == EVIL {
            for key in std::mem::take(&mut self.asked) {
                self.sighted.remove(&key);
            }
            self.declined.clear();
        }
        self.sighted.retain(|_, owner| *owner != who);
        let mut dropped = false;
        for (slot, n) in std::mem::take(&mut self.refs[who]) {
            if n > 0 && self.total(slot) == 0 {
                self.limbo.insert(slot, self.epoch + 1);
                self.go(slot, keys(self.content[&slot]).line);
                dropped = true;
            }
        }
        self.acknowledged[who] = u64::MAX;
        self.settle(dropped);
    }
}

/// The well-behaved connection's script: one page after the other is shared, used and dropped.
fn good_step(step: u64, good: &mut Client, model: &mut Model, keys: &impl Fn(u64) -> Keys) {
    let (seed, epoch) = (step / 4, good.index.epoch());
    let Keys { full, .. } = keys(seed);
    let (sightings, refs) = match step % 4 {
        0 => (vec![full], vec![]),
        1 => {
            let slots = good.publish(&[page(seed)]);
            model.publish(
                GOOD,
                &[(seed, Announced::Full, 0)],
                &[slots[0].unwrap().number()],
                keys,
            );
            return;
        }
        2 => (vec![full], vec![]),
        _ => {
            let held = model.refs[GOOD]
                .iter()
                .find(|(_, n)| **n > 0)
                .map(|(slot, _)| *slot)
                .unwrap();
            (vec![], vec![(held, -1)])
        }
    };
    let deltas: Vec<_> = refs
        .iter()
        .map(|(s, d)| (Slot::try_new(*s).unwrap(), *d))
        .collect();
    good.send_batch(epoch, &sightings, &[], &deltas);
    let expected = model.batch(GOOD, epoch, &sightings, &[], &[], &refs, keys);
    assert_eq!(Expected::Reply(good.batch_reply()), expected);
}

fn check_content(client: &Client, model: &Model) {
    let live = model.live();
    for slot in live.iter().copied() {
        let seed = model.content[&slot];
        // A page that came back from limbo may have been published anew meanwhile: either slot is as good.
        let found = client.find(&page(seed)).map(Slot::number);
        assert!(
            found.is_some_and(|found| live.contains(&found) && model.content[&found] == seed),
            "{seed} is found in {found:?}, and is in {slot}"
        );
        assert_eq!(
            client.content(Slot::try_new(slot).unwrap()),
            page(seed),
            "slot {slot} has changed"
        );
    }
}

fn key((full, number): (bool, u64)) -> u64 {
    u64::from(full) << 47 | (number << 20) | 5
}

/// Sends what the action says; returns what should come back, if that is a matter of the model.
fn evil_step(
    action: &Action,
    evil: &mut Client,
    model: &mut Model,
    keys: &impl Fn(u64) -> Keys,
    target: u64,
) -> Expected {
    match action {
        Action::Batch {
            epoch,
            sightings,
            withdrawals,
            ambiguous,
            refs,
        } => {
            let epoch = if *epoch == i64::MIN {
                0
            } else {
                evil.index.epoch().saturating_add_signed(*epoch)
            };
            let sightings: Vec<u64> = sightings.iter().copied().map(key).collect();
            // It tries to withdraw what the good one has sighted, too.
            let withdrawals: Vec<u64> = withdrawals.iter().copied().map(key).chain([target]).collect();
            let ambiguous: Vec<u64> = ambiguous.iter().map(|seed| keys(*seed).line).collect();
            let deltas: Vec<_> = refs
                .iter()
                .map(|(slot, delta)| RefDelta {
                    slot: *slot,
                    delta: *delta,
                })
                .collect();
            let record = encode_batch(epoch, &sightings, &withdrawals, &ambiguous, &deltas);
            socket::send(&evil.socket, &record, &[]).unwrap();
            let expected = model.batch(EVIL, epoch, &sightings, &withdrawals, &ambiguous, refs, keys);
            if let Expected::Reply(_) = expected {
                assert_eq!(Expected::Reply(evil.batch_reply()), expected);
            }
            expected
        }
        Action::Publish(pages) => {
            for (at, (seed, _, _)) in pages.iter().enumerate() {
                evil.staging.write_page(at, &page(*seed));
            }
            let staged = |(seed, announced, gap): &(u64, Announced, u16)| {
                let key = match announced {
                    Announced::Line => keys(*seed).line,
                    Announced::Full => keys(*seed).full,
                    Announced::Other => keys(*seed).full ^ 1,
                };
                key | u64::from(*gap) << 48
            };
            let slots = evil.publish_staged(&pages.iter().map(staged).collect::<Vec<_>>());
            // It goes on writing after the store has looked.
            (0..pages.len()).for_each(|at| evil.staging.write_page(at, &page(77)));
            let slots: Vec<u32> = slots
                .into_iter()
                .map(|s| s.map_or(NO_SLOT, Slot::number))
                .collect();
            model.publish(EVIL, pages, &slots, keys);
            Expected::Reply(Vec::new())
        }
        Action::Report(bytes) => {
            let size = size_of::<vmm_dedup_protocol::stats::ServiceStats>();
            let body: Vec<u8> = bytes.iter().copied().cycle().take(size).collect();
            socket::send(&evil.socket, &encode(Kind::Report, &[&body]), &[]).unwrap();
            Expected::Reply(Vec::new())
        }
        Action::Record(kind, body) => {
            // None of these is a valid record with such a body, or it is out of place; a descriptor comes along. What a service
            // may say is not sent: most of it is played by other actions, and who says farewell is told nothing.
            let mut record = encode(Kind::Error, &[body]);
            record[6..8].copy_from_slice(&kind.to_le_bytes());
            let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            let mut buffer = aligned_buffer();
            buffer.as_mut_bytes()[..record.len()].copy_from_slice(&record);
            let harmless = matches!(
                vmm_dedup_protocol::message::parse(&buffer.as_bytes()[..record.len()]),
                Ok(Message::Batch(_) | Message::Publish(_) | Message::StatsRequest(_) | Message::Goodbye)
            );
            if !harmless {
                let with_file = socket::send(&evil.socket, &record, &[std::os::fd::AsFd::as_fd(&file)]);
                // From Linux 6.16 on the kernel does not pass it on.
                with_file
                    .or_else(|_| socket::send(&evil.socket, &record, &[]))
                    .unwrap();
            }
            if harmless {
                Expected::Reply(Vec::new())
            } else {
                Expected::End
            }
        }
        Action::Garbage(bytes) => {
            socket::send(&evil.socket, bytes, &[]).unwrap();
            Expected::End
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_hostile_service_gets_what_the_model_says_and_leaves_nothing(actions in actions()) {
        let server = Server::start(|_| ());
        let mut good = Client::connect(&server.socket, "good");
        let mut evil = Client::over(connected_by_another_process(&server.socket), "evil");
        let salt = good.salt;
        let keys = move |seed: u64| {
            use vmm_dedup_protocol::key::{Key, PageHash, line_words};
            let words = page(seed);
            let line = Key::of_lines(&line_words(|i| words[i]), salt).raw();
            Keys { line, full: PageHash::of(&words, salt).key().raw() }
        };
        let mut model = Model { epoch: 1, acknowledged: [1, 1], ..Model::default() };
        let mut step = 0;
        for action in &actions {
            good_step(step, &mut good, &mut model, &keys);
            step += 1;
            check_content(&good, &model);
            if evil_step(action, &mut evil, &mut model, &keys, keys((step - 1) / 4).full) == Expected::End {
                let text = if matches!(action, Action::Garbage(bytes) if bytes.is_empty()) {
                    String::new()
                } else {
                    evil.error()
                };
                prop_assert!(text.len() < 300);
                break;
            }
        }
        drop(evil);
        model.leave(EVIL, &keys);
        // Its references go a moment after it.
        eventually(|| stats(&server.socket).vms == 1 && good.index.epoch() == model.epoch);
        while step % 4 != 0 {
            good_step(step, &mut good, &mut model, &keys);
            step += 1;
        }
        check_content(&good, &model);
        good.acknowledge();
        model.batch(GOOD, good.index.epoch(), &[], &[], &[], &[], &keys);
        let mut account = stats(&server.socket).store;
        eventually(|| {
            account = stats(&server.socket).store;
            (account.pages_shared, account.pages_sharing, account.slots_limbo) == (0, 0, 0)
        });
        // Empty segments that could take pages go within a second.
        prop_assert!(account.resident_bytes < SEGMENT_BYTES as u64);
        prop_assert_eq!(account.sightings, model.sighted.len() as u64);
        let marks = model.lines.values().filter(|(_, marked)| *marked).count();
        prop_assert_eq!(account.marks, marks as u64);
        prop_assert_eq!(account.epoch, model.epoch);
        prop_assert!(account.metadata_bytes < 1 << 20);
    }
}
