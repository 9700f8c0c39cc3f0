//! Packing: the scanning thread's part.

use crate::error::Error;
use crate::memory::layout::Page;
use crate::memory::page_map::{NotMerged, PageMap, VMAS_PER_RUN};
use crate::pack::budget::Touches;
use crate::pack::cold::Cold;
use crate::pack::figures::{Packed, WINDOW};
use crate::pack::memory::Buffers;
use crate::pack::packer::Packer;
use crate::pack::table::{MOST_BYTES, OVERLAY_LINES, base_of};
use crate::store::connection::{HeldSlot, Membership, Store};
use crate::sys::cache;
use crate::sys::page_size::{CHUNK_PAGES, PAGE_SIZE, bytes};
use crate::sys::pagemap::{Pagemap, Written};
use crate::sys::sched::Urgent;
use crate::track::access::Probes;
use crate::window::{PageSet, Scratch, Taken, Window};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_dedup_packed::{Codecs, Keeping, Kind, Kinds, Offers, Page as PageBytes, Rule, Weights};
use vmm_dedup_protocol::{Slot, raw};

/// A page that was packed, and is not taken yet.
#[derive(Debug)]
struct Prepared {
    page: Page,
    into: Into,
}

/// What a page was packed to.
#[derive(Debug)]
enum Into {
    Bytes {
        kind: Kind,
        /// The number of the buffer that has its packed bytes, and how many these are.
        buffer: usize,
        length: usize,
    },
    /// A slot of the store.
    Slot(HeldSlot),
}

/// Room in the table for a window's pages. What was not needed of it goes, however the window ends.
struct Room<'a>(&'a Packer);

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.0.lock().table.drop_reserved();
    }
}

/// See the [room's](mod@crate::pack) text.
#[derive(Debug)]
pub(crate) struct Packing {
    packer: Arc<Packer>,
    cold: Cold,
    scratch: Scratch,
    codecs: Codecs,
    rule: Rule,
    offers: Offers,
    /// The copy of the page that is being packed.
    copy: Buffers,
    /// Packed bytes, one page's each.
    buffers: Buffers,
    prepared: Vec<Prepared>,
    early: u64,
    touches: Touches,
    /// All records have followed what a connection had told of by then: how often it had.
    followed: Option<(Membership, u64)>,
}

impl Packing {
    /// `touches_per_second`: of pages in slots, while there are more of which no further pages are to take part.
    pub(crate) fn new(packer: Arc<Packer>, idle: Duration, touches_per_second: u64) -> Result<Self, Error> {
        let no_memory = |error| Error::Scratch(std::io::Error::other(error));
        Ok(Self {
            cold: Cold::new(idle),
            scratch: Scratch::new(packer.uffd.clone())?,
            packer,
            codecs: Codecs::try_new(OVERLAY_LINES).map_err(no_memory)?,
            rule: Rule {
                kinds: Kinds::of(&[Kind::Overlay, Kind::Lz4, Kind::Zstd]),
                weights: Weights::default(),
                keeping: Keeping::Whole,
                most_lines: OVERLAY_LINES,
            },
            offers: Offers::default(),
            copy: Buffers::new(1).map_err(Error::Scratch)?,
            buffers: Buffers::new(WINDOW).map_err(Error::Scratch)?,
            prepared: Vec::with_capacity(WINDOW),
            early: 0,
            touches: Touches::new(touches_per_second),
            followed: None,
        })
    }

    /// Takes note of what came back, and lets its places go home.
    pub(crate) fn take_home(&mut self, map: &mut PageMap) {
        let returned = self.packer.take_returned();
        let touched = returned.iter().filter(|page| page.touched_after.is_some());
        self.touches.note(touched.count());
        for page in &returned {
            if let Some(after) = page.touched_after {
                self.early += u64::from(self.cold.note_touched(page.page, after));
            }
        }
        let pages = returned.into_iter().map(|returned| returned.page);
        self.packer.go_home(map, pages);
    }

    /// Pages that came back early.
    pub(crate) fn early(&self) -> u64 {
        self.early
    }

    pub(crate) fn bytes(&self) -> usize {
        self.cold.bytes()
    }

    /// The next chunk to look at now, if there is one.
    pub(crate) fn next_chunk(&mut self, map: &mut PageMap) -> Option<usize> {
        // From now on there may be holes, of which a child would read zeros.
        map.memory().keep_from_children();
        self.cold.next(map)
    }

