//! Pages that rest and have no twin are kept *packed*: their bytes lie, compressed, in memory of the VMM's own, and their places in
//! the guest are empty. Whoever touches one waits until the *rebuilding thread* has put the page back.
//!
//! ```text
//!              cold                 packed                                touched
//!   private ----------> prepared ----------> hole, registered for ----------------> private, and soon tracked again
//!            (scanning            (a window,  missing pages       (rebuilding
//!             thread)              compared)                       thread)
//! ```
//!
//! # Why no page is lost, and no write and no DMA
//!
//! Holes are registered with a userfaultfd of their own ([`Packer`]), since that of merging replaces registrations, and reads
//! faults in the scanning thread. A place has one registration, so the place changes hands while its page is there:
//!
//! 1. *Prepare.* The scanning thread copies the page, packs the copy, and puts that into the table as room that is reserved: what
//!    must be allocated is allocated now. Nothing is held, and the guest may write meanwhile.
//! 2. *Arm.* The place's registration with the tracker ends, and it is registered for missing pages with the packer. The page is
//!    there all the time: nobody misses it, and a write that nobody tracks in between is in the page. If the second step fails the
//!    place goes back to the tracker.
//! 3. *Take*, in a [`Window`](crate::window::Window): a page that is pinned, or that another process has, is refused. From here on
//!    nobody else can reach the page. Who touches its place waits for the rebuilding thread, which waits for the lock of the table.
//! 4. *Compare.* What the table has is rebuilt, and compared with the page that was taken: only if all bytes are equal does the
//!    record count. Else the page goes back, as it does whatever else happens, a panic included, and the room is given up.
//! 5. *Leave.* The record is in the table before the page stops being away. If the thread dies in between, the page is put back and
//!    the record stays: whoever finds it finds the place filled, and drops the record.
//! 6. *Close.* What was not packed is back, and its place goes home to the tracker.
//!
//! *Rebuilding* happens under the table's lock: a place whose page is in the table is filled with a copy (UFFDIO_COPY, which fails
//! where something is), and then the record is dropped. Whoever waits is woken after that. An empty place that is registered with
//! the packer and not in the table reads as zeros: it was given up by the guest (the discarder drops the record under the same
//! lock, in the same step in which the page counts as freed), or never was there. If there is no memory for a copy, whoever waits
//! waits on, and it is tried again: a packed page is never lost for want of memory.
//!
//! A fault may be read long after it was raised: its place may be the tracker's by then, and its page away in a window of merging. (The
//! kernel does not ask whose registration a place has that is filled.) So which places are the packer's is noted under the table's
//! lock, in one step with each registration that ends, and no other place is filled.
//!
//! *Going home.* Only places whose page is not in the table leave the packer's registration, and only the scanning thread puts pages
//! into the table. So none of them can be a hole that somebody else has to fill.
//!
//! *The end.* The rebuilding thread outlives the scanning thread, also one that has panicked: it brings back everything, ends all
//! registrations, and only then ends itself. If it panics it goes on from the beginning of its loop; what it was doing is done anew.
//!
//! A page whose bytes cannot be rebuilt (memory that broke) becomes a memory error for the guest (UFFDIO_POISON), never other bytes.
//!
//! # Locks
//!
//! The table's lock is taken last: by the scanning thread within that of the discards, by a discarder as well, by the rebuilding
//! thread alone. Whoever holds it touches no guest page, makes no log, and allocates no segment.
//!
//! # Known holes
//!
//! - Access that may not wait fails at a hole (/proc/PID/mem: EIO, a core dump lacks the page), until somebody else has touched the
//!   page. Windows do the same for microseconds.
//! - A child of the VMM would read zeros, so once packing is on no child gets guest memory (MADV_DONTFORK), whatever was advised.
//! - A packed page is no twin: its key is withdrawn, and nobody finds it until it is back.

#[cfg(feature = "pack")]
mod budget;
#[cfg(feature = "pack")]
mod cold;
mod figures;
#[cfg(feature = "pack")]
mod memory;
#[cfg(not(feature = "pack"))]
mod nobody;
#[cfg(feature = "pack")]
mod packer;
#[cfg(feature = "pack")]
mod packing;
#[cfg(feature = "pack")]
mod serving;
#[cfg(feature = "pack")]
mod table;

pub(crate) use figures::WINDOW;
#[cfg(not(feature = "pack"))]
pub(crate) use nobody::{Packer, Packing, Server};
#[cfg(feature = "pack")]
pub(crate) use packer::Packer;
#[cfg(all(feature = "inject", feature = "pack"))]
pub use packer::delay_by_first_bit;
#[cfg(feature = "pack")]
pub(crate) use packing::Packing;
#[cfg(feature = "pack")]
pub(crate) use serving::Server;

#[cfg(all(test, feature = "pack"))]
mod tests;
