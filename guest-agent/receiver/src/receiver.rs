//! The receiver: bytes and times in, answers and knowledge out.
//!
//! # States
//!
//! ```text
//! nobody --connected()--> silent --Hello--> listening --Begin--> in a snapshot --End--> listening
//!    ^                       |                  |                     |
//!    `-- disconnected(), or an error: the service closes the connection
//! ```
//!
//! What is known survives the connection, for [`Limits::stale_after`]: then all but marks are forgotten. Marks that forbid
//! sharing stay until an agent that knows all marks has told a snapshot without them.
//!
//! # Marks that forbid sharing
//!
//! From the moment that such a mark is received, [`Receiver::marks`] tells it. The service undoes what is shared already:
//! [`Receiver::take_withheld`] names the blocks, and [`Receiver::in_force`] tells the agent when it is done.

use crate::credit::Bucket;
use crate::map::{Counts, Map, MarkMap, MarkedBlock, Marks};
use std::time::Duration;
use vmm_dedup_agent_wire::block::Frames;
use vmm_dedup_agent_wire::frame::{Block, Gfn, Stretch};
use vmm_dedup_agent_wire::message::{
    Blocks, HEADER, Header, Hello, MARK_COST, Mark, Message, Pressure, Refusal, Sources, Stretches,
};
use vmm_dedup_agent_wire::said::Said;
use vmm_dedup_agent_wire::stream::Stream;
use vmm_dedup_agent_wire::{Malformed, VERSION};

/// What a guest may cost.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes a second, in the long run.
    pub bytes_per_second: u64,
    /// Bytes at once: a snapshot should fit.
    pub burst: u64,
    /// Seconds in which one connection more is allowed.
    pub seconds_per_connection: u64,
    /// Connections at once.
    pub connections: u64,
    /// How long what a guest said is believed when its agent has gone.
    pub stale_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes_per_second: 128 << 10,
            burst: 2 << 20,
            seconds_per_connection: 2,
            connections: 8,
            stale_after: Duration::from_secs(120),
        }
    }
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A message that nobody sends.
    #[error("the agent sent a malformed message: {0}")]
    Malformed(#[from] Malformed),
    /// More than the credit.
    #[error("the agent used {used} of credit, where {credit} was granted")]
    Credit {
        /// What it used since the connection's beginning.
        used: u64,
        /// The grant.
        credit: u64,
    },
    /// A message where it cannot come.
    #[error("the agent sent {0} when it must not")]
    Order(&'static str),
    /// No version in common.
    #[error("the agent speaks versions {lowest} to {highest}, the service {VERSION}: update the older one")]
    Version {
        /// The agent's oldest.
        lowest: u8,
        /// The agent's newest.
        highest: u8,
    },
    /// There is no connection.
    #[error("there is no connection")]
    Nobody,
}

impl Violation {
    fn refusal(self) -> Refusal {
        match self {
            Self::Version { .. } => Refusal::Version,
            _ => Refusal::Malformed,
        }
    }
}

/// Why no agent tells when frames were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoUse {
    /// There is none.
    #[error("no agent is connected")]
    Nobody,
    /// It has said so.
    #[error("the agent cannot see use: its guest's kernel has neither idle page tracking nor DAMON for it")]
    Sources,
    /// What is known may be another boot's.
    #[error("the agent has not told everything yet")]
    Incomplete,
    /// It sends nothing any more, though it is connected.
    #[error("the agent is silent")]
    Silent,
}

/// An agent that has sent nothing for so long does not tell use: even one with no news tells of pressure every few seconds.
const SILENT_AFTER: Duration = Duration::from_secs(30);

/// Counters, since the receiver was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Connections that were accepted.
    pub connections: u64,
    /// Connections that were refused for coming too often.
    pub refused: u64,
    /// Connections that ended with a violation.
    pub violations: u64,
    /// Bytes.
    pub bytes: u64,
    /// Messages.
    pub messages: u64,
    /// Blocks that were told.
    pub blocks: u64,
    /// Blocks and stretches that lie beyond the guest's memory.
    pub beyond: u64,
    /// Snapshots that were whole.
    pub snapshots: u64,
    /// Times that everything was asked for again.
    pub resyncs: u64,
}

/// Blocks in which frames are newly marked never to be shared.
#[derive(Debug)]
#[must_use = "the agent waits for Receiver::in_force"]
pub struct Withheld {
    /// The blocks; maybe none, if all that was marked was marked before.
    pub blocks: Vec<Block>,
    connection: u64,
    serial: u32,
}

/// A connection.
#[derive(Debug)]
struct Connection {
    stream: Stream,
    /// Of the next message from the agent, and to it.
    expected: u32,
    next: u32,
    /// Credit that was used, and all there is.
    used: u64,
    credit: u64,
    hello: Option<Hello>,
    snapshot: Option<Snapshot>,
    has_begun: bool,
    /// A snapshot was whole.
    complete: bool,
    /// A message was missing, and everything was asked for again.
    lost: bool,
    /// When it last sent something.
    heard: Duration,
}

