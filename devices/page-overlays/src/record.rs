//! Traces of real memory: what a process wrote, by comparing its memory at intervals.
//!
//! A VMM's guest memory is memory of its process, so that the same records a guest. Each sample names the lines that differ
//! from those of the sample before, with their bytes. What it cannot see: reads, instructions, the order of writes within an
//! interval (they come by address), writes of the same bytes, and of several writes to a line all but the last. The process
//! is not stopped: a line may hold half of a write, the rest of which comes with the next sample. Pages begin as zeros in the
//! trace, whatever they held.

use crate::address::{AddressError, Pid};
use crate::machine::Contents;
use crate::pipeline::Issue;
use crate::sizes::{LINE_BYTES, PAGE_BYTES, index, number};
use crate::trace::{Action, Bytes, Record, TraceWriter};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Why a recording ended.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The trace cannot be written.
    #[error("cannot write the trace")]
    Write(#[from] io::Error),
    /// A number cannot be a process's.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A process's memory cannot be read.
    #[error("cannot read {path}: is the process alive, and yours?")]
    Process {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// More memory than the recorder may hold.
    #[error("the process has more than {most} pages in memory: name a range, or allow more")]
    TooMuch {
        /// Pages that are allowed.
        most: usize,
    },
}

/// Compares samples of memory and writes what differs.
#[derive(Debug)]
pub struct Recorder<W: Write> {
    trace: TraceWriter<W>,
    process: Pid,
    child: Pid,
    pages: BTreeMap<u64, Box<[u8; PAGE_BYTES]>>,
    most: usize,
    samples: u64,
    lines: u64,
}

impl<W: Write> Recorder<W> {
    /// Begins a trace. The recorder holds at most `most` pages.
    ///
    /// # Errors
    /// [`RecordError::Write`].
    pub fn new(to: W, most: usize) -> Result<Self, RecordError> {
        Ok(Self {
            trace: TraceWriter::new(to)?,
            process: Pid::try_new(1)?,
            child: Pid::try_new(2)?,
            pages: BTreeMap::new(),
            most,
            samples: 0,
            lines: 0,
        })
    }

    fn write(&mut self, action: Action) -> Result<(), RecordError> {
        Ok(self.trace.write(&Record { core: 0, action })?)
    }

    /// A page of the sample, at a virtual address.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn page(&mut self, address: u64, now: &[u8; PAGE_BYTES]) -> Result<(), RecordError> {
        let Some(before) = self.pages.get(&address) else {
            if self.pages.len() == self.most {
                return Err(RecordError::TooMuch { most: self.most });
            }
            self.pages.insert(address, Box::new(*now));
            return self.write(Action::Map {
                pid: self.process,
                contents: Contents::Own,
                address,
                pages: 1,
            });
        };
        let lines = lines_that_differ(before, now);
        for line in &lines {
            let at = line * LINE_BYTES;
            self.lines += 1;
            self.write(Action::Store {
                metadata: false,
                pid: self.process,
                bytes: Bytes::new(&now[at..at + LINE_BYTES]).expect("a line has 64 bytes"),
                issue: Issue::Free,
                address: address + number(at),
            })?;
        }
        if !lines.is_empty() {
            self.pages.insert(address, Box::new(*now));
        }
        Ok(())
    }

    /// The sample is whole. After the first one the process forks, so that all later writes are to shared pages.
    ///
    /// # Errors
    /// [`RecordError::Write`].
    pub fn end_sample(&mut self) -> Result<(), RecordError> {
        self.samples += 1;
        if self.samples == 1 {
            let (parent, child) = (self.process, self.child);
            self.write(Action::Fork { parent, child })?;
        }
        Ok(())
    }

    /// Pages seen, and lines that differed so far.
    pub fn seen(&self) -> (usize, u64) {
        (self.pages.len(), self.lines)
    }

    /// Ends the trace, and gives the writer back.
    ///
    /// # Errors
    /// [`RecordError::Write`].
    pub fn finish(self) -> Result<W, RecordError> {
        Ok(self.trace.finish()?)
    }
}

/// The lines in which two versions of a page differ.
fn lines_that_differ(before: &[u8; PAGE_BYTES], now: &[u8; PAGE_BYTES]) -> Vec<usize> {
    let lines = before.chunks_exact(LINE_BYTES).zip(now.chunks_exact(LINE_BYTES));
    lines
        .enumerate()
        .filter(|(_, (before, now))| before != now)
        .map(|(line, _)| line)
        .collect()
}

