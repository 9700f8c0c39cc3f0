//! The interposed functions. Each does what the VMM asked for, and lets the supervisor know before or after.
#![allow(unsafe_code, unreachable_pub)] // C functions, found by name

use crate::kvm::{KVM_RUN, Meaning, MemorySlot, UffdRegister, meaning};
use crate::manager::tell;
use crate::mappings::{Mapping, SMALLEST};
use crate::watch::{Lent, watch};
use crate::{active, devices, kvm, manager, real};
use libc::{c_int, c_ulong, c_void, off_t, size_t};
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use vmm_dedup::{HostRange, Lease, Supervisor, refusal};

/// Runs a part of a hook: errno stays as it was, and no panic leaves it.
pub(crate) fn quietly<T>(work: impl FnOnce() -> T, otherwise: T) -> T {
    // SAFETY: errno's address is valid for the calling thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise);
    // SAFETY: as above.
    unsafe { *errno = before };
    result
}

/// Whether a hook is to look at its call: it is the VMM's own, and there is a supervisor.
pub(crate) fn concerned() -> bool {
    active::active() && !manager::is_ours()
}

fn addresses(at: *mut c_void, len: size_t) -> Range<usize> {
    let start = at as usize;
    start
        ..start
            .saturating_add(len)
            .checked_next_multiple_of(4096)
            .unwrap_or(usize::MAX)
}

fn is_guest(range: &Range<usize>) -> bool {
    watch().mappings.has_guest(range)
}

/// Memory is about to be unmapped or replaced: the engine lets go of it first.
fn forget(range: &Range<usize>) {
    if is_guest(range) {
        tell(|supervisor| supervisor.remove_range(range.clone()));
    }
    let mut inner = watch();
    inner.mappings.remove(range);
    inner
        .lent
        .retain(|lent| lent.range.end <= range.start || range.end <= lent.range.start);
}

fn remember(at: *mut c_void, len: size_t, prot: c_int) {
    let range = addresses(at, len);
    let usable = libc::PROT_READ | libc::PROT_WRITE;
    let mut inner = watch();
    if range.len() < SMALLEST || prot & usable != usable {
        inner.mappings.remove(&range);
        return;
    }
    inner.mappings.add(Mapping {
        start: range.start,
        end: range.end,
        guest: false,
        guest_address: None,
    });
}

/// # Safety
/// ioctl's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    #[allow(clippy::cast_possible_truncation)] // the kernel takes 32 bits
    let request_number = request as u32;
    if request_number == KVM_RUN {
        // SAFETY: the caller's call.
        return unsafe { real::ioctl(fd, request, arg) };
    }
    let meaning = meaning(request_number);
    if meaning != Meaning::Other {
        quietly(|| before_ioctl(fd, meaning, arg), ());
    }
    // SAFETY: the caller's call.
    let result = unsafe { real::ioctl(fd, request, arg) };
    if meaning == Meaning::Slot && result == 0 {
        quietly(|| note_slot(arg), ());
    }
    if meaning == Meaning::Userfaultfd && result == 0 {
        quietly(|| note_lent(fd, arg), ());
    }
    result
}

/// The range and the mode of UFFDIO_REGISTER's argument, if it is for guest memory.
fn registered(arg: *mut c_void) -> Option<(Range<usize>, u64)> {
    if arg.is_null() {
        return None;
    }
    // SAFETY: UFFDIO_REGISTER's argument, which the caller vouches for.
    let UffdRegister { start, len, mode, .. } = unsafe { arg.cast::<UffdRegister>().read_unaligned() };
    let start = usize::try_from(start).ok()?;
    let range = start..start.saturating_add(usize::try_from(len).ok()?);
    is_guest(&range).then_some((range, mode))
}

/// The VMM registered guest memory with a userfaultfd of its own.
fn note_lent(fd: c_int, arg: *mut c_void) {
    if concerned()
        && let Some((range, mode)) = registered(arg)
    {
        let lent = &mut watch().lent;
        lent.retain(|known| known.range != range);
        lent.push(Lent {
            range,
            uffd: fd,
            mode,
        });
    }
}

fn before_ioctl(fd: c_int, meaning: Meaning, arg: *mut c_void) {
    if meaning == Meaning::Hello && active::wanted() {
        active::start();
    }
    if !concerned() {
        return;
    }
    match meaning {
        Meaning::Pin => devices::pins(fd),
        // Nothing would show that it takes memory still, when its file is another process's.
        Meaning::Take => tell(|supervisor| supervisor.refuse(refusal::passthrough())),
        Meaning::Confidential => tell(|supervisor| supervisor.refuse(refusal::confidential())),
        // SAFETY: KVM_SET_CPUID2's argument, which the caller vouches for, begins with the number of leaves that follow.
        Meaning::Cpuid if !arg.is_null() && unsafe { kvm::has_nested_virtualisation(arg.cast()) } => {
            tell(Supervisor::nested_guests);
        }
        Meaning::Userfaultfd => {
            if let Some((range, _)) = registered(arg) {
                tell(|supervisor| supervisor.lend(range, Lease::UntilFree));
            }
        }
        _ => {}
    }
}

