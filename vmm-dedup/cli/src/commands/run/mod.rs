//! `run`: one VM under the reference VMM, with dedup if a store is named.

mod console;
mod guest;

use clap::builder::RangedU64ValueParser;
use clap::{ArgGroup, Args, ValueEnum};
use console::{Console, Log};
use guest::Guest;
use serde_json::json;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use vmm_dedup::{Breaks, Config, Options, Policy, Setup, Supervisor, UseSource, Verification};
use vmm_dedup_fleet::dedup_file;
use vmm_dedup_host::{Failure, kvm, note, registry, silence};
use vmm_dedup_protocol::observer::Observer;
use vmm_dedup_refvmm::{Error, ExitReason, RunningVm, ThpMode, Vm, VmConfig};

/// Run one VM with the reference VMM; its serial console is this terminal.
///
/// With --store or --dedup the VM's memory is deduplicated. The kernel is a Linux bzImage or vmlinux, or any PVH ELF image.
#[cfg_attr(
    feature = "demo",
    doc = "--payload runs the built-in test guest instead, which verifies its own memory."
)]
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("deduplicated").args(["store", "dedup"])))]
pub(crate) struct RunArgs {
    #[command(flatten)]
    guest: Guest,
    /// Initial RAM disk.
    #[arg(long)]
    initrd: Option<PathBuf>,
    /// Guest memory, MiB.
    #[arg(long, default_value_t = 256)]
    memory_mib: u64,
    /// vCPUs.
    #[arg(long, default_value_t = 1)]
    vcpus: u8,
    /// Transparent huge pages for guest memory.
    #[arg(long, value_enum, default_value_t = Thp::Default)]
    thp: Thp,
    /// Deduplicate with the store at this socket.
    #[arg(long, value_name = "SOCKET")]
    store: Option<PathBuf>,
    /// Deduplicate as this line says, e.g. store=/run/vmm-dedup/store.sock,name=web1,cpu_percent=10, instead of the options below.
    #[arg(long, value_name = "LINE", conflicts_with = "store")]
    dedup: Option<Setup>,
    /// Name of the VM in metrics.
    #[arg(long, default_value_t = Config::default().name, conflicts_with = "dedup")]
    name: String,
    /// CPU that dedup may use, percent of one core.
    #[arg(long, alias = "budget", default_value_t = Config::default().cpu_percent, requires = "store", conflicts_with = "dedup")]
    cpu_percent: u32,
    /// Milliseconds from one dedup pass to the next.
    #[arg(long, default_value_t = Config::default().pass_period_ms, requires = "store", conflicts_with = "dedup")]
    pass_period_ms: u64,
    /// Which huge pages are split for sharing and built again: smartmd, ksm, no-splitting or ingens.
    #[arg(long, default_value_t = Policy::default(), requires = "store", conflicts_with = "dedup")]
    huge_policy: Policy,
    /// What tells which huge pages are used, for smartmd and ingens: fault-sampling, damon, page-idle or writes.
    #[arg(long, default_value_t = UseSource::default(), requires = "store", conflicts_with = "dedup")]
    use_source: UseSource,
    /// What looks for the page that another one equals: index, or an engine that compares pages in the order that a
    /// store started with --ordered keeps: tree (this CPU), dsa, pageforge, pagecmp or pagecmp-hybrid.
    #[arg(long, value_name = "ENGINE", default_value_t = Config::default().search, requires = "store", conflicts_with = "dedup")]
    search: String,
    /// With --search pageforge: the socket of a device (`vmm-dedup device pageforge`). Without, a model in this process.
    /// With --search dsa: a work queue (/dev/dsa/wq0.0). Without, all user queues that are free.
    #[arg(long, value_name = "SOCKET", requires = "store", conflicts_with = "dedup")]
    search_socket: Option<PathBuf>,
    /// What compares pages with those that are to replace them: cpu, dsa, pageforge, pagecmp or pagecmp-hybrid. What an
    /// engine calls equal the CPU compares once more.
    #[arg(long, value_name = "ENGINE", default_value_t = Config::default().verify.engine, requires = "store", conflicts_with = "dedup")]
    verify: String,
    /// With --verify pageforge: the socket of a device. With --verify dsa: a work queue.
    #[arg(long, value_name = "SOCKET", requires = "store", conflicts_with = "dedup")]
    verify_socket: Option<PathBuf>,
    /// Who copies a shared page that the guest writes.
    #[arg(long, value_enum, default_value_t = BreakMode::Kernel, requires = "store", conflicts_with = "dedup")]
    breaks: BreakMode,
    /// How long the VM's faults may be held up by a fork that tells which of the pages that the kernel copied are pinned,
    /// microseconds; 0: no forks.
    #[arg(long, default_value_t = Breaks::KERNEL.heal_stall_us(), requires = "store", conflicts_with = "dedup")]
    heal_stall_us: u64,
    /// With managed breaks: pages kept ready for writers [default: 1024].
    #[arg(long, requires = "store", conflicts_with = "dedup", value_parser = RangedU64ValueParser::<usize>::new().range(1..=16_777_216))]
    reserve_pages: Option<usize>,
    /// With managed breaks: host memory below which the reserve is not refilled, MiB [default: 256].
    #[arg(long, requires = "store", conflicts_with = "dedup", value_parser = clap::value_parser!(u64).range(1..=16_777_216))]
    reserve_floor_mib: Option<u64>,
    /// Read the engine's settings from this TOML file, instead of the options for them.
    #[arg(
        long,
        value_name = "FILE",
        requires = "store",
        conflicts_with_all = [
            "dedup", "name", "cpu_percent", "pass_period_ms", "search", "search_socket", "verify", "verify_socket", "breaks",
            "heal_stall_us", "reserve_pages", "reserve_floor_mib",
        ]
    )]
    dedup_config: Option<PathBuf>,
    /// Write what the guest writes to its serial port into this file instead. When it has 1 MiB it is renamed to FILE.1 and begun anew.
    #[arg(long, value_name = "FILE")]
    serial_log: Option<PathBuf>,
    /// Write the process number to this file once the guest runs; the file goes when the guest has ended in order.
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,
    /// At the end bring everything back to anonymous memory, and print the dedup account as JSON on standard error.
    #[arg(long, requires = "deduplicated")]
    account: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Thp {
    /// As the host is set.
    Default,
    Always,
    Never,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum BreakMode {
    /// The kernel's copy-on-write: fast, but a page is merged again only if it can be told that it is not pinned.
    Kernel,
    /// The service, from a reserve: pages stay mergeable, and no write fails for want of memory.
    Managed,
}

impl RunArgs {
    fn vm_config(&self) -> VmConfig {
        let (kernel, cmdline) = self.guest.boot();
        let thp = match self.thp {
            Thp::Default => ThpMode::Default,
            Thp::Always => ThpMode::Always,
            Thp::Never => ThpMode::Never,
        };
        let initrd = self.initrd.clone();
        VmConfig {
            memory_mib: self.memory_mib,
            vcpus: self.vcpus,
            kernel,
            initrd,
            cmdline,
            thp,
        }
    }

    /// Fails if options are given that would do nothing, or name engines that there are not.
    fn check(&self) -> Result<(), Failure> {
        let reserve = self.reserve_pages.is_some() || self.reserve_floor_mib.is_some();
        if reserve && matches!(self.breaks, BreakMode::Kernel) {
            return Err(Failure::usage(
                "--reserve-pages and --reserve-floor-mib need --breaks managed: the kernel's copies have no reserve",
            ));
        }
        if let Some(setup) = self.setup()? {
            if setup.agent.is_some() {
                return Err(Failure::usage(
                    "guests of the reference VMM have no vsock: leave agent out",
                ));
            }
            let checked = setup.check(&vmm_dedup_engines::engines());
            checked.map_err(|error| Failure::usage(error.to_string()))?;
        }
        Ok(())
    }

    /// The store and the engine's settings, by a line or by options.
    fn setup(&self) -> Result<Option<Setup>, Failure> {
        let by_options = || {
            let store = self.store.clone()?;
            let config = self.engine_config();
            Some(config.map(|config| Setup {
                config,
                ..Setup::new(store)
            }))
        };
        match &self.dedup {
            Some(setup) => Ok(Some(setup.clone())),
            None => by_options().transpose(),
        }
    }

    fn engine_config(&self) -> Result<Config, Failure> {
        if let Some(path) = &self.dedup_config {
            return dedup_file::read(path);
        }
        let mut breaks = match self.breaks {
            BreakMode::Kernel => Breaks::KERNEL,
            BreakMode::Managed => Breaks::MANAGED,
        };
        match &mut breaks {
            Breaks::Kernel { heal_stall_us, .. } => *heal_stall_us = self.heal_stall_us,
            Breaks::Managed {
                reserve_pages,
                floor_bytes,
                heal_stall_us,
                ..
            } => {
                *heal_stall_us = self.heal_stall_us;
                *reserve_pages = self.reserve_pages.unwrap_or(*reserve_pages);
                *floor_bytes = self.reserve_floor_mib.map_or(*floor_bytes, |mib| mib << 20);
            }
            _ => {} // there are no others
        }
        Ok(Config {
            name: self.name.clone(),
            pass_period_ms: self.pass_period_ms,
            cpu_percent: self.cpu_percent,
            breaks,
            huge_policy: self.huge_policy,
            use_source: self.use_source,
            search: self.search.clone(),
            search_socket: self.search_socket.clone(),
            verify: Verification {
                engine: self.verify.clone(),
                socket: self.verify_socket.clone(),
                ..Verification::default()
            },
            ..Config::default()
        })
    }
}

/// Runs a VM to its end.
pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    args.check()?;
    kvm::need()?;
    let log = args.serial_log.as_deref().map(Log::open).transpose()?;
    let config = args.vm_config();
    let vm = Vm::new(&config).map_err(not_made)?;
    let dedup = args.setup()?.map(|setup| start_dedup(&vm, setup)).transpose()?;
    let (listener, verdict) = args.guest.listen();
    let console = Console::new(log, listener);
    let vm = vm.start(Box::new(console)).map_err(Failure::from_error)?;
    if let Some(path) = &args.pid_file {
        write_pid(path)?;
    }
    let mut vm = Arc::new(vm);
    forward_input(&vm);
    while !vm.ends_within(Duration::from_secs(3600)) {}
    // The input thread holds on to the VM only while it types a byte.
    let vm = loop {
        match Arc::try_unwrap(vm) {
            Ok(vm) => break vm,
            Err(shared) => vm = shared,
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let exit = vm.wait().map_err(Failure::from_error)?;
    if let Some(dedup) = dedup {
        let stats = dedup.detach(args.account).map_err(Failure::from_error)?;
        if let Some(stats) = stats.filter(|_| args.account) {
            let account = json!({ "mapped": stats.pages_mapped, "merges": stats.merges_total + stats.zero_merges_total });
            note!("{account}");
        }
    }
    match exit {
        ExitReason::PowerOff => {
            if let Some(path) = &args.pid_file {
                let _ = std::fs::remove_file(path);
            }
            verdict.check()
        }
        other => Err(Failure::new(format!("the guest ended with {other:?}"))),
    }
}

/// Why there is no VM: options that cannot be, or what the host lacks.
fn not_made(error: Error) -> Failure {
    match error {
        Error::MemorySize { .. } | Error::VcpuCount { .. } | Error::CommandLine { .. } => {
            Failure::usage(error.to_string())
        }
        Error::KvmMissing | Error::KvmDenied | Error::Kvm { .. } | Error::MapMemory { .. } => {
            Failure::from_error(error).of_host()
        }
        _ => Failure::from_error(error),
    }
}

/// Dedup was asked for by hand: if it cannot start, nor does the VM.
fn start_dedup(vm: &Vm, setup: Setup) -> Result<Supervisor, Failure> {
    let options = Options {
        engines: vmm_dedup_engines::engines(),
        // Its guests cannot run guests, and no other process has a file of this one's alone.
        vouch_for_pins: true,
        // It starts when it is told to.
        settle: Duration::from_secs(60),
        ..Options::default()
    };
    let memory = Arc::new(vm.memory().clone());
    let store = setup.store.clone();
    Supervisor::serving(options, setup, |supervisor| supervisor.add_memory(memory))
        .map_err(|error| not_served(error, &store))
}

/// Why there is no dedup, and what to ask first. Of a store that cannot be used the same is said as by commands that ask it.
fn not_served(error: vmm_dedup::Error, store: &Path) -> Failure {
    use vmm_dedup::Error::{Connect, StoreGone, StoreIo};
    let asked = Observer::connect(store).and_then(|mut observer| observer.stats());
    let failure = match (&error, asked) {
        (Connect { .. } | StoreIo(_) | StoreGone, Err(silent)) => {
            let pid = registry::record(store).map(|record| record.pid);
            silence::failure(store, pid, silent)
        }
        _ => Failure::from_error(error),
    };
    failure.of_host()
}

/// Whoever sees the file sees the number in it.
fn write_pid(path: &Path) -> Result<(), Failure> {
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, format!("{}\n", std::process::id()))
        .and_then(|()| std::fs::rename(&fresh, path))
        .map_err(|e| Failure::new(format!("cannot write {}: {e}", path.display())))
}

/// Types what comes on standard input into the guest's serial port.
fn forward_input(vm: &Arc<RunningVm>) {
    let vm = Arc::downgrade(vm);
    std::thread::spawn(move || {
        let mut byte = [0];
        while std::io::stdin().read(&mut byte).is_ok_and(|n| n == 1) {
            match vm.upgrade() {
                Some(vm) => vm.serial_input(&byte),
                None => return,
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_host_lacks_is_told_with_what_looks_at_it() {
        let store = Path::new("/s");
        let lacks = not_served(vmm_dedup::Error::KernelLacks("a feature"), store).to_string();
        assert!(
            lacks.ends_with("`vmm-dedup doctor` tells what is wrong on this host"),
            "{lacks}"
        );
        assert!(
            not_made(Error::KvmDenied)
                .to_string()
                .contains("vmm-dedup doctor")
        );
        // No store is there.
        let gone = not_served(vmm_dedup::Error::StoreGone, store).to_string();
        assert!(
            gone.starts_with("no store listens at /s: start one with `vmm-dedup store --socket /s")
                && gone.contains("vmm-dedup doctor"),
            "{gone}"
        );
    }
}
