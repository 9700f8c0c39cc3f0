//! A payload guest under the reference VMM, with dedup.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};
use vmm_dedup::{Config, Options, ServiceStats, Settings, Setup, Supervisor};
use vmm_dedup_payload::{Console, PayloadConfig, Report, measure_tsc_khz};
use vmm_dedup_refvmm::{Image, RunningVm, ThpMode, Vm, VmConfig};

/// Guests start slowly where KVM shadows page tables in software.
const PATIENCE: Duration = Duration::from_secs(120);

/// A guest that runs.
pub struct Guest {
    vm: RunningVm,
    console: Console,
    /// Of a guest with dedup.
    supervisor: Option<Supervisor>,
}

/// How a guest ended.
#[derive(Clone, Copy, Debug)]
pub struct Verdict {
    /// Every page was right and every write accounted for.
    pub ok: bool,
    /// Wrong words.
    pub errors: u64,
    /// Writes the guest did.
    pub writes: u64,
    /// Pages verified.
    pub pages: u64,
}

impl Guest {
    /// Boots a payload of `memory_mib` and starts dedup on it before it runs.
    ///
    /// # Panics
    /// If anything fails: a test cannot go on then.
    #[must_use]
    pub fn boot(
        payload: PayloadConfig,
        memory_mib: u64,
        thp: ThpMode,
        dedup: Option<(&Path, Config)>,
    ) -> Self {
        let setup = |(store, config): (&Path, Config)| Setup {
            store: store.to_owned(),
            agent: None,
            config,
        };
        Self::boot_with(payload, memory_mib, thp, dedup.map(setup))
    }

    /// The same with all that can be set of dedup.
    ///
    /// # Panics
    /// As [`Self::boot`].
    #[must_use]
    pub fn boot_with(payload: PayloadConfig, memory_mib: u64, thp: ThpMode, dedup: Option<Setup>) -> Self {
        let payload = payload.tsc_khz(measure_tsc_khz());
        payload.check_fits(memory_mib, 0).expect("the areas fit");
        let config = VmConfig {
            memory_mib,
            vcpus: 1,
            kernel: Image::Bytes(vmm_dedup_payload::ELF),
            initrd: None,
            cmdline: payload.command_line(),
            thp,
        };
        let vm = Vm::new(&config).expect("the VM is built");
        let supervisor = dedup.map(|setup| supervise(&vm, setup));
        let console = Console::new();
        let vm = vm.start(Box::new(console.clone())).expect("the VM starts");
        let guest = Self {
            vm,
            console,
            supervisor,
        };
        guest.wait("ready", |r| matches!(r, Report::Ready { .. }));
        guest
    }

    /// Waits for a report.
    ///
    /// # Panics
    /// If it does not come.
    pub fn wait(&self, what: &str, is: impl Fn(&Report) -> bool) -> Report {
        match self.console.wait_for(PATIENCE, is) {
            Ok(report) => report,
            Err(error) => panic!("waiting for {what}: {error}"),
        }
    }

    /// Pages that the guest has written and restored so far, by its last report.
    ///
    /// # Panics
    /// If it has found a wrong word.
    #[must_use]
    pub fn progress(&self) -> u64 {
        let tick = |report: &Report| match report {
            Report::Tick {
                writes,
                restores,
                errors,
                ..
            } => Some((writes + restores, *errors)),
            _ => None,
        };
        let (done, errors) = self
            .console
            .reports()
            .iter()
            .rev()
            .find_map(tick)
            .unwrap_or_default();
        assert_eq!(errors, 0, "{}", self.console.text());
        done
    }

    /// Where the guest's memory is in this process.
    ///
    /// # Panics
    /// If it has none.
    #[must_use]
    pub fn memory(&self) -> Vec<Range<usize>> {
        let place = |region: &<vmm_dedup_refvmm::GuestMemory as GuestMemoryBackend>::R| {
            let start = region.get_host_address(MemoryRegionAddress(0)).expect("mapped") as usize;
            start..start + usize::try_from(region.len()).expect("64 bits")
        };
        self.vm.memory().iter().map(place).collect()
    }

    /// The service's account.
    #[must_use]
    pub fn stats(&self) -> ServiceStats {
        self.supervisor
            .as_ref()
            .and_then(Supervisor::stats)
            .unwrap_or_default()
    }

    /// Changes settings of its service, if it has one.
    ///
    /// # Errors
    /// Those of [`Supervisor::set`].
    pub fn set(&self, settings: Settings) -> Result<(), vmm_dedup::Error> {
        self.supervisor
            .as_ref()
            .map_or(Ok(()), |supervisor| supervisor.set(settings))
    }

    /// Ends dedup, with or without giving everything back first; the last account, if there was a service.
    ///
    /// # Panics
    /// If something could not be given back.
    pub fn end_dedup(&self, unmerge: bool) -> Option<ServiceStats> {
        let supervisor = self.supervisor.as_ref()?;
        supervisor.detach(unmerge).expect("dedup stops")
    }

    /// The VM.
    #[must_use]
    pub fn vm(&self) -> &RunningVm {
        &self.vm
    }

    /// Lets the guest verify all of its memory and power off; then stops dedup.
    ///
    /// # Panics
    /// If the guest does not answer.
    pub fn finish(self) -> (Verdict, ServiceStats) {
        self.vm.serial_input(b"q");
        let verify = self.wait("verify", |r| matches!(r, Report::Verify { .. }));
        let done = self.wait("done", |r| matches!(r, Report::Done { .. }));
        let Report::Verify {
            pages,
            errors,
            writes,
        } = verify
        else {
            unreachable!()
        };
        let verdict = Verdict {
            ok: matches!(done, Report::Done { ok: true }),
            errors,
            writes,
            pages,
        };
        if !verdict.ok {
            eprintln!("{}", self.console.text());
        }
        let stats = self.end_dedup(false).unwrap_or_default();
        self.vm.wait().expect("the VM ends");
        (verdict, stats)
    }
}

fn supervise(vm: &Vm, setup: Setup) -> Supervisor {
    let options = Options {
        // Guests of the reference VMM cannot run guests.
        vouch_for_pins: true,
        ..Options::default()
    };
    let memory = Arc::new(vm.memory().clone());
    Supervisor::serving(options, setup, |supervisor| supervisor.add_memory(memory)).expect("dedup starts")
}
