//! What a guest's agent sends, beside its bytes by the documentation of `vmm-dedup-agent-wire`.
//!
//! The model reads bits as a list and values as a list, and says of each message whether it can have been sent, what it says of
//! which frame, and what it costs. The receiver must close the connection exactly where the model does, and know the same of every
//! frame afterwards. So a length that is read from the wrong place, a block that is let through with bits too many, or work that
//! is not paid for cannot stay unseen.

use std::collections::BTreeMap;
use std::time::Duration;
use vmm_dedup_agent_receiver::receiver::{Limits, Receiver};
use vmm_dedup_agent_wire::block::Frames;
use vmm_dedup_agent_wire::frame::{BLOCK, Block, Gfn, Stretch};
use vmm_dedup_agent_wire::message::{
    BlocksBuilder, Hello, Mark, Message, NOTHING, Pressure, Refusal, Sources, StretchesBuilder,
};
use vmm_dedup_agent_wire::said::{Kind, Said, Temperature};

/// Blocks of the guest.
const BLOCKS: u64 = 2;
const FRAMES: u64 = BLOCKS * BLOCK as u64;
const HEADER: usize = 8;
/// What the receiver may take: a block's longest form, its counts and its marks, and a connection.
const MOST_MEMORY: usize = 2 * (126 + 64 + 2 * 256) + 4096;
const LIMITS: Limits = Limits {
    bytes_per_second: 1 << 10,
    burst: 8 << 10,
    seconds_per_connection: 2,
    connections: 4,
    stale_after: Duration::from_secs(10),
};

/// What the guest has said, by the model.
#[derive(Debug, Default)]
struct Known {
    blocks: BTreeMap<u64, Vec<u8>>,
    fresh: Vec<u64>,
    marks: [Vec<bool>; 3],
    snapshot: Option<(u64, [Vec<bool>; 3])>,
    begun: u64,
    lost: bool,
    expected: Option<u64>,
    used: u64,
}

/// Input: bytes that follow an agent's greeting.
///
/// # Panics
/// If the receiver does not do what the model says.
pub fn check(input: &[u8]) {
    let mut receiver = Receiver::new(FRAMES, LIMITS, Duration::ZERO);
    receiver.connected(Duration::ZERO).expect("the first one");
    let (mut greeting, mut out) = (Vec::new(), Vec::new());
    Message::Hello(hello()).encode(0, &mut greeting);
    receiver
        .received(&greeting, Duration::ZERO, &mut out)
        .expect("a greeting");
    let no_marks = || std::array::from_fn(|_| vec![false; frames()]);
    let mut known = Known {
        marks: no_marks(),
        expected: Some(1),
        ..Known::default()
    };
    // Credit comes once for all: time stands still.
    let result = receiver.received(input, Duration::ZERO, &mut out);
    let is_fine = known.read(input);
    assert_eq!(result.is_ok(), is_fine, "{result:?}");
    for frame in 0..FRAMES {
        let (gfn, at) = (Gfn::try_new(frame).expect("a frame"), usize_of(frame));
        let said = known
            .blocks
            .get(&(frame / BLOCK as u64))
            .map_or(0, |block| block[at % BLOCK]);
        assert_eq!(receiver.said(gfn).bits(), said, "frame {frame}");
        let marks = receiver.marks(gfn);
        for (mark, is) in Mark::ALL.into_iter().zip(&known.marks) {
            assert_eq!(marks.has(mark), is[at], "frame {frame}, {mark:?}");
        }
    }
    assert!(
        receiver.memory_bytes() <= MOST_MEMORY,
        "{} bytes",
        receiver.memory_bytes()
    );
}

fn frames() -> usize {
    usize_of(FRAMES)
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).expect("64 bits")
}

fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Known {
    /// Reads messages to the end of the bytes or to the first that cannot be; that one may have said something before it went
    /// wrong. Returns whether all were fine.
    fn read(&mut self, mut bytes: &[u8]) -> bool {
        if !self.pay(bytes.len() as u64) {
            return false;
        }
        while bytes.len() >= HEADER {
            let len = usize_of(number(&bytes[..2]));
            if len > 16 << 10 {
                return false;
            }
            let Some(payload) = bytes.get(HEADER..HEADER + len) else {
                return true;
            };
            let numbered = number(&bytes[4..8]);
            if bytes[3] != 1 || !self.message(bytes[2], numbered, payload) {
                return false;
            }
            bytes = &bytes[HEADER + len..];
        }
        true
    }

    fn pay(&mut self, cost: u64) -> bool {
        self.used = self.used.saturating_add(cost);
        self.used <= LIMITS.burst
    }

    fn message(&mut self, kind: u8, numbered: u64, payload: &[u8]) -> bool {
        let fits = match kind {
            2 => payload.len() == 8,
            4 => payload.len() == 5 && payload[4] < 2,
            5 => {
                payload.len() >= 8
                    && (1..=3).contains(&payload[4])
                    && payload[5] < 2
                    && payload[6..8] == [0; 2]
            }
            6 => payload.len() == 32 && payload[4..8] == [0; 4],
            7 => payload.is_empty(),
            other => other == 3,
        };
        if !fits {
            return false;
        }
        if self.expected != Some(numbered) {
            self.snapshot = None;
            self.lost = true;
        }
        self.expected = Some((numbered + 1) & 0xffff_ffff);
        match kind {
            2 => {
                // The first is paid for by the connection, which took one of four; time stands still.
                self.begun += 1;
                if self.begun > LIMITS.connections {
                    return false;
                }
                self.lost = false;
                self.fresh.clear();
                let none = std::array::from_fn(|_| vec![false; frames()]);
                self.snapshot = Some((number(&payload[..4]), none));
                true
            }
            3 => self.read_blocks(payload),
            4 => {
                self.end(number(&payload[..4]), payload[4] == 1);
                true
            }
            5 => self.read_marks(payload),
            _ => true,
        }
    }

    fn end(&mut self, snapshot: u64, all_marks: bool) {
        if self
            .snapshot
            .as_ref()
            .is_none_or(|(number, _)| *number != snapshot)
        {
            return;
        }
        let (_, marks) = self.snapshot.take().expect("just looked at");
        let fresh = &self.fresh;
        self.blocks.retain(|block, _| fresh.contains(block));
        if all_marks {
            self.marks = marks;
        }
    }

    fn read_blocks(&mut self, mut bytes: &[u8]) -> bool {
        let mut next = 0_u64;
        while !bytes.is_empty() {
            let Some(gap) = varint(&mut bytes) else {
                return false;
            };
            let block = next.saturating_add(gap);
            let Some((values, used)) = (block < 1 << 31).then(|| read_block(bytes)).flatten() else {
                return false;
            };
            bytes = &bytes[used..];
            next = block + 1;
            if block < BLOCKS {
                self.fresh.push(block);
                self.blocks.insert(block, values);
            }
        }
        true
    }

    fn read_marks(&mut self, payload: &[u8]) -> bool {
        let (mark, set) = (usize::from(payload[4]) - 1, payload[5] == 1);
        let (mut bytes, mut end) = (&payload[8..], None::<u64>);
        while !bytes.is_empty() {
            let (Some(gap), Some(count)) = (varint(&mut bytes), varint(&mut bytes)) else {
                return false;
            };
            let touches = end.is_some() && gap == 0;
            let first = end.unwrap_or(0).saturating_add(gap);
            let after = first.saturating_add(count);
            if touches || count == 0 || after > 1 << 40 {
                return false;
            }
            end = Some(after);
            let blocks = (after - 1) / BLOCK as u64 - first / BLOCK as u64 + 1;
            if !self.pay(8 * blocks) {
                return false;
            }
            for frame in first..after.min(FRAMES) {
                self.marks[mark][usize_of(frame)] = set;
                if let Some((_, marks)) = &mut self.snapshot {
                    marks[mark][usize_of(frame)] = set;
                }
            }
        }
        true
    }
}

/// LEB128 in its shortest form.
fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let len = bytes.iter().position(|byte| byte & 0x80 == 0)? + 1;
    let (digits, rest) = bytes.split_at(len);
    *bytes = rest;
    let value = digits
        .iter()
        .rev()
        .fold(0_u128, |value, digit| value << 7 | u128::from(digit & 0x7f));
    let is_shortest = len == 1 || digits[len - 1] != 0;
    (len <= 10 && is_shortest)
        .then(|| u64::try_from(value).ok())
        .flatten()
}

