//! Records and their layout.

use crate::address::Pid;
use crate::machine::{Contents, Promotion};
use crate::pipeline::Issue;
use crate::sizes::LINE_BYTES;

pub(super) const MAGIC: [u8; 8] = *b"PGOVLAYS";
pub(super) const VERSION: u16 = 1;
pub(super) const HEADER: usize = 16;
/// Bytes of a record before its fields.
pub(super) const PREFIX: usize = 4;
pub(super) const END: u8 = 255;
pub(super) const END_FIELDS: usize = 12;
/// The longest fields: a store of a whole line.
pub(super) const MOST_FIELDS: usize = 12 + LINE_BYTES;

/// Pages that one record maps at most: 4 GiB.
const MOST_PAGES: u64 = 1 << 20;

/// At most a line of bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Bytes {
    bytes: [u8; LINE_BYTES],
    length: u8,
}

impl Bytes {
    /// The bytes; `None` if they are none, or more than a line.
    pub fn new(from: &[u8]) -> Option<Self> {
        let mut bytes = [0; LINE_BYTES];
        bytes.get_mut(..from.len())?.copy_from_slice(from);
        let length = u8::try_from(from.len()).ok().filter(|length| *length > 0)?;
        Some(Self { bytes, length })
    }

    /// The bytes.
    pub fn get(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.get().fmt(f)
    }
}

/// What a core does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Instructions that access no memory.
    Compute(u32),
    /// New pages.
    Map {
        /// The process.
        pid: Pid,
        /// What they are.
        contents: Contents,
        /// The virtual address of the first one.
        address: u64,
        /// How many.
        pages: u64,
    },
    /// A load, or a load of metadata.
    Load {
        /// Of metadata.
        metadata: bool,
        /// The process.
        pid: Pid,
        /// Bytes, 1 to 64.
        bytes: u8,
        /// When it may begin.
        issue: Issue,
        /// The virtual address.
        address: u64,
    },
    /// A store, or a store of metadata.
    Store {
        /// Of metadata.
        metadata: bool,
        /// The process.
        pid: Pid,
        /// What is stored.
        bytes: Bytes,
        /// When it may begin.
        issue: Issue,
        /// The virtual address.
        address: u64,
    },
    /// A fork.
    Fork {
        /// Who forks.
        parent: Pid,
        /// A process without pages.
        child: Pid,
    },
    /// The end of a process.
    Exit(Pid),
    /// An overlay becomes a page, or is dropped.
    Promote {
        /// The process.
        pid: Pid,
        /// What becomes of it.
        how: Promotion,
        /// A virtual address in the page.
        address: u64,
    },
    /// From now on a process writes to overlays.
    Speculate(Pid),
}

/// What happens, and on which core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The core.
    pub core: u8,
    /// What it does.
    pub action: Action,
}

/// What fields can say wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A kind that there is not.
    #[error("kind {0} is unknown")]
    Kind(u8),
    /// Fields of another length than the kind's.
    #[error("kind {kind} has {length} bytes of fields, it should have {expected}")]
    Length {
        /// The kind.
        kind: u8,
        /// Bytes there are.
        length: usize,
        /// Bytes there should be.
        expected: usize,
    },
    /// A value that a field cannot have.
    #[error("{what} cannot be {value}")]
    Field {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}

/// Takes fields from the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (first, rest) = self.0.split_first_chunk().expect("the length was checked");
        self.0 = rest;
        *first
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    fn pid(&mut self) -> Result<Pid, Malformed> {
        let pid = self.u16();
        Pid::try_new(pid).map_err(|_| field("process", pid))
    }

    fn issue(&mut self) -> Result<Issue, Malformed> {
        match self.u8() {
            0 => Ok(Issue::Free),
            1 => Ok(Issue::AfterLoad),
            other => Err(field("issue", other)),
        }
    }
}

fn field(what: &'static str, value: impl Into<u64>) -> Malformed {
    Malformed::Field {
        what,
        value: value.into(),
    }
}

/// The lengths that a kind's fields may have.
fn lengths(kind: u8) -> Option<std::ops::RangeInclusive<usize>> {
    Some(match kind {
        1 | 7 => 4..=4,
        2 => 20..=20,
        3 | 5 => 12..=12,
        4 | 6 => 13..=MOST_FIELDS,
        8 | 10 => 2..=2,
        9 => 12..=12,
        END => END_FIELDS..=END_FIELDS,
        _ => return None,
    })
}

