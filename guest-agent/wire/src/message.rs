//! Messages, and the bytes of each.
//!
//! A message has a header of [`HEADER`] bytes and a payload of at most [`MOST_PAYLOAD`]. Numbers are little-endian; a *varint*
//! is LEB128 in its shortest form.
//!
//! | bytes | header |
//! | --- | --- |
//! | 0..2 | length of the payload |
//! | 2 | kind of the message |
//! | 3 | version |
//! | 4..8 | number: 0 for the first message of a connection in this direction, then one more each |
//!
//! | kind | from | payload |
//! | --- | --- | --- |
//! | 1 `Hello` | agent | lowest and highest version (u8 each), u16 0, [`Sources`] (u32), boot (16 bytes), run (u64), blocks (u32); more is ignored |
//! | 2 `Begin` | agent | number of the snapshot (u32), blocks (u32) |
//! | 3 `Blocks` | agent | for each: blocks passed over since the one before (varint), the block, coded ([`crate::block`]) |
//! | 4 `End` | agent | number of the snapshot (u32), whether all marks were told (u8) |
//! | 5 `Marks` | agent | serial (u32), mark (u8), set or lifted (u8), u16 0; for each stretch: frames passed over, at least one but for the first, and frames (varints) |
//! | 6 `Pressure` | agent | some and full stall of the last 10 s, in 1/100 % (u16 each), u32 0, available and total pages (u64 each), refaults so far (u64) |
//! | 7 `Bye` | agent | nothing |
//! | 64 `Welcome` | service | version (u8), 3 bytes 0, credit (u64) |
//! | 65 `Grant` | service | credit (u64): what the agent may have used since the connection's beginning: a byte sent costs 1, and marks more ([`MARK_COST`]) |
//! | 66 `Resync` | service | nothing |
//! | 67 `Done` | service | serial (u32): these marks and all before are in force |
//! | 68 `Refuse` | service | reason (u8), seconds to wait (u32) |

use crate::block::{self, Frames};
use crate::frame::{Block, Stretch};
use crate::said::Said;
use crate::{Malformed, VERSION};

/// Bytes of a header.
pub const HEADER: usize = 8;
/// Most bytes of a payload.
pub const MOST_PAYLOAD: usize = 16 << 10;
/// Credit that a stretch of `Marks` costs for each block that it touches, beside its bytes: few bytes can mean much work.
pub const MARK_COST: u64 = 8;
/// Bytes of a `Hello` that every version has.
const HELLO: usize = 36;

/// What an agent can read, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources(pub u32);

impl Sources {
    /// Kinds of frames.
    pub const FLAGS: u32 = 1;
    /// How often frames are mapped.
    pub const COUNTS: u32 = 1 << 1;
    /// Temperature by idle page tracking.
    pub const IDLE: u32 = 1 << 2;
    /// Temperature by DAMON.
    pub const DAMON: u32 = 1 << 3;
    /// Stalls for memory.
    pub const PRESSURE: u32 = 1 << 4;
    /// Marks of programs.
    pub const MARKS: u32 = 1 << 5;
}

/// Who the agent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The oldest version that it speaks.
    pub lowest: u8,
    /// The newest.
    pub highest: u8,
    /// What it can read.
    pub sources: Sources,
    /// The guest's boot, by its kernel's boot_id.
    pub boot: [u8; 16],
    /// This run of the agent: a random number.
    pub run: u64,
    /// Blocks of the guest's memory, with gaps: one more than the highest.
    pub blocks: u32,
}

/// What a program says of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Mark {
    /// Worth sharing.
    Worth = 1,
    /// Never to be shared, nor read for keys.
    Never = 2,
    /// Soon overwritten.
    Soon = 3,
}

impl Mark {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Worth, Self::Never, Self::Soon];

    fn try_new(raw: u8) -> Result<Self, Malformed> {
        Self::ALL
            .into_iter()
            .find(|mark| *mark as u8 == raw)
            .ok_or(Malformed::Field {
                field: "mark",
                value: u64::from(raw),
            })
    }
}

