//! Verifying: whether pages that were taken from a guest are what slots of the store hold.
#![allow(unsafe_code)] // pages that an engine reads after the call that named them

use super::{Answer, Engine, PageId};
use std::time::Duration;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};

/// A page that stays as it is for `'a`: one that was taken from a guest, or a slot in use.
#[derive(Clone, Copy)]
pub struct StablePage<'a>(&'a PageWords);

impl<'a> StablePage<'a> {
    /// The page at an address.
    ///
    /// # Safety
    /// The address must be a multiple of 8. A page must be readable there for `'a`, and nobody may write it meanwhile.
    pub unsafe fn at(address: usize) -> Self {
        // SAFETY: as promised by the caller.
        Self(unsafe { &*(address as *const PageWords) })
    }

    /// Its content.
    #[inline]
    #[must_use]
    pub fn words(self) -> &'a PageWords {
        self.0
    }

    /// Its address in this process, for devices that read this process's memory.
    #[must_use]
    pub fn address(self) -> usize {
        std::ptr::from_ref(self.0) as usize
    }

    fn byte(self, offset: usize) -> u8 {
        self.words()[offset / 8].to_ne_bytes()[offset % 8]
    }
}

impl<'a> From<&'a PageWords> for StablePage<'a> {
    fn from(words: &'a PageWords) -> Self {
        Self(words)
    }
}

impl std::fmt::Debug for StablePage<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StablePage({:p})", self.0)
    }
}

/// What a taken page is compared with.
#[derive(Clone, Copy, Debug)]
pub enum With<'a> {
    /// Zeros.
    Zeros,
    /// A slot.
    Slot {
        /// Its number, by which a device knows it ([`Engine::map`]).
        id: PageId,
        /// Its page in this process.
        page: StablePage<'a>,
    },
}

/// A page that was taken, and what is to replace it.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// A page in memory of this process that nobody else reaches, or that is frozen at the guest's own address. A device is not given that memory: either it reads
    /// this process's addresses, or its driver copies the page.
    pub taken: StablePage<'a>,
    /// The other one.
    pub with: With<'a>,
}

impl Pair<'_> {
    /// Whether both are equal, by the CPU: as fast as `memcmp`.
    #[inline]
    #[must_use]
    pub fn equal(&self) -> bool {
        match self.with {
            // One call of memcmp.
            With::Slot { page, .. } => self.taken.words() == page.words(),
            With::Zeros => {
                let mut lines = self.taken.words().chunks_exact(8);
                lines.all(|line| line.iter().fold(0, |all, word| all | word) == 0)
            }
        }
    }

    /// What the CPU answers.
    #[must_use]
    pub fn compare(&self) -> Compared {
        if self.equal() {
            return Compared::Equal;
        }
        let zeros = [0; PAGE_WORDS];
        let (taken, with) = match self.with {
            With::Slot { page, .. } => (self.taken.words(), page.words()),
            With::Zeros => (self.taken.words(), &zeros),
        };
        let first = taken.iter().zip(with).position(|(a, b)| a != b);
        let offset = first.and_then(|word| {
            let (a, b) = (taken[word].to_ne_bytes(), with[word].to_ne_bytes());
            let byte = a.iter().zip(b).position(|(a, b)| *a != b)?;
            u16::try_from(word * 8 + byte).ok()
        });
        Compared::Different(offset)
    }

    /// Whether both differ in the byte at this offset.
    #[must_use]
    pub fn differs_at(&self, offset: u16) -> bool {
        let offset = usize::from(offset);
        offset < PAGE_SIZE
            && match self.with {
                With::Slot { page, .. } => self.taken.byte(offset) != page.byte(offset),
                With::Zeros => self.taken.byte(offset) != 0,
            }
    }
}

/// What comparing a pair tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// All 4,096 bytes are equal.
    Equal,
    /// They are not; with the offset of the first byte that differs, if the engine can tell it.
    Different(Option<u16>),
}

/// The answer to one pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairAnswer {
    /// The pair's number.
    pub number: u64,
    /// An error other than [`Error::Device`](super::Error::Device) is of this pair alone.
    pub answer: Answer<Compared>,
}

/// What a verifying engine can do. It stays the same for the engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pairs that it takes best in one call, at least 1. The caller asks between two calls whether somebody waits for the
    /// pages, so a call should take no longer than some ten microseconds.
    pub at_once: usize,
    /// Whether it compares with [`With::Zeros`]; else it is not asked to.
    pub zeros: bool,
}

/// Compares pages that were taken with slots, in batches, while the CPU does something else.
///
/// The caller submits pairs in calls of at most [`Limits::at_once`], as many calls as the engine takes, and polls for
/// answers. Guests wait for the pages meanwhile, so it gives up after a time of its own choice, by [`Self::abort`]. It
/// drops an engine that has failed when no page is away any more.
///
/// The engine answers each pair once, in any order, after any time: a CPU at once, a device later. `Equal` means that all
/// 4,096 bytes of both were read and are equal. Pairs in flight are bounded by the engine: it takes fewer when it is full.
/// No call blocks, except that [`Self::poll`] may wait as long as it is told to, or writes a log, which may end in a thread
/// that waits for one of the pages. Dropping an engine aborts.
pub trait Verify: Engine {
    /// What it can do.
    fn limits(&self) -> Limits;

    /// Begins to compare pairs, which get the numbers `first` and following. Returns how many it took, from the first
    /// pair on: fewer than all when it is full, 0 only while answers of others are outstanding.
    ///
    /// # Safety
    /// The pairs' pages must stay readable and unwritten, also beyond this call, until their answers were polled or
    /// [`Self::abort`] has returned.
    ///
    /// # Errors
    /// If the device failed. The caller calls [`Self::abort`] then, and nothing else.
    unsafe fn submit(&mut self, first: u64, pairs: &[Pair<'_>]) -> Answer<usize>;

    /// Compares a pair at once, if that is how the engine works: as the CPU does, by which the service verifies unless settings
    /// name another engine. Such an engine is not asked by batches there, since it could do nothing else meanwhile.
    #[inline]
    fn compare_now(&mut self, _pair: &Pair<'_>) -> Option<Compared> {
        None
    }

    /// Appends the answers there are; if there are none, waits for one, at most so long.
    ///
    /// # Errors
    /// As for [`Self::submit`].
    fn poll(&mut self, wait: Duration, answers: &mut Vec<PairAnswer>) -> Answer<()>;

    /// Forgets all pairs that have no answer yet: they get none any more. When it returns no thread reads their pages. A
    /// device that cannot be stopped may go on reading, as it cannot write what it reads; it will read whatever is there.
    fn abort(&mut self);
}
