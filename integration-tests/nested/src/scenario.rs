//! The scenarios that L1 can play.

use crate::debian::Release;
use clap::ValueEnum;
use std::fmt;
use std::time::Duration;

/// A play of some guests on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Scenario {
    /// The reference VMM boots Linux with one CPU and with two, hears the keyboard, and powers off.
    Boot,
    /// A kernel before 6.8 is refused, and the guest does not start.
    OldKernel,
    /// Four same guests share; then KSM gets the same fleet.
    Same,
    /// Four guests with different work share, and go on working.
    Mixed,
    /// A store is killed and comes back, a guest is killed, another reboots, a third rewrites what it shares.
    Trouble,
    /// The host has no memory left for writers: they wait, and nobody is killed.
    Pressure,
    /// Guests on huge pages share.
    Huge,
    /// The kernel's DAMON tells which memory is used, of a process and of guests.
    Damon,
    /// Guests of QEMU and, if there is one, Cloud Hypervisor: `estimate` looks into them.
    Vmms,
    /// Guests of QEMU and, if there is one, Cloud Hypervisor read the same files, with agents and without.
    Agents,
    /// Cloud Hypervisor has a device that pins its guest's memory, and gives it back.
    Passthrough,
    /// L1's kernel panics: what is said then.
    #[value(hide = true)]
    Panic,
    /// L1 never ends: what is said then.
    #[value(hide = true)]
    Hang,
}

impl Scenario {
    /// Those that are of interest; the others test this harness.
    pub fn all() -> impl Iterator<Item = Self> {
        let shown = |scenario: &Self| {
            scenario
                .to_possible_value()
                .is_some_and(|value| !value.is_hide_set())
        };
        Self::value_variants().iter().copied().filter(shown)
    }

    /// Memory of L1.
    #[must_use]
    pub fn memory_mib(self) -> u64 {
        match self {
            Scenario::Boot | Scenario::OldKernel | Scenario::Panic | Scenario::Hang => 1024,
            // What is left is to be used up, which takes long in software.
            Scenario::Pressure => 1024,
            Scenario::Vmms | Scenario::Passthrough => 2560,
            Scenario::Agents => 4096,
            _ => 2048,
        }
    }

    /// L1's kernel.
    #[must_use]
    pub fn release(self) -> Release {
        match self {
            Scenario::OldKernel => Release::Bookworm,
            _ => Release::Trixie,
        }
    }

    /// The end of all patience, for a slow machine that does other things as well.
    #[must_use]
    pub fn limit(self) -> Duration {
        match self {
            Scenario::Hang => Duration::from_secs(20),
            // Four fleets, one after the other.
            Scenario::Agents => Duration::from_secs(3600),
            _ => Duration::from_secs(900),
        }
    }

    /// Whether what is found out depends on what happens within some milliseconds.
    pub(crate) fn measures_time(self) -> bool {
        self == Scenario::Damon
    }

    /// Whether L1 needs other VMMs than ours.
    pub(crate) fn wants_vmms(self) -> bool {
        matches!(self, Scenario::Vmms | Scenario::Agents | Scenario::Passthrough)
    }

    /// Whether guests need an agent, what programs of theirs mark, and a disk.
    pub(crate) fn wants_agents(self) -> bool {
        self == Scenario::Agents
    }

    /// Whether L1 needs a device to pass through, behind an IOMMU.
    pub(crate) fn wants_device(self) -> bool {
        self == Scenario::Passthrough
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scenario::Boot => "boot",
            Scenario::OldKernel => "old-kernel",
            Scenario::Same => "same",
            Scenario::Mixed => "mixed",
            Scenario::Trouble => "trouble",
            Scenario::Pressure => "pressure",
            Scenario::Huge => "huge",
            Scenario::Damon => "damon",
            Scenario::Vmms => "vmms",
            Scenario::Agents => "agents",
            Scenario::Passthrough => "passthrough",
            Scenario::Panic => "panic",
            Scenario::Hang => "hang",
        })
    }
}
