//! The service's side of the guest agent.
//!
//! - [`map`]: what the guest says of each frame, compact;
//! - [`credit`]: how much a guest may say, and how often it may begin;
//! - [`receiver`]: the state machine, without I/O and without a clock;
//! - [`listen`]: the sockets on which agents come.
//!
//! A service has one [`receiver::Receiver`] for its VM. It feeds it what comes from the connection and the time, sends what
//! the receiver answers, and asks it for any frame when it wants to: [`receiver::Receiver::said`], one call per frame.
//!
//! # Trust
//!
//! The guest is hostile. What it says is about its own memory only, and a lie costs its own sharing. Memory is bounded by the
//! size of the VM's memory ([`receiver::Receiver::memory_bytes`]), time by the credit.

pub mod credit;
pub mod listen;
pub mod map;
pub mod receiver;