#[derive(Debug)]
struct Snapshot {
    number: u32,
    marks: MarkMap,
}

/// See the module's text.
#[derive(Debug)]
pub struct Receiver {
    limits: Limits,
    map: Map,
    connection: Option<Connection>,
    left: Option<Duration>,
    bytes: Bucket,
    connections: Bucket,
    withheld: crate::map::BlockSet,
    /// The last serial of a mark that forbids, if it is not in force yet.
    pending: Option<u32>,
    pressure: Option<Pressure>,
    tally: Tally,
}

impl Receiver {
    /// For a guest whose frames end at `end`.
    #[must_use]
    pub fn new(end: u64, limits: Limits, now: Duration) -> Self {
        let map = Map::new(end);
        Self {
            limits,
            withheld: map.changed.clone(),
            map,
            connection: None,
            left: None,
            bytes: Bucket::new(limits.bytes_per_second, limits.burst, now),
            // Counted in seconds' worth, since a bucket fills by whole tokens.
            connections: Bucket::new(1, limits.connections * limits.seconds_per_connection, now),
            pending: None,
            pressure: None,
            tally: Tally::default(),
        }
    }

    /// An agent has come; one that is there is taken to have gone.
    ///
    /// # Errors
    /// Agents come too often: the answer to send before closing.
    pub fn connected(&mut self, now: Duration) -> Result<(), Vec<u8>> {
        if !self.pay_beginning(now) {
            self.tally.refused += 1;
            let seconds = u32::try_from(self.limits.seconds_per_connection).unwrap_or(u32::MAX);
            let mut out = Vec::new();
            let reason = Refusal::Often;
            Message::Refuse { reason, seconds }.encode(0, &mut out);
            return Err(out);
        }
        self.disconnected(now);
        self.tally.connections += 1;
        self.connection = Some(Connection {
            stream: Stream::default(),
            expected: 0,
            next: 0,
            used: 0,
            // Enough for a greeting.
            credit: 4096,
            hello: None,
            snapshot: None,
            has_begun: false,
            complete: false,
            lost: false,
            heard: now,
        });
        Ok(())
    }

    /// A connection, or another snapshot.
    fn pay_beginning(&mut self, now: Duration) -> bool {
        let price = self.limits.seconds_per_connection;
        let has = self.connections.available(now) >= price;
        if has {
            self.connections.take(price, now);
        }
        has
    }

    /// Everything is to be told again, for the service's own reasons.
    pub fn resync(&mut self, out: &mut Vec<u8>) {
        // Who has not greeted yet tells everything anyway.
        if let Some(mut connection) = self.connection.take_if(|connection| connection.hello.is_some()) {
            self.lose(&mut connection, out);
            self.connection = Some(connection);
        }
    }

    /// The connection has ended.
    pub fn disconnected(&mut self, now: Duration) {
        if let Some(connection) = self.connection.take() {
            self.left = Some(now);
            if connection.hello.is_some() {
                self.bytes
                    .give_back(connection.credit.saturating_sub(connection.used));
            }
            // The agent will tell its marks again, with serials of their own.
            self.pending = None;
        }
    }

    /// Takes bytes of the connection; appends what is to be sent.
    ///
    /// # Errors
    /// [`Violation`]: after what was appended is sent, the connection is to be closed. It counts as ended here.
    pub fn received(&mut self, bytes: &[u8], now: Duration, out: &mut Vec<u8>) -> Result<(), Violation> {
        let mut connection = self.connection.take().ok_or(Violation::Nobody)?;
        let mut stream = std::mem::take(&mut connection.stream);
        self.tally.bytes += bytes.len() as u64;
        connection.heard = now;
        let result = connection.pay(bytes.len() as u64).and_then(|()| {
            stream.take(bytes, |header, payload| {
                self.message(&mut connection, header, payload, now, out)
            })
        });
        connection.stream = stream;
        if let Err(violation) = result {
            self.tally.violations += 1;
            let (reason, seconds) = (violation.refusal(), 60);
            connection.send(&Message::Refuse { reason, seconds }, out);
            self.connection = Some(connection);
            self.disconnected(now);
            return Err(violation);
        }
        self.connection = Some(connection);
        self.tick(now, out);
        Ok(())
    }

