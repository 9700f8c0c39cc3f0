//! Whether any page of the host is pinned, by the kernel's own account.
//!
//! The kernel counts every page that it pins for somebody (FOLL_PIN: direct I/O of block devices and of the file systems that
//! we let pass, buffers registered with io_uring, process_vm_writev, VFIO), and every one that it lets go:
//! `nr_foll_pin_acquired` and `nr_foll_pin_released` of /proc/vmstat (Linux 5.7, mm/gup.c; Documentation/core-api/
//! pin_user_pages.rst). Where both are equal no page is pinned, neither by this process nor by another one that writes its
//! memory.
//!
//! # Why equal counts are exact
//!
//! - Each CPU collects what it counts, and adds it to the sum later. Reading /proc/sys/vm/stat_refresh has all of them do so.
//!   A CPU cannot be asked between taking a page's reference and counting it: interrupts or preemption are off there. A pin of a
//!   page that somebody froze meanwhile is counted before the page table is looked at again and the pin given up.
//! - While the CPUs are asked one after the other, a pin may be counted as released and not as acquired. So it is read
//!   twice. Both only grow; if neither has grown, nothing was counted between the first reading and the second question, and
//!   what was read first is how it was then.
//! - A page is counted as released after whoever pinned it is done with it.
//!
//! One thing breaks the account: the older way of direct I/O (FAT, NTFS, UDF, OCFS2: fs/direct-io.c) pins a page again without
//! counting that, but counts the release. So more is released than acquired, for good. Where that was seen once the account is
//! not believed again. It is asked before pages are frozen, and again after.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const REFRESH: &str = "/proc/sys/vm/stat_refresh";
const COUNTS: &str = "/proc/vmstat";
/// Longest text of the counts that is read.
const LONGEST: usize = 64 << 10;
/// Tries, while pages are pinned and let go all the time.
const TRIES: usize = 4;

/// Pages that were ever pinned, and let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    acquired: u64,
    released: u64,
}

/// Reads the account. Opened before system calls are restricted.
#[derive(Debug)]
pub(crate) struct PinCount {
    files: Result<Files, String>,
    buffer: Vec<u8>,
}

#[derive(Debug)]
struct Files {
    refresh: File,
    counts: File,
}

impl PinCount {
    pub(crate) fn open() -> Self {
        let open = |path: &str| {
            File::open(path).map_err(|e| format!("the kernel's count of pinned pages: {path}: {e}"))
        };
        let files = open(REFRESH).and_then(|refresh| {
            let counts = open(COUNTS)?;
            Ok(Files { refresh, counts })
        });
        Self {
            files,
            buffer: Vec::new(),
        }
    }

    /// Whether at some moment since the call began no page of the host was pinned.
    ///
    /// # Errors
    /// Why not, or why nobody can tell.
    pub(crate) fn none(&mut self) -> Result<(), String> {
        let mut before = self.read()?;
        for _ in 0..TRIES {
            let after = self.read()?;
            if before == after {
                return self.judge(after);
            }
            before = after;
        }
        Err("pages of the host are pinned all the time".to_owned())
    }

    fn judge(&mut self, counts: Counts) -> Result<(), String> {
        match counts.acquired.checked_sub(counts.released) {
            Some(0) => Ok(()),
            Some(pinned) => Err(format!("{pinned} pages of the host are pinned")),
            None => {
                let why =
                    "the kernel's count of pinned pages is wrong: more were let go than pinned".to_owned();
                self.files = Err(why.clone());
                Err(why)
            }
        }
    }

    fn read(&mut self) -> Result<Counts, String> {
        let Self { files, buffer } = self;
        let Files { refresh, counts } = files.as_ref().map_err(Clone::clone)?;
        buffer.resize(LONGEST, 0);
        let mut read = || -> io::Result<Option<Counts>> {
            refresh.read_at(&mut buffer[..1], 0)?;
            let len = counts.read_at(buffer, 0)?;
            Ok(std::str::from_utf8(&buffer[..len]).ok().and_then(parse))
        };
        match read() {
            Ok(Some(counts)) => Ok(counts),
            Ok(None) => Err("the kernel does not count pinned pages".to_owned()),
            Err(error) => Err(format!(
                "the kernel's count of pinned pages cannot be read: {error}"
            )),
        }
    }
}

fn parse(text: &str) -> Option<Counts> {
    let number = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().parse().ok()
    };
    Some(Counts {
        acquired: number("nr_foll_pin_acquired ")?,
        released: number("nr_foll_pin_released ")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_found_among_others() {
        let text =
            "nr_free_pages 5\nnr_foll_pin_acquired 138185254\nnr_foll_pin_released 138185250\nnr_x 1\n";
        let counts = parse(text).unwrap();
        assert_eq!((counts.acquired, counts.released), (138_185_254, 138_185_250));
        assert_eq!(parse("nr_foll_pin_acquired 1\n"), None);
    }

    #[test]
    fn an_account_that_cannot_be_right_is_not_believed_again() {
        let mut pins = PinCount::open();
        let counts = |acquired, released| Counts { acquired, released };
        if pins.files.is_ok() {
            assert_eq!(pins.judge(counts(7, 7)), Ok(()));
        }
        assert!(pins.judge(counts(9, 7)).unwrap_err().starts_with("2 pages"));
        assert!(pins.judge(counts(7, 9)).is_err());
        assert!(pins.none().is_err());
    }
}
