//! The machine: guest memory, KVM's part of it, and one vCPU with a thread of its own, which can be paused.

use crate::balloon::{Balloon, Registers};
use crate::boot;
use crate::ports::{Ports, Power};
use crate::snapshot::Snapshot;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use vm_memory::mmap::GuestRegionMmap;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_dedup::Discarder;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

pub(crate) type Failure = Box<dyn std::error::Error>;

/// What to run.
pub(crate) struct Config {
    pub(crate) kernel: PathBuf,
    pub(crate) command_line: String,
    pub(crate) mib: usize,
    /// Whether the guest may run guests.
    pub(crate) nested: bool,
}

/// Where KVM's own pages are, where no guest has memory.
const TSS: usize = 0xfffb_d000;
/// Memory that is plugged in comes behind the hole for devices.
const ABOVE: u64 = 4 << 30;
/// In leaf 1, and in leaf 0x80000001: the guest could run guests (VMX, SVM).
const VMX: u32 = 1 << 5;
const SVM: u32 = 1 << 2;
/// A kick that comes between the look at what is wished and the entry into the guest is lost, so it is repeated.
const KICK_AGAIN: Duration = Duration::from_millis(2);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    Run,
    Pause,
    Stop,
}

struct State {
    wish: Wish,
    /// The vCPU is not in the guest.
    rests: bool,
}

/// What the vCPU's thread has in common with others.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Its thread's, but while it rests.
    vcpu: Mutex<VcpuFd>,
    ports: Mutex<Ports>,
}

/// A VM. Where it is dropped no vCPU runs any more.
pub(crate) struct Vm {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    fd: VmFd,
    /// Behind what uses it.
    memory: GuestMemoryMmap<()>,
}

impl Vm {
    /// Makes a VM that does not run yet, from its kernel or from a snapshot.
    pub(crate) fn new(
        config: &Config,
        snapshot: Option<&Snapshot>,
        discarder: Discarder,
    ) -> Result<Self, Failure> {
        let ranges = match snapshot {
            Some(snapshot) => snapshot.ranges(),
            None => vec![(GuestAddress(0), config.mib << 20)],
        };
        let memory = GuestMemoryMmap::from_ranges(&ranges)?;
        let kvm = Kvm::new()?;
        let fd = create(&kvm)?;
        for (slot, region) in (0..).zip(memory.iter()) {
            set_slot(&fd, slot, region, region.len())?;
        }
        fd.set_tss_address(TSS)?;
        fd.create_irq_chip()?;
        let vcpu = fd.create_vcpu(0)?;
        vcpu.set_cpuid2(&cpuid(&kvm, config.nested)?)?;
        let mut ports = Ports::new(Balloon {
            registers: Registers::new(),
            memory: memory.clone(),
            discarder,
        });
        match snapshot {
            Some(snapshot) => snapshot.restore(&memory, &vcpu, &mut ports)?,
            None => boot::enter(&vcpu, boot::load(&memory, &config.kernel, &config.command_line)?)?,
        }
        let shared = Shared {
            state: Mutex::new(State {
                wish: Wish::Run,
                rests: true,
            }),
            changed: Condvar::new(),
            vcpu: Mutex::new(vcpu),
            ports: Mutex::new(ports),
        };
        Ok(Self {
            shared: Arc::new(shared),
            thread: None,
            fd,
            memory,
        })
    }

    pub(crate) fn memory(&self) -> &GuestMemoryMmap<()> {
        &self.memory
    }

