//! What servers of devices over vfio-user have in common.
//!
//! ```text
//!  client --- socket --- gate ---- socket --- vfio-user crate --- session --- device
//!    |                  checks                 speaks the          regions,
//!    |                  every message          protocol            interrupts
//!    `------- client's memory: DmaMemory -------------------------------------'
//! ```
//!
//! Each client has a [`Session`] and threads of its own; clients do not share anything. A client is hostile: see [`Gate`]
//! for its messages, [`DmaMemory`] for its memory, [`Interrupts`] for its eventfds.

mod config_space;
mod dma;
mod gate;
mod interrupts;
mod raiser;
mod server;
mod wire;

pub use config_space::{ConfigSpace, Identity, MsiX};
pub use dma::{DmaError, DmaMemory, DmaView};
pub use gate::{Gate, GateError};
pub use interrupts::Interrupts;
pub use server::{DEFAULT_CLIENTS, Server, ServerError, Session, plain_region};
