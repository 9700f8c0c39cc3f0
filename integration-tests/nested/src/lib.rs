//! Real Linux guests, with dedup on, on a real Linux host, on any machine that has QEMU.
//!
//! Three machines are in each other. L0 is this one: it fetches packages ([`debian`]), builds images ([`images`]) and
//! runs QEMU ([`host`]), with KVM where that runs stock kernels, else emulating AMD-V. L1, in QEMU, runs a Debian
//! kernel with KVM and this crate's own program ([`inside`]), which starts a store and a fleet of VMs and plays a
//! [`Scenario`]. L2 is a VM of that fleet: the same kernel with a small Debian userland that serves files, keeps a
//! database, computes, or does nothing.
//!
//! L1 tells what happens by JSON lines ([`event`]) on its second serial line; the first is its console. Times in L1
//! mean little when the CPU is emulated; what is saved, by whom, and that nothing is lost, does.
//!
//! [`corpus`] needs no L1: it lets QEMU alone boot the guests, and dumps their memory.

mod archive;
pub mod corpus;
pub mod debian;
pub mod dsa;
mod elf;
pub mod event;
mod failure;
mod guest;
pub mod host;
pub mod images;
pub mod inside;
mod qemu;
mod scenario;
mod shared_files;
mod wait;
mod workload;

pub use failure::Failure;
pub use scenario::Scenario;
pub use workload::Workload;
