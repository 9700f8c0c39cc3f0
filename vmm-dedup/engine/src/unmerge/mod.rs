//! Taking shared pages out of a guest: for a writer, for a range, for memory that the guest gives up.

pub(crate) mod address_space;
mod copy_room;
pub(crate) mod cow;
pub(crate) mod discard;
pub(crate) mod fault_thread;
mod foresight;
pub(crate) mod page_reserve;