    /// To be called now and then, at least once in some seconds: grants credit, and forgets what is stale.
    pub fn tick(&mut self, now: Duration, out: &mut Vec<u8>) {
        let Some(connection) = &mut self.connection else {
            if self
                .left
                .is_some_and(|left| now.saturating_sub(left) >= self.limits.stale_after)
            {
                self.left = None;
                self.pressure = None;
                self.map.forget_all();
            }
            return;
        };
        if connection.hello.is_none() {
            return;
        }
        let left = connection.credit.saturating_sub(connection.used);
        if left > self.limits.burst / 2 {
            return;
        }
        let more = self.bytes.take(self.limits.burst - left, now);
        // Small grants are not worth a message.
        if more >= 16 << 10 || left == 0 && more > 0 {
            connection.credit += more;
            let credit = connection.credit;
            connection.send(&Message::Grant { credit }, out);
        } else {
            self.bytes.give_back(more);
        }
    }

    fn message(
        &mut self,
        connection: &mut Connection,
        header: Header,
        payload: &[u8],
        now: Duration,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        self.tally.messages += 1;
        if connection.hello.is_none() {
            return self.greet(connection, header, payload, now, out);
        }
        if header.version != VERSION {
            return Err(Malformed::Version(header.version).into());
        }
        let message = Message::parse(header.kind, payload)?;
        if header.number != connection.expected {
            self.lose(connection, out);
        }
        connection.expected = header.number.wrapping_add(1);
        match message {
            Message::Begin { snapshot, .. } => {
                // A connection has paid for one snapshot.
                if connection.has_begun && !self.pay_beginning(now) {
                    return Err(Violation::Order("snapshots more often than it may"));
                }
                connection.has_begun = true;
                connection.lost = false;
                self.map.begin_snapshot();
                connection.snapshot = Some(Snapshot {
                    number: snapshot,
                    marks: MarkMap::default(),
                });
            }
            Message::Blocks(blocks) => self.blocks(blocks)?,
            Message::End { snapshot, all_marks } => self.end(connection, snapshot, all_marks),
            Message::Marks {
                serial,
                mark,
                set,
                stretches,
            } => {
                self.marks_come(connection, mark, set, stretches)?;
                if mark == Mark::Never && set {
                    self.pending = Some(serial);
                }
            }
            Message::Pressure(pressure) => self.pressure = Some(pressure),
            Message::Bye => {}
            Message::Hello(_) => return Err(Violation::Order("a second greeting")),
            Message::Welcome { .. }
            | Message::Grant { .. }
            | Message::Resync
            | Message::Done { .. }
            | Message::Refuse { .. } => return Err(Violation::Order("a service's message")),
        }
        Ok(())
    }

    fn greet(
        &mut self,
        connection: &mut Connection,
        header: Header,
        payload: &[u8],
        now: Duration,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        let Message::Hello(hello) = Message::parse(header.kind, payload)? else {
            return Err(Violation::Order("something before its greeting"));
        };
        let (lowest, highest) = (hello.lowest, hello.highest);
        if !(lowest..=highest).contains(&VERSION) {
            return Err(Violation::Version { lowest, highest });
        }
        connection.hello = Some(hello);
        connection.expected = header.number.wrapping_add(1);
        connection.credit = connection.used + self.bytes.take(self.limits.burst, now);
        let (version, credit) = (VERSION, connection.credit);
        connection.send(&Message::Welcome { version, credit }, out);
        self.left = None;
        Ok(())
    }

    /// A message is missing. What is known stays as it is until it is told again.
    fn lose(&mut self, connection: &mut Connection, out: &mut Vec<u8>) {
        connection.snapshot = None;
        if !connection.lost {
            connection.lost = true;
            self.tally.resyncs += 1;
            connection.send(&Message::Resync, out);
        }
    }

    fn blocks(&mut self, blocks: Blocks<'_>) -> Result<(), Violation> {
        for block in blocks.walk() {
            match self.map.tell(block?) {
                true => self.tally.blocks += 1,
                false => self.tally.beyond += 1,
            }
        }
        Ok(())
    }

    fn end(&mut self, connection: &mut Connection, number: u32, all_marks: bool) {
        let Some(snapshot) = connection.snapshot.take_if(|snapshot| snapshot.number == number) else {
            return;
        };
        self.tally.snapshots += 1;
        connection.complete = true;
        self.map.end_snapshot();
        if all_marks {
            self.map.replace_marks(snapshot.marks);
        }
    }

    fn marks_come(
        &mut self,
        connection: &mut Connection,
        mark: Mark,
        set: bool,
        stretches: Stretches<'_>,
    ) -> Result<(), Violation> {
        for stretch in stretches.walk() {
            let stretch = stretch?;
            connection.pay(stretch.blocks() * MARK_COST)?;
            let Some(stretch) = self.within_memory(stretch) else {
                continue;
            };
            if let Some(snapshot) = &mut connection.snapshot {
                snapshot.marks.mark(stretch, mark, set, |_| {});
            }
            let (changed, withheld) = (&mut self.map.changed, &mut self.withheld);
            let forbids = mark == Mark::Never && set;
            self.map.marks.mark(stretch, mark, set, |block| {
                changed.insert(block);
                if forbids {
                    withheld.insert(block);
                }
            });
        }
        Ok(())
    }

