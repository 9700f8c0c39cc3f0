//! The scanning thread: the order of its work, and what it answers meanwhile.

pub(crate) mod control;
pub(crate) mod exchange;
mod explain;
mod follow;
pub(crate) mod hints;
pub(crate) mod hotplug;
pub(crate) mod huge;
mod merge;
pub(crate) mod merging;
pub(crate) mod order;
pub(crate) mod pace;
mod pack;
pub(crate) mod pass;
mod poll;
pub(crate) mod questions;
mod registrations;
pub(crate) mod secure;
pub(crate) mod stages;
pub(crate) mod standby;
pub(crate) mod stats;
mod twins;
