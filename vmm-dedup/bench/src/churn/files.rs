//! Real files of this machine, which guests read into their page caches.

use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use vmm_dedup_host::Failure;
use vmm_dedup_protocol::PAGE_SIZE;
use vmm_dedup_protocol::key::{PAGE_WORDS, PageWords};

/// Most pages that are read at once: a large file counts as several.
const READ_AHEAD: usize = 64;

/// Files, one after the other, each padded to whole pages.
#[derive(Debug)]
pub(super) struct Files {
    list: List,
    /// The first page of each, and the end of the last.
    starts: Vec<usize>,
    /// For each page the first that holds the same; empty where nobody counts.
    first_equal: Vec<usize>,
    /// The last file that was read.
    open: Option<(usize, File)>,
}

/// Which files there are, for other processes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct List(Vec<Piece>);

/// A file, or a part of a large one.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Piece {
    path: PathBuf,
    offset: u64,
    pages: usize,
}

impl Files {
    /// No files, for content that needs none.
    pub(super) fn none() -> Self {
        Self::new(List::default())
    }

    /// As found by another process.
    pub(super) fn new(list: List) -> Self {
        let mut end = 0;
        let ends = list.0.iter().map(|piece| {
            end += piece.pages;
            end
        });
        Self {
            starts: std::iter::once(0).chain(ends).collect(),
            list,
            first_equal: Vec::new(),
            open: None,
        }
    }

    /// Finds files of at least `least` pages, up to `most`, and tells which of their pages are equal.
    pub(super) fn find(least: usize, most: usize) -> Result<Self, Failure> {
        let (mut list, mut pages) = (List::default(), 0);
        for path in vmm_dedup_payload::real_files() {
            let Ok(bytes) = std::fs::metadata(&path).map(|m| m.len()) else {
                continue;
            };
            if File::open(&path).is_err() {
                continue;
            }
            let end = usize::try_from(bytes).unwrap_or(0).div_ceil(PAGE_SIZE);
            for start in (0..end).step_by(READ_AHEAD) {
                let piece = Piece {
                    path: path.clone(),
                    offset: (start * PAGE_SIZE) as u64,
                    pages: READ_AHEAD.min(end - start),
                };
                pages += piece.pages;
                list.0.push(piece);
            }
            if pages >= most {
                break;
            }
        }
        if pages < least {
            return Err(Failure::new(format!(
                "{} MiB of shared libraries and locales found under /usr/lib, {} needed: choose a smaller --mib",
                pages >> 8,
                least >> 8
            )));
        }
        let mut files = Self::new(list);
        files.compare()?;
        Ok(files)
    }

    fn compare(&mut self) -> Result<(), Failure> {
        let mut first: HashMap<u64, usize> = HashMap::new();
        for page in 0..self.starts.last().copied().unwrap_or(0) {
            let mut hasher = DefaultHasher::new();
            self.read(page)?.hash(&mut hasher);
            self.first_equal
                .push(*first.entry(hasher.finish()).or_insert(page));
        }
        Ok(())
    }

    /// Files of so many pages, all of them different, that cannot be read.
    #[cfg(test)]
    pub(super) fn of_lengths(lengths: &[usize]) -> Self {
        let piece = |pages: &usize| Piece {
            path: PathBuf::new(),
            offset: 0,
            pages: *pages,
        };
        Self::new(List(lengths.iter().map(piece).collect()))
    }

    /// Which files these are.
    pub(super) fn list(&self) -> &List {
        &self.list
    }

    /// The file that is the `n`th to be read: after the last comes the first.
    pub(super) fn number(&self, n: usize) -> usize {
        n % self.list.0.len().max(1)
    }

    /// Pages of the `n`th file to be read.
    pub(super) fn pages(&self, n: usize) -> Range<usize> {
        let at = self.number(n);
        self.starts[at]..self.starts[at + 1]
    }

    /// The first page that holds the same as this one.
    pub(super) fn first_equal(&self, page: usize) -> usize {
        self.first_equal.get(page).copied().unwrap_or(page)
    }

    /// What a page holds.
    pub(super) fn read(&mut self, page: usize) -> Result<PageWords, Failure> {
        let at = self.starts.partition_point(|start| *start <= page) - 1;
        let piece = &self.list.0[at];
        let failed = |e: io::Error| unreadable(&piece.path, &e);
        if self.open.as_ref().is_none_or(|(open, _)| *open != at) {
            self.open = Some((at, File::open(&piece.path).map_err(failed)?));
        }
        let offset = piece.offset + ((page - self.starts[at]) * PAGE_SIZE) as u64;
        let mut bytes = [0; PAGE_SIZE];
        if let Some((_, file)) = &self.open {
            read_up_to(file, &mut bytes, offset).map_err(failed)?;
        }
        let word = |n: usize| std::array::from_fn(|byte| bytes[n * 8 + byte]);
        Ok(std::array::from_fn::<u64, PAGE_WORDS, _>(|n| {
            u64::from_ne_bytes(word(n))
        }))
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("cannot read {}: {error}", path.display()))
}

/// Reads a page; what is beyond the end of the file stays zero.
fn read_up_to(file: &File, page: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < page.len() {
        match file.read_at(&mut page[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_protocol::key::bytes_of;

    #[test]
    fn pages_hold_what_is_in_the_files_and_the_same_after_the_way_to_another_process() {
        let mut files = Files::find(256, 1024).unwrap();
        let mut copy = Files::new(files.list().clone());
        let last = files.pages(0).len() - 1;
        let piece = files.list.0[0].clone();
        let bytes = std::fs::read(&piece.path).unwrap();
        let start = last * PAGE_SIZE;
        let end = bytes.len().min(start + PAGE_SIZE);
        let page = files.read(last).unwrap();
        assert_eq!(bytes_of(&page)[..end - start], bytes[start..end]);
        assert!(bytes_of(&page)[end - start..].iter().all(|byte| *byte == 0));
        assert_eq!(copy.read(last).unwrap(), page);
        let first = files.first_equal(300);
        assert!(first <= 300 && files.read(first).unwrap() == files.read(300).unwrap());
    }

    #[test]
    fn after_the_last_file_comes_the_first() {
        let files = Files::of_lengths(&[3, 5]);
        assert_eq!([0, 1, 2, 3].map(|n| files.pages(n)), [0..3, 3..8, 0..3, 3..8]);
    }

    #[test]
    fn too_few_files_are_refused_with_what_would_help() {
        let error = Files::find(1 << 40, 1).unwrap_err().to_string();
        assert!(error.contains("--mib"), "{error}");
    }
}
