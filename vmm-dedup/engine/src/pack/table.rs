//! The table of packed pages: what each was packed to, and how it is rebuilt. Whoever has it has the lock.

use crate::memory::layout::Page;
use crate::pack::figures::WINDOW;
use crate::pack::memory::{Buffers, Hidden, Ready};
use crate::store::connection::HeldSlot;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use vmm_dedup_packed::segments::{CELL_METADATA_BYTES, Owner};
use vmm_dedup_packed::{Class, Codecs, Kind, Page as PageBytes, Place, SegmentBytes, Segments, ZERO_PAGE};
use vmm_dedup_protocol::raw;

/// Bytes of a segment. Whoever compacts empties one at a time, with the lock.
const SEGMENT_BYTES: usize = 128 << 10;
/// Bytes of segments that hold nothing, from which on they are compacted: so many, and a quarter of all.
const LOOSE_BYTES: u64 = 4 * SEGMENT_BYTES as u64;
/// Slots that are looked at with the lock.
const SLOTS_AT_ONCE: usize = 512;
/// Lines of an overlay beside compression.
pub(super) const OVERLAY_LINES: u32 = 16;

/// Where the bytes of a packed page are.
#[derive(Debug)]
enum Content {
    /// In a cell of the segments, packed.
    Cell { place: Place, kind: Kind },
    /// In a slot of the store, as they are: [`Table::slots`] has it.
    Slot,
}

/// What is known of a packed page.
#[derive(Debug)]
pub(super) struct Record {
    content: Content,
    /// Seconds after the packer's beginning.
    pub(super) since: u32,
    /// Its page was compared, and is nowhere else. Else there is room for it only.
    kept: bool,
}

/// Bytes that a record takes: its node's share, keys and gaps included; and what the segments keep of its cell.
const RECORD_BYTES: usize = 2 * (size_of::<Page>() + size_of::<Record>()) + CELL_METADATA_BYTES;
const _: () = assert!(RECORD_BYTES == 48);
/// Bytes that a slot takes beside.
const SLOT_BYTES: usize = 2 * (size_of::<Page>() + size_of::<HeldSlot>());

/// A page that is in the table no more, and whose place is to go home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Returned {
    pub(crate) page: Page,
    /// Seconds for which it was packed, if somebody touched it.
    pub(crate) touched_after: Option<u32>,
}

#[derive(Debug)]
pub(super) struct Table {
    records: BTreeMap<Page, Record>,
    /// Of pages that lie in slots.
    slots: BTreeMap<Page, HeldSlot>,
    /// Records of pages that are packed.
    kept: usize,
    /// Pages that have room since the last [`Self::drop_reserved`].
    reserved: Vec<Page>,
    segments: Segments<Ready>,
    /// Bytes that packed pages take of them, by their classes.
    used: u64,
    codecs: Codecs,
    /// Where pages are rebuilt.
    rebuilt: Buffers,
    /// Cells of pages that were given up by a thread whose system calls may be filtered.
    garbage: Vec<Place>,
    /// Slots that no record names any more, for whoever tells the store.
    freed: Vec<HeldSlot>,
    /// Pages that are to go home.
    returned: Vec<Returned>,
}

/// What a codec packs against, beside the page.
pub(super) fn base_of(kind: Kind) -> Option<&'static PageBytes> {
    (kind == Kind::Overlay).then_some(&ZERO_PAGE)
}

/// Bytes that packed bytes take in a segment.
fn class_bytes(packed: &[u8]) -> u64 {
    Class::holding(packed.len()).map_or(0, |class| class.bytes() as u64)
}

