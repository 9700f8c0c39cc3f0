//! A guest that proves that its memory survived whatever the host did to it.
//!
//! The guest ([`ELF`], sources in `guest/`) is a freestanding PVH image of about 60 KB that any VMM with a PVH
//! loader boots in milliseconds: the reference VMM, Cloud Hypervisor, QEMU. It needs one vCPU, RAM, a 16550 at
//! 0x3f8 and a local APIC. All its work runs at CPL3, because a KVM that emulates CPL0 in software is slow there;
//! CPL0 is a trap handler of a few dozen instructions (`guest/boot.s`).
//!
//! What happens, in order:
//! 1. The guest reads the command line ([`PayloadConfig`]) and fills four areas of data pages: *files* (copies of
//!    the initrd, page-aligned, the same in every guest with that initrd), *private* (random, from its seed),
//!    *zero*, and *common* (random, from a seed that guests share). It reports [`Report::Ready`].
//! 2. It reads and writes pages of its working set at the rate that was asked for. Each access compares the whole
//!    page, word by word, with what the guest's book says it must hold; a write increments a counter in the page
//!    and leaves three more marks. With [`Rewrite::Restore`] every second pass gives the pages back their
//!    original content, so that they become equal to other pages again. [`Report::Tick`] tells how it goes.
//!    When the host sends `b`, the guest gives its common pages to the host by way of a virtio balloon, looks whether
//!    they read as zeros, and takes them back ([`Report::Balloon`]); with `f` it reports them as free instead.
//! 3. When the time is up, or the host sends `q` on the serial line, it verifies every page, reports
//!    ([`Report::Latency`], [`Report::Verify`], [`Report::Done`]) and powers off.
//!
//! Asked to drive a device ([`Device`]), it does that instead, and reports each answer as [`Report::Check`].
//!
//! A wrong word is reported as [`Report::Bad`]; a trap as [`Report::Fault`]; a command line or a memory size that
//! does not work as [`Report::Fail`].
//!
//! Known holes: the guest's own code, stack and book are not verified (a fault there shows as a crash or as
//! errors); the longest access includes the time in which the host did not run the vCPU.

mod config;
mod console;
mod files;
mod report;
#[cfg(test)]
mod tests;
mod time;

pub use config::{ConfigError, Device, Idle, PayloadConfig, Rewrite, WorkingSet};
pub use console::{Console, WaitError};
pub use files::real_files;
pub use report::{Access, Report, ReportError};
pub use time::measure_tsc_khz;

/// The guest image: an ELF64 file with a PVH entry note.
pub static ELF: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/payload.elf"));
