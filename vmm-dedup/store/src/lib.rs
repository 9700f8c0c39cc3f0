//! The page store: one per host and trust domain.
//!
//! It owns the shared pages ([`segments`]), the index that every service reads without asking ([`catalog`]), the
//! keys that were sighted once ([`sightings`]) and the account of who maps what ([`lifetime`]). Services talk to it
//! over a Unix socket; `docs/protocol.md` describes the exchange.
//!
//! # The way of a page
//! A service *sights* a key that the index does not have. The second sighting of a line key marks it as ambiguous:
//! its holders come back with whole-page keys. The second sighting of a whole-page key makes the store ask the
//! service that sent it for the page. The service copies the page into its staging buffer, the store copies it out,
//! hashes what it copied, writes it into a slot and enters the slot into the index. Every holder finds it there,
//! compares, maps, and reports a reference. When the last reference goes, the slot leaves the index and waits in
//! limbo until nobody can map it any more ([`lifetime`] tells why that is safe, also when sockets break).
//!
//! # Shape
//! One tokio thread. A task per connection ([`connection`]) receives a record, calls `State::handle` and sends the
//! answer; nothing in `handle` waits, so the lock around the state is never contended and records are handled one
//! at a time. Pushes go into bounded queues ([`outbox`]): a peer that does not read is cut off, and holds up nobody.
//! What an observer asks of a VM is [relayed](`relay`), and answered for VMs that do not ([`questions`]).
//! [`slots`], [`epochs`], [`references`] and [`lifetime`] do no I/O; `tests` in `verification` walk through all
//! their interleavings with services that read, map, lose their socket and die.
//!
//! # What is trusted
//! Nothing that arrives. A peer can spoil its own account and the savings of its trust domain (fill the store with
//! its pages, hold back the reuse of slots by not acknowledging epochs), it cannot change a page that others map:
//! pages are verified by the store against a private copy and never written while anybody may map them.
//!
//! # Known holes
//! - A process that shares its memory with another one (`CLONE_VM` without `CLONE_THREAD`, or a fork that inherits
//!   mappings of slots) and ends first: the store sees only the process that connected. A VMM must not do that (guest memory is to be
//!   marked `MADV_DONTFORK` where a VMM forks at all).
//! - Two stores started at the same instant on one stale socket path can both pass the check for a live one; the
//!   later one wins the path.
//! - Growing a very large table (sightings, index) is one pass without a pause: about 5 ms per million entries.
//! - A hostile service that aims line keys at one place of the index (its hashing is public) makes lookups there
//!   slow for its own trust domain, and entries there are refused: about a thousand words are read at most.
//! - A device that reads a page for longer than `quarantine_seconds` after its VM let go of it can read another page.

mod accounts;
mod catalog;
mod config;
mod connection;
mod epochs;
mod error;
mod exchange;
mod http;
mod huge;
mod lifetime;
mod listener;
mod metrics;
mod outbox;
mod peer;
mod publication;
mod questions;
mod references;
mod relay;
mod segment;
mod segments;
mod series;
mod server;
mod sightings;
mod slots;
mod state;
#[cfg(test)]
mod verification;
mod vms;
mod watched;

pub use config::Config;
pub use epochs::EpochViolation;
pub use error::Error;
pub use lifetime::ReferenceViolation;
pub use references::Unbalanced;
pub use server::Store;
pub use slots::NotLive;
