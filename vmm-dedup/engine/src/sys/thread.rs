//! Threads of the engine: named, with all signals blocked, and with what an embedder wants of each of them.

use crate::seccomp::Part;
use crate::sys::sched;
use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

/// What every thread of the engine does first ([`Options::each`](crate::supervisor::Options::each)).
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

/// Starts a thread of the engine.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn spawn<T: Send + 'static>(
    part: Part,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let each = EACH.with_borrow(Clone::clone);
    Builder::new().name(part.name().into()).spawn(move || {
        enter(part, each);
        work()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Mutex;

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