    /// Pages of a chunk that are to be packed now: cold, and there.
    ///
    /// # Errors
    /// [`Error::Pagemap`].
    pub(crate) fn look(
        &mut self,
        map: &mut PageMap,
        pagemap: &mut Pagemap,
        probes: Probes,
        at: usize,
    ) -> Result<Vec<Page>, Error> {
        let mut cold = self.cold.look(map, probes, at);
        if cold.is_empty() {
            return Ok(cold);
        }
        let chunk = map.chunk_at(at).addresses();
        let mut written = Vec::new();
        let note = |found: Written| written.push(found.range);
        pagemap.written(chunk.clone(), note).map_err(Error::Pagemap)?;
        let there = pagemap.populated(chunk).map_err(Error::Pagemap)?;
        let within = |ranges: &[Range<usize>], address| ranges.iter().any(|range| range.contains(&address));
        cold.retain(|page| {
            let address = map.memory().address(*page);
            within(&there, address) && !within(&written, address)
        });
        Ok(cold)
    }

    /// Packs copies of some pages of one chunk, at most [`WINDOW`], for [`Self::pack`]. Nothing is held.
    #[allow(unsafe_code)] // reads guest pages
    pub(crate) fn prepare(&mut self, map: &PageMap, pages: &[Page]) {
        self.give_up_prepared();
        self.packer.make_ready();
        for page in pages {
            // SAFETY: a guest page, which is mapped, and a page of ours, to which there are no references now.
            unsafe { raw::copy_page(map.memory().address(*page), self.copy.address(0)) };
            let buffer = self.prepared.len();
            if let Some((kind, length)) = self.pack_copy(buffer) {
                self.prepared.push(Prepared {
                    page: *page,
                    into: Into::Bytes { kind, buffer, length },
                });
            }
        }
    }

    /// As [`Self::prepare`], for pages whose bytes are in slots, with a reference each. Returns slots that cannot be read: there is no
    /// use for their references.
    pub(crate) fn prepare_slots(&mut self, store: &Store, pages: &[(Page, Slot)]) -> Vec<Slot> {
        self.give_up_prepared();
        let mut lost = Vec::new();
        if pages
            .iter()
            .any(|(_, slot)| store.evacuated().contains(&slot.segment()))
        {
            self.followed = None;
        }
        for (page, slot) in pages {
            let Some(held) = store.hold(*slot) else {
                lost.push(*slot);
                continue;
            };
            // Mapped in this process before any page is away.
            cache::touch(held.address());
            let into = Into::Slot(held);
            self.prepared.push(Prepared { page: *page, into });
        }
        lost
    }

    /// Gives up what was prepared and has no room in the table.
    pub(crate) fn give_up_prepared(&mut self) {
        give_up(&self.packer, self.prepared.drain(..));
    }

    /// What was compared is in no cache any more, as what was not.
    fn leave_no_trace(&mut self) {
        for prepared in self.prepared.drain(..) {
            if let Into::Slot(held) = prepared.into {
                cache::flush_page(held.address());
            }
        }
    }

    /// Slots that no record names any more.
    pub(crate) fn take_freed(&mut self) -> Vec<HeldSlot> {
        self.packer.take_freed()
    }

    /// Lets records name the slots that theirs have moved to. Returns those, for each of which there is a reference more.
    pub(crate) fn follow(&mut self, store: &Store) -> Vec<Slot> {
        let told = Some((store.membership(), store.evacuations()));
        if store.evacuated().is_empty() || self.followed == told {
            return Vec::new();
        }
        let (taken, all) = self.packer.follow(store);
        self.followed = told.filter(|_| all);
        taken
    }

    /// Pages in slots of other connections than this one.
    pub(crate) fn pages_of_earlier(&self, now: Membership) -> impl Iterator<Item = Page> {
        self.packer.pages_of_earlier(now)
    }

    /// Whether more pages came back lately than may, so that no others are to take part for now.
    pub(crate) fn is_over_budget(&self) -> bool {
        self.touches.are_too_many()
    }

    fn pack_copy(&mut self, number: usize) -> Option<(Kind, usize)> {
        let copy = self.copy.page(0);
        self.offers.collect(&mut self.codecs, self.rule.kinds, copy, &[]);
        let (offer, _) = self.rule.choose(&self.offers, |_| 0)?;
        let into = &mut self.buffers.page_mut(number)[..MOST_BYTES];
        let packed = self.codecs.of(offer.kind).pack(copy, base_of(offer.kind), into);
        packed.ok().map(|length| (offer.kind, length))
    }

