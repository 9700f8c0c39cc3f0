//! The supervisor of a process, for a VMM whose crates do not know each other: whoever frees memory, plugs it in or pins it finds
//! the supervisor here. (A [`Supervisor`] of one's own is the same without this.)

use crate::config::Setup;
use crate::error::Error;
use crate::supervisor::{Options, Supervisor};
use crate::sync::{Mutex, lock};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

static SUPERVISOR: OnceLock<Supervisor> = OnceLock::new();

/// Held by whoever makes the supervisor: there is never a second thread that would do what the options want of the first.
static MAKES: Mutex<()> = Mutex::new(());

/// The number of the next VM. Which one there is the supervisor's thread knows: nobody holds a lock while that works, or drops what it
/// kept.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Makes the process's supervisor, from a thread that is not restricted.
///
/// # Errors
/// Those of [`Supervisor::spawn`]: there is one then as if its thread had died, so that none is made later by a thread that is restricted, and
/// VMs run without dedup. [`Error::Supervised`]: there is one already, which goes on, and what these options want (a filter of each thread)
/// does not hold for it.
pub fn spawn(options: Options) -> Result<(), Error> {
    let _makes = lock(&MAKES);
    if SUPERVISOR.get().is_some() {
        return Err(Error::Supervised);
    }
    let (supervisor, spawned) = match Supervisor::spawn(options) {
        Ok(supervisor) => (supervisor, Ok(())),
        Err(error) => (Supervisor::dead(), Err(error)),
    };
    // Nobody else sets it meanwhile.
    let _ = SUPERVISOR.set(supervisor);
    spawned
}

/// The process's supervisor. Where nobody has made one, as in tests of a VMM's parts, this makes one with the default options,
/// which deduplicates nothing as long as nobody attaches a VM. Where there is no thread to be had, it is as one whose thread has died.
pub fn supervisor() -> &'static Supervisor {
    // A child by fork may never get the lock.
    if let Some(supervisor) = SUPERVISOR.get() {
        return supervisor;
    }
    let _makes = lock(&MAKES);
    SUPERVISOR.get_or_init(|| Supervisor::spawn(Options::default()).unwrap_or_else(|_| Supervisor::dead()))
}

/// A VM begins ([`Supervisor::attach`]), and ends where what this returns is dropped: keep it with the VM. A VM of which somebody
/// it still ends first.
///
/// # Errors
/// Those of [`Supervisor::attach`]; then there is no VM.
pub fn attach(setup: Setup) -> Result<Attached, Error> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    supervisor().replace(number, setup)?;
    Ok(Attached(number))
}

/// A VM that has begun, and ends where this is dropped ([`Supervisor::detach`] without unmerging): when no vCPU runs any more.
/// The supervisor keeps the VM's memory until then. If another VM has begun meanwhile, this one has ended before, and nothing happens.
/// In the supervisor's own thread (see [`Supervisor`]) the VM ends behind what that thread does. Where the supervisor has died the
/// same holds: the memory of its last VM is forgotten when what stands for that one is dropped, and of no other.
#[derive(Debug)]
#[must_use = "the VM ends where this is dropped"]
pub struct Attached(u64);

impl Drop for Attached {
    fn drop(&mut self) {
        supervisor().end_of(self.0);
    }
}

/// madvise(MADV_DONTNEED) for guest memory, whether it is deduplicated or not ([`Discarder`](crate::Discarder)). Where nobody has made
/// a supervisor nothing is deduplicated, and none is made.
///
/// # Errors
/// Those of madvise.
///
/// # Safety
/// As for [`Discarder::discard`](crate::Discarder::discard).
#[allow(unsafe_code)] // frees memory, as the caller promises
pub unsafe fn discard(address: *const u8, len: usize) -> io::Result<()> {
    let discarder = SUPERVISOR.get().map(Supervisor::discarder).unwrap_or_default();
    // SAFETY: the caller's promise.
    unsafe { discarder.discard(address as usize, len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::Status;

    #[test]
    fn a_vm_ends_with_what_stands_for_it() {
        supervisor();
        let again = spawn(Options {
            first: Some(Box::new(|| panic!("it is not the first"))),
            ..Options::default()
        });
        assert!(matches!(again, Err(Error::Supervised)), "{again:?}");
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
        // One that began in another way is nobody's.
        let ended = attach(nowhere()).unwrap();
        supervisor().detach(false).unwrap();
        supervisor().attach(nowhere()).unwrap();
        drop(ended);
        assert_ne!(supervisor().status(), Status::Detached);
        supervisor().detach(false).unwrap();
    }

    /// The other tests make a supervisor: this one is a process of its own.
    #[test]
    #[allow(unsafe_code)] // frees memory
    fn what_is_freed_where_nobody_deduplicates_makes_no_thread() {
        const ALONE: &str = "VMM_DEDUP_FREES_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let name = "process::tests::what_is_freed_where_nobody_deduplicates_makes_no_thread";
            let mut test = std::process::Command::new(std::env::current_exe().unwrap());
            let test = test.args(["--exact", name]).env(ALONE, "").output().unwrap();
            assert!(test.status.success(), "{test:?}");
            return;
        }
        let page = crate::sys::vma::Anonymous::new(1).unwrap();
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        let before = threads();
        // SAFETY: a page of our own, which is not needed.
        unsafe {
            crate::sys::guest::store_page(page.base(), &[7; 512]);
            discard(page.base() as *const u8, 4096).unwrap();
            assert!(crate::sys::guest::is_zero_page(page.base()));
        }
        assert_eq!(threads(), before);
    }

    #[test]
    fn a_vm_may_end_in_the_supervisors_thread_while_another_begins() {
        let nowhere = || Setup::new("/nonexistent/store.sock");
        let vm = attach(nowhere()).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let (works, working) = std::sync::mpsc::channel();
        let worker = std::thread::spawn(move || {
            supervisor().with_service(move |_| {
                works.send(()).unwrap();
                told.recv().unwrap();
                drop(vm);
            })
        });
        working.recv().unwrap();
        let beginner = std::thread::spawn(move || attach(nowhere()));
        // By then it waits for the thread.
        std::thread::sleep(std::time::Duration::from_millis(100));
        tell.send(()).unwrap();
        assert_eq!(worker.join().unwrap(), Some(()));
        let next = beginner.join().unwrap().unwrap();
        // The end of the first one has been read by now.
        assert_eq!(supervisor().with_service(|_| ()), Some(()));
        assert_ne!(supervisor().status(), Status::Detached, "the next one goes on");
        // Alone it ends there as well.
        supervisor().with_service(move |_| drop(next)).unwrap();
        assert_eq!(supervisor().with_service(|_| ()), Some(()));
        assert_eq!(supervisor().status(), Status::Detached);
    }
}