/// The private, writable memory of a process.
#[derive(Debug)]
pub struct ProcessMemory {
    folder: String,
    memory: File,
    pagemap: File,
}

/// Of an entry of the kernel's page map: the page is in memory, or swapped out.
const EXISTS: u64 = 0b11 << 62;

impl ProcessMemory {
    /// The memory of a process. Nothing is stopped or written.
    ///
    /// # Errors
    /// [`RecordError::Process`].
    pub fn open(pid: u32) -> Result<Self, RecordError> {
        let folder = format!("/proc/{pid}");
        let open = |name: &str| {
            let path = format!("{folder}/{name}");
            File::open(&path).map_err(|source| RecordError::Process { path, source })
        };
        Ok(Self {
            memory: open("mem")?,
            pagemap: open("pagemap")?,
            folder,
        })
    }

    /// Gives a recorder all pages that exist in a range of virtual addresses, as one sample. A page that goes meanwhile is
    /// left out.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn sample<W: Write>(
        &self,
        range: &Range<u64>,
        recorder: &mut Recorder<W>,
    ) -> Result<(), RecordError> {
        let path = format!("{}/maps", self.folder);
        let maps = std::fs::read_to_string(&path).map_err(|source| RecordError::Process { path, source })?;
        let mut page = [0; PAGE_BYTES];
        for mapped in maps.lines().filter_map(private_writable) {
            let (start, end) = (mapped.start.max(range.start), mapped.end.min(range.end));
            for address in (start..end).step_by(PAGE_BYTES) {
                if self.exists(address) && self.memory.read_exact_at(&mut page, address).is_ok() {
                    recorder.page(address, &page)?;
                }
            }
        }
        recorder.end_sample()
    }

    fn exists(&self, address: u64) -> bool {
        let mut entry = [0; 8];
        let at = address / number(PAGE_BYTES) * 8;
        self.pagemap.read_exact_at(&mut entry, at).is_ok() && u64::from_le_bytes(entry) & EXISTS != 0
    }
}

/// The addresses of a line of the kernel's list of mappings, if the mapping is private and writable.
fn private_writable(line: &str) -> Option<Range<u64>> {
    let (range, rest) = line.split_once(' ')?;
    if !rest.starts_with("rw-p") {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let address = |hex: &str| u64::from_str_radix(hex, 16).ok();
    let page = |address: u64| index(address).is_multiple_of(PAGE_BYTES).then_some(address);
    Some(page(address(start)?)?..page(address(end)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, OnWrite};
    use crate::experiments::fork::run_trace;
    use crate::trace::TraceReader;

    #[test]
    fn what_a_process_writes_is_in_its_trace() {
        let pages = 16;
        let mut memory = vec![1u8; (pages + 2) * PAGE_BYTES];
        let first = memory.as_ptr().align_offset(PAGE_BYTES);
        let start = number(memory.as_ptr() as usize + first);
        let range = start..start + number(pages * PAGE_BYTES);
        let process = ProcessMemory::open(std::process::id()).unwrap();
        let mut recorder = Recorder::new(Vec::new(), 64).unwrap();
        process.sample(&range, &mut recorder).unwrap();
        for page in 0..pages {
            memory[first + page * PAGE_BYTES + 100] = 7;
            memory[first + page * PAGE_BYTES + 4000] = 8;
        }
        std::hint::black_box(&memory);
        process.sample(&range, &mut recorder).unwrap();
        assert_eq!(recorder.seen(), (pages, 2 * pages as u64));
        let trace = recorder.finish().unwrap();
        let play = |on_write| {
            let reader = TraceReader::new(trace.as_slice()).unwrap();
            run_trace(reader, Config::table_2(on_write)).unwrap()
        };
        assert_eq!(play(OnWrite::Copy).bytes(), 16 * 4096);
        assert_eq!(play(OnWrite::Overlay).bytes(), 16 * 256);
    }

    #[test]
    fn too_much_memory_is_refused() {
        let mut recorder = Recorder::new(Vec::new(), 1).unwrap();
        recorder.page(0, &[0; PAGE_BYTES]).unwrap();
        let error = recorder.page(4096, &[0; PAGE_BYTES]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the process has more than 1 pages in memory: name a range, or allow more"
        );
    }
}
