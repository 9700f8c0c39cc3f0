//! Which pages lie in mappings of store files, as threads that discard memory look at it.
//!
//! They must never believe a page to be anonymous that is not: freeing it would bring the slot's content back. So a page is said
//! to lie in a file before a slot is mapped, and not to after that was made undone. The other way round costs a mapping only: fresh
//! memory over anonymous memory is the same as freeing it. A state is noted when all is done, so a thread that dies in between (a
//! panic) leaves too many pages said to lie in a file, and none too few.

use super::PageMap;
use crate::memory::bitmap::Bits;
use crate::memory::layout::Page;
use std::sync::Arc;

impl PageMap {
    /// Pages whose addresses lie in mappings of store files, as other threads may look at them.
    pub(crate) fn in_file(&self) -> Arc<Bits> {
        self.pages.table().in_file()
    }

    /// Slots are about to be mapped over these pages.
    pub(crate) fn expect_in_file(&self, pages: impl Iterator<Item = Page>) {
        self.pages.table().in_file_bits().set_all(pages);
    }

    /// It is done, or was not to be done: from now on it holds what their states say.
    pub(crate) fn sync_in_file(&self, pages: impl Iterator<Item = Page>) {
        let bits = self.pages.table().in_file_bits();
        let private = pages.filter(|page| !self.backing(*page).in_file_mapping());
        private.for_each(|page| bits.set(page, false));
    }
}
