//! A supervisor with its thread, where no guest is needed.

use super::*;
use crate::config::Config;
use crate::memory::bitmap::Bits;
use crate::memory::layout::{Memory, Page};
use crate::sys::uffd::Uffd;
use crate::unmerge::cow::Breaker;
use crate::unmerge::discard::Discards;
use std::os::fd::AsFd;
use std::time::Instant;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_dedup_protocol::socket;

fn supervisor() -> Supervisor {
    Supervisor::spawn(Options::default()).unwrap()
}

/// A VM that looks for a store at a path.
fn setup(store: &std::path::Path) -> Setup {
    Setup {
        store: store.into(),
        agent: None,
        config: Config {
            name: "vm".into(),
            ..Config::default()
        },
    }
}

fn nowhere() -> Setup {
    setup("/nonexistent/store.sock".as_ref())
}

/// Memory in two regions.
fn memory() -> Arc<GuestMemoryMmap<()>> {
    let ranges = [(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 1 << 20)];
    Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap())
}

/// Waits until all letters so far are read.
fn settle(supervisor: &Supervisor) {
    assert_eq!(supervisor.with_service(|service| service.is_none()), Some(true));
}

/// The supervisor's thread has a bug.
fn die(supervisor: &Supervisor) {
    let died = supervisor.ask(Letter::Ask(Ask::Die)).0;
    assert!(matches!(died, Err(Error::Stopped)), "{died:?}");
}

#[test]
fn a_store_that_hangs_does_not_hang_whoever_asks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sock");
    let supervisor = supervisor();
    // It is there, and never answers.
    let listener = socket::listen(&path).unwrap();
    supervisor.attach(setup(&path)).unwrap();
    supervisor.add_memory(memory()).unwrap();
    for _ in 0..2 {
        // The store is asked by now.
        std::thread::sleep(Duration::from_millis(1500));
        let start = Instant::now();
        supervisor.pin().unwrap();
        supervisor.unpin();
        let waited = start.elapsed();
        assert!(waited < Duration::from_secs(6), "{waited:?}");
    }
    let start = Instant::now();
    supervisor.detach(false).unwrap();
    assert!(start.elapsed() < Duration::from_secs(6));
    drop(listener);
}

#[test]
fn settings_that_are_read_in_the_supervisors_thread_are_checked() {
    let supervisor = supervisor();
    supervisor.attach_with(nowhere(), || Ok(nowhere().with(|config| config.cpu_percent = 0)));
    settle(&supervisor);
    let status = supervisor.status();
    let says = |refusal: &Refusal| refusal.detail().contains("cpu_percent is 0");
    assert!(
        matches!(&status, Status::Refused(refusal) if says(refusal)),
        "{status:?}"
    );
}

/// A supervisor for whose threads of one part there is no place at first.
fn lacks_once(lacking: Part) -> Supervisor {
    let lacks = std::sync::atomic::AtomicBool::new(true);
    Supervisor::spawn(Options {
        each: Some(Arc::new(move |part| {
            let fails = part == lacking && lacks.swap(false, std::sync::atomic::Ordering::AcqRel);
            assert!(!fails, "no thread for now");
        })),
        ..Options::default()
    })
    .unwrap()
}

#[test]
fn a_refusal_is_announced_when_there_is_a_thread_for_that() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.sock");
    let listener = socket::listen(&path).unwrap();
    let supervisor = lacks_once(Part::Refused);
    supervisor.attach(setup(&path)).unwrap();
    supervisor.refuse(refusal::confidential()).unwrap();
    let bell = crate::sys::bell::Bell::new().unwrap();
    assert!(bell.wait(Duration::from_secs(60), Some(listener.as_fd())));
}

#[test]
fn memory_is_kept_for_a_vm_only() {
    let (supervisor, memory) = (supervisor(), memory());
    let add = || supervisor.add_memory(memory.clone()).unwrap();
    add();
    settle(&supervisor);
    assert_eq!(Arc::strong_count(&memory), 1, "there is no VM");
    supervisor.attach(nowhere()).unwrap();
    // Twice: the second time nothing is added, but kept.
    add();
    add();
    settle(&supervisor);
    assert_eq!(Arc::strong_count(&memory), 3);
    supervisor.detach(false).unwrap();
    assert_eq!(Arc::strong_count(&memory), 1, "the VM has ended");
}

