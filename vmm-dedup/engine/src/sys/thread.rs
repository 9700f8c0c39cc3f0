//! Threads of the engine: named, with all signals blocked, and with what an embedder wants of each of them.

use crate::seccomp::Part;
use crate::sys::page_size::{PAGE_SIZE, bytes};
use crate::sys::sched;
use std::cell::RefCell;
use std::io;
use std::sync::{Arc, mpsc};
use std::thread::{Builder, JoinHandle};

/// What every thread of the engine does first ([`Options::each`](crate::supervisor::Options::each)). Whoever starts a thread waits for
/// it: it must not wait for the supervisor, or for whoever may call that.
pub type Each = Arc<dyn Fn(Part) + Send + Sync>;

thread_local! {
    /// What threads do first that this one starts.
    static EACH: RefCell<Option<Each>> = const { RefCell::new(None) };
}

/// Begins the life of a thread of the engine: it does what `each` wants of it, and so do all that it starts.
pub(crate) fn enter(part: Part, each: Option<Each>) {
    sched::enter_service_thread();
    if let Some(each) = &each {
        each(part);
    }
    EACH.set(each);
}

/// Mappings that a thread needs when it starts (its stack, another one for signals, and a page that guards each), and as many for
/// others who map something meanwhile.
const MAPPINGS: usize = 16;

/// Whether the process can have some more mappings. The standard library ends the process if a thread that starts finds none for
/// its stack for signals, and the process is the VMM.
#[allow(unsafe_code)] // maps memory
fn try_mappings() -> io::Result<()> {
    let len = bytes(MAPPINGS);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice, which nobody accesses.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mut room = Ok(());
    // Every second page is a mapping of its own, and so is what is between.
    for page in (1..MAPPINGS).step_by(2) {
        // SAFETY: within that mapping.
        if unsafe { libc::mprotect(base.byte_add(bytes(page)), PAGE_SIZE, libc::PROT_READ) } < 0 {
            room = Err(io::Error::last_os_error());
            break;
        }
    }
    // SAFETY: all of that mapping.
    unsafe { libc::munmap(base, len) };
    room
}

/// Starts a thread of the engine, and waits until it has done what it does first. If that panics there is no such thread, and nothing
/// of its work was begun: nobody waits then for what it would have served.
///
/// # Errors
/// Those of the kernel; ENOMEM if the process has hardly any mappings left; that what it does first has panicked.
pub(crate) fn spawn<T: Send + 'static>(
    part: Part,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    try_mappings()?;
    let each = EACH.with_borrow(Clone::clone);
    let (begins, begun) = mpsc::sync_channel(1);
    let thread = Builder::new().name(part.name().into()).spawn(move || {
        enter(part, each);
        let _ = begins.send(());
        work()
    })?;
    if begun.recv().is_err() {
        let _ = thread.join();
        return Err(io::Error::other(format!(
            "{} has panicked before its work",
            part.name()
        )));
    }
    Ok(thread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Mutex;

    #[test]
    fn a_thread_that_panics_before_its_work_is_not_started() {
        let began = Arc::new(Mutex::new(false));
        let theirs = began.clone();
        let tried = std::thread::spawn(move || {
            let each = |part| assert_ne!(part, Part::Scan, "what the embedder does fails");
            enter(Part::Supervisor, Some(Arc::new(each)));
            spawn(Part::Scan, move || *crate::sync::lock(&theirs) = true).map(|_| ())
        });
        let error = tried.join().unwrap().unwrap_err();
        assert_eq!(error.to_string(), "dedup-scan has panicked before its work");
        assert!(!*crate::sync::lock(&began));
    }

    #[test]
    fn threads_of_threads_do_it_first_as_well() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let theirs = seen.clone();
        let each: Each = Arc::new(move |part| crate::sync::lock(&theirs).push(part));
        std::thread::spawn(move || {
            enter(Part::Supervisor, Some(each));
            let scan = spawn(Part::Scan, || spawn(Part::Damon, || ()).unwrap().join());
            scan.unwrap().join().unwrap().unwrap();
        })
        .join()
        .unwrap();
        spawn(Part::Fault, || ()).unwrap().join().unwrap();
        let seen = crate::sync::lock(&seen).clone();
        assert_eq!(seen, [Part::Supervisor, Part::Scan, Part::Damon]);
    }
}
