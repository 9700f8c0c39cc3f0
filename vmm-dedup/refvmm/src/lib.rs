//! The reference VMM: what it takes to run a guest on KVM, and no more.
//!
//! It exists so that memory sharing can be run and tested where Cloud Hypervisor is not installed. Guest RAM is
//! what Cloud Hypervisor's is by default: private anonymous mappings through vm-memory, one KVM slot below 3 GiB
//! and one from 4 GiB on. There are no disks and no network.
//!
//! The actors:
//! - [`VmConfig`] says what to build; [`Vm::new`] builds it: memory, kernel and initrd in it, boot parameters,
//!   in-kernel interrupt controllers and timer, vCPUs. Nothing runs yet, so a service can adopt the memory first.
//! - [`Vm::start`] gives every vCPU a thread (`vcpu0`, ...) and returns a [`RunningVm`], which pauses, resumes
//!   and stops them, types into the serial line, and waits for the end.
//! - A vCPU thread runs the guest and serves its port accesses on the spot (`devices`): a 16550 at COM1, the
//!   shutdown port 0x600 as in Cloud Hypervisor, ACPI's PM1a registers, the keyboard controller's reset line.
//!
//! Two ways into the guest: an ELF image with a PVH note is entered in 32-bit mode with a start info structure;
//! a bzImage, or an ELF image without the note, by the 64-bit Linux boot protocol. Both get the same memory map
//! and minimal ACPI tables (FADT, MADT, a DSDT that can power off).
//!
//! Known holes: no PCI, no clock (the guest sees 1970 unless it has kvmclock), no reboot (a reset ends the VM
//! with [`ExitReason::Reboot`]), no confidential guests, x86-64 only.

mod boot;
mod config;
mod cpuid;
mod devices;
mod error;
mod gate;
mod image;
mod kick;
mod layout;
mod memory;
mod registers;
mod running;
mod vcpu;
mod vm;

pub use config::{Image, ThpMode, VmConfig};
pub use devices::ExitReason;
pub use error::Error;
pub use memory::GuestMemory;
pub use running::RunningVm;
pub use vm::Vm;
