//! The table of packed pages: what each was packed to, and how it is rebuilt. Whoever has it has the lock.

use crate::memory::layout::Page;
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

/// Why a page was not put into the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotPut {
    /// What was prepared is not the page.
    Differs,
    NoMemory,
}

#[derive(Debug)]
pub(super) struct Table {
    records: BTreeMap<Page, Record>,
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

    /// Keeps packed bytes of a page, if that is what they rebuild.
    pub(super) fn put(
        &mut self,
        page: Page,
        bytes: &[u8],
        kind: Kind,
        original: &PageBytes,
        since: u32,
    ) -> Result<(), NotPut> {
        let rebuilt = self.rebuilt.page_mut(0);
        let done = self.codecs.of(kind).rebuild(bytes, base_of(kind), rebuilt);
        if done.is_err() || rebuilt != original {
            return Err(NotPut::Differs);
        }
        let place = self.segments.put(bytes, Owner(page));
        let place = place.map_err(|_| NotPut::NoMemory)?;
        // What is kept is what was compared.
        if self.segments.get(place) != Ok(bytes) {
            let _ = self.segments.free(place);
            return Err(NotPut::Differs);
        }
        self.used += class_bytes(bytes);
        let old = self.records.insert(page, Record { place, kind, since });
        self.free(old);
        Ok(())
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
        self.records.get(&page)
    }

    /// The first packed page among some.
    pub(super) fn first(&self, pages: &Range<Page>) -> Option<Page> {
        self.records.range(pages.clone()).next().map(|(page, _)| *page)
    }

    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    /// Makes a page again; where it is then, until the next call. `None`: its bytes are broken.
    pub(super) fn rebuild(&mut self, page: Page) -> Option<usize> {
        let Record { place, kind, .. } = *self.records.get(&page)?;
        let bytes = self.segments.get(place).ok()?;
        let (to, codec) = (self.rebuilt.page_mut(0), self.codecs.of(kind));
        // Whoever waits for the page must not wait for ever because a codec panics each time.
        let rebuild = AssertUnwindSafe(|| codec.rebuild(bytes, base_of(kind), to));
        let done = catch_unwind(rebuild).ok()?;
        done.ok().map(|()| self.rebuilt.address(0))
    }

    /// A page is at its place again. `touched_after`: see [`Returned`].
    pub(super) fn remove(&mut self, page: Page, touched_after: Option<u32>) {
        let record = self.records.remove(&page);
        if record.is_some() {
            self.returned.push(Returned { page, touched_after });
        }
        self.free(record);
        self.sweep();
    }

    /// Pages are given up. Frees no memory of segments: the caller's system calls may be filtered.
    pub(super) fn give_up(&mut self, pages: &Range<Page>) {
        while let Some(page) = self.first(pages) {
            if let Some(record) = self.records.remove(&page) {
                self.garbage.push(record.place);
                self.returned.push(Returned {
                    page,
                    touched_after: None,
                });
            }
        }
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