    /// Packs what was prepared and still is a candidate. To be called while the discards' lock is held, and what they noted is
    /// taken note of.
    pub(crate) fn pack(&mut self, map: &mut PageMap, pagemap: &mut Pagemap, pass: u64) -> Packed {
        let packer = self.packer.clone();
        let gone = |prepared: &mut Prepared| map.private_candidate(prepared.page).is_none();
        give_up(&packer, self.prepared.extract_if(.., gone));
        let _room = self.reserve(&packer);
        let Some(first) = self.prepared.first().map(|prepared| prepared.page) else {
            return Packed::default();
        };
        let armed = self.arm(map);
        let urgent = Urgent::begin();
        let (packed, pinned) = self.take_and_compare(map, pagemap, first, armed);
        drop(urgent);
        self.leave_no_trace();
        let left = armed.runs().flatten().filter_map(|offset| page_at(first, offset));
        // Those that were packed stay.
        self.packer.go_home(map, left);
        for offset in pinned.runs().flatten() {
            if let Some(page) = page_at(first, offset) {
                map.not_merged(page, NotMerged::Pinned, pass);
            }
        }
        packed
    }

    /// Makes room for what was prepared, and forgets what there is none for: whoever waits for a page must not wait for memory.
    fn reserve<'a>(&mut self, packer: &'a Packer) -> Room<'a> {
        let (room, since) = (Room(packer), packer.seconds());
        let mut inner = packer.lock();
        self.prepared.retain(|Prepared { page, into }| match into {
            Into::Bytes { kind, buffer, length } => {
                let bytes = &self.buffers.page(*buffer)[..*length];
                inner.table.reserve(*page, bytes, *kind, since)
            }
            Into::Slot(held) => inner.table.reserve_slot(*page, held.clone(), since),
        });
        room
    }

    /// Registers the places of what was prepared; which were. As many runs as there are mappings for.
    fn arm(&self, map: &mut PageMap) -> PageSet {
        let first = self.prepared[0].page;
        let runs = self
            .prepared
            .chunk_by(|a, b| b.page == a.page + 1)
            .map(|run| run[0].page..run[run.len() - 1].page + 1);
        let mut armed = PageSet::default();
        for run in runs.collect::<Vec<_>>() {
            // Half of what there is is for merging.
            if map.has_vmas_for(VMAS_PER_RUN + map.vmas_max() / 2) && self.packer.arm(map, &run) {
                armed.insert((run.start - first) as usize..(run.end - first) as usize);
            }
        }
        armed
    }

    /// Takes the pages of a window, and leaves away what was packed: see the room's text. Returns what was pinned as well.
    #[allow(unsafe_code)] // reads pages that were taken
    fn take_and_compare(
        &mut self,
        map: &PageMap,
        pagemap: &mut Pagemap,
        first: Page,
        armed: PageSet,
    ) -> (Packed, PageSet) {
        let (mut done, mut pinned) = (Packed::default(), PageSet::default());
        let end = armed.runs().last().map_or(0, |run| run.end);
        let place = self.scratch.place(end);
        let packer = self.packer.clone();
        let mut inner = packer.lock();
        let clock = Instant::now();
        let mut window = Window::of_registered(&packer.uffd, map.memory().address(first), place, end);
        for run in armed.runs() {
            window.take(run.clone());
            for (offset, taken) in (run.start..).zip(window.became(run)) {
                if *taken == Taken::Pinned {
                    pinned.insert(offset..offset + 1);
                }
            }
        }
        // What was swapped out meanwhile goes back unread.
        let mut there = PageSet::default();
        let note =
            |run: Range<usize>| there.insert((run.start - place) / PAGE_SIZE..(run.end - place) / PAGE_SIZE);
        let _ = pagemap.each_populated(place..place + bytes(end), note);
        for prepared in &self.prepared {
            let offset = (prepared.page - first) as usize;
            let taken = window.taken(offset);
            if !window.away().contains(offset) || !there.contains(offset) {
                continue;
            }
            if packer.somebody_waits() {
                break;
            }
            // SAFETY: the page was taken, so nobody else reaches it, and it is in memory or comes back from swap as it was.
            let original = unsafe { &*(taken as *const PageBytes) };
            if inner.table.keep(prepared.page, original) {
                #[cfg(test)]
                packer.panic_comparing();
                window.leave_empty(offset..offset + 1);
                done.packed += 1;
            }
        }
        window.close();
        inner.figures.packs += done.packed;
        done.pinned = pinned.runs().map(|run| run.len() as u64).sum();
        done.stop_ns = u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX);
        (done, pinned)
    }

    /// Frees what windows left, and what gaps hold.
    pub(crate) fn clean_up(&mut self) {
        self.scratch.free();
        self.packer.compact();
    }
}

/// There are no records of these, and there will be none.
fn give_up(packer: &Packer, prepared: impl Iterator<Item = Prepared>) {
    for prepared in prepared {
        if let Into::Slot(held) = prepared.into {
            cache::flush_page(held.address());
            packer.lock().table.give_up_slot(held);
        }
    }
}

fn page_at(first: Page, offset: usize) -> Option<Page> {
    debug_assert!(offset < CHUNK_PAGES);
    Page::try_from(offset).ok().map(|offset| first + offset)
}