/// How the guest is off for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Share of the last 10 s in which somebody waited for memory, in 1/100 %.
    pub some: u16,
    /// The same, in which all did.
    pub full: u16,
    /// Pages that programs could still have.
    pub available: u64,
    /// All pages.
    pub total: u64,
    /// Pages of files and programs that were brought back soon after they had gone, since the boot.
    pub refaults: u64,
}

/// Why a service will not listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Refusal {
    /// No version in common.
    Version = 1,
    /// Too many connections; wait.
    Often = 2,
    /// A message was malformed, or more than the credit was sent.
    Malformed = 3,
    /// The operator does not want this VM's hints.
    Off = 4,
}

impl Refusal {
    fn try_new(raw: u8) -> Result<Self, Malformed> {
        match raw {
            1 => Ok(Self::Version),
            2 => Ok(Self::Often),
            3 => Ok(Self::Malformed),
            4 => Ok(Self::Off),
            other => Err(Malformed::Field {
                field: "reason",
                value: u64::from(other),
            }),
        }
    }
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Who the agent is; its first message.
    Hello(Hello),
    /// A snapshot begins.
    Begin {
        /// Its number.
        snapshot: u32,
        /// Blocks of the guest's memory, with gaps.
        blocks: u32,
    },
    /// What is said of some blocks.
    Blocks(Blocks<'a>),
    /// A snapshot is whole.
    End {
        /// Its number.
        snapshot: u32,
        /// All marks were told; others are lifted.
        all_marks: bool,
    },
    /// Programs mark memory, or lift marks.
    Marks {
        /// One more than that of the last.
        serial: u32,
        /// Which.
        mark: Mark,
        /// Set, or lifted.
        set: bool,
        /// Of which frames.
        stretches: Stretches<'a>,
    },
    /// How the guest is off for memory.
    Pressure(Pressure),
    /// The agent ends, and means to.
    Bye,
    /// The service listens.
    Welcome {
        /// The version of all that follows.
        version: u8,
        /// The first credit.
        credit: u64,
    },
    /// More credit.
    Grant {
        /// What the agent may have used since the connection's beginning.
        credit: u64,
    },
    /// Tell everything again.
    Resync,
    /// Marks are in force.
    Done {
        /// Up to this serial.
        serial: u32,
    },
    /// The service does not listen, and closes.
    Refuse {
        /// Why.
        reason: Refusal,
        /// How long to wait before the next try.
        seconds: u32,
    },
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the payload.
    pub len: usize,
    /// Kind of the message.
    pub kind: u8,
    /// Its version.
    pub version: u8,
    /// Its number.
    pub number: u32,
}

impl Header {
    /// Reads one.
    ///
    /// # Errors
    /// [`Malformed::Long`].
    pub fn parse(bytes: [u8; HEADER]) -> Result<Self, Malformed> {
        let [l0, l1, kind, version, n0, n1, n2, n3] = bytes;
        let len = usize::from(u16::from_le_bytes([l0, l1]));
        if len > MOST_PAYLOAD {
            return Err(Malformed::Long(len));
        }
        Ok(Self {
            len,
            kind,
            version,
            number: u32::from_le_bytes([n0, n1, n2, n3]),
        })
    }
}

/// Reads numbers from the front of a payload.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Short)?;
        self.0 = rest;
        Ok(*first)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_le_bytes)
    }

    fn bool(&mut self, field: &'static str) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Malformed::Field {
                field,
                value: u64::from(other),
            }),
        }
    }

    /// So many bytes that are zero.
    fn zeros<const N: usize>(&mut self) -> Result<(), Malformed> {
        match self.take::<N>()?.iter().find(|byte| **byte != 0) {
            None => Ok(()),
            Some(byte) => Err(Malformed::Field {
                field: "reserved",
                value: u64::from(*byte),
            }),
        }
    }

    fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            let overflows = shift == 63 && bits > 1;
            let is_longer_than_needed = byte == 0 && shift > 0;
            if overflows || is_longer_than_needed {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed::Field {
            field: "varint",
            value,
        })
    }

    fn end(self) -> Result<(), Malformed> {
        match self.0 {
            [] => Ok(()),
            _ => Err(Malformed::Trailing),
        }
    }
}

