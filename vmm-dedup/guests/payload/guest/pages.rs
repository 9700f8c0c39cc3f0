//! The data pages: where each one lies, what it held at first, how often it was written, and therefore what it
//! must hold now. The book is in memory of its own; the words on the pages are never taken on trust.

use crate::content::{self, Page};
use crate::machine::cycles;
use crate::memory::{Extent, Memory, OutOfMemory, PAGE};
use crate::params::{Params, WorkingSet};
use crate::say;

const MAX_EXTENTS: usize = 32;
const AREAS: usize = 4;
/// Wrong words that are reported one by one; the rest is only counted.
const REPORTED: u64 = 16;
/// In a book entry: the page differs from its original. The other bits count the writes.
const DIRTY: u64 = 1 << 63;
const PAGES_PER_MIB: u64 = 256;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Area {
    Files,
    Private,
    Zero,
    Common,
}

impl Area {
    const ALL: [Area; AREAS] = [Area::Files, Area::Private, Area::Zero, Area::Common];
}

/// Access times, in cycles.
#[derive(Clone, Copy)]
pub struct Latency {
    /// The longest ever.
    pub max: u64,
    /// The longest since the last report.
    pub recent: u64,
    /// Accesses by the position of the highest bit of their time.
    pub histogram: [u64; 48],
}

impl Latency {
    const NEW: Latency = Latency {
        max: 0,
        recent: 0,
        histogram: [0; 48],
    };

    fn add(&mut self, time: u64) {
        self.max = self.max.max(time);
        self.recent = self.recent.max(time);
        let bucket = (time | 1).ilog2() as usize;
        self.histogram[bucket.min(47)] += 1;
    }
}

/// All data pages.
pub struct Pages {
    seed: u64,
    common_seed: u64,
    own_every: u64,
    initrd: &'static [u8],
    extents: [(u64, Extent); MAX_EXTENTS],
    extent_count: usize,
    /// The first page number of each area, and the end.
    firsts: [u64; AREAS + 1],
    working: (u64, u64),
    working_pages: u64,
    book: &'static mut [u64],
    /// Checksums of the initrd's pages, taken before anybody could share them.
    sums: &'static mut [u64],
    expected: Page,
    /// Wrong words seen.
    pub errors: u64,
    /// First reads of pages.
    pub read_latency: Latency,
    /// First writes to pages.
    pub write_latency: Latency,
}

impl Pages {
    /// Takes the memory and fills it.
    pub fn build(memory: &mut Memory, params: &Params) -> Result<Pages, OutOfMemory> {
        let initrd = memory.initrd();
        let file_pages = (initrd.len() as u64).div_ceil(PAGE);
        let counts = [
            file_pages * params.copies,
            params.private_mib * PAGES_PER_MIB,
            params.zero_mib * PAGES_PER_MIB,
            params.common_mib * PAGES_PER_MIB,
        ];
        let mut firsts = [0; AREAS + 1];
        for (number, count) in counts.into_iter().enumerate() {
            firsts[number + 1] = firsts[number] + count;
        }
        let total = firsts[AREAS];
        let wanted = total * (PAGE + 8) + file_pages * 8;
        if wanted > memory.free_bytes() {
            return Err(OutOfMemory { wanted });
        }
        let area = |number: usize| (firsts[number], firsts[number + 1]);
        let working = match params.ws_area {
            WorkingSet::All => (0, total),
            WorkingSet::Files => area(0),
            WorkingSet::Private => area(1),
            WorkingSet::Zero => area(2),
            WorkingSet::Common => area(3),
        };
        let mut pages = Pages {
            seed: params.seed,
            common_seed: params.common_seed,
            own_every: params.own_every,
            initrd,
            extents: [(0, Extent { start: 0, end: 0 }); MAX_EXTENTS],
            extent_count: 0,
            firsts,
            working,
            working_pages: params.ws_pages.min(working.1 - working.0),
            book: memory.take_words(total)?,
            sums: memory.take_words(file_pages)?,
            expected: [0; content::WORDS],
            errors: 0,
            read_latency: Latency::NEW,
            write_latency: Latency::NEW,
        };
        let mut placed = 0;
        while placed < total {
            let wanted = total - placed;
            let extent = memory.take_pages(wanted).ok_or(OutOfMemory {
                wanted: wanted * PAGE,
            })?;
            if pages.extent_count == MAX_EXTENTS {
                return Err(OutOfMemory {
                    wanted: wanted * PAGE,
                });
            }
            pages.extents[pages.extent_count] = (placed, extent);
            pages.extent_count += 1;
            placed += (extent.end - extent.start) / PAGE;
        }
        pages.fill();
        Ok(pages)
    }

    /// Data pages in all.
    pub fn total(&self) -> u64 {
        self.firsts[AREAS]
    }

    /// Pages of each area: files, private, zero, common.
    pub fn counts(&self) -> [u64; AREAS] {
        core::array::from_fn(|area| self.firsts[area + 1] - self.firsts[area])
    }

    /// Pages in the working set.
    pub fn working_set(&self) -> u64 {
        self.working_pages
    }

    /// The number of page `index` of the working set, which is spread evenly over its areas.
    pub fn working_page(&self, index: u64) -> u64 {
        let (first, end) = self.working;
        first + index * (end - first) / self.working_pages
    }

    fn fill(&mut self) {
        for page in 0..self.sums.len() as u64 {
            self.load_file(page);
            self.sums[page as usize] = content::checksum(&self.expected);
        }
        for page in 0..self.total() {
            self.load_original(page);
            self.store_expected(page);
        }
    }

    fn area(&self, page: u64) -> (Area, u64) {
        let number = (0..AREAS)
            .rev()
            .find(|&area| page >= self.firsts[area])
            .unwrap_or(0);
        (Area::ALL[number], page - self.firsts[number])
    }