/// Checks a kind and the length of its fields.
pub(super) fn check_length(kind: u8, length: usize) -> Result<(), Malformed> {
    let lengths = lengths(kind).ok_or(Malformed::Kind(kind))?;
    if lengths.contains(&length) {
        return Ok(());
    }
    Err(Malformed::Length {
        kind,
        length,
        expected: *lengths.start(),
    })
}

impl Action {
    /// Reads fields whose length was checked.
    pub(super) fn decode(kind: u8, fields: &[u8]) -> Result<Self, Malformed> {
        let length = fields.len();
        let mut fields = Fields(fields);
        Ok(match kind {
            1 => Self::Compute(u32::from_le_bytes(fields.take())),
            2 => Self::Map {
                pid: fields.pid()?,
                contents: match fields.u16() {
                    0 => Contents::Own,
                    1 => Contents::Zeros,
                    2 => Contents::WithMetadata,
                    other => return Err(field("contents", other)),
                },
                address: fields.u64(),
                pages: match fields.u64() {
                    pages @ 1..=MOST_PAGES => pages,
                    other => return Err(field("number of pages", other)),
                },
            },
            3 | 5 => {
                let (pid, bytes) = (fields.pid()?, fields.u8());
                if !(1..=LINE_BYTES).contains(&usize::from(bytes)) {
                    return Err(field("number of bytes", bytes));
                }
                Self::Load {
                    metadata: kind == 5,
                    pid,
                    bytes,
                    issue: fields.issue()?,
                    address: fields.u64(),
                }
            }
            4 | 6 => {
                let (pid, bytes) = (fields.pid()?, fields.u8());
                let (issue, address) = (fields.issue()?, fields.u64());
                let expected = 12 + usize::from(bytes);
                if length != expected {
                    return Err(Malformed::Length {
                        kind,
                        length,
                        expected,
                    });
                }
                let bytes = Bytes::new(fields.0).ok_or(field("number of bytes", bytes))?;
                Self::Store {
                    metadata: kind == 6,
                    pid,
                    bytes,
                    issue,
                    address,
                }
            }
            7 => Self::Fork {
                parent: fields.pid()?,
                child: fields.pid()?,
            },
            8 => Self::Exit(fields.pid()?),
            9 => Self::Promote {
                pid: fields.pid()?,
                how: match fields.u16() {
                    0 => Promotion::CopyAndCommit,
                    1 => Promotion::Commit,
                    2 => Promotion::Discard,
                    other => return Err(field("promotion", other)),
                },
                address: fields.u64(),
            },
            10 => Self::Speculate(fields.pid()?),
            other => return Err(Malformed::Kind(other)),
        })
    }

    /// Adds the fields; returns the kind.
    pub(super) fn encode(&self, fields: &mut Vec<u8>) -> u8 {
        let pid = |fields: &mut Vec<u8>, pid: &Pid| fields.extend(pid.get().to_le_bytes());
        let issue = |issue: &Issue| u8::from(*issue == Issue::AfterLoad);
        match self {
            Self::Compute(instructions) => {
                fields.extend(instructions.to_le_bytes());
                1
            }
            Self::Map {
                pid: process,
                contents,
                address,
                pages,
            } => {
                pid(fields, process);
                let contents: u16 = match contents {
                    Contents::Own => 0,
                    Contents::Zeros => 1,
                    Contents::WithMetadata => 2,
                };
                fields.extend(contents.to_le_bytes());
                fields.extend(address.to_le_bytes());
                fields.extend(pages.to_le_bytes());
                2
            }
            Self::Load {
                metadata,
                pid: process,
                bytes,
                issue: when,
                address,
            } => {
                pid(fields, process);
                fields.extend([*bytes, issue(when)]);
                fields.extend(address.to_le_bytes());
                if *metadata { 5 } else { 3 }
            }
            Self::Store {
                metadata,
                pid: process,
                bytes,
                issue: when,
                address,
            } => {
                pid(fields, process);
                fields.extend([bytes.length, issue(when)]);
                fields.extend(address.to_le_bytes());
                fields.extend(bytes.get());
                if *metadata { 6 } else { 4 }
            }
            Self::Fork { parent, child } => {
                pid(fields, parent);
                pid(fields, child);
                7
            }
            Self::Exit(process) => {
                pid(fields, process);
                8
            }
            Self::Promote {
                pid: process,
                how,
                address,
            } => {
                pid(fields, process);
                let how: u16 = match how {
                    Promotion::CopyAndCommit => 0,
                    Promotion::Commit => 1,
                    Promotion::Discard => 2,
                };
                fields.extend(how.to_le_bytes());
                fields.extend(address.to_le_bytes());
                9
            }
            Self::Speculate(process) => {
                pid(fields, process);
                10
            }
        }
    }
}
