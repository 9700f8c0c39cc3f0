//! The memory of one VM, wherever it is: what ranges there are, and how to read them.
//!
//! Files are read, not mapped: a file that shrinks meanwhile is then an error and not a SIGBUS, and the copy stays
//! in the CPU's cache until it is hashed.

use crate::error::Error;
use crate::process::{PAGE, Process};
use object::elf;
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader};
use rustix::fs::{SeekFrom, seek};
use std::fs::{self, File};
use std::io;
use std::iter;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Memory of a VM, to be read.
#[derive(Debug)]
pub struct Memory {
    name: String,
    kind: &'static str,
    reader: Reader,
    ranges: Vec<Range<u64>>,
    /// Pages that hold nothing: holes of files, addresses that were never populated.
    absent: u64,
    /// Pages of a process that others map as well: the zero page, pages merged already.
    shared: u64,
}

#[derive(Debug)]
enum Reader {
    File(PathBuf, File),
    Process(Process),
}

impl Memory {
    /// The private anonymous memory of a process, as far as it is populated. Nothing is populated by looking, and
    /// nothing is stopped.
    ///
    /// # Errors
    /// If there is no such process, it may not be read, or it has no such memory.
    pub fn of_process(pid: u32) -> Result<Self, Error> {
        let process = Process::open(pid)?;
        let populated = process.populated()?;
        if populated.ranges.is_empty() {
            return Err(Error::Nothing { pid });
        }
        Ok(Self {
            name: format!("{} {pid}", process.command()),
            kind: "process",
            reader: Reader::Process(process),
            ranges: populated.ranges,
            absent: populated.absent,
            shared: populated.shared,
        })
    }

    /// The memory in a file: an ELF core (as QEMU's dump-guest-memory and Cloud Hypervisor's coredump write it), a
    /// directory with a Cloud Hypervisor snapshot, or a raw file of pages, whose last partial page is left out.
    ///
    /// # Errors
    /// If the file cannot be read or is not understood.
    pub fn of_file(path: &Path) -> Result<Self, Error> {
        let metadata = fs::metadata(path).map_err(file_error(path))?;
        if metadata.is_dir() {
            return Self::of_snapshot(path);
        }
        if !metadata.is_file() {
            return Err(format_error(
                path,
                "not a file: give a memory dump or a raw image",
            ));
        }
        let file = File::open(path).map_err(file_error(path))?;
        let mut magic = [0; 8];
        let read = file.read_at(&mut magic, 0).map_err(file_error(path))?;
        match &magic[..read] {
            [0x7f, b'E', b'L', b'F', ..] => {
                let ranges = elf_ranges(path, &file)?;
                Self::of_ranges(path, path, file, "ELF core", ranges)
            }
            b"KDUMP   " => Err(format_error(
                path,
                "a compressed kdump: dump without compression (QEMU: without -z, -l and -s)",
            )),
            _ => Self::of_ranges(path, path, file, "raw", iter::once(0..metadata.len())),
        }
    }

    /// A Cloud Hypervisor snapshot: its memory is one file of whole pages, beside state.json.
    fn of_snapshot(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("memory-ranges");
        if !folder.join("state.json").is_file() || !path.is_file() {
            return Err(format_error(
                folder,
                "a directory without state.json and memory-ranges: give that of a Cloud Hypervisor snapshot \
                 (one of a VM with shared memory has no memory-ranges: give the shared file itself)",
            ));
        }
        let file = File::open(&path).map_err(file_error(&path))?;
        let length = file.metadata().map_err(file_error(&path))?.len();
        if length % PAGE != 0 {
            return Err(format_error(
                &path,
                "not a whole number of pages: the snapshot is incomplete, take it again",
            ));
        }
        Self::of_ranges(folder, &path, file, "snapshot", iter::once(0..length))
    }

