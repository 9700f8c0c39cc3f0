//! Which calls the engine makes while guest pages are away or frozen, and where it asks the allocator for memory while they are away.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use vmm_dedup::{Call, Observer, Site};

/// Notes what is called in windows, while it lives.
#[derive(Debug)]
pub struct Windows {
    _observer: Observer,
    seen: Arc<Mutex<Seen>>,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Windows in which pages were away.
    pub away: u64,
    /// Stretches that were frozen.
    pub frozen: u64,
    /// Calls that take memory for pages, made meanwhile.
    pub allocating: BTreeSet<Site>,
    /// From where the allocator was asked while pages were away: functions of the engine, the innermost first.
    pub asking: BTreeSet<String>,
    threads: HashMap<ThreadId, Now>,
}

/// What a thread holds.
#[derive(Clone, Copy, Debug, Default)]
struct Now {
    away: bool,
    frozen: u64,
}

impl Windows {
    /// Begins with none.
    #[must_use]
    pub fn watch() -> Self {
        lock(&ASKING).clear();
        let seen = Arc::<Mutex<Seen>>::default();
        let told = seen.clone();
        Self {
            _observer: Observer::begin(move |site| {
                AWAY.set(false);
                let away = lock(&told).note(site);
                AWAY.set(away);
            }),
            seen,
        }
    }

    /// What was seen so far.
    #[must_use]
    pub fn seen(&self) -> Seen {
        let asking = lock(&ASKING).clone();
        Seen {
            asking,
            ..lock(&self.seen).clone()
        }
    }
}

thread_local! {
    /// Whether pages are away in this thread.
    static AWAY: Cell<bool> = const { Cell::new(false) };
}

/// From where the allocator was asked meanwhile.
static ASKING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// An allocator that is the system's, and notes who asks for memory while [`Windows`] sees pages away.
#[derive(Debug)]
pub struct Heap;

#[allow(unsafe_code)] // an allocator
// SAFETY: the system's allocator does it.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note_asking();
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller, who has it from there.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note_asking();
        // SAFETY: as promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note_asking();
        // SAFETY: as promised by the caller, who has it from there.
        unsafe { System.realloc(at, layout, size) }
    }
}

fn note_asking() {
    // Noting asks as well.
    if AWAY.replace(false) {
        let trace = Backtrace::force_capture().to_string();
        let ours = |line: &&str| line.contains("vmm_dedup::") || line.contains("vmm_dedup_packed::");
        let functions: Vec<&str> = trace.lines().filter(ours).map(str::trim).take(3).collect();
        lock(&ASKING).insert(functions.join(" < "));
        AWAY.set(true);
    }
}

fn lock<T>(seen: &Mutex<T>) -> MutexGuard<'_, T> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seen {
    /// Notes a call; whether pages are away in this thread once it is made.
    fn note(&mut self, site: Site) -> bool {
        let window = site.file.ends_with("window/mod.rs");
        let frozen = site.file.ends_with("window/frozen.rs");
        let now = self.threads.entry(std::thread::current().id()).or_default();
        match site.call {
            Call::Move if window => {
                self.away += u64::from(!now.away);
                now.away = true;
            }
            Call::Wake if window => now.away = false,
            Call::Register if frozen => {
                self.frozen += 1;
                now.frozen += 1;
            }
            Call::Wake if frozen => now.frozen = now.frozen.saturating_sub(1),
            _ => {}
        }
        // Zeros are mapped over frozen pages: that takes no memory for pages.
        let beside = site.file.ends_with("run_builder.rs");
        let now = *now;
        let allocates = match site.call {
            Call::Populate => true,
            Call::MapAnonymous => !frozen,
            Call::MapSegment | Call::Copy => beside,
            _ => false,
        };
        if allocates && (now.away || now.frozen > 0) {
            self.allocating.insert(site);
        }
        now.away
    }
}
