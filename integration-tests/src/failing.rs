//! What the kernel says to calls that fail in tests, and what the engine tells of them.

use vmm_dedup::{Call, Site};

/// What the kernel says to a call that lacks what it needs.
#[must_use]
pub fn lack(call: Call) -> i32 {
    match call {
        Call::Wake | Call::Schedule => libc::EINVAL,
        Call::PollFaults | Call::Brk => libc::EINTR,
        Call::Fork | Call::Mincore | Call::Split => libc::EAGAIN,
        Call::PagemapRead => libc::EIO,
        _ => libc::ENOMEM,
    }
}

/// Whether what failed is done in another way, or need not be done: then nothing is told.
#[must_use]
pub fn has_another_way(site: &Site) -> bool {
    let other_ways = [
        // Page by page; by a copy; by ending the protection.
        (Call::ZeroPage, "window/mod.rs"),
        (Call::Move, "window/mod.rs"),
        (Call::Unregister, "window/frozen.rs"),
    ];
    let known = |(call, file): &(Call, &str)| *call == site.call && site.file.ends_with(file);
    // Advice is lost.
    site.call == Call::Advise || other_ways.iter().any(known)
}

/// Whether another counter tells of it: `heal_failed_total` of the service, which the tests of healing look at.
#[must_use]
pub fn is_counted_elsewhere(site: &Site) -> bool {
    matches!(site.call, Call::Fork | Call::PagemapRead)
}
