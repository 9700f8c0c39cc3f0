//! How many pages of the host are pinned, by the kernel's own account.
//!
//! The kernel counts every page that it pins for somebody (FOLL_PIN: process_vm_writev, direct I/O, buffers registered with
//! io_uring, VFIO), and every one that it lets go: `nr_foll_pin_acquired` and `nr_foll_pin_released` of /proc/vmstat (Linux 5.7,
//! mm/gup.c; Documentation/core-api/pin_user_pages.rst).
//!
//! # What two readings tell
//!
//! It is read once before pages are frozen, and once after. If both readings are the same, and as many were let go as were pinned,
//! no page of the host was pinned from the first reading until after the freezing.
//!
//! - Each CPU collects what it counts, and adds it to the sum later. A reading has all of them do so first (/proc/sys/vm/
//!   stat_refresh), one after the other. Both counts only grow. So what a CPU had counted before the first reading and was not
//!   yet in it, or has counted since, until it is asked the second time, makes the second reading another one.
//! - A pin of one of the pages that is under way while they are frozen holds the lock of the page table, or has interrupts off and
//!   looks at the page table again. So it is counted before the freezing is done, or is given up.
//! - A page is counted as released after whoever pinned it is done with it.
//!
//! The first reading may be any earlier one that said so: the counts only grow.
//!
//! What remains: a pin whose counting is under way on another CPU at that moment. Where a CPU's counter runs over, it is emptied
//! first and added to the sum afterwards; who pins a huge page that is mapped as one counts all of it at once, which does that
//! most easily. And a node of memory that goes offline takes its counts along. Then the older way of direct I/O (FAT, NTFS, UDF, OCFS2: fs/direct-io.c) counts releases of pins that it did not count.
//! So the counts of a host where somebody has done that are equal while exactly so many pages are pinned as were counted too
//! much. And it is only asked about other processes that write this one's memory: what this process can have pinned, its open files
//! tell ([`pinners`](mod@crate::sys::pinners)).
//!
//! # More releases than pins
//!
//! One reading may have more releases than pins although the account is right: who pins a page on a CPU that was asked just before,
//! moves to another, and lets the page go there before that one is asked, is in it with the release alone. So such a reading tells
//! nothing, and it is read again at once. Two readings that are the same are exact, since nothing was counted between them. If these have
//! more releases than pins the account is wrong, and is not believed again.
//!
//! # Asking takes time
//!
//! A CPU that is busy with a real-time thread may not answer for long, and a thread that waits for it cannot be interrupted. So a
//! thread of its own asks ([`Asker`]), and nobody waits for it longer than he wants to. Each question has work done on every CPU. So it is not
//! asked again for [`PAUSE`] after it did not say that nothing is pinned.
//!
//! The kernel checks at each reading whether the reader is root. A VMM that gives that up (QEMU, started by libvirt) is never told.

use crate::sys::asker::{Asker, NoAnswer};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const REFRESH: &str = "/proc/sys/vm/stat_refresh";
/// How long an answer holds that something is pinned.
const PAUSE: Duration = Duration::from_millis(2);
const COUNTS: &str = "/proc/vmstat";
/// Readings at once, at most, to find two that are the same, while there are more releases than pins.
const SETTLING: usize = 4;
/// Longest text of the counts that is read.
const LONGEST: usize = 64 << 10;
/// So much of it is read first: the two counts come early, and the kernel writes no more than it is asked for.
const EARLY: usize = 2 << 10;

/// Pages that were ever pinned, and let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    acquired: u64,
    released: u64,
}

/// Reads the account.
#[derive(Debug)]
pub(crate) struct PinCount {
    /// Opened before anything restricts that.
    files: Option<Files>,
    asker: Option<Asker<(), Result<Counts, String>>>,
    /// What was read last.
    last: Option<Counts>,
    /// Why the account tells nothing.
    useless: Option<String>,
    /// What was said when it was asked before pages were frozen, if something was pinned.
    refused: Option<(Instant, String)>,
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
        let useless = files.as_ref().err().cloned();
        Self {
            files: files.ok(),
            asker: None,
            last: None,
            useless,
            refused: None,
        }
    }

    /// Starts the thread that asks. To be called once, where the service's threads start: a thread that starts when the process has
    /// no mapping left ends the process.
    pub(crate) fn start(&mut self) {
        let Some(files) = self.files.take() else { return };
        let mut buffer = vec![0; LONGEST];
        match Asker::start(move |()| files.read(&mut buffer)) {
            Ok(asker) => self.asker = Some(asker),
            Err(e) => self.useless = Some(format!("no thread to ask for the kernel's count: {e}")),
        }
    }

    /// As [`Self::nothing_pinned`], but what was refused less than [`PAUSE`] ago is refused again.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn nothing_pinned_lately(&mut self, within: Duration) -> Result<Counts, String> {
        let lately = |(asked, _): &&(Instant, String)| asked.elapsed() < PAUSE;
        if let Some((_, why)) = self.refused.as_ref().filter(lately) {
            return Err(why.clone());
        }
        let counts = self.nothing_pinned(within);
        self.refused = counts.as_ref().err().map(|why| (Instant::now(), why.clone()));
        counts
    }

    /// The counts, if they say that no page is pinned.
    ///
    /// # Errors
    /// Why not, or why they cannot be told within so much time.
    pub(crate) fn nothing_pinned(&mut self, within: Duration) -> Result<Counts, String> {
        if let Some(why) = &self.useless {
            return Err(why.clone());
        }
        let (start, mut left) = (Instant::now(), within);
        for _ in 0..SETTLING {
            let counts = self.read(left)?;
            left = within.saturating_sub(start.elapsed());
            let last = self.last.replace(counts);
            match counts.acquired.checked_sub(counts.released) {
                Some(0) => return Ok(counts),
                Some(pinned) => return Err(format!("{pinned} pages of the host are pinned")),
                None if last == Some(counts) => {
                    let why = "the kernel's count of pinned pages is wrong: more were let go than pinned";
                    self.useless = Some(why.to_owned());
                    return Err(why.to_owned());
                }
                None => {}
            }
        }
        Err("pages of the host are pinned and let go while the kernel counts".to_owned())
    }

    fn read(&mut self, within: Duration) -> Result<Counts, String> {
        let asker = self.asker.as_mut().ok_or("nobody asks for the kernel's count")?;
        asker.ask((), within).unwrap_or_else(|none| {
            Err(match none {
                NoAnswer::Late => format!(
                    "the kernel's count of pinned pages takes more than {} us",
                    within.as_micros()
                ),
                NoAnswer::Ended => "the thread that asks for the kernel's count has ended".to_owned(),
            })
        })
    }
}

