//! The device's window (BAR 2): memory that software and device share, with the tables and the ring of jobs.
//!
//! The paper's software writes a table through five functions, entry by entry. Over a socket each of these would be a
//! message. So a client may also keep tables in this memory, which it maps, and name one in each *job*: a candidate, a
//! table, where to start. One doorbell starts all jobs up to a number; the modules take them in turn, load the
//! table and run. All is 64-bit words, little-endian:
//!
//! | word | what |
//! | --- | --- |
//! | 0 | head: jobs done since the device was reset, modulo 2^32 (written by the device) |
//! | 512 | [`RING`] jobs of 4 words |
//! | 8192 | [`TABLES`] tables of 32 words, of which 31 are entries |
//!
//! Everything here is hostile: the client may write it at any time. The device reads each word once.

use crate::hash_key::HashKey;
use crate::scan_table::{
    Candidate, EntryIndex, OTHER_PAGES, OtherPage, PPN_BITS, PfeInfo, Pointer, Ppn, RunError,
};
use std::sync::atomic::{AtomicU64, Ordering};

/// Jobs that the ring holds.
pub const RING: usize = 1024;
/// Tables in the window.
pub const TABLES: usize = (WINDOW_BYTES / 8 - TABLES_AT) / TABLE_WORDS;
/// Bytes of the window.
pub const WINDOW_BYTES: usize = 2 << 20;

const HEAD: usize = 0;
const JOBS_AT: usize = 512;
const JOB_WORDS: usize = 4;
const TABLES_AT: usize = 8192;
const TABLE_WORDS: usize = 32;

const _: () = assert!(JOBS_AT + RING * JOB_WORDS <= TABLES_AT && OTHER_PAGES <= TABLE_WORDS);
const _: () = assert!(TABLES == 7936);

const VALID: u64 = 1 << 63;
const LESS_SHIFT: u32 = PPN_BITS;
const MORE_SHIFT: u32 = PPN_BITS + 8;
const PTR_SHIFT: u32 = PPN_BITS;
const LAST_REFILL: u64 = 1 << (PPN_BITS + 8);

/// One word of a table: the page number in bits 0-39, Less in 40-47, More in 48-55, V in bit 63.
pub fn encode_entry(entry: Option<OtherPage>) -> u64 {
    entry.map_or(0, |page| {
        let less = u64::from(page.less.bits()) << LESS_SHIFT;
        let more = u64::from(page.more.bits()) << MORE_SHIFT;
        VALID | page.ppn.number() | less | more
    })
}

/// Reads a word of a table; no word is malformed.
pub fn decode_entry(word: u64) -> Option<OtherPage> {
    (word & VALID != 0).then(|| OtherPage {
        ppn: Ppn::truncated(word),
        less: pointer(word >> LESS_SHIFT),
        more: pointer(word >> MORE_SHIFT),
    })
}

#[allow(clippy::cast_possible_truncation)] // the low 8 bits
fn pointer(bits: u64) -> Pointer {
    Pointer::new(bits as u8)
}

/// What is to be done: compare a candidate with the pages of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// The PFE entry to be inserted.
    pub candidate: Candidate,
    /// The table to be loaded, below [`TABLES`].
    pub table: u32,
}

/// Why a job or a table was not processed to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// Processing ended early.
    #[error(transparent)]
    Run(#[from] RunError),
    /// There is no such table.
    #[error("the job names a table that the window does not have: tables are below {TABLES}")]
    Table,
}

impl JobError {
    const ALL: [Self; 4] = [
        Self::Run(RunError::CandidateFault),
        Self::Run(RunError::OtherFault),
        Self::Run(RunError::Loop),
        Self::Table,
    ];

    /// The error's number in an INFO word, from 1 on.
    fn code(self) -> u32 {
        (1..)
            .zip(Self::ALL)
            .find(|(_, error)| *error == self)
            .map_or(0, |(code, _)| code)
    }

