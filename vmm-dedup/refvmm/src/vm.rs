//! Building a VM.

use std::io::Write;
use std::sync::Arc;
use std::thread;

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::register_signal_handler;

use crate::config::VmConfig;
use crate::cpuid::Template;
use crate::devices::Devices;
use crate::error::Error;
use crate::gate::Gate;
use crate::kick::kick_signal;
use crate::memory::{self, GuestMemory};
use crate::running::RunningVm;
use crate::vcpu::Vcpu;
use crate::{boot, layout, registers};

/// A VM that is built and loaded but does not run yet.
pub struct Vm {
    vm: VmFd,
    vcpus: Vec<VcpuFd>,
    memory: GuestMemory,
    interrupt: EventFd,
    tsc_khz: Option<u32>,
}

impl Vm {
    /// Builds the VM that `config` describes.
    ///
    /// # Errors
    /// If the configuration is invalid, a file is not what it should be or does not fit, or KVM is missing or
    /// refuses.
    pub fn new(config: &VmConfig) -> Result<Vm, Error> {
        config.validate()?;
        // Files before KVM: whoever has no KVM learns about a wrong file all the same.
        let memory = memory::map(config.memory_mib, config.thp)?;
        let entry = boot::load(&memory, config)?;

        let kvm = open_kvm()?;
        let vm = create(&kvm).map_err(Error::kvm("create a VM"))?;
        memory::register(&vm, &memory)?;
        let interrupt = create_interrupt_controllers(&vm)?;

        let vcpus = (0..config.vcpus)
            .map(|id| vm.create_vcpu(u64::from(id)).map_err(Error::kvm("create a vCPU")))
            .collect::<Result<Vec<_>, _>>()?;
        // Some KVMs do not tell.
        let tsc_khz = vcpus
            .first()
            .and_then(|vcpu| vcpu.get_tsc_khz().ok())
            .filter(|khz| *khz > 0);
        let cpuid = Template::new(&kvm, config.vcpus, tsc_khz)?;
        for (id, vcpu) in (0..).zip(&vcpus) {
            vcpu.set_cpuid2(&cpuid.for_vcpu(id)?)
                .map_err(Error::kvm("set a vCPU's CPUID"))?;
            registers::set_msrs(vcpu)?;
        }
        if let Some(first) = vcpus.first() {
            registers::set_entry_state(first, &memory, entry)?;
        }
        Ok(Vm {
            vm,
            vcpus,
            memory,
            interrupt,
            tsc_khz,
        })
    }

    /// The guest's RAM.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Frequency of the guest's time stamp counter, if KVM tells it.
    #[must_use]
    pub fn tsc_khz(&self) -> Option<u32> {
        self.tsc_khz
    }

    /// Starts the vCPUs. What the guest writes to COM1 goes to `serial_out`, from the thread of the vCPU.
    ///
    /// # Errors
    /// If the host has no more threads or events to give.
    pub fn start(self, serial_out: Box<dyn Write + Send>) -> Result<RunningVm, Error> {
        extern "C" fn kicked(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        register_signal_handler(kick_signal(), kicked).map_err(|error| Error::Host {
            what: "handle a signal",
            source: error.into(),
        })?;

        let count = u8::try_from(self.vcpus.len()).unwrap_or(u8::MAX);
        let devices = Arc::new(Devices::new(self.interrupt, serial_out));
        let gate = Arc::new(Gate::new(count));
        let mut running = RunningVm::new(self.vm, self.memory.clone(), devices.clone(), gate.clone());
        let mut failed = None;
        for (id, fd) in (0..count).zip(self.vcpus) {
            let vcpu = Vcpu {
                id,
                fd,
                devices: devices.clone(),
                gate: gate.clone(),
                memory: self.memory.clone(),
            };
            match thread::Builder::new()
                .name(format!("vcpu{id}"))
                .spawn(move || vcpu.run())
            {
                Ok(thread) => running.adopt(thread),
                Err(source) => {
                    // The gate counts a thread that never was as one that is gone, so that dropping works.
                    gate.leave(None);
                    failed = Some(Error::Host {
                        what: "start a vCPU thread",
                        source,
                    });
                }
            }
        }
        failed.map_or(Ok(running), Err)
    }
}

/// Makes a VM. KVM gives up where a signal is pending (mm_take_all_locks), and has done nothing then.
fn create(kvm: &Kvm) -> Result<VmFd, kvm_ioctls::Error> {
    loop {
        match kvm.create_vm() {
            Err(error) if error.errno() == libc::EINTR => {}
            made => return made,
        }
    }
}

fn open_kvm() -> Result<Kvm, Error> {
    Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => Error::KvmMissing,
        libc::EACCES | libc::EPERM => Error::KvmDenied,
        _ => Error::Kvm {
            operation: "open /dev/kvm",
            source: error,
        },
    })
}

/// PICs, IOAPIC, local APICs and PIT in the kernel; returns the serial line's interrupt.
fn create_interrupt_controllers(vm: &VmFd) -> Result<EventFd, Error> {
    vm.set_identity_map_address(layout::IDENTITY_MAP)
        .map_err(Error::kvm("place the identity map"))?;
    vm.set_tss_address(layout::TSS)
        .map_err(Error::kvm("place the TSS"))?;
    vm.create_irq_chip()
        .map_err(Error::kvm("create the interrupt controllers"))?;
    let pit = kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    };
    vm.create_pit2(pit).map_err(Error::kvm("create the timer"))?;
    let interrupt = EventFd::new(EFD_NONBLOCK).map_err(|source| Error::Host {
        what: "create an event",
        source,
    })?;
    vm.register_irqfd(&interrupt, layout::COM1_IRQ)
        .map_err(Error::kvm("wire the serial interrupt"))?;
    Ok(interrupt)
}