    /// Has the vCPU run.
    pub(crate) fn start(&mut self) -> Result<(), Failure> {
        extern "C" fn kicked(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        register_signal_handler(SIGRTMIN(), kicked)?;
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("vcpu0".into());
        self.thread = Some(thread.spawn(move || shared.run())?);
        Ok(())
    }

    /// Types into the serial line.
    pub(crate) fn type_in(&self, bytes: &[u8]) -> Result<(), Failure> {
        lock(&self.shared.ports).type_in(bytes)
    }

    /// When this returns the vCPU is not in the guest.
    pub(crate) fn pause(&self) {
        self.halt(Wish::Pause);
    }

    pub(crate) fn resume(&self) {
        lock(&self.shared.state).wish = Wish::Run;
        self.shared.changed.notify_all();
    }

    fn halt(&self, wish: Wish) {
        let mut state = lock(&self.shared.state);
        state.wish = wish;
        self.shared.changed.notify_all();
        while !state.rests {
            // It may have left the guest for good.
            let _ = self.thread.as_ref().map(|thread| thread.kill(SIGRTMIN()));
            let woken = self.shared.changed.wait_timeout(state, KICK_AGAIN);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// All that it is at this moment. It must be paused.
    pub(crate) fn snapshot(&self) -> Result<Snapshot, Failure> {
        Snapshot::take(&self.memory, &lock(&self.shared.vcpu), &lock(&self.shared.ports))
    }

    /// Gives the VM more memory. Nothing tells the guest, but that it may give it to the balloon.
    pub(crate) fn plug(&mut self, mib: usize) -> Result<Arc<GuestRegionMmap<()>>, Failure> {
        let start = GuestAddress(self.memory.last_addr().raw_value().max(ABOVE - 1) + 1);
        let region = Arc::new(GuestRegionMmap::from_range(start, mib << 20, None)?);
        let memory = self.memory.insert_region(region.clone())?;
        set_slot(
            &self.fd,
            u32::try_from(self.memory.num_regions())?,
            &region,
            region.len(),
        )?;
        lock(&self.shared.ports).balloon.memory = memory.clone();
        self.memory = memory;
        Ok(region)
    }

    /// Takes from the VM what was plugged in last.
    pub(crate) fn unplug(&mut self, region: &GuestRegionMmap<()>) -> Result<(), Failure> {
        let (memory, _) = self.memory.remove_region(region.start_addr(), region.len())?;
        set_slot(&self.fd, u32::try_from(memory.num_regions())?, region, 0)?;
        lock(&self.shared.ports).balloon.memory = memory.clone();
        self.memory = memory;
        Ok(())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.halt(Wish::Stop);
        let _ = self.thread.take().map(JoinHandle::join);
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

/// Gives KVM a region, or takes it back, with a length of 0.
#[allow(unsafe_code)] // KVM takes an address
fn set_slot(vm: &VmFd, slot: u32, region: &GuestRegionMmap<()>, len: u64) -> Result<(), Failure> {
    let slot = kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: region.start_addr().raw_value(),
        memory_size: len,
        userspace_addr: region.as_ptr() as u64,
    };
    // SAFETY: a mapping of that length, which lives as long as the VM does, or until KVM has it no more: both are fields of `Vm`, in
    // that order.
    Ok(unsafe { vm.set_user_memory_region(slot) }?)
}

/// What KVM offers, and with `nested` what guests need to run guests, if it offers that.
fn cpuid(kvm: &Kvm, nested: bool) -> Result<CpuId, Failure> {
    let mut cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    for leaf in cpuid.as_mut_slice().iter_mut().filter(|_| !nested) {
        match leaf.function {
            1 => leaf.ecx &= !VMX,
            0x8000_0001 => leaf.ecx &= !SVM,
            _ => {}
        }
    }
    Ok(cpuid)
}

impl Shared {
    /// The vCPU's thread.
    fn run(&self) {
        if let Err(failure) = self.run_guest() {
            log::error!("the vCPU has stopped: {failure}");
        }
        lock(&self.state).rests = true;
        self.changed.notify_all();
    }

    fn run_guest(&self) -> Result<(), Failure> {
        loop {
            let mut state = lock(&self.state);
            state.rests = true;
            self.changed.notify_all();
            while state.wish == Wish::Pause {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.wish == Wish::Stop {
                return Ok(());
            }
            state.rests = false;
            drop(state);
            let mut vcpu = lock(&self.vcpu);
            while self.enter(&mut vcpu)? {}
        }
    }

    /// Enters the guest, and serves why it comes back; whether it goes on.
    fn enter(&self, vcpu: &mut VcpuFd) -> Result<bool, Failure> {
        let rests = lock(&self.state).wish != Wish::Run;
        // KVM does what the last exit has left to be done, and comes back: a snapshot must not see it half done.
        vcpu.set_kvm_immediate_exit(rests.into());
        match vcpu.run() {
            Ok(VcpuExit::IoOut(port, data)) => {
                if lock(&self.ports).write(port, data)? == Power::Off {
                    lock(&self.state).wish = Wish::Stop;
                }
            }
            Ok(VcpuExit::IoIn(port, data)) => lock(&self.ports).read(port, data),
            // There is nothing.
            Ok(VcpuExit::MmioRead(_, data)) => data.fill(0xff),
            Ok(VcpuExit::MmioWrite(..) | VcpuExit::Intr | VcpuExit::Hlt) => {}
            Ok(exit) => return Err(format!("{exit:?}").into()),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => return Ok(!rests),
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    }
}