#[allow(clippy::cast_possible_truncation)] // seven bits each
fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

impl<'a> Message<'a> {
    /// Reads the payload of a message of this kind. Lists are checked as they are walked through.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn parse(kind: u8, payload: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(payload);
        let message = match kind {
            1 => {
                let hello = hello(&mut fields)?;
                return Ok(Self::Hello(hello));
            }
            2 => Self::Begin {
                snapshot: fields.u32()?,
                blocks: fields.u32()?,
            },
            3 => return Ok(Self::Blocks(Blocks(payload))),
            4 => Self::End {
                snapshot: fields.u32()?,
                all_marks: fields.bool("all marks")?,
            },
            5 => return marks(fields),
            6 => Self::Pressure(pressure(&mut fields)?),
            7 => Self::Bye,
            64 => {
                let version = fields.u8()?;
                fields.zeros::<3>()?;
                let credit = fields.u64()?;
                Self::Welcome { version, credit }
            }
            65 => Self::Grant {
                credit: fields.u64()?,
            },
            66 => Self::Resync,
            67 => Self::Done {
                serial: fields.u32()?,
            },
            68 => Self::Refuse {
                reason: Refusal::try_new(fields.u8()?)?,
                seconds: fields.u32()?,
            },
            other => return Err(Malformed::Message(other)),
        };
        fields.end()?;
        Ok(message)
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Hello(_) => 1,
            Self::Begin { .. } => 2,
            Self::Blocks(_) => 3,
            Self::End { .. } => 4,
            Self::Marks { .. } => 5,
            Self::Pressure(_) => 6,
            Self::Bye => 7,
            Self::Welcome { .. } => 64,
            Self::Grant { .. } => 65,
            Self::Resync => 66,
            Self::Done { .. } => 67,
            Self::Refuse { .. } => 68,
        }
    }

    /// Appends the message, with a header of this number.
    ///
    /// # Panics
    /// If a list has more than [`MOST_PAYLOAD`] bytes.
    pub fn encode(&self, number: u32, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0, 0, self.kind(), VERSION]);
        out.extend(number.to_le_bytes());
        match *self {
            Self::Hello(hello) => {
                out.extend([hello.lowest, hello.highest, 0, 0]);
                out.extend(hello.sources.0.to_le_bytes());
                out.extend(hello.boot);
                out.extend(hello.run.to_le_bytes());
                out.extend(hello.blocks.to_le_bytes());
            }
            Self::Begin { snapshot, blocks } => {
                out.extend(snapshot.to_le_bytes());
                out.extend(blocks.to_le_bytes());
            }
            Self::Blocks(Blocks(bytes)) => out.extend(bytes),
            Self::End { snapshot, all_marks } => {
                out.extend(snapshot.to_le_bytes());
                out.push(u8::from(all_marks));
            }
            Self::Marks {
                serial,
                mark,
                set,
                stretches,
            } => {
                out.extend(serial.to_le_bytes());
                out.extend([mark as u8, u8::from(set), 0, 0]);
                out.extend(stretches.0);
            }
            Self::Pressure(pressure) => {
                out.extend(pressure.some.to_le_bytes());
                out.extend(pressure.full.to_le_bytes());
                out.extend([0; 4]);
                for number in [pressure.available, pressure.total, pressure.refaults] {
                    out.extend(number.to_le_bytes());
                }
            }
            Self::Bye | Self::Resync => {}
            Self::Welcome { version, credit } => {
                out.extend([version, 0, 0, 0]);
                out.extend(credit.to_le_bytes());
            }
            Self::Grant { credit } => out.extend(credit.to_le_bytes()),
            Self::Done { serial } => out.extend(serial.to_le_bytes()),
            Self::Refuse { reason, seconds } => {
                out.push(reason as u8);
                out.extend(seconds.to_le_bytes());
            }
        }
        let len = out.len() - start - HEADER;
        assert!(len <= MOST_PAYLOAD, "a payload of {len} bytes");
        #[allow(clippy::cast_possible_truncation)] // just asserted
        out[start..start + 2].copy_from_slice(&(len as u16).to_le_bytes());
    }
}

