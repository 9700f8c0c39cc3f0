//! What is chosen among a few: who breaks, how huge pages are managed, what tells which memory is used.

#[cfg(feature = "settings")]
use serde::{Deserialize, Serialize};
use vmm_dedup_protocol::stats::USE_SOURCES;

/// Who copies a shared page when the guest writes it, and how pages that the kernel copied are merged again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "settings",
    derive(Serialize, Deserialize),
    serde(rename_all = "kebab-case", tag = "mode", deny_unknown_fields)
)]
#[non_exhaustive]
pub enum Breaks {
    /// The kernel: a few microseconds a page, but the page stays private until it is healed, and memory may run out.
    Kernel {
        /// How long the kernel may hold up the VM's faults, in microseconds (0..=1000000), for a fork that tells which of the
        /// pages that it copied are pinned, where somebody may pin; 0: no forks. It goes with the number of the process's
        /// mappings.
        #[cfg_attr(feature = "settings", serde(default = "heal_stall_us"))]
        heal_stall_us: u64,
        /// Whether such pages are also merged again without a fork, where no open file can have them pinned. Another process
        /// that writes this one's memory (process_vm_writev, a debugger) and is held up in the middle can lose that write.
        #[cfg_attr(feature = "settings", serde(default))]
        heal_without_fork: bool,
    },
    /// The service, from a reserve: slower, and a writer waits when there is no memory. The kernel only copies a page whose
    /// mapping was not in place when it was written, or for which there was no mapping left.
    Managed {
        /// Pages (4 KiB) kept ready for writers.
        reserve_pages: usize,
        /// The reserve is refilled only while the host has more than this available, in bytes.
        floor_bytes: u64,
        /// As with [`Breaks::Kernel`].
        #[cfg_attr(feature = "settings", serde(default = "heal_stall_us"))]
        heal_stall_us: u64,
        /// As with [`Breaks::Kernel`].
        #[cfg_attr(feature = "settings", serde(default))]
        heal_without_fork: bool,
    },
}

/// What a table has that does not say, microseconds.
const fn heal_stall_us() -> u64 {
    5000
}

impl Breaks {
    /// The kernel's, with the default budget for forks.
    pub const KERNEL: Self = Self::Kernel {
        heal_stall_us: heal_stall_us(),
        heal_without_fork: false,
    };

    /// The service's, with a reserve of a usual size: 1024 pages, refilled while the host has 256 MiB available.
    pub const MANAGED: Self = Self::managed(1024, 256 << 20);

    /// The service's, with a reserve of so many pages, to be refilled while the host has so many bytes available, and the
    /// default budget for forks.
    #[must_use]
    pub const fn managed(reserve_pages: usize, floor_bytes: u64) -> Self {
        Self::Managed {
            reserve_pages,
            floor_bytes,
            heal_stall_us: heal_stall_us(),
            heal_without_fork: false,
        }
    }

    /// The budget for forks, microseconds.
    #[must_use]
    pub const fn heal_stall_us(self) -> u64 {
        match self {
            Self::Kernel { heal_stall_us, .. } | Self::Managed { heal_stall_us, .. } => heal_stall_us,
        }
    }

    /// Whether pages are merged again without a fork as well.
    #[must_use]
    pub const fn heal_without_fork(self) -> bool {
        match self {
            Self::Kernel {
                heal_without_fork, ..
            }
            | Self::Managed {
                heal_without_fork, ..
            } => heal_without_fork,
        }
    }
}

