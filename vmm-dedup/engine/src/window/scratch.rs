//! Where small pages are while they are away.

use crate::error::Error;
use crate::sys::late_log;
use crate::sys::page_size::{CHUNK_PAGES, HUGE_SIZE, PAGE_SIZE, bytes};
use crate::sys::uffd::{Mode, Uffd};
use crate::sys::vma::Anonymous;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Most pages in one window.
pub(crate) const MAX_WINDOW: usize = CHUNK_PAGES;
/// Windows go one behind the other, and what they leave is freed for many at once.
const PAGES: usize = 2 * MAX_WINDOW;

/// Scratch memory for windows of small pages, one after the other.
#[derive(Debug)]
pub(crate) struct Scratch {
    uffd: Arc<Uffd>,
    area: Anonymous,
    /// Pages of it in use, from the first on.
    used: usize,
}

impl Scratch {
    pub(crate) fn new(uffd: Arc<Uffd>) -> Result<Self, Error> {
        Ok(Self {
            area: new_area(&uffd).map_err(Error::Scratch)?,
            uffd,
            used: 0,
        })
    }

    /// Address of an empty place for so many pages, at most [`MAX_WINDOW`].
    pub(crate) fn place(&mut self, pages: usize) -> usize {
        assert!(pages <= MAX_WINDOW);
        if self.used + pages > PAGES {
            self.free();
        }
        let place = self.area.base() + bytes(self.used);
        self.used += pages;
        place
    }

    /// Frees what windows left: the pages that were merged. What is taken next must find its place empty.
    pub(crate) fn free(&mut self) {
        while let Err(error) = self.area.discard(0, bytes(self.used)) {
            late_log::note(
                "freeing merged pages",
                &error,
                "it was tried again until it worked",
            );
            if let Ok(fresh) = new_area(&self.uffd) {
                self.area = fresh;
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.used = 0;
        make_tables(&self.uffd, &self.area);
    }
}

/// Allocates the page tables of scratch memory, so that taking pages needs no memory: a window would be open for as long as the
/// kernel looks for some. Kernels may free the table of memory that was freed (Linux 6.14, CONFIG_PT_RECLAIM). Where it fails
/// it is left to the window.
fn make_tables(uffd: &Uffd, area: &Anonymous) {
    let end = area.base() + bytes(area.pages());
    let mut at = area.base();
    while at < end {
        let made = match uffd.zero_page(at, PAGE_SIZE) {
            // The last one could not be discarded.
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Err(error),
            _ => area.discard(at - area.base(), PAGE_SIZE),
        };
        if let Err(error) = made {
            late_log::note(
                "allocating page tables of scratch memory",
                &error,
                "windows allocate them; they may take longer",
            );
        }
        at = (at / HUGE_SIZE + 1) * HUGE_SIZE;
    }
}

fn new_area(uffd: &Uffd) -> io::Result<Anonymous> {
    let area = Anonymous::new(PAGES)?;
    area.hide();
    // UFFDIO_MOVE wants its destination registered and to have been anonymous memory in use: one page is enough.
    area.populate_part(0, PAGE_SIZE)?;
    area.discard(0, PAGE_SIZE)?;
    uffd.register(area.base(), bytes(PAGES), Mode::Missing)?;
    make_tables(uffd, &area);
    Ok(area)
}
