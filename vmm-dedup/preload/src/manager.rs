//! The supervisor of this process, which owns the service: it starts before the VMM restricts itself, so its threads are
//! unfiltered.

use crate::logging;
use crate::settings::Settings;
use std::cell::Cell;
use std::sync::OnceLock;
use std::time::Duration;
use vmm_dedup::{Discarder, Error, Options, Supervisor};

thread_local! {
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Whether what the calling thread does is our own doing or the engine's, and not the VMM's.
pub(crate) fn is_ours() -> bool {
    OURS.get() || vmm_dedup::in_service_thread()
}

/// While this lives, what the calling thread does is our own doing, in a thread of the VMM.
#[derive(Debug)]
pub(crate) struct Ours {
    before: bool,
}

impl Ours {
    pub(crate) fn begin() -> Self {
        Self {
            before: OURS.replace(true),
        }
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        OURS.set(self.before);
    }
}

/// Does something of ours in a thread of the VMM.
pub(crate) fn as_ours<T>(work: impl FnOnce() -> T) -> T {
    let _ours = Ours::begin();
    work()
}

/// How long to wait for more memory slots before the service starts.
const SETTLE: Duration = Duration::from_millis(20);

/// The one there is, and its discarder.
static SUPERVISOR: OnceLock<(Supervisor, Discarder)> = OnceLock::new();

/// The supervisor, once it was started.
pub(crate) fn supervisor() -> Option<&'static Supervisor> {
    SUPERVISOR.get().map(|(supervisor, _)| supervisor)
}

/// Lets the supervisor do something that the VMM's call has to wait for. What fails it has logged; the call goes through.
pub(crate) fn tell(what: impl FnOnce(&Supervisor) -> Result<(), Error>) {
    let _ = supervisor().map(what);
}

/// What frees guest memory.
pub(crate) fn discarder() -> Option<&'static Discarder> {
    SUPERVISOR.get().map(|(_, discarder)| discarder)
}

/// Starts the supervisor; whether that worked.
pub(crate) fn spawn(settings: &'static Settings) -> bool {
    let options = Options {
        engines: vmm_dedup_engines::engines(),
        // Guests that run guests, and devices, are noticed by the hooks; everything else that pins guest memory is an open file.
        vouch_for_pins: true,
        settle: SETTLE,
        may_be_filtered: settings.allows_filters(),
        first: Some(Box::new(|| logging::start(settings))),
        ..Options::default()
    };
    let Ok(supervisor) = Supervisor::spawn(options) else {
        return false;
    };
    supervisor.attach_with(settings.fallback(), || settings.setup());
    let discarder = supervisor.discarder();
    SUPERVISOR.set((supervisor, discarder)).is_ok()
}
