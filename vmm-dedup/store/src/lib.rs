//! The page store: one per host and trust domain.
//!
//! The store owns the shared pages, the index that every service reads without asking, the keys that were sighted once,
//! and the account of who maps what. Services talk to it over a Unix socket; `docs/protocol.md` describes the messages.
//!
//! # The way of a page
//! 1. A service *sights* a key that the index does not have: first the key of four lines of a page. The store remembers
//!    it ([`ledger::sightings`]).
//! 2. When a key is sighted again, by the same service or another, the store asks the service that did so to *publish*
//!    the page ([`requests::exchange`]).
//! 3. The service copies the page into its staging buffer. The store copies it out into a slot, computes the key of what
//!    it copied, and enters the slot into the index under its line key ([`memory::pool`]).
//! 4. Every service that has the key finds the slot in the index, compares the page with it, maps it, and reports a
//!    *reference*.
//! 5. A service whose page differs from the slot of its line key reports the key as *ambiguous*. A second slot with one
//!    line key makes it ambiguous as well. The slots of an ambiguous key are found by the hashes of their whole pages,
//!    and services sight those ([`memory::catalog`]).
//! 6. When the last reference goes, the slot leaves the index and is *dead*: it stays as it is, since devices may still read
//!    its page. It waits in limbo until no process can map it any more, also when sockets break ([`ledger::lifetime`]).
//! 7. The page's memory returns with its whole segment, when no slot of that is in use. Sparse segments are emptied: their
//!    pages move to others, and services follow ([`ledger::allocator`], [`memory::evacuation`]).
//!
//! # Rooms
//! docs/design/store.md lists the modules of the root, its *rooms*. Each uses those before it and none behind it; a test of the
//! workspace (`integration-tests/tests/rooms`) holds the crate to that list.
//!
//! One tokio thread runs all tasks. A connection's task receives a record, calls [`state::State::handle`] and sends the
//! answer. Nothing in `handle` waits, so the lock around the state is never contended. Pushes go into bounded queues
//! ([`requests::outbox`]): a peer that does not read is cut off, and holds up nobody.
//!
//! # What is trusted
//! Nothing that arrives. A peer can spoil its own account and the savings of its trust domain: it can fill the store with
//! its pages, and keep the memory of segments that were emptied by not following. It cannot change a page that others map:
//! the store verifies pages in a slot that nobody knows of yet, and never writes a slot again that could be found.
//!
//! # Known holes
//! - A process that shares its memory with another one (`CLONE_VM` without `CLONE_THREAD`, or a fork that inherits
//!   mappings of slots) and ends first: the store sees only the process that connected. The other one keeps memory that
//!   nobody accounts for. A VMM must not do that (guest memory is to be marked `MADV_DONTFORK` where a VMM forks at all).
//! - Two stores started at the same instant on one stale socket path can both pass the check for a live one; the
//!   later one wins the path.
//! - Growing a very large index is one pass without a pause, which takes longer the larger it is.
//! - A hostile service that aims line keys at one place of the index (its hashing is public) makes lookups there
//!   slow for its own trust domain, and entries there are refused: about a thousand words are read at most.
//! - Memory returns by whole segments. A process that does not follow pages which have moved keeps theirs, beyond the store's
//!   limit: one whose service hangs or is hostile, or that lost its socket and lives on.

mod config;
mod error;
mod ledger;
mod memory;
mod metrics;
mod net;
mod requests;
mod server;
mod state;

pub use config::Config;
pub use error::Error;
pub use server::Store;
