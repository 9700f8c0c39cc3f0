//! What engines must do, as suites that each one's tests run for what it offers: [`keys()`],
//! [`tree_search()`], [`verify()`], [`deltas()`].
//!
//! The oracle is the order of the pages' bytes. Each case fills an [`Arena`](crate::compare::Arena) and asks the engine that the
//! caller makes for it (a device is given the arena's file then). [`doubles`] are engines that do not conform, or only just: for tests
//! of those who ask engines, and of the suites.

mod deltas;
pub mod doubles;
mod keys;
mod pages;
mod tree_search;
mod verify;

pub use deltas::check as deltas;
pub use keys::check as keys;
pub use tree_search::check as tree_search;
pub use verify::check as verify;

#[cfg(test)]
mod tests;
