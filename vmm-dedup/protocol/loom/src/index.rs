//! The index, from the protocol's sources.

#[path = "../../src/index/entry.rs"]
mod entry;
#[path = "../../src/index/layout.rs"]
mod layout;
#[path = "../../src/index/reader.rs"]
mod reader;
#[path = "../../src/index/writer.rs"]
mod writer;

pub use entry::Line;
pub use layout::{MAGIC, VERSION, file_len};
pub use reader::{IndexError, IndexReader, News};
pub use writer::{IndexWriter, Placed};

use crate::MAX_SLOTS;
use crate::mapping::Mapping;
use layout::table_at;

/// An empty index for so many entries: its writer and its mapping.
pub fn create(capacity: usize) -> (IndexWriter, Mapping) {
    let slots = MAX_SLOTS as usize;
    let map = Mapping::zeroed(table_at(slots) + capacity);
    let writer = IndexWriter::format(map.clone(), capacity, slots).expect("the mapping is large enough");
    (writer, map)
}
