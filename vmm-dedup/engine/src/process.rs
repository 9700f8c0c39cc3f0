//! The supervisor of a process, for a VMM whose crates do not know each other: whoever frees memory, plugs it in or pins it finds
//! the supervisor here. (A [`Supervisor`] of one's own is the same without this.)

use crate::config::Setup;
use crate::error::Error;
use crate::supervisor::{Options, Supervisor};
use crate::sync::{Mutex, lock};
use std::io;
use std::sync::OnceLock;

static SUPERVISOR: OnceLock<Supervisor> = OnceLock::new();

/// VMs that began so far.
static BEGUN: Mutex<u64> = Mutex::new(0);

/// Makes the process's supervisor, from a thread that is not restricted. If there is one already this does nothing.
///
/// # Errors
/// Those of [`Supervisor::spawn`].
pub fn spawn(options: Options) -> Result<(), Error> {
    if SUPERVISOR.get().is_none() {
        // Whoever comes second ends its own.
        let _ = SUPERVISOR.set(Supervisor::spawn(options)?);
    }
    Ok(())
}

/// The process's supervisor. Where nobody has made one, as in tests of a VMM's parts, this makes one with the default options,
/// which deduplicates nothing as long as nobody attaches a VM.
///
/// # Panics
/// If it has to make one and there is no thread to be had.
pub fn supervisor() -> &'static Supervisor {
    SUPERVISOR.get_or_init(|| Supervisor::spawn(Options::default()).expect("one thread"))
}

/// A VM begins ([`Supervisor::attach`]), and ends where what this returns is dropped: keep it with the VM. A VM of which somebody
/// it still ends first.
///
/// # Errors
/// Those of [`Supervisor::attach`]; then there is no VM.
pub fn attach(setup: Setup) -> Result<Attached, Error> {
    let (mut begun, supervisor) = (lock(&BEGUN), supervisor());
    // An error changes nothing: the VM has ended all the same.
    let _ = supervisor.detach(false);
    *begun += 1;
    supervisor.attach(setup)?;
    Ok(Attached(*begun))
}

/// A VM that has begun, and ends where this is dropped ([`Supervisor::detach`] without unmerging): when no vCPU runs any more.
/// The supervisor keeps the VM's memory until then.
#[derive(Debug)]
#[must_use = "the VM ends where this is dropped"]
pub struct Attached(u64);

impl Drop for Attached {
    fn drop(&mut self) {
        let begun = lock(&BEGUN);
        // If another VM has begun, this one has ended before. Errors: as in `attach`.
        if *begun == self.0 {
            let _ = supervisor().detach(false);
        }
    }
}

/// madvise(MADV_DONTNEED) for guest memory, whether it is deduplicated or not ([`Discarder`](crate::Discarder)).
///
/// # Errors
/// Those of madvise.
///
/// # Safety
/// As for [`Discarder::discard`](crate::Discarder::discard).
#[allow(unsafe_code)] // frees memory, as the caller promises
pub unsafe fn discard(address: *const u8, len: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { supervisor().discarder().discard(address as usize, len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::Status;

    #[test]
    fn a_vm_ends_with_what_stands_for_it() {
        spawn(Options::default()).unwrap();
        spawn(Options::default()).unwrap();
        let nowhere = || Setup::new("/nonexistent/store.sock");
        let vm = attach(nowhere()).unwrap();
        assert_ne!(supervisor().status(), Status::Detached);
        assert!(matches!(supervisor().attach(nowhere()), Err(Error::Attached)));
        assert!(attach(Setup::default()).is_err(), "without a store");
        assert_eq!(supervisor().status(), Status::Detached);
        let next = attach(nowhere()).unwrap();
        drop(vm);
        assert_ne!(supervisor().status(), Status::Detached, "the next one goes on");
        drop(next);
        assert_eq!(supervisor().status(), Status::Detached);
    }
}