    fn within_memory(&mut self, stretch: Stretch) -> Option<Stretch> {
        let frames = stretch.numbers();
        let end = frames.end.min(self.map.end());
        if end < frames.end {
            self.tally.beyond += 1;
        }
        Stretch::try_new(frames.start, end.checked_sub(frames.start)?).ok()
    }

    /// What is forbidden newly; `None` if there is nothing. What is taken out here is to be finished in the same order.
    pub fn take_withheld(&mut self) -> Option<Withheld> {
        let serial = self.pending?;
        Some(Withheld {
            blocks: self.withheld.drain().collect(),
            connection: self.tally.connections,
            serial,
        })
    }

    /// Nothing of what is forbidden is shared any more: tells the agent.
    pub fn in_force(&mut self, withheld: &Withheld, out: &mut Vec<u8>) {
        // An agent that has gone, or another one, does not know the serial.
        if let Some(connection) = &mut self.connection
            && withheld.connection == self.tally.connections
        {
            let serial = withheld.serial;
            connection.send(&Message::Done { serial }, out);
            // Others may have come meanwhile.
            self.pending.take_if(|pending| *pending == serial);
        }
    }

    /// Blocks of which something else is said, or whose marks are others, than when this was last asked.
    pub fn take_changed(&mut self) -> impl Iterator<Item = Block> {
        self.map.changed.drain()
    }
}

/// What is known.
impl Receiver {
    /// Whether what is said of temperatures is how the guest uses its memory now.
    ///
    /// # Errors
    /// Why not.
    pub fn tells_use(&self, now: Duration) -> Result<(), NoUse> {
        let connection = self.connection.as_ref().ok_or(NoUse::Nobody)?;
        let hello = connection.hello.as_ref().ok_or(NoUse::Nobody)?;
        if hello.sources.0 & (Sources::IDLE | Sources::DAMON) == 0 {
            return Err(NoUse::Sources);
        }
        if !connection.complete {
            return Err(NoUse::Incomplete);
        }
        match now.saturating_sub(connection.heard) < SILENT_AFTER {
            true => Ok(()),
            false => Err(NoUse::Silent),
        }
    }

    /// What the guest says of a frame.
    #[must_use]
    pub fn said(&self, frame: Gfn) -> Said {
        self.map.said(frame)
    }

    /// What the guest says of each frame of a block.
    #[must_use]
    pub fn frames(&self, block: Block) -> Frames {
        self.map.frames(block)
    }

    /// How many frames of a block are what.
    #[must_use]
    pub fn counts(&self, block: Block) -> Counts {
        self.map.counts(block)
    }

    /// The marks of a frame.
    #[must_use]
    pub fn marks(&self, frame: Gfn) -> Marks {
        self.map.marks(frame)
    }

    /// The marks of each frame of a block.
    #[must_use]
    pub fn marked_in(&self, block: Block) -> MarkedBlock {
        self.map.marked_in(block)
    }

    /// Where the guest's frames end.
    #[must_use]
    pub fn frames_end(&self) -> u64 {
        self.map.end()
    }

    /// How many frames have a mark.
    #[must_use]
    pub fn marked(&self, mark: Mark) -> u64 {
        self.map.marked(mark)
    }

    /// How the guest is off for memory, if it has said.
    #[must_use]
    pub fn pressure(&self) -> Option<Pressure> {
        self.pressure
    }

    /// The agent that is connected and has greeted.
    #[must_use]
    pub fn agent(&self) -> Option<Hello> {
        self.connection.as_ref()?.hello
    }

    /// The guest's frames end elsewhere now.
    pub fn resize(&mut self, end: u64) {
        self.map.resize(end);
        self.withheld = {
            let mut withheld = self.map.changed.clone();
            withheld.clear();
            self.withheld.drain().for_each(|block| withheld.insert(block));
            withheld
        };
    }

    /// Counters.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Bytes of memory that this takes, but for the connection's, which are at most a message.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let snapshot = self.connection.as_ref().and_then(|c| c.snapshot.as_ref());
        self.map.memory_bytes() + snapshot.map_or(0, |snapshot| snapshot.marks.memory_bytes())
    }
}

impl Connection {
    fn pay(&mut self, cost: u64) -> Result<(), Violation> {
        self.used = self.used.saturating_add(cost);
        let (used, credit) = (self.used, self.credit);
        match used > credit {
            true => Err(Violation::Credit { used, credit }),
            false => Ok(()),
        }
    }

    fn send(&mut self, message: &Message<'_>, out: &mut Vec<u8>) {
        message.encode(self.next, out);
        self.next = self.next.wrapping_add(1);
    }
}

const _: () = assert!(HEADER < 4096);

#[cfg(test)]
mod tests;