/// A memory slot was set.
fn note_slot(arg: *mut c_void) {
    if !concerned() || arg.is_null() {
        return;
    }
    // SAFETY: both requests' arguments begin so, and the kernel has just read it.
    let slot = unsafe { arg.cast::<MemorySlot>().read_unaligned() };
    if kvm::is_confidential(&slot) {
        tell(|supervisor| supervisor.refuse(refusal::confidential()));
    }
    let (Some(ram), Some(supervisor)) = (kvm::ram(&slot), manager::supervisor()) else {
        return;
    };
    let mut inner = watch();
    let known = inner.mappings.mark_guest(&ram, slot.guest_phys_addr);
    if !known && ram.len() >= SMALLEST {
        inner.unknown += ram.len();
        supervisor.note(refusal::unknown_memory(inner.unknown));
    }
    for mapping in inner.mappings.iter().filter(|m| m.guest && m.overlaps(&ram)) {
        let range = mapping.range();
        let Ok(range) = HostRange::try_new(range.start, range.len()) else {
            continue;
        };
        // SAFETY: guest memory, which only the guest and raw addresses reach; munmap, mmap and mremap tell the supervisor before
        // it goes.
        unsafe {
            supervisor.add_range(match mapping.guest_address {
                Some(address) => range.at_guest_address(address),
                None => range,
            });
        }
    }
}

/// # Safety
/// mmap's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let look = active::watching() && !manager::is_ours();
    if look && flags & libc::MAP_FIXED != 0 && flags & libc::MAP_FIXED_NOREPLACE != libc::MAP_FIXED_NOREPLACE
    {
        quietly(|| forget(&addresses(at, len)), ());
    }
    // SAFETY: the caller's call.
    let mapped = unsafe { real::mmap(at, len, prot, flags, fd, offset) };
    if look && mapped != libc::MAP_FAILED && len >= SMALLEST {
        quietly(|| remember(mapped, len, prot), ());
    }
    mapped
}

/// The same where off_t has 64 bits.
///
/// # Safety
/// mmap's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's call.
    unsafe { mmap(at, len, prot, flags, fd, offset) }
}

/// # Safety
/// munmap's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(at: *mut c_void, len: size_t) -> c_int {
    if active::watching() && !manager::is_ours() {
        quietly(|| forget(&addresses(at, len)), ());
    }
    // SAFETY: the caller's call.
    unsafe { real::munmap(at, len) }
}

/// # Safety
/// mremap's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    at: *mut c_void,
    len: size_t,
    new_len: size_t,
    flags: c_int,
    new_at: *mut c_void,
) -> *mut c_void {
    if active::watching() && !manager::is_ours() {
        quietly(
            || {
                let from = addresses(at, len);
                if is_guest(&from) {
                    tell(|supervisor| supervisor.lend(from.clone(), Lease::UntilTakenBack));
                    tell(|supervisor| supervisor.remove_range(from.clone()));
                }
                watch().mappings.remove(&from);
                if flags & libc::MREMAP_FIXED != 0 {
                    forget(&addresses(new_at, new_len));
                }
            },
            (),
        );
    }
    // SAFETY: the caller's call.
    unsafe { real::mremap(at, len, new_len, flags, new_at) }
}

/// Guest memory that the VMM wants to see writes to, or no use of, is left alone: the engine's mappings could be written.
///
/// # Safety
/// mprotect's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(at: *mut c_void, len: size_t, prot: c_int) -> c_int {
    let usable = libc::PROT_READ | libc::PROT_WRITE;
    if prot & usable != usable && concerned() {
        quietly(
            || {
                let range = addresses(at, len);
                if is_guest(&range) {
                    tell(|supervisor| supervisor.leave_alone(range, refusal::protected()));
                }
            },
            (),
        );
    }
    // SAFETY: the caller's call.
    unsafe { real::mprotect(at, len, prot) }
}

/// # Safety
/// madvise's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(at: *mut c_void, len: size_t, advice: c_int) -> c_int {
    let frees = matches!(
        advice,
        libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_DONTNEED_LOCKED
    );
    if frees && concerned() {
        match quietly(|| discard(at, len), None) {
            None => {}
            Some(Ok(())) => return 0,
            Some(Err(error)) => {
                // SAFETY: errno's address is valid for the calling thread.
                unsafe { *libc::__errno_location() = error.raw_os_error().unwrap_or(libc::EINVAL) };
                return -1;
            }
        }
    }
    // SAFETY: the caller's call.
    unsafe { real::madvise(at, len, advice) }
}

/// Frees guest memory; `None` if it is none.
fn discard(at: *mut c_void, len: size_t) -> Option<io::Result<()>> {
    if !is_guest(&addresses(at, len)) {
        return None;
    }
    let discarder = manager::discarder()?;
    let mut renewed = Vec::new();
    // The engine's own mmap and madvise come back to these hooks.
    // SAFETY: the VMM itself says that nothing there is needed any more.
    let done = manager::as_ours(|| unsafe {
        discarder.discard_and_tell(at as usize, len, |range| renewed.push(range))
    });
    register_again(&renewed);
    Some(done)
}

/// Memory was renewed. Where the VMM has a userfaultfd on it, that is to tell of it as before. (By the supervisor: this thread
/// may not be allowed to.)
fn register_again(renewed: &[Range<usize>]) {
    let within = |lent: &Lent| {
        let lent = lent.clone();
        renewed.iter().filter_map(move |range| {
            let range = range.start.max(lent.range.start)..range.end.min(lent.range.end);
            (!range.is_empty()).then(|| Lent {
                range,
                ..lent.clone()
            })
        })
    };
    let again: Vec<Lent> = watch().lent.iter().flat_map(within).collect();
    if let (false, Some(supervisor)) = (again.is_empty(), manager::supervisor()) {
        let _ = supervisor.with_service(move |_| {
            for Lent { range, uffd, mode } in &again {
                if let Err(error) = kvm::register_again(*uffd, range, *mode) {
                    log::debug!("the VMM's userfaultfd has {range:x?} no more: {error}");
                }
            }
        });
    }
}
