//! Traces: what a machine is to do, as a file.
//!
//! A trace begins with 16 bytes: the magic number, the version (16 bits) and 6 bytes of zeros. Records follow, all numbers
//! little-endian: kind (8 bits), core (8), length of what follows (16), and the fields:
//!
//! | kind | record | fields |
//! | --- | --- | --- |
//! | 1 | instructions without access | number (32 bits) |
//! | 2 | map | process (16), contents (16), address (64), pages (64), 1 to 2^20 |
//! | 3 | load | process (16), bytes (8), issue (8), address (64) |
//! | 4 | store | the same, and the bytes |
//! | 5 | load of metadata | as a load |
//! | 6 | store of metadata | as a store |
//! | 7 | fork | parent (16), child (16) |
//! | 8 | exit | process (16) |
//! | 9 | promote | process (16), how (16), address (64) |
//! | 10 | speculate | process (16) |
//! | 255 | end | records before it (64), CRC32C of all bytes before it (32) |
//!
//! A reader refuses whatever it does not know, with the record's number, and a trace without its end, or with more behind
//! it. `record` has the records, `read` and `write` the two ends.

mod read;
mod record;
mod write;

pub use read::{TraceError, TraceReader};
pub use record::{Action, Bytes, Malformed, Record};
pub use write::TraceWriter;