fn hello(fields: &mut Fields<'_>) -> Result<Hello, Malformed> {
    let [lowest, highest] = fields.take()?;
    // Reserved in the layout that every version has: not looked at.
    fields.u16()?;
    let hello = Hello {
        lowest,
        highest,
        sources: Sources(fields.u32()?),
        boot: fields.take()?,
        run: fields.u64()?,
        blocks: fields.u32()?,
    };
    if lowest > highest {
        return Err(Malformed::Field {
            field: "lowest version",
            value: u64::from(lowest),
        });
    }
    Ok(hello)
}
const _: () = assert!(HELLO == 2 + 2 + 4 + 16 + 8 + 4);

fn pressure(fields: &mut Fields<'_>) -> Result<Pressure, Malformed> {
    let (some, full) = (fields.u16()?, fields.u16()?);
    fields.zeros::<4>()?;
    Ok(Pressure {
        some,
        full,
        available: fields.u64()?,
        total: fields.u64()?,
        refaults: fields.u64()?,
    })
}

fn marks(mut fields: Fields<'_>) -> Result<Message<'_>, Malformed> {
    let serial = fields.u32()?;
    let mark = Mark::try_new(fields.u8()?)?;
    let set = fields.bool("set")?;
    fields.zeros::<2>()?;
    Ok(Message::Marks {
        serial,
        mark,
        set,
        stretches: Stretches(fields.0),
    })
}

/// A list of blocks, as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks<'a>(&'a [u8]);

impl<'a> Blocks<'a> {
    /// The blocks, each with the bytes that it begins with. A walk ends with the first error.
    pub fn walk(self) -> impl Iterator<Item = Result<CodedBlock<'a>, Malformed>> {
        let (mut rest, mut next, mut failed) = (self.0, 0_u64, false);
        std::iter::from_fn(move || {
            if rest.is_empty() || failed {
                return None;
            }
            let item = coded_block(&mut rest, &mut next);
            failed = item.is_err();
            Some(item)
        })
    }
}

/// A block of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodedBlock<'a> {
    /// Which.
    pub block: Block,
    /// What is said of it, coded; it can be decoded.
    pub coded: &'a [u8],
}

fn coded_block<'a>(rest: &mut &'a [u8], next: &mut u64) -> Result<CodedBlock<'a>, Malformed> {
    let mut fields = Fields(rest);
    let number = next.saturating_add(fields.varint()?);
    let block = Block::try_new(number)?;
    let mut decoder = block::Decoder::new(fields.0);
    while decoder.next_run()?.is_some() {}
    let (coded, after) = fields.0.split_at(decoder.end()?);
    (*rest, *next) = (after, number + 1);
    Ok(CodedBlock { block, coded })
}

/// Makes a list of blocks.
#[derive(Debug, Default)]
pub struct BlocksBuilder {
    bytes: Vec<u8>,
    next: u64,
}

impl BlocksBuilder {
    /// Whether another block fits for certain.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.bytes.len() + 5 + block::MOST_BYTES <= MOST_PAYLOAD
    }

    /// Appends a block that comes behind those that are there.
    ///
    /// # Panics
    /// If it does not come behind them.
    pub fn push(&mut self, block: Block, frames: &Frames) {
        let number = u64::from(block.number());
        assert!(number >= self.next, "blocks are told in ascending order");
        put_varint(number - self.next, &mut self.bytes);
        block::encode(frames, &mut self.bytes);
        self.next = number + 1;
    }

    /// Whether a block comes behind those that are there.
    #[must_use]
    pub fn takes(&self, block: Block) -> bool {
        u64::from(block.number()) >= self.next
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The list.
    #[must_use]
    pub fn list(&self) -> Blocks<'_> {
        Blocks(&self.bytes)
    }

    /// Begins anew, with the memory that there is.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.next = 0;
    }
}