/// How 2 MiB ranges are managed (SmartMD, USENIX ATC'17, slides 13 to 21). Policies that watch the use of memory take
/// pages for moments to see who wants them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "settings",
    derive(Serialize, Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum Policy {
    /// Split what is rarely used and has many duplicates, build again what is used often.
    #[default]
    Smartmd,
    /// As KSM: split whatever has a duplicate and stands still, however often it is read. Build nothing again.
    Ksm,
    /// Share whole 2 MiB only: split a huge page if all of its small pages have twins.
    NoSplitting,
    /// As Ingens (OSDI'16): split what is rarely used, whether it has duplicates or not, build again what is used often.
    Ingens,
}

impl Policy {
    /// All of them, in the order of benchmarks.
    pub const ALL: &[Policy] = &[Policy::Smartmd, Policy::Ksm, Policy::NoSplitting, Policy::Ingens];

    /// Its name in configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Policy::Smartmd => "smartmd",
            Policy::Ksm => "ksm",
            Policy::NoSplitting => "no-splitting",
            Policy::Ingens => "ingens",
        }
    }

    /// Whether it depends on how much of a huge page repeats. (Else it asks for a twin of every subpage.)
    pub(crate) fn counts_repetition(self) -> bool {
        self != Policy::Ksm
    }

    /// Whether it depends on how often memory is used.
    pub(crate) fn watches_access(self) -> bool {
        matches!(self, Policy::Smartmd | Policy::Ingens)
    }
}

impl std::fmt::Display for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Policy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut all = Policy::ALL.iter().copied();
        all.find(|p| p.name() == name).ok_or_else(|| {
            format!(
                "there is no policy {name:?}; choose one of {}",
                names(Policy::ALL, Policy::name)
            )
        })
    }
}

/// What tells which memory is used. If one cannot, the next of fault-sampling, damon, page-idle and writes is asked, and the reason
/// is logged and explained. So it is for what an agent does not tell, and while none does. Writes that break sharing count as use with any of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "settings",
    derive(Serialize, Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum UseSource {
    /// Memory is taken away for some milliseconds, and who uses it waits: tells how often as well, and needs nothing but what
    /// merging needs. Who uses memory is stopped once in an interval for each 2 MiB of it.
    #[default]
    #[cfg_attr(feature = "settings", serde(alias = "take-and-wait"))]
    FaultSampling,
    /// The kernel's DAMON, which looks at accessed bits: stops nobody, tells less about how often. Needs a kernel with
    /// DAMON for virtual addresses, CAP_SYS_ADMIN, and that nobody else on the host uses DAMON.
    Damon,
    /// The kernel's bitmap of idle pages: as `Damon`, for any number of VMs. Needs CAP_SYS_ADMIN, and a kernel with
    /// CONFIG_IDLE_PAGE_TRACKING, which those of distributions are not.
    PageIdle,
    /// Only writes that break sharing: costs nothing, and takes for idle what is only read.
    Writes,
    /// The guest's agent, where it has idle page tracking or DAMON: stops nobody, costs the host nothing. It tells of the last
    /// minute, and not how often.
    Agent,
}

/// What [`UseSource::FaultSampling`] was called before version 0.2.
pub(super) const FORMER_NAME: &str = "take-and-wait";

impl UseSource {
    /// All of them: the best of the host's first, then the guest's.
    pub const ALL: &[UseSource] = &[
        UseSource::FaultSampling,
        UseSource::Damon,
        UseSource::PageIdle,
        UseSource::Writes,
        UseSource::Agent,
    ];

    /// Its name in configurations and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        USE_SOURCES[self.number()]
    }

    pub(crate) fn number(self) -> usize {
        match self {
            UseSource::FaultSampling => 1,
            UseSource::Damon => 2,
            UseSource::Writes => 3,
            UseSource::PageIdle => 4,
            UseSource::Agent => 5,
        }
    }
}

impl std::fmt::Display for UseSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for UseSource {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut all = UseSource::ALL.iter().copied();
        all.find(|source| source.name() == name || *source == Self::FaultSampling && name == FORMER_NAME)
            .ok_or_else(|| {
                format!(
                    "nothing named {name:?} tells the use of memory; choose one of {}",
                    names(UseSource::ALL, UseSource::name)
                )
            })
    }
}

/// The names of all that can be chosen, for an error.
fn names<T: Copy>(all: &[T], name: fn(T) -> &'static str) -> String {
    let names: Vec<&str> = all.iter().map(|one| name(*one)).collect();
    names.join(", ")
}
