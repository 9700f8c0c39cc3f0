//! The engine that verifies taken pages, if the settings name one: made, told what it may read, let go when it fails.
//!
//! Making and dropping one may take a while, so both happen between windows. Within a window [`Verifier`] asks it, and has
//! the CPU do what it does not.

use crate::compare::registry::CPU;
use crate::compare::{DeviceWork, Engines, Error, Retry, Verifier};
use crate::config::Config;
use crate::store::connection::Store;
use crate::store::told_segments::ToldSegments;
use std::path::PathBuf;
use std::time::Duration;

/// What verifies a service's pages.
#[derive(Debug)]
pub(crate) struct VerifyEngine {
    /// What the settings ask for.
    name: String,
    socket: Option<PathBuf>,
    engines: Engines,
    verifier: Verifier,
    told: ToldSegments,
    retry: Retry,
    /// The number of the pass.
    pass: u64,
    /// CPU time of the helpers of engines that are gone, ns.
    past_helper_ns: u64,
    /// What their devices did.
    past_device: DeviceWork,
    booked_helper_ns: u64,
}

impl VerifyEngine {
    /// Makes no engine yet.
    pub(crate) fn new(config: &Config, engines: Engines) -> Self {
        let patience = Duration::from_micros(config.verify.timeout_us);
        Self {
            name: config.verify.engine.clone(),
            socket: config.verify.socket.clone(),
            engines,
            verifier: Verifier::new(config.verify.trusted, patience),
            told: ToldSegments::default(),
            retry: Retry::default(),
            pass: 0,
            past_helper_ns: 0,
            past_device: DeviceWork::default(),
            booked_helper_ns: 0,
        }
    }

    /// Before a pass: lets go of an engine that has failed since the last one, and makes one if it is time for that.
    pub(crate) fn prepare(&mut self, pass: u64) {
        self.pass = pass;
        self.clean_up();
        if self.name == CPU || self.verifier.has_engine() || !self.retry.is_due(pass) {
            return;
        }
        let made = self.engines.verifier(&self.name, self.socket.as_deref());
        if let Err(error) = made.and_then(|engine| self.verifier.attach(engine)) {
            self.note_failure(&error);
        }
    }

    /// Before pages are taken or frozen: lets the engine read what the store has now. (It must not compare with a segment
    /// that another one has taken the place of.)
    pub(crate) fn begin_window(&mut self, store: &Store) -> &mut Verifier {
        let told = match self.verifier.engine() {
            Some(engine) => self.told.tell(engine, store),
            None => Ok(()),
        };
        if let Err(error) = told {
            self.verifier.fail(error);
        }
        &mut self.verifier
    }

    /// After some windows: lets go of an engine that has failed in one.
    pub(crate) fn clean_up(&mut self) {
        if let Some(error) = self.verifier.failure() {
            self.note_failure(&error);
        }
    }

    /// Lets go of the engine, which may read the store that there was.
    pub(crate) fn forget_store(&mut self) {
        self.past_helper_ns += self.verifier.helper_cpu_ns();
        self.past_device = self.device_work();
        self.verifier.detach();
        self.told = ToldSegments::default();
    }

    fn note_failure(&mut self, error: &Error) {
        let (name, pause) = (&self.name, self.retry.fail(self.pass));
        log::warn!("no verification by {name} for {pause} passes, but by the CPU: {error}");
        self.forget_store();
    }

    /// What verifies now, by its name in settings.
    pub(crate) fn name(&self) -> &str {
        if self.verifier.has_engine() {
            &self.name
        } else {
            CPU
        }
    }

    /// Times that an engine failed or could not be made.
    pub(crate) fn failures(&self) -> u64 {
        self.retry.failures()
    }

    /// Pairs that engines have compared.
    pub(crate) fn answered(&self) -> u64 {
        self.verifier.answered()
    }

    /// What devices of engines were given to do.
    pub(crate) fn device_work(&self) -> DeviceWork {
        self.past_device.and(&self.verifier.device_work())
    }

    /// CPU time of threads that drive engines, ns.
    pub(crate) fn helper_cpu_ns(&self) -> u64 {
        self.past_helper_ns + self.verifier.helper_cpu_ns()
    }

    /// What of it was not booked yet.
    pub(crate) fn book_helper_cpu_ns(&mut self) -> u64 {
        let now = self.helper_cpu_ns();
        now.saturating_sub(std::mem::replace(&mut self.booked_helper_ns, now))
    }
}
