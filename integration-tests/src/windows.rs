//! Which calls the engine makes while guest pages are away or frozen.

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
        let seen = Arc::<Mutex<Seen>>::default();
        let told = seen.clone();
        Self {
            _observer: Observer::begin(move |site| lock(&told).note(site)),
            seen,
        }
    }

    /// What was seen so far.
    #[must_use]
    pub fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seen {
    fn note(&mut self, site: Site) {
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
        let allocates = match site.call {
            Call::Populate => true,
            Call::MapAnonymous => !frozen,
            Call::MapSegment | Call::Copy => beside,
            _ => false,
        };
        if allocates && (now.away || now.frozen > 0) {
            self.allocating.insert(site);
        }
    }
}
