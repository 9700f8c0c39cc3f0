//! L1's part: plays a scenario with the programs in its initial RAM disk, and tells L0 what happens.

mod agents;
mod damon;
mod fleet;
mod ksm;
mod memory_of;
mod passthrough;
mod sharing;
mod store;
mod trouble;
pub(crate) mod vmm;

use crate::event::Event;
use crate::wait::wait_for;
use crate::{Failure, Scenario};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::time::Instant;

pub use ksm::run_mergeable;

/// L1's port to L0: the first one behind a virtio-serial device's console.
const EVENTS: &str = "/dev/vport0p1";

/// Plays a scenario and tells how it went.
///
/// # Errors
/// If L0 cannot be told.
pub fn play(scenario: Scenario) -> Result<(), Failure> {
    let mut stage = Stage::new()?;
    let result = match scenario {
        Scenario::Boot => sharing::boot(&mut stage),
        Scenario::OldKernel => sharing::old_kernel(&mut stage),
        Scenario::Same => sharing::same(&mut stage),
        Scenario::Mixed => sharing::mixed(&mut stage),
        Scenario::Huge => sharing::huge(&mut stage),
        Scenario::Damon => damon::damon(&mut stage),
        Scenario::Vmms => sharing::vmms(&mut stage),
        Scenario::Agents => agents::agents(&mut stage),
        Scenario::Passthrough => passthrough::passthrough(&mut stage),
        Scenario::Trouble => trouble::trouble(&mut stage),
        Scenario::Pressure => trouble::pressure(&mut stage),
        Scenario::Panic => trouble::panic(),
        Scenario::Hang => trouble::hang(),
    };
    match result {
        Ok(()) => stage.tell(&Event::Done),
        Err(failure) => stage.tell(&Event::Failed(failure.to_string())),
    }
}

/// Where a scenario is played: the line to L0.
struct Stage {
    events: File,
    start: Instant,
}

impl Stage {
    fn new() -> Result<Self, Failure> {
        let events = wait_for(EVENTS, || Ok(OpenOptions::new().write(true).open(EVENTS).ok()))?;
        Ok(Self {
            events,
            start: Instant::now(),
        })
    }

    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        let mut line = serde_json::to_string(event).map_err(|e| Failure::new(e.to_string()))?;
        line.push('\n');
        // When this returns, L0 has it.
        let written = self.events.write_all(line.as_bytes());
        written.map_err(|e| Failure::new(format!("{EVENTS} cannot be written: {e}")))
    }

    fn note(&mut self, text: impl Into<String>) -> Result<(), Failure> {
        let seconds = self.start.elapsed().as_secs_f64();
        self.tell(&Event::Note(format!("{seconds:6.1} s  {}", text.into())))
    }

    fn measured(&mut self, name: &str, value: impl Serialize) -> Result<(), Failure> {
        let value = serde_json::to_value(value).map_err(|e| Failure::new(e.to_string()))?;
        self.note(format!("{name}: {value}"))?;
        self.tell(&Event::Measured(name.to_owned(), value))
    }

    fn file(&mut self, name: &str, text: String) -> Result<(), Failure> {
        self.tell(&Event::File(name.to_owned(), text))
    }
}
