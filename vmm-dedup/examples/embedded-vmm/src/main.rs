//! A VMM with dedup built in: `embedded-vmm KERNEL COMMAND_LINE MIB [SETTINGS [nested]]`, with settings like
//! `store=/run/store.sock,name=web1`.
//!
//! docs/embedding.md walks through it. All that concerns dedup is in lines that name something of it, and what goes on with these: `grep
//! -niE "supervisor|discarder|dedup|setup|lease|pinned|hostrange|refusal" src/*.rs` shows them, and `tests/embedded.rs` counts them. The machine is a small one, on KVM by kvm-ioctls: a vCPU ([`vm`]) that
//! is entered by PVH ([`boot`]), a serial line and a virtio balloon ([`ports`], [`balloon`]), a device that pins memory ([`device`]),
//! snapshots ([`snapshot`]).
//!
//! The guest's serial line is standard output. On standard input come commands, a line each, and each is answered by a line
//! `vmm: ...` on standard error (see [`Machine::command`]).

mod balloon;
mod boot;
mod calls;
mod device;
mod ports;
mod sandbox;
mod snapshot;
mod vm;

use device::Device;
use snapshot::Snapshot;
use std::io::BufRead;
use std::sync::Arc;
use vm::{Config, Failure, Vm};
use vm_memory::mmap::GuestRegionMmap;
use vm_memory::{Bytes, GuestMemoryRegion, MemoryRegionAddress};
use vmm_dedup::{Discarder, HostRange, Lease, Options, Pinned, Setup, Supervisor, refusal};

/// A VM, and what it was made of.
struct Machine {
    config: Config,
    setup: Option<Setup>,
    supervisor: Supervisor,
    discarder: Discarder,
    /// They go before the memory that they pin, and before their pins.
    devices: Vec<(Device, Pinned)>,
    vm: Option<Vm>,
    plugged: Option<Arc<GuestRegionMmap<()>>>,
    saved: Option<Snapshot>,
}

fn main() -> Result<(), Failure> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let mut arguments = std::env::args().skip(1);
    let mut next = |what| arguments.next().ok_or(what);
    let mut config = Config {
        kernel: next("KERNEL is missing")?.into(),
        command_line: next("COMMAND_LINE is missing")?,
        mib: next("MIB is missing")?.parse()?,
        nested: false,
    };
    // 1. Settings are checked with all others, before anything is made.
    let setup: Option<Setup> = next("").ok().map(|settings| settings.parse()).transpose()?;
    config.nested = next("").is_ok_and(|word| word == "nested");

    // 2. The supervisor's thread is made before this one is restricted. It and all others of the engine have filters of their own.
    let supervisor = Supervisor::spawn(Options {
        // Devices have pins of their own, and of guests that may run guests the supervisor is told.
        vouch_for_pins: true,
        ..Options::filtered()
    })?;
    // 3. Whoever frees guest memory gets the discarder when it is made, whether there is dedup or not.
    let discarder = supervisor.discarder();
    sandbox::restrict_this_thread()?;

    let mut machine = Machine {
        config,
        setup,
        supervisor,
        discarder,
        devices: Vec::new(),
        vm: None,
        plugged: None,
        saved: None,
    };
    machine.boot(None)?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line == "quit" {
            break;
        }
        let answer = machine.command(&line);
        let answer = answer.unwrap_or_else(|failure| format!("error: {failure}"));
        eprintln!("vmm: {answer}");
    }
    machine.shut_down()
}

impl Machine {
    fn boot(&mut self, saved: Option<&Snapshot>) -> Result<(), Failure> {
        // No VM fails to boot for want of dedup.
        if let Err(error) = self.attach() {
            log::error!("the VM is not deduplicated: {error}");
            let _ = self.supervisor.detach(false);
        }
        let booted = self.boot_attached(saved);
        if booted.is_err() {
            // Nothing keeps the memory of a VM that never ran, and there may be another one. What failed is why it does not boot.
            let _ = self.supervisor.detach(false);
        }
        booted
    }

    /// 4. A VM begins. Nobody waits for the store.
    fn attach(&self) -> Result<(), vmm_dedup::Error> {
        let Some(setup) = &self.setup else { return Ok(()) };
        self.supervisor.attach(setup.clone())?;
        // Before the guest's CPUID says so.
        match self.config.nested {
            true => self.supervisor.nested_guests(),
            false => Ok(()),
        }
    }

    fn boot_attached(&mut self, saved: Option<&Snapshot>) -> Result<(), Failure> {
        let mut vm = Vm::new(&self.config, saved, self.discarder.clone())?;
        // 5. Guest memory is mapped, and KVM has its slots. Of a VM that is not attached nothing is kept.
        if let Err(error) = self.supervisor.add_memory(Arc::new(vm.memory().clone())) {
            log::error!("the VM is not deduplicated: {error}");
        }
        vm.start()?;
        self.vm = Some(vm);
        Ok(())
    }

    fn shut_down(&mut self) -> Result<(), Failure> {
        self.devices.clear();
        // Its vCPU stops.
        drop(self.vm.take());
        // 15. No vCPU runs any more: nothing of dedup keeps the memory from here on, whatever failed. The next VM boots all the same.
        if let Err(error) = self.supervisor.detach(false) {
            log::error!("{error}");
        }
        self.plugged = None;
        Ok(())
    }

    /// The next VM is one that was saved, or a new one.
    fn reboot(&mut self, saved: Option<Snapshot>) -> Result<(), Failure> {
        self.shut_down()?;
        let booted = self.boot(saved.as_ref());
        self.saved = saved;
        booted
    }

