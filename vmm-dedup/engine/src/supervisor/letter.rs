//! What a thread of the VMM sends, and what it is answered.

use crate::error::Error;
use crate::supervisor::lifecycle::{Event, Span};
use crate::supervisor::theirs::Keep;
use crate::supervisor::watched::Still;
use std::fmt;

/// What a thread of the VMM sends.
pub(crate) enum Letter<A> {
    /// It has memory, which something may keep alive.
    Add(Vec<Span>, Option<Keep>),
    /// Something happened.
    Event(Event),
    /// A device is about to pin memory; whether it still may have.
    PinWhile(Still),
    /// Something that the driver's hands understand.
    Ask(A),
    /// The supervisor ends.
    End,
}

impl<A: fmt::Debug> fmt::Debug for Letter<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Add(..) => "Add",
            Self::Event(_) => "Event",
            Self::PinWhile(_) => "PinWhile",
            Self::Ask(ask) => return ask.fmt(f),
            Self::End => "End",
        })
    }
}

/// How it went, and the account of a service that has ended by it.
pub(crate) type Answer<T> = (Result<(), Error>, Option<T>);
