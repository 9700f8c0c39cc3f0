//! What the guest is asked to do, and the command line that says so.

use std::fmt;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// The guest's image, tables and stack, and the first megabyte, which it leaves alone.
const OVERHEAD: u64 = 4 * MIB;

/// Which areas the working set is spread over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkingSet {
    /// All of them, evenly.
    #[default]
    All,
    /// Copies of the initrd.
    Files,
    /// Random pages of this guest's own.
    Private,
    /// Zero pages.
    Zero,
    /// Random pages that every guest with the same common seed has.
    Common,
}

/// What becomes of written pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rewrite {
    /// They stay as they are; pages are picked at random.
    #[default]
    None,
    /// One pass over the working set writes every page, the next one restores the original content.
    Restore,
}

/// What the guest does when it has nothing to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Idle {
    /// Halts, so that the vCPU thread sleeps.
    #[default]
    Halt,
    /// Looks at the clock until it is time. For VMMs without a local APIC timer.
    Spin,
}

/// A device that the guest is to drive instead of working on its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// None: it works on its memory.
    #[default]
    None,
    /// A PageForge on PCI: it must find duplicates and make keys, by polling, by MSI-X and through its window.
    PageForge,
}

/// A combination of settings that cannot work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The areas do not fit.
    #[error(
        "the payload needs {needed_mib} MiB of guest memory and there are {memory_mib}: give the VM more, or shrink the areas"
    )]
    MemoryTooSmall {
        /// What the areas, the initrd and the guest itself need.
        needed_mib: u64,
        /// What the VM has.
        memory_mib: u64,
    },
}

/// The guest's parameters; the default is a small and short run.
///
/// Without [`tsc_khz`](Self::tsc_khz) the guest asks the hypervisor's CPUID leaf and then guesses, which makes
/// rates and durations wrong by the same factor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct PayloadConfig {
    seed: u64,
    private_mib: u64,
    zero_mib: u64,
    common_mib: u64,
    common_seed: u64,
    own_every: u64,
    copies: u64,
    ws_pages: u64,
    ws_area: WorkingSet,
    rate: u64,
    reads: u64,
    seconds: u64,
    max_writes: u64,
    rewrite: Rewrite,
    rest_ms: u64,
    report_ms: u64,
    tsc_khz: u64,
    idle: Idle,
    device: Device,
}

impl Default for PayloadConfig {
    fn default() -> Self {
        PayloadConfig {
            seed: 1,
            private_mib: 8,
            zero_mib: 8,
            common_mib: 0,
            common_seed: 1,
            own_every: 0,
            copies: 1,
            ws_pages: 1024,
            ws_area: WorkingSet::All,
            rate: 10_000,
            reads: 1,
            seconds: 5,
            max_writes: 0,
            rewrite: Rewrite::None,
            rest_ms: 0,
            report_ms: 500,
            tsc_khz: 0,
            idle: Idle::Halt,
            device: Device::None,
        }
    }
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => { impl PayloadConfig { $(
        $(#[$doc])*
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $name;
            self
        }
    )* } };
}

setters! {
    /// Seed of the private area, of the marks that writes leave, and of the choice of pages.
    seed: u64;
    /// Size of the private area.
    private_mib: u64;
    /// Size of the zero area. It is written, so it is populated.
    zero_mib: u64;
    /// Size of the common area.
    common_mib: u64;
    /// Seed of the common area: guests with the same one have the same pages.
    common_seed: u64;
    /// Every so manieth page of the common area is the guest's own, from its own seed; 0: none.
    own_every: u64;
    /// How often the initrd is copied into the files area.
    copies: u64;
    /// Pages in the working set; 0 makes an idle guest, more pages than there are means all.
    ws_pages: u64;
    /// Where the working set lies.
    ws_area: WorkingSet;
    /// Writes (with [`Rewrite::Restore`]: writes and restores) per second; 0 means as fast as possible.
    rate: u64;
    /// Random pages of the working set that are read and verified for each write.
    reads: u64;
    /// Length of the run; 0 goes straight to the final verification.
    seconds: u64;
    /// Ends the run after this many writes, give or take a batch; 0 sets no such end.
    max_writes: u64;
    /// What becomes of written pages.
    rewrite: Rewrite;
    /// With [`Rewrite::Restore`]: the pause after a round, in which all pages have their original content.
    rest_ms: u64;
    /// Time between two ticks. The guest looks for `q`, `b` and `f` on the serial line at the same time.
    report_ms: u64;
    /// Frequency of the time stamp counter that the guest sees.
    tsc_khz: u64;
    /// What the guest does when it has nothing to do.
    idle: Idle;
    /// A device that it drives instead of all that; it then reports [`Report::Check`](crate::Report::Check).
    device: Device;
}

impl PayloadConfig {
    /// The kernel command line.
    #[must_use]
    pub fn command_line(&self) -> String {
        self.to_string()
    }

    /// Guest memory that these settings need with an initrd of `initrd_bytes`.
    #[must_use]
    pub fn needed_mib(&self, initrd_bytes: u64) -> u64 {
        let initrd = initrd_bytes.next_multiple_of(PAGE);
        let areas = (self
            .private_mib
            .saturating_add(self.zero_mib)
            .saturating_add(self.common_mib))
        .saturating_mul(MIB)
        .saturating_add(initrd.saturating_mul(self.copies));
        let book = areas / PAGE * 8 + initrd / PAGE * 8 + 2 * PAGE;
        areas
            .saturating_add(initrd)
            .saturating_add(book)
            .saturating_add(OVERHEAD)
            .div_ceil(MIB)
    }

    /// Checks that the areas fit into a VM's memory.
    ///
    /// # Errors
    /// [`ConfigError::MemoryTooSmall`] if not.
    pub fn check_fits(&self, memory_mib: u64, initrd_bytes: u64) -> Result<(), ConfigError> {
        let needed_mib = self.needed_mib(initrd_bytes);
        if needed_mib > memory_mib {
            return Err(ConfigError::MemoryTooSmall {
                needed_mib,
                memory_mib,
            });
        }
        Ok(())
    }
}

impl fmt::Display for PayloadConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ws_area = match self.ws_area {
            WorkingSet::All => "all",
            WorkingSet::Files => "files",
            WorkingSet::Private => "private",
            WorkingSet::Zero => "zero",
            WorkingSet::Common => "common",
        };
        let rewrite = match self.rewrite {
            Rewrite::None => "none",
            Rewrite::Restore => "restore",
        };
        let idle = match self.idle {
            Idle::Halt => "halt",
            Idle::Spin => "spin",
        };
        let device = match self.device {
            Device::None => "none",
            Device::PageForge => "pageforge",
        };
        write!(
            out,
            "seed={} private_mib={} zero_mib={} common_mib={} common_seed={} own_every={} copies={} ",
            self.seed,
            self.private_mib,
            self.zero_mib,
            self.common_mib,
            self.common_seed,
            self.own_every,
            self.copies
        )?;
        write!(
            out,
            "ws_pages={} ws_area={ws_area} rate={} reads={} seconds={} max_writes={} ",
            self.ws_pages, self.rate, self.reads, self.seconds, self.max_writes
        )?;
        write!(
            out,
            "rewrite={rewrite} rest_ms={} report_ms={} tsc_khz={} idle={idle} device={device}",
            self.rest_ms, self.report_ms, self.tsc_khz
        )
    }
}