    /// What the VM is at this moment.
    fn save(&mut self) -> Result<(), Failure> {
        let vm = self.vm.as_ref().ok_or("there is no VM")?;
        vm.pause();
        self.supervisor.pause();
        let saved = vm.snapshot();
        self.supervisor.resume();
        vm.resume();
        self.saved = Some(saved?);
        Ok(())
    }

    /// Each device has a pin of its own, which ends when it has gone.
    fn plug_device(&mut self) -> Result<(), Failure> {
        // 7. Before the first pin.
        let pinned = self.supervisor.pinned()?;
        self.devices.push((Device::plug(self.addresses()?)?, pinned));
        Ok(())
    }

    fn command(&mut self, line: &str) -> Result<String, Failure> {
        let (word, argument) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "reboot" => self.reboot(None)?,
            "save" => self.save()?,
            "restore" => {
                let saved = self.saved.take().ok_or("nothing is saved")?;
                self.reboot(Some(saved))?;
            }
            _ => return self.command_of_vm(word, argument),
        }
        Ok("done".into())
    }

    fn command_of_vm(&mut self, word: &str, argument: &str) -> Result<String, Failure> {
        let vm = self.vm.as_mut().ok_or("there is no VM")?;
        match word {
            "type" => vm.type_in(argument.as_bytes())?,
            "pause" => {
                vm.pause();
                // 13. Only so that a snapshot or a migration has the CPU; memory may be read all the time.
                self.supervisor.pause();
            }
            "resume" => {
                self.supervisor.resume();
                vm.resume();
            }
            "plug" => {
                let region = vm.plug(argument.parse()?)?;
                // 9. Before or after the guest is told.
                self.supervisor.add_region(region.clone())?;
                self.plugged = Some(region);
            }
            "unplug" if self.devices.is_empty() => {
                let region = self.plugged.take().ok_or("nothing is plugged")?;
                // KVM and the balloon have it no more.
                vm.unplug(&region)?;
                // 9. Before it is unmapped, which is where the last one who has it goes: here.
                let range = HostRange::of_guest_region(&*region)?.addresses();
                if let Err(error) = self.supervisor.remove_range(range) {
                    log::error!("{error}");
                }
            }
            "share" => {
                let region = device::shared_memory(argument.parse()?)?;
                // What others may map too is refused, and the rest of the VM is not.
                self.supervisor.add_region(region)?;
            }
            "fill" => self.fill(argument.parse()?)?,
            "check" => return self.check(argument.parse()?),
            "discard" => return self.discard(),
            "pin" => self.plug_device()?,
            "dma" => {
                let (device, _) = self.devices.last_mut().ok_or("there is no device")?;
                device.write(argument.parse()?)?;
            }
            "unpin" => drop(self.devices.pop()),
            "lock" => self.lock()?,
            // 12. The guest's memory becomes its secret: what is shared would show it.
            "seal" => self.supervisor.refuse(refusal::confidential())?,
            // 10. Before a userfaultfd of the VMM's own comes to it, and behind that.
            "lend" => self.supervisor.lend(self.addresses()?, Lease::UntilTakenBack)?,
            "back" => self.supervisor.take_back(self.addresses()?),
            "stats" => {
                // 14. It waits for nobody.
                let stats = self.supervisor.stats().unwrap_or_default();
                let status = self.supervisor.status();
                let (pages, mapped, passes) = (stats.pages, stats.pages_mapped, stats.passes_total);
                return Ok(format!(
                    "pages={pages} mapped={mapped} passes={passes} status={status:?}"
                ));
            }
            _ => return Err("there is no such command".into()),
        }
        Ok("done".into())
    }

    fn plugged(&self) -> Result<&GuestRegionMmap<()>, Failure> {
        Ok(self.plugged.as_deref().ok_or("nothing is plugged")?)
    }

    fn addresses(&self) -> Result<std::ops::Range<usize>, Failure> {
        Ok(HostRange::of_guest_region(self.plugged()?)?.addresses())
    }

    /// Fills plugged memory as a device of the VMM's own would.
    fn fill(&self, seed: u64) -> Result<(), Failure> {
        let region = self.plugged()?;
        for at in (0..region.len()).step_by(8) {
            region.write_obj(word(seed, at), MemoryRegionAddress(at))?;
        }
        Ok(())
    }

    /// Words of plugged memory that are not what [`Self::fill`] wrote (seed 0: not zero).
    fn check(&self, seed: u64) -> Result<String, Failure> {
        let region = self.plugged()?;
        let mut wrong = 0;
        for at in (0..region.len()).step_by(8) {
            wrong += u64::from(region.read_obj::<u64>(MemoryRegionAddress(at))? != word(seed, at));
        }
        Ok(format!("wrong={wrong}"))
    }

    /// The guest locks a page of plugged memory (pvmemcontrol).
    #[allow(unsafe_code)] // mlock
    fn lock(&self) -> Result<(), Failure> {
        let range = self.addresses()?;
        // 11. Before mlock, or mprotect.
        self.supervisor.leave_alone(range.clone(), refusal::protected())?;
        // SAFETY: it changes no memory's content.
        match unsafe { libc::mlock(range.start as *const libc::c_void, 4096) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error().into()),
        }
    }

    /// The guest gives plugged memory up, all of it (virtio-mem); of what it gives up page by page see the balloon.
    #[allow(unsafe_code)] // frees guest memory
    fn discard(&self) -> Result<String, Failure> {
        let range = self.addresses()?;
        // SAFETY: the guest gave this memory up.
        unsafe { self.discarder.discard(range.start, range.len()) }?;
        self.check(0)
    }
}

/// What plugged memory holds at an offset: every page has a twin in the same memory.
fn word(seed: u64, at: u64) -> u64 {
    (at % (1 << 20) + 1).wrapping_mul(seed)
}