impl Table {
    pub(super) fn new() -> io::Result<Self> {
        let size = SegmentBytes::try_new(SEGMENT_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            records: BTreeMap::new(),
            slots: BTreeMap::new(),
            kept: 0,
            reserved: Vec::with_capacity(WINDOW),
            segments: Segments::new(Ready::default(), size),
            used: 0,
            codecs: Codecs::try_new(OVERLAY_LINES).map_err(io::Error::other)?,
            rebuilt: Buffers::new(1)?,
            garbage: Vec::new(),
            freed: Vec::new(),
            returned: Vec::new(),
        })
    }

    /// Memory for the next segment, for [`Self::set_ready`].
    pub(super) fn make_ready() -> Option<Hidden> {
        Ready::make(SEGMENT_BYTES)
    }

    pub(super) fn is_ready(&mut self) -> bool {
        self.segments.source_mut().is_set()
    }

    pub(super) fn set_ready(&mut self, memory: Hidden) {
        self.segments.source_mut().set(memory);
    }

    /// Makes room for a page, and puts there what it was packed to: whatever is allocated for it is allocated now. `false`: there is
    /// no memory, or the page is packed.
    pub(super) fn reserve(&mut self, page: Page, bytes: &[u8], kind: Kind, since: u32) -> bool {
        if self.get(page).is_some() {
            return false;
        }
        let Ok(place) = self.segments.put(bytes, Owner(page)) else {
            return false;
        };
        self.used += class_bytes(bytes);
        self.insert(page, Content::Cell { place, kind }, since);
        true
    }

    /// Makes room for a page whose bytes are in a slot. `false`: the page is packed, and the slot is given up.
    pub(super) fn reserve_slot(&mut self, page: Page, held: HeldSlot, since: u32) -> bool {
        if self.get(page).is_some() {
            self.freed.push(held);
            return false;
        }
        // Frees what it had, so that the slot comes after.
        self.insert(page, Content::Slot, since);
        self.slots.insert(page, held);
        true
    }

    fn insert(&mut self, page: Page, content: Content, since: u32) {
        let record = Record {
            content,
            since,
            kept: false,
        };
        let old = self.records.insert(page, record);
        self.free(page, old);
        self.reserved.push(page);
    }

    /// Keeps a page that has room, if what is there rebuilds it. Allocates nothing.
    #[allow(unsafe_code)] // reads a slot
    pub(super) fn keep(&mut self, page: Page, original: &PageBytes) -> bool {
        if self.records.get(&page).is_none_or(|record| record.kept) {
            return false;
        }
        let Some(rebuilt) = self.rebuild_any(page) else {
            return false;
        };
        if rebuilt != self.rebuilt.address(0) {
            // SAFETY: the slot is mapped as long as it is held, and the buffer is ours: there are no references to it now.
            unsafe { raw::copy_page(rebuilt, self.rebuilt.address(0)) };
        }
        if self.rebuilt.page(0) != original {
            return false;
        }
        if let Some(record) = self.records.get_mut(&page) {
            record.kept = true;
            self.kept += 1;
        }
        true
    }

    /// Gives up the room that was not needed.
    pub(super) fn drop_reserved(&mut self) {
        while let Some(page) = self.reserved.pop() {
            if self.records.get(&page).is_some_and(|record| !record.kept) {
                let record = self.records.remove(&page);
                self.free(page, record);
            }
        }
    }

    /// Frees what a page lay in whose record is gone.
    fn free(&mut self, page: Page, record: Option<Record>) {
        match record.map(|record| record.content) {
            Some(Content::Cell { place, .. }) => self.free_place(place),
            Some(Content::Slot) => self.freed.extend(self.slots.remove(&page)),
            None => {}
        }
    }

    fn free_place(&mut self, place: Place) {
        self.used -= self.segments.get(place).map_or(0, class_bytes);
        let freed = self.segments.free(place);
        debug_assert!(freed.is_ok());
    }

    /// Gathers what is packed in fewer segments, one at a time. To be called now and then.
    pub(super) fn compact(&mut self) {
        self.sweep();
        let given = self.segments.source_mut().given();
        let loose = given.saturating_sub(self.used);
        if loose < LOOSE_BYTES || loose < given / 4 {
            return;
        }
        self.compact_now();
    }

    fn compact_now(&mut self) {
        let records = &mut self.records;
        self.segments.compact(1, &mut |moved| {
            // A cell whose record was never made, since a thread panicked, is nobody's.
            let record = records.get_mut(&moved.owner.0);
            if let Some(Content::Cell { place, .. }) = record.map(|record| &mut record.content)
                && *place == moved.from
            {
                *place = moved.to;
            }
        });
    }

    pub(super) fn get(&self, page: Page) -> Option<&Record> {
        self.records.get(&page).filter(|record| record.kept)
    }

    /// The first packed page among some.
    pub(super) fn first(&self, pages: &Range<Page>) -> Option<Page> {
        let mut records = self.records.range(pages.clone());
        records.find(|(_, record)| record.kept).map(|(page, _)| *page)
    }

    pub(super) fn len(&self) -> usize {
        self.kept
    }

    /// Makes a page again; where it is then, until the next call. `None`: its bytes are broken.
    pub(super) fn rebuild(&mut self, page: Page) -> Option<usize> {
        self.get(page)?;
        self.rebuild_any(page)
    }

    fn rebuild_any(&mut self, page: Page) -> Option<usize> {
        let (place, kind) = match &self.records.get(&page)?.content {
            // Whoever else has the slot, this is the same.
            Content::Slot => return self.slots.get(&page).map(HeldSlot::address),
            Content::Cell { place, kind } => (*place, *kind),
        };
        let bytes = self.segments.get(place).ok()?;
        let (to, codec) = (self.rebuilt.page_mut(0), self.codecs.of(kind));
        // Whoever waits for the page must not wait for ever because a codec panics each time.
        let rebuild = AssertUnwindSafe(|| codec.rebuild(bytes, base_of(kind), to));
        let done = catch_unwind(rebuild).ok()?;
        done.ok().map(|()| self.rebuilt.address(0))
    }

    /// A page is at its place again. `touched_after`: see [`Returned`].
    pub(super) fn remove(&mut self, page: Page, touched_after: Option<u32>) {
        let record = self.take(page);
        if record.is_some() {
            self.returned.push(Returned { page, touched_after });
        }
        self.sweep();
        self.free(page, record);
    }

    /// Pages are given up. Frees no memory of segments: the caller's system calls may be filtered.
    pub(super) fn give_up(&mut self, pages: &Range<Page>) {
        while let Some(page) = self.first(pages) {
            if let Some(record) = self.take(page) {
                match record.content {
                    Content::Cell { place, .. } => self.garbage.push(place),
                    Content::Slot => self.freed.extend(self.slots.remove(&page)),
                }
                self.returned.push(Returned {
                    page,
                    touched_after: None,
                });
            }
        }
    }

    /// The record of a packed page, which is packed no more.
    fn take(&mut self, page: Page) -> Option<Record> {
        self.get(page)?;
        self.kept -= 1;
        self.records.remove(&page)
    }

    /// Frees the cells of what was given up.
    pub(super) fn sweep(&mut self) {
        for place in std::mem::take(&mut self.garbage) {
            self.free_place(place);
        }
    }

    /// Gives up a slot for which there is no record.
    pub(super) fn give_up_slot(&mut self, held: HeldSlot) {
        self.freed.push(held);
    }

    /// Slots that no record names any more.
    pub(super) fn take_freed(&mut self) -> Vec<HeldSlot> {
        self.sweep();
        std::mem::take(&mut self.freed)
    }

    /// The slot that was given up last: of the page that came back last, if it lay in one.
    pub(super) fn last_freed(&self) -> Option<&HeldSlot> {
        self.freed.last()
    }

    /// Pages in slots that are meant, from a page on, and the page to go on from: a part of all at a time, since whoever waits for a page
    /// waits for this.
    pub(super) fn some_slots(
        &self,
        from: Page,
        is_meant: impl Fn(&HeldSlot) -> bool,
    ) -> (Vec<(Page, HeldSlot)>, Option<Page>) {
        let mut slots = self.slots.range(from..);
        let some = slots.by_ref().take(SLOTS_AT_ONCE);
        let meant = some.filter(|(page, held)| is_meant(held) && self.get(**page).is_some());
        let found = meant.map(|(page, held)| (*page, held.clone())).collect();
        (found, slots.next().map(|(page, _)| *page))
    }

    /// A page lies in another slot, which holds the same bytes; if it lies in the old one still.
    pub(super) fn replace_slot(&mut self, page: Page, old: &HeldSlot, new: HeldSlot) -> bool {
        let is_kept = self.get(page).is_some();
        match self.slots.get_mut(&page).filter(|_| is_kept) {
            Some(held) if held.slot == old.slot && held.membership == old.membership => {
                self.freed.push(std::mem::replace(held, new));
                true
            }
            _ => false,
        }
    }

    pub(super) fn take_returned(&mut self) -> Vec<Returned> {
        std::mem::take(&mut self.returned)
    }

    /// Could not go home.
    pub(super) fn return_again(&mut self, page: Page) {
        self.returned.push(Returned {
            page,
            touched_after: None,
        });
    }

    /// Bytes of segments, and of all bookkeeping.
    pub(super) fn bytes(&mut self) -> (u64, u64) {
        let lists =
            self.garbage.capacity() * size_of::<Place>() + self.returned.capacity() * size_of::<Returned>();
        let records = self.records.len() * RECORD_BYTES + self.slots.len() * SLOT_BYTES;
        (self.segments.source_mut().given(), (lists + records) as u64)
    }
}

/// Most bytes that a page may be packed to: less, and what it saves does not pay for its place, which is a mapping.
pub(super) const MOST_BYTES: usize = 3072;
const _: () = assert!(MOST_BYTES <= Class::MOST_BYTES);

#[cfg(test)]
impl Table {
    /// Compacts as long as that frees anything.
    pub(super) fn compact_all(&mut self) {
        let mut before = u64::MAX;
        while self.segments.source_mut().given() < before {
            before = self.segments.source_mut().given();
            self.compact_now();
        }
    }

    /// As if the memory of a page's packed bytes had broken.
    pub(super) fn break_bytes(&mut self, page: Page) {
        let mut record = self.records.remove(&page).unwrap();
        let place = self.segments.put(&[0xff; 8], Owner(page)).unwrap();
        self.used += class_bytes(&[0xff; 8]);
        let Content::Cell { place: old, kind } = record.content else {
            unreachable!("it is packed");
        };
        record.content = Content::Cell { place, kind };
        self.free_place(old);
        self.records.insert(page, record);
    }
}