/// A list of stretches, as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretches<'a>(&'a [u8]);

impl Stretches<'_> {
    /// The stretches, ascending, none touching the next. A walk ends with the first error.
    pub fn walk(self) -> impl Iterator<Item = Result<Stretch, Malformed>> {
        let (mut rest, mut end, mut failed) = (self.0, None, false);
        std::iter::from_fn(move || {
            if rest.is_empty() || failed {
                return None;
            }
            let item = stretch(&mut rest, &mut end);
            failed = item.is_err();
            Some(item)
        })
    }
}

fn stretch(rest: &mut &[u8], end: &mut Option<u64>) -> Result<Stretch, Malformed> {
    let mut fields = Fields(rest);
    let gap = fields.varint()?;
    let first = match *end {
        None => gap,
        Some(_) if gap == 0 => {
            return Err(Malformed::Field {
                field: "gap",
                value: 0,
            });
        }
        Some(end) => gap.saturating_add(end),
    };
    let stretch = Stretch::try_new(first, fields.varint()?)?;
    (*rest, *end) = (fields.0, Some(stretch.numbers().end));
    Ok(stretch)
}

/// Makes a list of stretches.
#[derive(Debug, Default)]
pub struct StretchesBuilder {
    bytes: Vec<u8>,
    end: Option<u64>,
}

impl StretchesBuilder {
    /// Whether another stretch fits for certain.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.bytes.len() + 8 + 20 <= MOST_PAYLOAD
    }

    /// Appends a stretch that comes behind those that are there and does not touch them.
    ///
    /// # Panics
    /// If it does not come behind them.
    pub fn push(&mut self, stretch: Stretch) {
        let frames = stretch.numbers();
        let is_behind = self.end.is_none_or(|end| frames.start > end);
        assert!(is_behind, "stretches are told in ascending order");
        put_varint(frames.start - self.end.unwrap_or(0), &mut self.bytes);
        put_varint(stretch.len(), &mut self.bytes);
        self.end = Some(frames.end);
    }

    /// The list.
    #[must_use]
    pub fn list(&self) -> Stretches<'_> {
        Stretches(&self.bytes)
    }
}

