//! The shared pages: the memory that holds them, the index that tells where they are, and the pool that keeps both in
//! step with the ledger.

pub(crate) mod catalog;
mod collapse;
pub(crate) mod evacuation;
mod held;
pub(crate) mod huge;
pub(crate) mod pool;
mod segment;
pub(crate) mod segments;
mod series;
