//! Guests that start together.

use super::store::Stat;
use super::{Stage, store};
use crate::guest::{Guest, cmdline};
use crate::wait::wait_for;
use crate::{Failure, Workload};
use std::process::Command;
use std::time::Instant;
use vmm_dedup_protocol::control::Switch;

const KERNEL: &str = "/vmlinuz";
const INITRD: &str = "/guest.cpio";

/// How a guest is run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) memory_mib: u32,
    /// Under our engine, which is switched off until the guests are up.
    pub(super) dedup: bool,
    /// Mergeable by KSM.
    pub(super) mergeable: bool,
    /// More arguments for `vmm-dedup run`.
    pub(super) arguments: &'static [&'static str],
}

impl Plan {
    /// Small, with dedup.
    pub(super) const DEDUP: Self = Self {
        memory_mib: 192,
        dedup: true,
        mergeable: false,
        arguments: &[],
    };

    /// The reference VMM, with a guest.
    pub(super) fn command(self, name: &str, workload: Workload) -> Command {
        let mut command = if self.mergeable {
            let mut command = Command::new("vmm-dedup-nested");
            command.args(["mergeable", "--", "vmm-dedup"]);
            command
        } else {
            Command::new("vmm-dedup")
        };
        command.args(["run", "--kernel", KERNEL, "--initrd", INITRD]);
        command.args(["--memory-mib", &self.memory_mib.to_string()]);
        command.args(["--cmdline", &cmdline(name, workload), "--name", name]);
        if self.dedup {
            command.args(["--store", store::SOCKET]);
        }
        command.args(self.arguments);
        command
    }

    /// Starts a guest, which boots with dedup switched off.
    pub(super) fn start(self, name: &str, workload: Workload) -> Result<Guest, Failure> {
        let guest = Guest::start(name, &mut self.command(name, workload))?;
        if self.dedup {
            store::switch(name, Switch::Off)?;
        }
        Ok(guest)
    }
}

/// Some guests.
pub(super) struct Fleet {
    pub(super) guests: Vec<Guest>,
}

impl Fleet {
    /// Starts guests, all at once, and waits until they are up.
    pub(super) fn start(stage: &mut Stage, plan: Plan, workloads: &[Workload]) -> Result<Self, Failure> {
        let mut guests = Vec::new();
        for (workload, number) in workloads.iter().zip(1..) {
            guests.push(plan.start(&format!("{workload}{number}"), *workload)?);
        }
        let mut fleet = Self { guests };
        fleet.wait("L2 ready")?;
        stage.note(format!("{} guests are up", fleet.guests.len()))?;
        Ok(fleet)
    }

    /// Every guest has worked on since `before`, which is what it had done.
    pub(super) fn wait_for_work(&mut self) -> Result<(), Failure> {
        for guest in &mut self.guests {
            let before = guest.progress()?;
            wait_for(&format!("{} to do more work", guest.name.clone()), || {
                Ok((guest.progress()? > before).then_some(()))
            })?;
        }
        Ok(())
    }

    /// Lets the guests share, until nothing more is to be saved; returns the account, and how long it took.
    pub(super) fn share(&self) -> Result<(Stat, f64), Failure> {
        let start = Instant::now();
        self.guests
            .iter()
            .try_for_each(|guest| store::switch(&guest.name, Switch::On))?;
        Ok((store::settle()?, start.elapsed().as_secs_f64()))
    }

    /// Types a line to every guest.
    pub(super) fn type_line(&mut self, text: &str) -> Result<(), Failure> {
        self.guests.iter_mut().try_for_each(|guest| guest.type_line(text))
    }

    /// Waits until every guest has said something.
    pub(super) fn wait(&mut self, part: &str) -> Result<(), Failure> {
        self.guests
            .iter_mut()
            .try_for_each(|guest| guest.wait(part).map(drop))
    }

    /// Lets writers write all of their files anew, in place.
    pub(super) fn rewrite(&mut self, what: &str) -> Result<(), Failure> {
        self.type_line(&format!("rewrite {what}"))?;
        self.wait(&format!("L2 rewrote {what}"))
    }

    /// Lets every guest verify what it has.
    pub(super) fn verify(&mut self) -> Result<(), Failure> {
        // All at once: verifying takes long.
        self.type_line("verify")?;
        self.guests.iter_mut().try_for_each(Guest::verified)
    }

    pub(super) fn power_off(mut self) -> Result<(), Failure> {
        self.type_line("poweroff")?;
        self.guests.iter_mut().try_for_each(Guest::powered_off)
    }
}