#[test]
fn an_empty_range_is_nothing_even_within_a_page() {
    let supervisor = supervisor();
    let page = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
    let page = Arc::new(page);
    supervisor.attach(nowhere()).unwrap();
    supervisor.add_memory(page.clone()).unwrap();
    let start = HostRange::of_guest_memory(&*page).unwrap()[0].addresses().start;
    supervisor.remove_range(start + 5..start + 5).unwrap();
    assert_eq!(Arc::strong_count(&page), 2, "it is kept still");
    supervisor.remove_range(start + 5..start + 6).unwrap();
    assert_eq!(Arc::strong_count(&page), 1, "the page has gone");
}

#[test]
fn a_call_from_the_supervisors_own_thread_waits_for_nobody() {
    let supervisor = Arc::new(supervisor());
    let theirs = supervisor.clone();
    let asked = supervisor.with_service(move |_| {
        let removed = theirs.remove_range(0..4096);
        (theirs.pin(), removed, theirs.detach(true))
    });
    let stopped = matches!(
        asked,
        Some((Err(Error::Stopped), Err(Error::Stopped), Err(Error::Stopped)))
    );
    assert!(stopped, "{asked:?}");
    supervisor.pin().unwrap();
}

#[test]
fn a_pin_that_did_not_count_ends_no_other() {
    let supervisor = Arc::new(supervisor());
    supervisor.attach(nowhere()).unwrap();
    supervisor.add_memory(memory()).unwrap();
    supervisor.pin().unwrap();
    let theirs = supervisor.clone();
    let refused = supervisor.with_service(move |_| theirs.pinned().map(drop));
    assert!(matches!(refused, Some(Err(Error::Stopped))), "{refused:?}");
    // What it would have posted comes before this.
    supervisor.with_service(|_| ());
    assert_eq!(supervisor.status(), Status::Waiting(refusal::pinned()));
}

#[test]
fn a_pin_lasts_for_as_long_as_it_is_seen() {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    let supervisor = supervisor();
    let (seen, looks) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (still, counter) = (seen.clone(), looks.clone());
    let look = move || {
        counter.fetch_add(1, Ordering::AcqRel);
        still.load(Ordering::Acquire)
    };
    supervisor.pin_while(look).unwrap();
    supervisor.attach(nowhere()).unwrap();
    supervisor.add_memory(memory()).unwrap();
    let pinned = || supervisor.status() == Status::Waiting(refusal::pinned());
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    wait("it is not looked for twice", &|| {
        looks.load(Ordering::Acquire) > 1
    });
    assert!(pinned());
    seen.store(false, Ordering::Release);
    wait("the pin does not end", &|| !pinned());
}

