//! What a lifecycle is told, and what it has done.

use std::ops::Range;
use vmm_dedup_protocol::refusal::Refusal;

/// Guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) range: Range<usize>,
    /// Where the guest sees it, if known.
    pub(crate) guest_address: Option<u64>,
}

impl Span {
    /// Whether they have a byte in common: an empty range has none.
    pub(super) fn overlaps(&self, other: &Range<usize>) -> bool {
        !other.is_empty() && self.range.start < other.end && other.start < self.range.end
    }

    /// Its parts in front of and behind what goes.
    pub(super) fn without(&self, gone: &Range<usize>) -> impl Iterator<Item = Self> + use<> {
        let Self { range, guest_address } = self.clone();
        let before = range.start..range.end.min(gone.start);
        let behind = range.start.max(gone.end)..range.end;
        [before, behind]
            .into_iter()
            .filter(|part| part.start < part.end)
            .map(move |part| Self {
                // Where that is no address any more, nobody knows.
                guest_address: guest_address.and_then(|at| at.checked_add((part.start - range.start) as u64)),
                range: part,
            })
    }
}

/// How long memory is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lease {
    /// Until the VMM takes it back.
    UntilTakenBack,
    /// Nobody will tell: whether the borrower has gone is tried 5 s after the memory was given back for the first time, since it may need
    /// that long to register, and then every second.
    UntilFree,
}

/// What the VMM tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// There is a VM to deduplicate.
    Attach,
    /// It has this memory.
    Add(Span),
    /// What is wanted is tried at once.
    Hurry,
    /// Memory is about to be unmapped or replaced.
    Remove(Range<usize>),
    /// Somebody else is about to use a userfaultfd on memory.
    Lend(Range<usize>, Lease),
    /// The memory may be worked on again.
    TakeBack(Range<usize>),
    /// Memory is not to be deduplicated any more.
    LeaveAlone(Range<usize>, Refusal),
    /// Something about the VM is worth a line.
    Note(Refusal),
    /// The VM is not to be deduplicated any more.
    Refuse(Refusal),
    /// A device is about to pin memory.
    Pin,
    /// It has let go.
    Unpin,
    /// Nobody sees its pin any more, and nobody has told.
    LetGo,
    /// Merging rests.
    Pause,
    /// It goes on.
    Resume,
    /// Pages may be pinned from now on without any open file that shows it.
    HidePins,
    /// A file was opened for direct I/O.
    DirectIo,
    /// The VM ends.
    Detach { unmerge: bool },
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Starts a service on a first region, paused.
    Start(Span),
    /// Lets the discarder know the service.
    Publish,
    /// Tells the service that whatever pins memory shows in open files.
    Vouch,
    /// Gives the service one region more.
    Add(Span),
    /// Brings memory back to anonymous memory.
    Release(Span),
    /// Lets the service work on it again.
    Resume(Span),
    /// Lets the service forget memory.
    Remove(Range<usize>),
    /// Lets the discarder forget memory, and whoever keeps it alive let go.
    Forget(Range<usize>),
    /// Merging rests.
    Pause,
    /// Merging goes on.
    Unpause,
    /// The service is told that pins may be hidden.
    HidePins,
    /// The service looks at what is open for direct I/O.
    DirectIo,
    /// Ends the service.
    Stop { unmerge: bool },
    /// A line for the log.
    Say(Refusal),
    /// Tells the store why there is no service on so many pages.
    Announce(Refusal, u64),
    /// Tells it no more.
    Withdraw,
}

/// How an effect went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// It failed for a reason that may pass.
    Passes(Refusal),
    /// It failed for good.
    Fails(Refusal),
}
