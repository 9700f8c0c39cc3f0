//! The guest agent: tells the dedup service of its VM what only the guest knows.
//!
//! One thread does all, in [`agent`]: it walks over the guest's frames ([`walk`]), classifies them ([`classify`]) by what
//! the kernel says ([`source`]), and tells what has changed ([`teller`]) over the connection to the service ([`link`]). Programs
//! mark memory on a socket ([`programs`]). A second thread asks DAMON, if it is used ([`source::damon`]).
//!
//! What goes over the connection is in `vmm-dedup-agent-wire`, what programs say in `vmm-dedup-hints`.
//!
//! # Never worse
//!
//! The agent has a share of a core ([`budget`]) and rests while the guest waits for memory. It holds 9 bytes for each 2 MiB of
//! the guest's memory, and what programs have marked. It may be killed at any time: it has no state that matters.

pub mod agent;
pub mod budget;
pub mod classify;
pub mod config;
pub mod link;
pub mod programs;
pub mod report;
pub mod source;
pub mod stretches;
pub mod teller;
pub mod walk;