    /// Page `page` of the initrd into `expected`; behind its end come zeros.
    fn load_file(&mut self, page: u64) {
        let start = (page * PAGE) as usize;
        let bytes = &self.initrd[start..self.initrd.len().min(start + PAGE as usize)];
        let (words, tail) = bytes.as_chunks::<8>();
        self.expected.fill(0);
        for (to, from) in self.expected.iter_mut().zip(words) {
            *to = u64::from_le_bytes(*from);
        }
        if !tail.is_empty() {
            let mut last = [0; 8];
            last[..tail.len()].copy_from_slice(tail);
            self.expected[words.len()] = u64::from_le_bytes(last);
        }
    }

    /// The original content of `page` into `expected`.
    fn load_original(&mut self, page: u64) {
        let (area, index) = self.area(page);
        match area {
            Area::Files => {
                let file = index % self.sums.len() as u64;
                self.load_file(file);
                if content::checksum(&self.expected) != self.sums[file as usize] {
                    self.errors += 1;
                    if self.errors <= REPORTED {
                        say!(
                            "bad page={page} word=initrd want={:#x} got=0x0",
                            self.sums[file as usize]
                        );
                    }
                }
            }
            Area::Private => content::fill_random(&mut self.expected, self.seed, index),
            Area::Zero => self.expected.fill(0),
            Area::Common => {
                let own = self.own_every > 0 && index % self.own_every == self.own_every - 1;
                let seed = if own { self.seed } else { self.common_seed };
                content::fill_random(&mut self.expected, !seed, index);
            }
        }
    }

    /// What `page` must hold now into `expected`.
    fn load_expected(&mut self, page: u64) {
        self.load_original(page);
        let entry = self.book[page as usize];
        if entry & DIRTY != 0 {
            content::apply_writes(&mut self.expected, self.seed, page, entry & !DIRTY);
        }
    }

    fn address(&self, page: u64) -> *mut u64 {
        let extents = &self.extents[..self.extent_count];
        let (first, extent) = extents
            .iter()
            .rev()
            .find(|(first, _)| page >= *first)
            .unwrap_or(&extents[0]);
        (extent.start + (page - first) * PAGE) as *mut u64
    }

    fn store_expected(&mut self, page: u64) {
        let address = self.address(page);
        // SAFETY: `address` is that of a page taken from Memory, used by nobody else and never as a reference.
        unsafe { address.copy_from_nonoverlapping(self.expected.as_ptr(), content::WORDS) }
    }

    /// Compares `page` with what it must hold, word by word.
    pub fn verify(&mut self, page: u64) {
        self.load_expected(page);
        let address = self.address(page);
        let start = cycles();
        // SAFETY: as in `store_expected`.
        unsafe { address.read_volatile() };
        self.read_latency.add(cycles().saturating_sub(start));
        for word in 0..content::WORDS {
            // SAFETY: as in `store_expected`, and `word` is within the page.
            let got = unsafe { address.add(word).read_volatile() };
            let want = self.expected[word];
            if got != want {
                self.errors += 1;
                if self.errors <= REPORTED {
                    say!("bad page={page} word={word} want={want:#x} got={got:#x}");
                }
            }
        }
    }

    /// Verifies `page`, then increments its counter, leaves new marks, and enters it in the book.
    pub fn write(&mut self, page: u64) {
        self.verify(page);
        let entry = self.book[page as usize];
        let writes = (entry & !DIRTY) + 1;
        // A clean page's counter word is the original, whatever number of writes was restored away.
        let step = if entry & DIRTY != 0 { 1 } else { writes };
        let (counter, marks) = content::places(page);
        let address = self.address(page);
        // SAFETY: as in `store_expected`; the places are within the page.
        unsafe {
            let value = address.add(counter).read_volatile().wrapping_add(step);
            let start = cycles();
            address.add(counter).write_volatile(value);
            self.write_latency.add(cycles().saturating_sub(start));
            for (number, place) in marks.into_iter().enumerate() {
                address
                    .add(place)
                    .write_volatile(content::mark(self.seed, page, writes, number));
            }
        }
        self.book[page as usize] = DIRTY | writes;
    }

    /// Verifies `page` and gives it back its original content, if it was written.
    pub fn restore(&mut self, page: u64) -> bool {
        let entry = self.book[page as usize];
        if entry & DIRTY == 0 {
            return false;
        }
        self.verify(page);
        self.load_original(page);
        self.store_expected(page);
        self.book[page as usize] = entry & !DIRTY;
        true
    }

    /// The pages of the common area.
    pub fn common(&self) -> core::ops::Range<u64> {
        self.firsts[AREAS - 1]..self.firsts[AREAS]
    }

    /// Words of pages that are not zero, as all are of pages that the host has taken.
    pub fn stale_words(&self, pages: core::ops::Range<u64>) -> u64 {
        let words = pages.flat_map(|page| (0..content::WORDS).map(move |word| (page, word)));
        // SAFETY: as in `store_expected`, and `word` is within the page.
        let stale = |(page, word)| unsafe { self.address(page).add(word).read_volatile() } != 0;
        words.filter(|at| stale(*at)).count() as u64
    }

    /// Gives pages the content that they must hold, whatever they hold now.
    pub fn refill(&mut self, pages: core::ops::Range<u64>) {
        for page in pages {
            self.load_expected(page);
            self.store_expected(page);
        }
    }

    /// The address of a page, as the host knows it.
    pub fn physical(&self, page: u64) -> u64 {
        self.address(page) as u64
    }

    /// Writes that the book knows of.
    pub fn writes(&self) -> u64 {
        self.book.iter().map(|entry| entry & !DIRTY).sum()
    }
}
