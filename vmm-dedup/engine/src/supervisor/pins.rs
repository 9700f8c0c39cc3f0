//! Pins that end with what holds them.

use crate::supervisor::lifecycle::Event;
use crate::supervisor::shared::{Letter, Shared};
use std::sync::Arc;

/// Guest memory is pinned for as long as this lives, which may be longer than the VM
/// ([`Supervisor::pinned`](crate::supervisor::Supervisor::pinned)).
#[derive(Debug)]
#[must_use = "the pin ends where this is dropped"]
pub struct Pinned(pub(super) Arc<Shared>);

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.post(Letter::Event(Event::Unpin));
    }
}