/// A coded block: a value for each frame, and its bytes.
fn read_block(bytes: &[u8]) -> Option<(Vec<u8>, usize)> {
    let bits: Vec<bool> = bytes[..bytes.len().min(126)]
        .iter()
        .flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1))
        .collect();
    let mut bit = {
        let mut all = bits.iter().copied();
        move || all.next()
    };
    let (mut at, mut values, mut latest) = (0_usize, Vec::new(), Vec::<u8>::new());
    while values.len() < BLOCK {
        let mut ones = 0;
        while ones + 1 < latest.len() {
            at += 1;
            if !bit()? {
                break;
            }
            ones += 1;
        }
        let value = if ones + 1 < latest.len() {
            latest.remove(ones + 1)
        } else {
            at += 7;
            let mut value = 0;
            for place in 0..7 {
                value |= u8::from(bit()?) << place;
            }
            let (kind, more) = (value & 7, value >> 3);
            if kind > 5 || kind < 2 && more != 0 || latest.contains(&value) {
                return None;
            }
            value
        };
        latest.insert(0, value);
        let mut zeros = 0;
        while !bit()? {
            zeros += 1;
        }
        let mut length = 1_usize;
        for _ in 0..zeros {
            length = length.checked_mul(2)? + usize::from(bit()?);
        }
        at += 2 * zeros + 1;
        if values.len() + length > BLOCK {
            return None;
        }
        values.extend(std::iter::repeat_n(value, length));
    }
    let used = at.div_ceil(8);
    bits[at..used * 8]
        .iter()
        .all(|bit| !bit)
        .then_some((values, used))
}

fn hello() -> Hello {
    Hello {
        lowest: 1,
        highest: 1,
        sources: Sources(Sources::FLAGS),
        boot: [1; 16],
        run: 1,
        blocks: 2,
    }
}

/// Streams to begin with.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let block = |number| Block::try_new(number).expect("a block");
    let anonymous = Said::new(Kind::Anonymous).with_temperature(Temperature::Hot);
    let kinds = [
        Said::new(Kind::FileClean),
        Said::new(Kind::Free),
        anonymous,
        anonymous.with_huge(true),
    ];
    let mixed: Frames = std::array::from_fn(|at| kinds[at / 5 % 4]);
    let mut blocks = BlocksBuilder::default();
    blocks.push(block(0), &[kinds[0]; BLOCK]);
    blocks.push(block(1), &mixed);
    blocks.push(block(2), &NOTHING);
    blocks.push(block(77), &mixed);
    let mut stretches = StretchesBuilder::default();
    for (first, count) in [(3, 1), (511, 2), (1000, 200)] {
        stretches.push(Stretch::try_new(first, count).expect("a stretch"));
    }
    let begin = Message::Begin {
        snapshot: 5,
        blocks: 2,
    };
    let end = |all_marks| Message::End {
        snapshot: 5,
        all_marks,
    };
    let marks = |serial, mark, set| Message::Marks {
        serial,
        mark,
        set,
        stretches: stretches.list(),
    };
    let told = Message::Blocks(blocks.list());
    let pressure = Message::Pressure(Pressure::default());
    let never = marks(1, Mark::Never, true);
    let (reason, seconds) = (Refusal::Off, 1);
    let stream = |messages: &[Message<'_>]| {
        let mut bytes = Vec::new();
        for (number, message) in (1..).zip(messages) {
            message.encode(number, &mut bytes);
        }
        bytes
    };
    vec![
        ("blocks", stream(&[told])),
        ("greeting_twice", stream(&[Message::Hello(hello())])),
        (
            "marks",
            stream(&[never, marks(2, Mark::Worth, true), marks(3, Mark::Never, false)]),
        ),
        ("others", stream(&[pressure, Message::Bye])),
        ("services", stream(&[Message::Refuse { reason, seconds }])),
        ("snapshot", stream(&[told, never, begin, told, end(true)])),
        (
            "snapshot_with_marks",
            stream(&[begin, told, never, end(false), begin, end(true)]),
        ),
        ("snapshots", stream(&[begin, begin, begin, begin, begin, begin])),
    ]
}