    fn of_code(code: u32) -> Option<Self> {
        Self::ALL.get((code as usize).checked_sub(1)?).copied()
    }
}

/// S, in an INFO word.
pub const INFO_SCANNED: u32 = 1;
/// D.
pub const INFO_DUPLICATE: u32 = 2;
/// H.
pub const INFO_KEY_READY: u32 = 4;
/// The module works; nothing else in the word means anything.
pub const INFO_BUSY: u32 = 8;
/// V of the PFE entry: there is a candidate.
pub const INFO_VALID: u32 = 16;
const INFO_PTR_SHIFT: u32 = 8;
const INFO_ERROR_SHIFT: u32 = 16;

/// What `get_PFE_info` reads, or a job's outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// The key, once H is set.
    pub hash_key: Option<HashKey>,
    /// See [`PfeInfo::ptr`].
    pub ptr: Pointer,
    /// S.
    pub scanned: bool,
    /// D.
    pub duplicate: bool,
    /// What went wrong.
    pub error: Option<JobError>,
}

impl From<PfeInfo> for Info {
    fn from(info: PfeInfo) -> Self {
        Self {
            hash_key: info.hash_key,
            ptr: info.ptr,
            scanned: info.scanned,
            duplicate: info.duplicate,
            error: info.error.map(JobError::Run),
        }
    }
}

impl Info {
    /// The bits of the INFO register: S, D, H, V in bits 0, 1, 2, 4, `Ptr` in 8-15, an error in 16-23.
    pub fn bits(&self) -> u32 {
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        INFO_VALID
            | flag(self.scanned, INFO_SCANNED)
            | flag(self.duplicate, INFO_DUPLICATE)
            | flag(self.hash_key.is_some(), INFO_KEY_READY)
            | u32::from(self.ptr.bits()) << INFO_PTR_SHIFT
            | self.error.map_or(0, JobError::code) << INFO_ERROR_SHIFT
    }

    /// The bits of the KEY register.
    pub fn key_bits(&self) -> u32 {
        self.hash_key.map_or(0, HashKey::raw)
    }

    /// Reads both registers.
    pub fn of_bits(bits: u32, key: u32) -> Self {
        Self {
            hash_key: (bits & INFO_KEY_READY != 0).then(|| HashKey::of_raw(key)),
            ptr: pointer(u64::from(bits >> INFO_PTR_SHIFT)),
            scanned: bits & INFO_SCANNED != 0,
            duplicate: bits & INFO_DUPLICATE != 0,
            error: JobError::of_code(bits >> INFO_ERROR_SHIFT & 0xff),
        }
    }
}

