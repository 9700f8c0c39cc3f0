//! The store's books: who holds which slot, who sighted which key, what the VMs report. Pure, but for the [dice](mod@dice) of a store
//! that shares securely: nothing here does I/O or asks for the time, so that the same code runs in the server, in model checks and in property tests.

pub(crate) mod accounts;
pub(crate) mod allocator;
mod chunks;
mod dice;
pub(crate) mod epochs;
pub(crate) mod lifetime;
pub(crate) mod orphans;
pub(crate) mod pending;
pub(crate) mod references;
mod segment_slots;
pub(crate) mod shares;
pub(crate) mod sightings;
pub(crate) mod slots;
#[cfg(test)]
mod verification;