#[test]
fn what_the_vmm_gave_may_panic_and_dedup_goes_on() {
    let supervisor = supervisor();
    assert_eq!(supervisor.with_service(|_| panic!("work")), None::<()>);
    supervisor.attach_with(nowhere(), || panic!("settings"));
    settle(&supervisor);
    assert_eq!(supervisor.status(), Status::Refused(refusal::unread()));
    supervisor.detach(false).unwrap();

    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("memory");
        }
    }
    let keep = |memory: &GuestMemoryMmap<()>| {
        let ranges = HostRange::of_guest_memory(memory).unwrap();
        supervisor.add(&ranges[..1], Some(Keep::new(Panics)));
        ranges[0].addresses()
    };
    let memory = memory();
    // Without a VM, by a removal, and by its end.
    keep(&memory);
    supervisor.attach(nowhere()).unwrap();
    let range = keep(&memory);
    supervisor.remove_range(range).unwrap();
    keep(&memory);
    supervisor.detach(false).unwrap();
    assert_eq!(supervisor.status(), Status::Detached);

    // Nobody can say that this pin has ended.
    let (looks, looked) = std::sync::mpsc::channel();
    let look = move || {
        looks.send(()).unwrap();
        panic!("a look");
    };
    supervisor.attach(nowhere()).unwrap();
    supervisor.add_memory(memory.clone()).unwrap();
    supervisor.pin_while(look).unwrap();
    looked.recv_timeout(Duration::from_secs(60)).unwrap();
    let again = looked.recv_timeout(Duration::from_secs(60));
    assert_eq!(again, Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
    settle(&supervisor);
    assert_eq!(supervisor.status(), Status::Waiting(refusal::pinned()));
    supervisor.detach(false).unwrap();
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn the_last_handle_may_go_in_the_supervisors_own_thread() {
    let (tell, told) = std::sync::mpsc::channel();
    let supervisor = Arc::new(supervisor());
    let shared = supervisor.shared.clone();
    let last = supervisor.clone();
    supervisor.post(Letter::Ask(Ask::Work(Box::new(move |_| {
        // The other one has gone by then.
        told.recv().unwrap();
        drop(last);
    }))));
    drop(supervisor);
    tell.send(()).unwrap();
    let start = Instant::now();
    while shared.letters.post(Letter::Ask(Ask::Nested)) {
        assert!(start.elapsed() < Duration::from_secs(60), "it does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_supervisor_that_has_died_serves_nothing_and_keeps_nothing() {
    let (supervisor, memory) = (supervisor(), memory());
    supervisor.attach(nowhere()).unwrap();
    supervisor.add_memory(memory.clone()).unwrap();
    settle(&supervisor);
    assert_ne!(supervisor.status(), Status::Detached);
    die(&supervisor);
    assert_eq!(supervisor.status(), Status::Detached);
    assert_eq!(supervisor.stats(), None);
    assert!(matches!(supervisor.detach(false), Err(Error::Stopped)));
    // Callers are told before the thread lets go of what it has.
    let start = Instant::now();
    while Arc::strong_count(&memory) > 1 {
        assert!(start.elapsed() < Duration::from_secs(60), "it keeps the memory");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
#[allow(unsafe_code)] // fork
fn a_child_by_fork_waits_for_nobody() {
    let supervisor = supervisor();
    let number = 1;
    supervisor.replace(number, nowhere()).unwrap();
    // As if another thread was at work on the memory just then.
    let discarder = supervisor.shared.discarder.clone();
    let held = discarder.hold();
    // SAFETY: the child takes no lock that another thread may have, and ends without unwinding.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let stopped = matches!(supervisor.pin(), Err(Error::Stopped))
            && matches!(supervisor.remove_range(0..4096), Err(Error::Stopped))
            && matches!(supervisor.detach(false), Err(Error::Stopped));
        // SAFETY: nothing is freed, since it says no.
        let said = unsafe { discarder.discard(4096, 4096) };
        let stopped = stopped && said.is_err_and(|error| error.kind() == std::io::ErrorKind::Unsupported);
        discarder.forget(4096, 4096);
        let stopped = stopped && !discarder.covers(4096, 4096);
        supervisor.end_of(number);
        let detached = supervisor.status() == Status::Detached && supervisor.stats().is_none();
        supervisor.unpin();
        drop(supervisor);
        // SAFETY: nothing of the process's is to be cleaned up here.
        unsafe { libc::_exit(i32::from(!(stopped && detached))) };
    }
    let (start, mut status) = (Instant::now(), 0);
    // SAFETY: status is a valid, exclusive int.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if start.elapsed() > Duration::from_secs(60) {
            // SAFETY: our own child, which has not been waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status, 0, "it says no, or waits for ever");
    drop(held);
    supervisor.pin().unwrap();
}

#[test]
#[allow(unsafe_code)] // mprotect
fn memory_that_is_protected_when_it_comes_is_refused() {
    let supervisor = supervisor();
    let memory = memory();
    let range = HostRange::of_guest_memory(&*memory).unwrap()[0];
    let addresses = range.addresses();
    let unknown = supervisor.leave_alone(addresses.clone(), refusal::protected());
    assert!(matches!(unknown, Err(Error::Detached)), "{unknown:?}");
    supervisor.attach(nowhere()).unwrap();
    let unknown = supervisor.leave_alone(addresses.clone(), refusal::protected());
    assert!(matches!(unknown, Err(Error::NotAdded { .. })), "{unknown:?}");
    for access in [libc::PROT_NONE, libc::PROT_READ] {
        // SAFETY: a page in the middle of memory of our own, which nobody uses.
        let protected = unsafe { libc::mprotect((addresses.start + 8192) as *mut _, 4096, access) };
        assert_eq!(protected, 0);
        let refused = Memory::new(&[range]);
        assert!(
            matches!(refused, Err(Error::Protected(at)) if at == addresses.start + 8192),
            "{refused:?}"
        );
    }
    assert_eq!(
        Refusal::from(&Error::Protected(addresses.start)),
        refusal::protected()
    );
    supervisor.add_memory(memory).unwrap();
    supervisor.leave_alone(addresses, refusal::protected()).unwrap();
}

#[test]
fn all_memory_may_go_at_once() {
    let (supervisor, memory) = (supervisor(), memory());
    supervisor.attach(nowhere()).unwrap();
    supervisor.add_memory(memory.clone()).unwrap();
    supervisor.remove_range(0..usize::MAX).unwrap();
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn what_stands_for_a_vm_that_ended_before_forgets_no_memory_of_the_last_one() {
    let supervisor = supervisor();
    for number in [1, 2] {
        supervisor.replace(number, nowhere()).unwrap();
    }
    let (discarder, memory) = (supervisor.discarder(), memory());
    let range = HostRange::of_guest_memory(&*memory).unwrap()[0];
    let (start, len) = (range.addresses().start, range.addresses().len());
    let Ok(tracker) = Uffd::tracker() else {
        assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
        return eprintln!("SKIPPED: no userfaultfd");
    };
    discarder.adopt(&discarder_of(range, tracker, &[]));
    die(&supervisor);
    // The second VM goes on, and what it frees must read as zeros.
    supervisor.end_of(1);
    assert!(discarder.covers(start, len));
    supervisor.end_of(2);
    assert!(!discarder.covers(start, len));
}

#[test]
fn what_stands_for_a_vm_that_was_detached_ends_nothing_more() {
    let supervisor = supervisor();
    supervisor.replace(1, nowhere()).unwrap();
    assert_eq!(supervisor.shared.number(), Some(1));
    supervisor.detach(false).unwrap();
    assert_eq!(supervisor.shared.number(), None);
}

#[test]
fn where_nothing_is_merged_any_more_a_device_may_have_the_memory() {
    let supervisor = supervisor();
    supervisor.attach(nowhere()).unwrap();
    supervisor.add_memory(memory()).unwrap();
    die(&supervisor);
    drop(supervisor.pinned().unwrap());
    assert!(matches!(supervisor.pin(), Err(Error::Stopped)));
    // The same where there never was a thread.
    let dead = Supervisor::dead();
    drop(dead.pinned().unwrap());
    assert!(matches!(dead.attach(nowhere()), Err(Error::Stopped)));
    assert_eq!(dead.status(), Status::Detached);
    dead.unpin();
}

/// What is told where memory was renewed may free memory itself, and may panic.
#[test]
#[allow(unsafe_code)] // frees memory
fn whoever_is_told_of_renewed_memory_holds_no_lock() {
    let memory = memory();
    let range = HostRange::of_guest_memory(&*memory).unwrap()[0];
    let start = range.addresses().start;
    let Ok(tracker) = Uffd::tracker() else {
        assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let discarder = discarder_of(range, tracker, &[0, 2]);
    let (tell, told) = std::sync::mpsc::channel();
    let theirs = discarder.clone();
    let discards = std::thread::spawn(move || {
        let again = |range: Range<usize>| {
            // SAFETY: memory of the test, which nobody uses.
            unsafe { theirs.discard(range.start, range.len()) }.unwrap();
            tell.send(range.start).unwrap();
        };
        // SAFETY: as above.
        unsafe { theirs.discard_and_tell(start, 4 * PAGE_SIZE, again) }
    });
    let renewed = || told.recv_timeout(Duration::from_secs(60));
    assert_eq!(
        [renewed(), renewed()],
        [Ok(start), Ok(start + 2 * PAGE_SIZE)],
        "it waits for itself"
    );
    discards.join().unwrap().unwrap();
    let panics = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as above.
        unsafe { discarder.discard_and_tell(start, PAGE_SIZE, |_| panic!("the VMM's")) }
    }));
    assert!(panics.is_err());
    // SAFETY: as above.
    unsafe { discarder.discard(start, PAGE_SIZE) }.unwrap();
    discarder.forget(start, PAGE_SIZE);
}

/// What frees memory of a service that has this memory, with pages of it in mappings of a store.
fn discarder_of(range: HostRange, tracker: Uffd, in_store: &[Page]) -> Discarder {
    let memory = Arc::new(Memory::new(&[range]).unwrap());
    let in_file = Arc::new(Bits::new(memory.end()));
    in_store.iter().for_each(|page| in_file.set(*page, true));
    let breaker = Breaker::new(Arc::new(tracker), memory.clone(), None).unwrap();
    Discarder::of(Arc::new(Discards::new(memory, in_file)), Arc::new(breaker), None)
}
