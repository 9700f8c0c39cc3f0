//! The table of packed pages: what each was packed to, and how it is rebuilt. Whoever has it has the lock.

use crate::memory::layout::Page;
use crate::pack::figures::WINDOW;
use crate::pack::memory::{Buffers, Hidden, Ready};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use vmm_dedup_packed::segments::{CELL_METADATA_BYTES, Owner};
use vmm_dedup_packed::{Class, Codecs, Kind, Page as PageBytes, Place, SegmentBytes, Segments, ZERO_PAGE};

/// Bytes of a segment. Whoever compacts empties one at a time, with the lock.
const SEGMENT_BYTES: usize = 128 << 10;
/// Bytes of segments that hold nothing, from which on they are compacted: so many, and a quarter of all.
const LOOSE_BYTES: u64 = 4 * SEGMENT_BYTES as u64;
/// Lines of an overlay beside compression.
pub(super) const OVERLAY_LINES: u32 = 16;

/// What is known of a packed page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    place: Place,
    kind: Kind,
    /// Seconds after the packer's beginning.
    pub(super) since: u32,
    /// Its page was compared, and is nowhere else. Else there is room for it only.
    kept: bool,
}

/// Bytes that a record takes: its node's share, keys and gaps included; and what the segments keep of its cell.
const RECORD_BYTES: usize = 2 * (size_of::<Page>() + size_of::<Record>()) + CELL_METADATA_BYTES;

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
            kept: 0,
            reserved: Vec::with_capacity(WINDOW),
            segments: Segments::new(Ready::default(), size),
            used: 0,
            codecs: Codecs::try_new(OVERLAY_LINES).map_err(io::Error::other)?,
            rebuilt: Buffers::new(1)?,
            garbage: Vec::new(),
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
        let record = Record {
            place,
            kind,
            since,
            kept: false,
        };
        let old = self.records.insert(page, record);
        self.free(old);
        self.reserved.push(page);
        true
    }

    /// Keeps a page that has room, if what is there rebuilds it. Allocates nothing.
    pub(super) fn keep(&mut self, page: Page, original: &PageBytes) -> bool {
        let Some(record) = self.records.get(&page).copied() else {
            return false;
        };
        if record.kept || self.rebuild_from(record).is_none() || self.rebuilt.page(0) != original {
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
                self.free(record);
            }
        }
    }

    fn free(&mut self, record: Option<Record>) {
        if let Some(record) = record {
            self.free_place(record.place);
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
            if let Some(record) = record.filter(|record| record.place == moved.from) {
                record.place = moved.to;
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
        let record = *self.get(page)?;
        self.rebuild_from(record)
    }

    fn rebuild_from(&mut self, Record { place, kind, .. }: Record) -> Option<usize> {
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
        self.free(record);
        self.sweep();
    }

    /// Pages are given up. Frees no memory of segments: the caller's system calls may be filtered.
    pub(super) fn give_up(&mut self, pages: &Range<Page>) {
        while let Some(page) = self.first(pages) {
            if let Some(record) = self.take(page) {
                self.garbage.push(record.place);
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
        let records = self.records.len() * RECORD_BYTES;
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
        let record = self.records[&page];
        let place = self.segments.put(&[0xff; 8], Owner(page)).unwrap();
        self.used += class_bytes(&[0xff; 8]);
        self.free(Some(record));
        self.records.insert(page, Record { place, ..record });
    }
}
