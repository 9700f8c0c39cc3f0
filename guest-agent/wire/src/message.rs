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

use crate::block::Frames;
use crate::fields::Fields;
pub use crate::limits::MOST_PAYLOAD;
pub use crate::lists::{Blocks, BlocksBuilder, CodedBlock, Stretches, StretchesBuilder};
use crate::malformed::Malformed;
use crate::said::Said;

/// Bytes of a header.
pub const HEADER: usize = 8;

/// The version of the messages.
pub const VERSION: u8 = 1;
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

/// What is said of nothing.
pub const NOTHING: Frames = [Said::UNKNOWN; crate::frame::BLOCK];

#[cfg(test)]
mod tests;
