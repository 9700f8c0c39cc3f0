//! What was told to the service, and what is to be told: the agent's side of the stream, without I/O.
//!
//! Of each block there is a hash of what was told. Nothing queues: what the credit does not allow is told later, as it is then.

use crate::stretches::FrameSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use vmm_dedup_agent_wire::block::{self, Frames};
use vmm_dedup_agent_wire::frame::{BLOCK, Block, Stretch};
use vmm_dedup_agent_wire::message::{
    BlocksBuilder, HEADER, Header, Hello, MARK_COST, Mark, Message, NOTHING, Pressure, Refusal,
    StretchesBuilder,
};
use vmm_dedup_agent_wire::stream::Stream;
use vmm_dedup_agent_wire::{Malformed, VERSION};

/// What may be used before the service has greeted.
const FIRST_CREDIT: u64 = 4096;
/// Credit that is kept back for small messages.
const RESERVE: u64 = 256;
/// Bytes of `Marks` before its list.
const MARKS: u64 = 8;
/// Frames of a stretch of marks, so that each is affordable: 64 MiB.
const MOST_STRETCH: u64 = 32 * BLOCK as u64;
/// A hash that says that a block was not told.
const NOT_TOLD: u64 = 0;

/// Why a connection is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Not from a service.
    #[error("the service sent a malformed message: {0}")]
    Malformed(#[from] Malformed),
    /// It does not want us.
    #[error("the service refuses ({reason:?}); trying again in {seconds} s")]
    Refused {
        /// Why.
        reason: Refusal,
        /// How long to wait.
        seconds: u32,
    },
    /// A message that only agents send, or a version that was not offered.
    #[error("the service sent {0}")]
    Unexpected(&'static str),
}

/// What came of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It was told like that before.
    Same,
    /// It is told.
    Now,
    /// There is no credit: to be tried again.
    Later,
}

#[derive(Debug, Default)]
struct Link {
    stream: Stream,
    is_welcome: bool,
    credit: u64,
    used: u64,
    number: u32,
    /// A snapshot is to begin.
    begins: bool,
    in_snapshot: bool,
}

/// See the module's text.
#[derive(Debug)]
pub struct Teller {
    told: Vec<u64>,
    /// Blocks with memory, and how many of them were told in this snapshot.
    blocks: u64,
    told_blocks: u64,
    snapshot: u32,
    link: Option<Link>,
    builder: BlocksBuilder,
    marks: [FrameSet; Mark::ALL.len()],
    serial: u32,
    /// The last serial that is to be acknowledged, and that was.
    awaited: u32,
    done: u32,
    /// All programs that were there before us have had time to mark again.
    knows_all_marks: bool,
    out: Vec<u8>,
}

impl Teller {
    /// For memory that ends before block `end`, of which `blocks` blocks exist.
    #[must_use]
    pub fn new(end: u32, blocks: u64) -> Self {
        Self {
            told: vec![NOT_TOLD; end as usize],
            blocks,
            told_blocks: 0,
            snapshot: 0,
            link: None,
            builder: BlocksBuilder::default(),
            marks: Default::default(),
            serial: 0,
            awaited: 0,
            done: 0,
            knows_all_marks: false,
            out: Vec::new(),
        }
    }

    /// A connection has been made.
    pub fn connected(&mut self, hello: Hello) {
        self.disconnected();
        // Nobody answers for what the last one was told.
        (self.awaited, self.done) = (self.serial, self.serial);
        self.link = Some(Link {
            credit: FIRST_CREDIT,
            ..Link::default()
        });
        self.send(&Message::Hello(hello), 0);
    }

    /// The connection has ended.
    pub fn disconnected(&mut self) {
        self.link = None;
        self.out.clear();
        self.builder.clear();
    }