impl Files {
    fn read(&self, buffer: &mut [u8]) -> Result<Counts, String> {
        let mut read = || -> io::Result<Option<Counts>> {
            self.refresh.read_at(&mut buffer[..1], 0)?;
            for most in [EARLY, LONGEST] {
                let len = self.counts.read_at(&mut buffer[..most], 0)?;
                let counts = std::str::from_utf8(&buffer[..len]).ok().and_then(parse);
                if counts.is_some() {
                    return Ok(counts);
                }
            }
            Ok(None)
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

/// The counts, if both are in the text to the end of their lines.
fn parse(text: &str) -> Option<Counts> {
    let number = |name: &str| {
        let mut lines = text.split_inclusive('\n');
        let line = lines.find_map(|line| line.strip_prefix(name))?;
        line.strip_suffix('\n')?.trim().parse().ok()
    };
    Some(Counts {
        acquired: number("nr_foll_pin_acquired ")?,
        released: number("nr_foll_pin_released ")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender};

    #[test]
    fn counts_are_found_among_others() {
        let text =
            "nr_free_pages 5\nnr_foll_pin_acquired 138185254\nnr_foll_pin_released 138185250\nnr_x 1\n";
        let counts = parse(text).unwrap();
        assert_eq!((counts.acquired, counts.released), (138_185_254, 138_185_250));
        assert_eq!(parse("nr_foll_pin_acquired 1\n"), None);
        let cut = text.find("250\n").unwrap();
        assert_eq!(parse(&text[..cut + 2]), None, "the rest of a number is missing");
        assert_eq!(parse(&text[..cut + 3]), None);
        assert!(parse(&text[..cut + 4]).is_some());
    }

    /// One that is answered what `counts` says.
    fn answered(
        counts: impl IntoIterator<Item = (u64, u64)>,
    ) -> (PinCount, Receiver<()>, Sender<Result<Counts, String>>) {
        let (asker, asked, tell) = Asker::unanswered();
        for (acquired, released) in counts {
            tell.send(Ok(Counts { acquired, released })).unwrap();
        }
        let count = PinCount {
            files: None,
            asker: Some(asker),
            last: None,
            useless: None,
            refused: None,
        };
        (count, asked, tell)
    }

    #[test]
    fn an_account_that_cannot_be_right_is_not_believed_again() {
        let within = Duration::from_secs(60);
        let (mut count, asked, _tell) = answered([(7, 7), (9, 7), (7, 9), (7, 9), (9, 9)]);
        assert!(count.nothing_pinned(within).is_ok());
        assert!(count.nothing_pinned(within).unwrap_err().starts_with("2 pages"));
        assert!(count.nothing_pinned(within).unwrap_err().contains("is wrong"));
        assert!(count.nothing_pinned(within).unwrap_err().contains("is wrong"));
        assert_eq!(asked.try_iter().count(), 4);
    }

    #[test]
    fn who_lets_pages_go_on_another_cpu_while_the_kernel_counts_does_not_make_the_account_wrong() {
        let within = Duration::from_secs(60);
        let (mut count, asked, _tell) = answered([(7, 8), (8, 8)]);
        assert!(count.nothing_pinned(within).is_ok());
        assert_eq!(asked.try_iter().count(), 2);
        let busy = (0..SETTLING as u64).map(|n| (10 + n, 11 + n));
        let (mut count, _asked, _tell) = answered(busy.chain([(20, 20)]));
        assert!(
            count
                .nothing_pinned(within)
                .unwrap_err()
                .contains("while the kernel counts")
        );
        assert!(count.nothing_pinned(within).is_ok());
    }

    #[test]
    fn who_was_refused_is_refused_for_a_moment_without_a_question() {
        let within = Duration::from_secs(1);
        let (mut count, asked, _tell) = answered([(9, 7), (9, 9)]);
        assert!(count.nothing_pinned_lately(within).is_err() && count.nothing_pinned_lately(within).is_err());
        assert_eq!(asked.try_iter().count(), 1);
        std::thread::sleep(PAUSE);
        assert!(count.nothing_pinned_lately(within).is_ok());
    }

    #[test]
    fn a_kernel_that_is_slow_tells_nothing() {
        let (mut count, _asked, _tell) = answered([]);
        let within = Duration::from_millis(1);
        assert!(count.nothing_pinned(within).unwrap_err().contains("1000 us"));
    }

    #[test]
    fn the_kernel_answers() {
        let mut count = PinCount::open();
        count.start();
        if let Some(why) = &count.useless {
            return eprintln!("SKIPPED: {why}");
        }
        let counts = count.read(Duration::from_secs(60)).unwrap();
        assert!(counts.acquired >= counts.released);
    }
}
