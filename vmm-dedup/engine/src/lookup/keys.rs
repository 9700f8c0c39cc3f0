//! Reading the key lines of guest pages.

use crate::account::Account;
use crate::lookup::request::Keyed;
use crate::memory::layout::{Memory, Page};
use crate::sys::guest;
use crate::sys::page_size::PAGE_SIZE;
use vmm_dedup_protocol::key::{Key, PAGE_WORDS, Salt};

/// Pages whose key lines are fetched ahead.
pub(crate) const PREFETCH: usize = 8;

/// Reads keys of one guest's memory.
pub(crate) struct KeyReader<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) salt: Salt,
    pub(crate) account: &'a mut Account,
}

impl KeyReader<'_> {
    /// Reads the key lines of pages.
    pub(crate) fn read_all(&mut self, pages: &[Page]) -> Keyed {
        let mut keyed = Keyed::default();
        for (at, page) in pages.iter().enumerate() {
            if let Some(ahead) = pages.get(at + PREFETCH) {
                guest::prefetch_key_lines(self.memory.address(*ahead));
            }
            match self.read(*page) {
                (_, true) => keyed.zeros.push(*page),
                (key, false) => keyed.keys.push((*page, key)),
            }
        }
        keyed
    }

    /// Reads a page's key: `(key, whether all of the page is zero)`.
    pub(crate) fn read(&mut self, page: Page) -> (Key, bool) {
        let (key, zero) = self.read_key(page);
        (key, zero && self.is_zero(page))
    }

    /// Reads a page's key: `(key, whether what was read for it is zero)`.
    #[allow(unsafe_code)] // reads guest memory
    pub(crate) fn read_key(&mut self, page: Page) -> (Key, bool) {
        // SAFETY: guest memory stays mapped while the service runs.
        let lines = unsafe { guest::key_lines(self.memory.address(page)) };
        let stats = &mut self.account.stats;
        stats.pages_keyed_total += 1;
        stats.bytes_read.key += 256;
        let zero = lines.iter().fold(0, |all, w| all | w) == 0;
        (Key::of_lines(&lines, self.salt), zero)
    }

    #[allow(unsafe_code)] // reads guest memory
    fn is_zero(&mut self, page: Page) -> bool {
        let mut words = [0; PAGE_WORDS];
        // SAFETY: as above.
        unsafe { guest::copy_page(self.memory.address(page), &mut words) };
        self.account.stats.bytes_read.key += PAGE_SIZE as u64;
        words.iter().fold(0, |all, w| all | w) == 0
    }
}