    /// Bytes to be written; those that were are to be removed.
    pub fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Bytes that wait to be written.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.out.len()
    }

    /// Whether the service listens.
    #[must_use]
    pub fn is_welcome(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.is_welcome)
    }

    /// Whether a snapshot is being told, so that every block is to be looked at.
    #[must_use]
    pub fn in_snapshot(&self) -> bool {
        self.link
            .as_ref()
            .is_some_and(|link| link.in_snapshot || link.begins)
    }

    /// Snapshots that were told whole, or begun.
    #[must_use]
    pub fn snapshots(&self) -> u32 {
        self.snapshot
    }

    /// Takes bytes from the service.
    ///
    /// # Errors
    /// [`Error`]: the connection is to be closed.
    pub fn received(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Some(mut link) = self.link.take() else {
            return Ok(());
        };
        let mut stream = std::mem::take(&mut link.stream);
        let result = stream.take(bytes, |header, payload| self.message(&mut link, header, payload));
        link.stream = stream;
        self.link = Some(link);
        result
    }

    fn message(&mut self, link: &mut Link, header: Header, payload: &[u8]) -> Result<(), Error> {
        let message = Message::parse(header.kind, payload)?;
        match message {
            Message::Welcome {
                version: VERSION,
                credit,
            } if !link.is_welcome => {
                link.is_welcome = true;
                link.credit = credit;
                link.begins = true;
            }
            Message::Refuse { reason, seconds } => return Err(Error::Refused { reason, seconds }),
            _ if !link.is_welcome => return Err(Error::Unexpected("something else than a welcome")),
            // Grants only grow.
            Message::Grant { credit } => link.credit = link.credit.max(credit),
            Message::Resync => link.begins = true,
            // A serial of before is no news.
            Message::Done { serial }
                if is_at_or_after(serial, self.done) && is_at_or_after(self.serial, serial) =>
            {
                self.done = serial;
            }
            Message::Done { .. } => {}
            _ => return Err(Error::Unexpected("an agent's message")),
        }
        Ok(())
    }

    fn left(&self) -> u64 {
        self.link
            .as_ref()
            .map_or(0, |link| link.credit.saturating_sub(link.used))
    }

    /// Appends a message, which there must be credit for.
    fn send(&mut self, message: &Message<'_>, more_cost: u64) {
        let Some(link) = &mut self.link else { return };
        let before = self.out.len();
        message.encode(link.number, &mut self.out);
        link.number = link.number.wrapping_add(1);
        link.used += (self.out.len() - before) as u64 + more_cost;
    }

    /// Begins a snapshot if one is wanted and can be paid for.
    fn begin(&mut self) {
        let left = self.left();
        let Some(link) = self.link.as_mut().filter(|link| link.begins && left >= RESERVE) else {
            return;
        };
        (link.begins, link.in_snapshot) = (false, true);
        self.snapshot = self.snapshot.wrapping_add(1);
        self.told.fill(NOT_TOLD);
        self.told_blocks = 0;
        self.marks = Default::default();
        self.builder.clear();
        let (snapshot, blocks) = (self.snapshot, u32::try_from(self.told.len()).unwrap_or(u32::MAX));
        self.send(&Message::Begin { snapshot, blocks }, 0);
    }

    /// Tells a block, if it is another one than was told.
    pub fn tell(&mut self, block: u32, frames: &Frames) -> Told {
        self.begin();
        let Some(told) = self.told.get(block as usize).copied() else {
            return Told::Same;
        };
        let hash = hash_of(frames);
        if told == hash {
            return Told::Same;
        }
        if !self.is_welcome() {
            return Told::Later;
        }
        let Ok(number) = Block::try_new(u64::from(block)) else {
            return Told::Same;
        };
        if !self.builder.has_room() || !self.builder.takes(number) {
            self.flush();
        }
        // What nothing is said of needs no word in a snapshot.
        let is_silent = self.in_snapshot() && *frames == NOTHING;
        if !is_silent {
            let cost = HEADER + self.builder.len() + 5 + block::MOST_BYTES;
            if self.left() < cost as u64 + RESERVE {
                self.flush();
                return Told::Later;
            }
            self.builder.push(number, frames);
        }
        self.told[block as usize] = hash;
        self.told_blocks += u64::from(told == NOT_TOLD);
        Told::Now
    }

    /// Sends what was told. To be called after each step.
    pub fn flush(&mut self) {
        if self.builder.is_empty() {
            return;
        }
        let mut builder = std::mem::take(&mut self.builder);
        self.send(&Message::Blocks(builder.list()), 0);
        builder.clear();
        self.builder = builder;
    }

    /// Ends the snapshot if all blocks and marks were told: `marks` says that they were. Returns whether one has ended.
    pub fn end_snapshot(&mut self, marks: bool) -> bool {
        let is_whole = marks && self.told_blocks >= self.blocks && self.left() >= RESERVE;
        let in_snapshot = self
            .link
            .as_ref()
            .is_some_and(|link| link.in_snapshot && !link.begins);
        if !is_whole || !in_snapshot {
            return false;
        }
        self.flush();
        let (snapshot, all_marks) = (self.snapshot, self.knows_all_marks);
        self.send(&Message::End { snapshot, all_marks }, 0);
        if let Some(link) = &mut self.link {
            link.in_snapshot = false;
        }
        true
    }

    /// From now on all programs' marks are known. A snapshot that is being told says so at its end; one that has ended without them
    /// is told again.
    pub fn know_all_marks(&mut self) {
        if !std::mem::replace(&mut self.knows_all_marks, true)
            && let Some(link) = &mut self.link
        {
            link.begins |= link.is_welcome && !link.in_snapshot;
        }
    }

    /// Tells the frames that have a mark now; returns whether all was told. New ones come before those that are lifted.
    pub fn mark(&mut self, mark: Mark, wanted: &FrameSet) -> bool {
        self.begin();
        let at = mark as usize - 1;
        let news = wanted.without(&self.marks[at]);
        if !news.is_empty() && !self.send_marks(mark, true, &news) {
            return false;
        }
        let gone = self.marks[at].without(wanted);
        gone.is_empty() || self.send_marks(mark, false, &gone)
    }

    fn send_marks(&mut self, mark: Mark, set: bool, frames: &FrameSet) -> bool {
        let pieces = frames
            .stretches()
            .iter()
            .flat_map(|range| pieces(range.start, range.end));
        let mut pieces = pieces
            .filter_map(|(first, count)| Stretch::try_new(first, count).ok())
            .peekable();
        while pieces.peek().is_some() {
            let (mut builder, mut sent, mut cost) = (StretchesBuilder::default(), Vec::new(), 0);
            let mut end = None;
            while let Some(stretch) = pieces.next_if(|stretch| {
                // Pieces of one stretch touch, and go into messages of their own.
                let touches = end == Some(stretch.numbers().start);
                let total = HEADER as u64
                    + MARKS
                    + 20 * (sent.len() as u64 + 1)
                    + cost
                    + stretch.blocks() * MARK_COST;
                !touches && builder.has_room() && self.left() >= total + RESERVE
            }) {
                builder.push(stretch);
                cost += stretch.blocks() * MARK_COST;
                end = Some(stretch.numbers().end);
                sent.push(stretch.numbers());
            }
            if sent.is_empty() || !self.is_welcome() {
                return false;
            }
            self.serial = self.serial.wrapping_add(1);
            let (serial, stretches) = (self.serial, builder.list());
            self.send(
                &Message::Marks {
                    serial,
                    mark,
                    set,
                    stretches,
                },
                cost,
            );
            if mark == Mark::Never && set {
                // Only marks that forbid are acknowledged.
                self.awaited = serial;
            }
            let (told, sent) = (&mut self.marks[mark as usize - 1], FrameSet::of(sent));
            *told = if set {
                told.with(&sent)
            } else {
                told.without(&sent)
            };
        }
        true
    }

    /// The serial of the last marks that forbid: when [`Teller::is_done`] says so of it, they hold.
    #[must_use]
    pub fn awaited(&self) -> u32 {
        self.awaited
    }

    /// Whether the service has said that all marks up to this serial hold.
    #[must_use]
    pub fn is_done(&self, serial: u32) -> bool {
        is_at_or_after(self.done, serial)
    }

    /// Tells how the guest is off, if there is credit.
    pub fn pressure(&mut self, pressure: Pressure) {
        if self.is_welcome() && self.left() >= RESERVE {
            self.send(&Message::Pressure(pressure), 0);
        }
    }
}

/// Serials wrap around.
fn is_at_or_after(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) < 1 << 31
}

fn pieces(start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let starts = (start..end).step_by(usize::try_from(MOST_STRETCH).unwrap_or(usize::MAX));
    starts.map(move |at| (at, MOST_STRETCH.min(end - at)))
}

fn hash_of(frames: &Frames) -> u64 {
    let mut hasher = DefaultHasher::new();
    frames
        .map(vmm_dedup_agent_wire::said::Said::bits)
        .hash(&mut hasher);
    match hasher.finish() {
        NOT_TOLD => 1,
        hash => hash,
    }
}

#[cfg(test)]
mod tests;
