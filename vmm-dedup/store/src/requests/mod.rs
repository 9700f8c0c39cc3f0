//! What peers send, and what it does. Nothing here waits: a record is handled in one go, and answers and pushes go into
//! the peers' outboxes.

pub(crate) mod exchange;
pub(crate) mod keepers;
pub(crate) mod outbox;
pub(crate) mod peers;
mod publication;
mod questions;
pub(crate) mod relay;
pub(crate) mod rights;
pub(crate) mod statistics;
pub(crate) mod unread;
pub(crate) mod violation;
mod vms;