/// A view of the window, of either side.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Window<'a> {
    /// The window in these words, of which there must be [`WINDOW_BYTES`] / 8.
    pub fn new(words: &'a [AtomicU64]) -> Self {
        assert_eq!(words.len(), WINDOW_BYTES / 8, "a window has a fixed size");
        Self { words }
    }

    /// Jobs done, modulo 2^32.
    #[allow(clippy::cast_possible_truncation)] // modulo
    pub fn head(&self) -> u32 {
        self.words[HEAD].load(Ordering::Acquire) as u32
    }

    /// Device: jobs done.
    pub fn set_head(&self, head: u32) {
        self.words[HEAD].store(head.into(), Ordering::Release);
    }

    /// Reads the job of this number (any; places are used in turn). As for entries, no bits are malformed.
    #[allow(clippy::cast_possible_truncation)] // the low half of the word
    pub fn job(&self, number: u32) -> Job {
        let words = self.job_words(number);
        let first = words[0].load(Ordering::Acquire);
        let candidate = Candidate {
            ppn: Ppn::truncated(first),
            last_refill: first & LAST_REFILL != 0,
            ptr: pointer(first >> PTR_SHIFT),
        };
        Job {
            candidate,
            table: words[1].load(Ordering::Relaxed) as u32,
        }
    }

    /// Writes a job.
    pub fn set_job(&self, number: u32, job: &Job) {
        let words = self.job_words(number);
        let last_refill = if job.candidate.last_refill { LAST_REFILL } else { 0 };
        let ptr = u64::from(job.candidate.ptr.bits()) << PTR_SHIFT;
        words[1].store(job.table.into(), Ordering::Relaxed);
        words[0].store(job.candidate.ppn.number() | ptr | last_refill, Ordering::Release);
    }

    /// What became of a job, once the head is beyond it.
    #[allow(clippy::cast_possible_truncation)] // halves of the word
    pub fn outcome(&self, number: u32) -> Info {
        let word = self.job_words(number)[2].load(Ordering::Acquire);
        Info::of_bits(word as u32, (word >> 32) as u32)
    }

    /// Device: what became of a job.
    pub fn set_outcome(&self, number: u32, info: &Info) {
        let word = u64::from(info.key_bits()) << 32 | u64::from(info.bits());
        self.job_words(number)[2].store(word, Ordering::Release);
    }

    /// The Other Pages of a table; `None` if there is no such table.
    pub fn table(&self, table: u32) -> Option<[Option<OtherPage>; OTHER_PAGES]> {
        let words = self.table_words(table)?;
        Some(std::array::from_fn(|entry| {
            decode_entry(words[entry].load(Ordering::Relaxed))
        }))
    }

    /// Writes an entry of a table, if there is such a table.
    pub fn set_entry(&self, table: u32, index: EntryIndex, entry: Option<OtherPage>) {
        if let Some(words) = self.table_words(table) {
            words[index.number()].store(encode_entry(entry), Ordering::Relaxed);
        }
    }

    fn job_words(&self, number: u32) -> &'a [AtomicU64] {
        &self.words[JOBS_AT + number as usize % RING * JOB_WORDS..][..JOB_WORDS]
    }

    fn table_words(&self, table: u32) -> Option<&'a [AtomicU64]> {
        let table = table as usize;
        (table < TABLES).then(|| &self.words[TABLES_AT + table * TABLE_WORDS..][..TABLE_WORDS])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn empty() -> Vec<AtomicU64> {
        (0..WINDOW_BYTES / 8).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn there_are_no_more_tables_than_tables() {
        let words = empty();
        let window = Window::new(&words);
        let last = u32::try_from(TABLES - 1).unwrap();
        assert!(window.table(last).is_some() && window.table(last + 1).is_none());
        window.set_entry(u32::MAX, EntryIndex::try_new(0).unwrap(), None);
    }

    proptest! {
        #[test]
        fn entries_come_back(ppn in 0..1u64 << PPN_BITS, less: u8, more: u8) {
            let entry = OtherPage {
                ppn: Ppn::try_new(ppn).unwrap(),
                less: Pointer::new(less),
                more: Pointer::new(more),
            };
            prop_assert_eq!(decode_entry(encode_entry(Some(entry))), Some(entry));
        }

        #[test]
        fn jobs_and_outcomes_come_back(
            number: u32, ppn in 0..1u64 << PPN_BITS, last_refill: bool, ptr: u8, table: u32,
            info: u32, key: u32,
        ) {
            let words = empty();
            let window = Window::new(&words);
            let candidate = Candidate { ppn: Ppn::try_new(ppn).unwrap(), last_refill, ptr: Pointer::new(ptr) };
            let job = Job { candidate, table };
            window.set_job(number, &job);
            let info = Info::of_bits(info, key);
            window.set_outcome(number, &info);
            prop_assert_eq!((window.job(number), window.outcome(number)), (job, info));
        }

        #[test]
        fn no_bits_are_malformed(word: u64) {
            // Decoding and encoding again loses nothing but bits without a meaning.
            let entry = decode_entry(word);
            prop_assert_eq!(decode_entry(encode_entry(entry)), entry);
        }
    }
}