    fn of_ranges(
        name: &Path,
        path: &Path,
        file: File,
        kind: &'static str,
        ranges: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<Self, Error> {
        let mut present = Vec::new();
        let mut absent = 0;
        for range in ranges {
            let pages = (range.end - range.start) / PAGE;
            let with_data = data_ranges(&file, &range).map_err(file_error(path))?;
            absent += pages - with_data.iter().map(pages_of).sum::<u64>();
            present.extend(with_data);
        }
        if present.is_empty() && absent == 0 {
            return Err(format_error(path, "holds not one page of memory"));
        }
        let name = name.file_name().unwrap_or(name.as_os_str());
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            kind,
            reader: Reader::File(path.to_owned(), file),
            ranges: present,
            absent,
            shared: 0,
        })
    }

    /// What it is called in reports.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is: `process`, `ELF core`, `snapshot` or `raw`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// Pages to be read.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.ranges.iter().map(pages_of).sum()
    }

    pub(crate) fn absent(&self) -> u64 {
        self.absent
    }

    pub(crate) fn shared(&self) -> u64 {
        self.shared
    }

    pub(crate) fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// Reads ranges one after the other into `buffer`; returns the bytes read, which are fewer only if a process
    /// has given up the rest meanwhile. `buffer` has room for all of them.
    pub(crate) fn read(&self, ranges: &[Range<u64>], buffer: &mut [u8]) -> Result<usize, Error> {
        match &self.reader {
            Reader::Process(process) => process.read(ranges, buffer),
            Reader::File(path, file) => {
                let mut done = 0;
                for range in ranges {
                    let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
                    let part = &mut buffer[done..][..length];
                    file.read_exact_at(part, range.start).map_err(file_error(path))?;
                    done += length;
                }
                Ok(done)
            }
        }
    }
}

fn pages_of(range: &Range<u64>) -> u64 {
    (range.end - range.start) / PAGE
}

fn file_error(path: &Path) -> impl Fn(io::Error) -> Error {
    move |source| Error::File {
        path: path.to_owned(),
        source,
    }
}

fn format_error(path: &Path, problem: impl Into<String>) -> Error {
    Error::Format {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

/// Where an ELF core keeps memory. Segments that show the same bytes again (QEMU's paging mode) count once.
fn elf_ranges(path: &Path, file: &File) -> Result<Vec<Range<u64>>, Error> {
    let broken = |e: object::Error| format_error(path, format!("not a 64-bit ELF core ({e})"));
    let length = file.metadata().map_err(file_error(path))?.len();
    let cache = ReadCache::new(file);
    let header = elf::FileHeader64::<object::Endianness>::parse(&cache).map_err(broken)?;
    let endian = header.endian().map_err(broken)?;
    if header.e_type.get(endian) != elf::ET_CORE {
        return Err(format_error(
            path,
            "an ELF file, but no core dump: give a memory dump",
        ));
    }
    let mut ranges = Vec::new();
    for segment in header.program_headers(endian, &cache).map_err(broken)? {
        if segment.p_type(endian) != elf::PT_LOAD || segment.p_filesz(endian) == 0 {
            continue;
        }
        let (start, size) = (segment.p_offset(endian), segment.p_filesz(endian));
        let end = start.checked_add(size).filter(|end| *end <= length);
        let end = end.ok_or_else(|| format_error(path, "cut short: a segment ends after the file's end"))?;
        // Pages begin where the address is that of a page, wherever that is in the file.
        let skip = segment.p_paddr(endian).wrapping_neg() % PAGE;
        if skip < size {
            ranges.push(start + skip..end);
        }
    }
    ranges.sort_by_key(|range| range.start);
    let mut distinct: Vec<Range<u64>> = Vec::new();
    for mut range in ranges {
        if let Some(last) = distinct.last().filter(|last| last.end > range.start) {
            // Stay in step with this segment's own pages.
            let step = (last.end - range.start).next_multiple_of(PAGE);
            range.start = range.start.saturating_add(step).min(range.end);
        }
        let pages = pages_of(&range);
        if pages > 0 {
            distinct.push(range.start..range.start + pages * PAGE);
        }
    }
    Ok(distinct)
}

/// The whole pages of a range that are not holes of the file.
fn data_ranges(file: &File, range: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let end = range.start + pages_of(range) * PAGE;
    let (mut found, mut at): (Vec<Range<u64>>, u64) = (Vec::new(), range.start);
    while at < end {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            // A file system that knows no holes.
            Err(rustix::io::Errno::INVAL) => at,
            Err(error) => return Err(error.into()),
        };
        let hole = seek(file, SeekFrom::Hole(data)).unwrap_or(end);
        // Pages that are data in part, counted from the range's start.
        let first = (data - range.start) / PAGE * PAGE + range.start;
        let last = (hole.min(end) - range.start).next_multiple_of(PAGE) + range.start;
        if first < end {
            match found.last_mut().filter(|previous| previous.end >= first) {
                Some(previous) => previous.end = last.min(end),
                None => found.push(first..last.min(end)),
            }
        }
        at = hole.max(at + 1);
    }
    Ok(found)
}