/// What is said of nothing.
pub const NOTHING: Frames = [Said::UNKNOWN; crate::frame::BLOCK];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::BLOCK;
    use crate::said::Kind;
    use proptest::prelude::*;

    fn bytes_of(message: &Message<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        message.encode(7, &mut out);
        out
    }

    fn parsed(bytes: &[u8]) -> Result<Message<'_>, Malformed> {
        let header = Header::parse(bytes[..HEADER].try_into().unwrap())?;
        assert_eq!((header.len, header.number), (bytes.len() - HEADER, 7));
        Message::parse(header.kind, &bytes[HEADER..])
    }

    fn hello() -> Hello {
        Hello {
            lowest: 1,
            highest: 3,
            sources: Sources(Sources::FLAGS | Sources::MARKS),
            boot: [9; 16],
            run: 0x0102_0304_0506_0708,
            blocks: 8192,
        }
    }

    #[test]
    fn every_message_comes_out_as_it_went_in() {
        let mut blocks = BlocksBuilder::default();
        blocks.push(Block::try_new(3).unwrap(), &[Said::new(Kind::Free); BLOCK]);
        blocks.push(Block::try_new(700).unwrap(), &NOTHING);
        let mut stretches = StretchesBuilder::default();
        stretches.push(Stretch::try_new(5, 1).unwrap());
        stretches.push(Stretch::try_new(1 << 39, 1 << 20).unwrap());
        let pressure = Pressure {
            some: 9999,
            full: 1,
            available: 2,
            total: 3,
            refaults: u64::MAX,
        };
        let all = [
            Message::Hello(hello()),
            Message::Begin {
                snapshot: 2,
                blocks: 8192,
            },
            Message::Blocks(blocks.list()),
            Message::End {
                snapshot: 2,
                all_marks: true,
            },
            Message::Marks {
                serial: 8,
                mark: Mark::Never,
                set: true,
                stretches: stretches.list(),
            },
            Message::Pressure(pressure),
            Message::Bye,
            Message::Welcome {
                version: 1,
                credit: 1 << 40,
            },
            Message::Grant { credit: 5 },
            Message::Resync,
            Message::Done { serial: 8 },
            Message::Refuse {
                reason: Refusal::Often,
                seconds: 300,
            },
        ];
        for message in all {
            let bytes = bytes_of(&message);
            assert_eq!(parsed(&bytes), Ok(message));
            // The first byte of each list is a payload's end, and Hello's end is not fixed.
            let is_fixed = !matches!(
                message,
                Message::Blocks(_) | Message::Marks { .. } | Message::Hello(_)
            );
            let longer = Message::parse(bytes[2], &[&bytes[HEADER..], &[0]].concat()).is_ok();
            assert_eq!(longer, !is_fixed, "{message:?}");
        }
        let walked: Vec<u32> = blocks.list().walk().map(|b| b.unwrap().block.number()).collect();
        assert_eq!(walked, [3, 700]);
        let walked: Vec<u64> = stretches.list().walk().map(|s| s.unwrap().len()).collect();
        assert_eq!(walked, [1, 1 << 20]);
    }

    #[test]
    fn a_hello_of_a_later_release_is_understood() {
        let bytes = bytes_of(&Message::Hello(hello()));
        let longer = [&bytes[HEADER..], b"something new"].concat();
        assert_eq!(Message::parse(1, &longer), Ok(Message::Hello(hello())));
        assert_eq!(Message::parse(1, &longer[..HELLO - 1]), Err(Malformed::Short));
    }

    #[test]
    fn stretches_that_touch_or_leave_the_address_space_are_refused() {
        let walk = |bytes: &[u8]| Stretches(bytes).walk().collect::<Result<Vec<_>, _>>();
        assert!(walk(&[5, 2, 1, 2]).is_ok());
        assert!(walk(&[5, 2, 0, 2]).is_err());
        assert!(walk(&[5, 0]).is_err());
        assert!(walk(&[0x85, 0, 2]).is_err(), "longer than needed");
        let huge = [0xff; 9];
        assert!(walk(&[&[5, 1], &huge[..], &[1, 1]].concat()).is_err());
    }

    #[test]
    fn any_guest_of_16_gib_is_told_in_a_mebibyte() {
        // The worst: every frame differs from the next at random.
        let mut state = 1_u64;
        let values: Vec<Said> = (0..=u8::MAX).filter_map(Said::from_bits).collect();
        let mut random = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            values[(state >> 33) as usize % values.len()]
        };
        let (mut blocks, mut out, mut number) = (BlocksBuilder::default(), Vec::new(), 0);
        for block in 0..8192 {
            if !blocks.has_room() {
                Message::Blocks(blocks.list()).encode(number, &mut out);
                number += 1;
                blocks.clear();
            }
            blocks.push(Block::try_new(block).unwrap(), &std::array::from_fn(|_| random()));
        }
        Message::Blocks(blocks.list()).encode(number, &mut out);
        assert!(out.len() < 1 << 20, "{} bytes", out.len());
    }

    proptest! {
        #[test]
        fn what_is_parsed_has_one_form(kind in 0_u8..70, payload in prop::collection::vec(any::<u8>(), 0..200)) {
            let Ok(message) = Message::parse(kind, &payload) else { return Ok(()) };
            match message {
                Message::Blocks(list) => list.walk().for_each(drop),
                Message::Marks { stretches, .. } => stretches.walk().for_each(drop),
                _ => {}
            }
            let bytes = bytes_of(&message);
            if !matches!(message, Message::Hello(_)) {
                prop_assert_eq!(&bytes[HEADER..], &payload[..]);
            }
        }

        #[test]
        fn numbers_have_one_form(value in any::<u64>()) {
            let mut bytes = Vec::new();
            put_varint(value, &mut bytes);
            let mut fields = Fields(&bytes);
            prop_assert_eq!(fields.varint(), Ok(value));
            prop_assert!(fields.end().is_ok());
        }
    }
}
