//! Memory of this process under a dedup service, standing for a guest's.
#![allow(unsafe_code)] // raw pages, since they come and go under the service

use std::path::Path;
use vmm_dedup::{Config, DedupService, Engines, HostRange};
use vmm_dedup_protocol::PAGE_SIZE;

/// Anonymous pages, kept for the process's life, so that a service can never outlive them.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    base: usize,
    count: usize,
}

impl Pages {
    /// Maps `count` small pages.
    ///
    /// # Panics
    /// If there is no memory.
    #[must_use]
    pub fn map(count: usize) -> Self {
        Self::map_with(count, libc::MADV_NOHUGEPAGE)
    }

    /// Maps `count` pages, huge where the kernel can.
    ///
    /// # Panics
    /// If there is no memory.
    #[must_use]
    pub fn map_huge(count: usize) -> Self {
        Self::map_with(count, libc::MADV_HUGEPAGE)
    }

    fn map_with(count: usize, advice: i32) -> Self {
        const HUGE: usize = 2 << 20;
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping, which is never unmapped.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), count * PAGE_SIZE + HUGE, prot, flags, -1, 0) };
        assert_ne!(raw, libc::MAP_FAILED, "no memory");
        let pages = Self {
            base: (raw as usize).next_multiple_of(HUGE),
            count,
        };
        pages.advise(advice);
        pages
    }

    /// Gives the memory back: one empty mapping is left. No service may work on it.
    ///
    /// # Panics
    /// If the kernel does not let us.
    pub fn renew(&self) {
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
        );
        // SAFETY: our own mapping, which no reference points into.
        let raw = unsafe { libc::mmap(self.base as *mut _, self.count * PAGE_SIZE, prot, flags, -1, 0) };
        assert_ne!(raw, libc::MAP_FAILED, "no memory");
    }

    /// Asks for huge pages again, in memory that is new.
    pub fn advise_huge(&self) {
        self.advise(libc::MADV_HUGEPAGE);
    }

    /// Advises the kernel for all pages, in a way that leaves their content.
    pub fn advise(&self, advice: i32) {
        // SAFETY: our own mapping. Where there are no huge pages this fails, and tests look at what they got.
        unsafe { libc::madvise(self.base as *mut _, self.count * PAGE_SIZE, advice) };
    }

    /// Number of pages.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Address of a page.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn address(&self, page: usize) -> usize {
        assert!(page < self.count);
        self.base + page * PAGE_SIZE
    }

    /// The word that [`Self::fill`] with `id` writes.
    #[must_use]
    pub fn expected(&self, id: u64, word: usize) -> u64 {
        id.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_mul(word as u64 * 2 + 1)
    }

    /// Fills a page with words that depend on `id` and their place; 0 makes a zero page.
    pub fn fill(&self, page: usize, id: u64) {
        for word in 0..PAGE_SIZE / 8 {
            let value = self.expected(id, word);
            // SAFETY: inside the mapping.
            unsafe { self.word(page, word).write_volatile(value) };
        }
    }

    /// Whether a page holds what [`Self::fill`] with `id` wrote.
    #[must_use]
    pub fn holds(&self, page: usize, id: u64) -> bool {
        (0..PAGE_SIZE / 8).all(|word| self.load(page, word) == self.expected(id, word))
    }

    /// Reads a word.
    #[must_use]
    pub fn load(&self, page: usize, word: usize) -> u64 {
        // SAFETY: inside the mapping.
        unsafe { self.word(page, word).read_volatile() }
    }

    /// Writes a word.
    pub fn store(&self, page: usize, word: usize, value: u64) {
        // SAFETY: inside the mapping.
        unsafe { self.word(page, word).write_volatile(value) };
    }

    fn word(&self, page: usize, word: usize) -> *mut u64 {
        assert!(word < PAGE_SIZE / 8);
        (self.address(page) + word * 8) as *mut u64
    }

    /// Starts a service on these pages.
    ///
    /// # Errors
    /// Those of [`DedupService::start`].
    pub fn serve(&self, store: &Path, config: Config) -> Result<DedupService, vmm_dedup::Error> {
        self.serve_at(store, config, 0)
    }

    /// The same, with the guest physical address that the pages stand for.
    ///
    /// # Errors
    /// Those of [`DedupService::start`].
    pub fn serve_at(
        &self,
        store: &Path,
        config: Config,
        guest: u64,
    ) -> Result<DedupService, vmm_dedup::Error> {
        self.serve_with(store, config, guest, vmm_dedup_engines::engines())
    }

    /// The same, with engines by another hand.
    ///
    /// # Errors
    /// Those of [`DedupService::start`].
    pub fn serve_with(
        &self,
        store: &Path,
        config: Config,
        guest: u64,
        engines: Engines,
    ) -> Result<DedupService, vmm_dedup::Error> {
        let range = HostRange::try_new(self.base, self.count * PAGE_SIZE)?.at_guest_address(guest);
        // SAFETY: the pages are never unmapped and only accessed through raw pointers.
        unsafe { DedupService::start_on_ranges_with(&[range], store, config, engines) }
    }
}

/// The kernel's flags (VmFlags in smaps) of the mappings that pages lie in.
///
/// # Panics
/// If /proc is not there.
#[must_use]
pub fn flags_of(pages: &Pages) -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/smaps").expect("/proc is there");
    let range = pages.address(0)..pages.address(pages.count() - 1) + PAGE_SIZE;
    let address = |hex: &str| usize::from_str_radix(hex, 16).ok();
    let mut found = Vec::new();
    let mut within = false;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            found.extend(within.then(|| flags.to_owned()));
        } else if let Some((start, rest)) = line.split_once('-')
            && let (Some(start), Some(end)) = (address(start), rest.split(' ').next().and_then(address))
        {
            within = start < range.end && range.start < end;
        }
    }
    found
}
