//! Boots a kernel under the reference VMM, with its serial line on this terminal:
//! `boot KERNEL INITRD|- CMDLINE [MEMORY_MIB [VCPUS]]`. The exit code is 0 after a power-off, 3 after a reboot.

use std::io::{self, Read};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use vmm_dedup_refvmm::{ExitReason, Image, RunningVm, ThpMode, Vm, VmConfig};

const USAGE: &str = "usage: boot KERNEL INITRD|- CMDLINE [MEMORY_MIB [VCPUS]]";
const REBOOTED: u8 = 3;

fn main() -> ExitCode {
    match boot() {
        Ok(ExitReason::PowerOff | ExitReason::Stopped) => ExitCode::SUCCESS,
        Ok(ExitReason::Reboot) => ExitCode::from(REBOOTED),
        Err(error) => {
            let mut message = error.to_string();
            let mut source = error.source();
            while let Some(cause) = source {
                message = format!("{message}: {cause}");
                source = cause.source();
            }
            eprintln!("boot: {message}");
            ExitCode::FAILURE
        }
    }
}

fn boot() -> Result<ExitReason, Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kernel, initrd, cmdline, rest @ ..] = arguments.as_slice() else {
        return Err(USAGE.into());
    };
    let config = VmConfig {
        memory_mib: rest.first().map_or(Ok(512), |text| text.parse())?,
        vcpus: rest.get(1).map_or(Ok(1), |text| text.parse())?,
        kernel: Image::Path(kernel.into()),
        initrd: (initrd != "-").then(|| initrd.into()),
        cmdline: cmdline.clone(),
        thp: ThpMode::Default,
    };
    let vm = Arc::new(Vm::new(&config)?.start(Box::new(io::stdout()))?);
    let typist = Arc::downgrade(&vm);
    thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok(count @ 1..) = io::stdin().read(&mut bytes) {
            let Some(vm) = typist.upgrade() else { break };
            vm.serial_input(&bytes[..count]);
        }
    });
    while !vm.ends_within(Duration::from_secs(3600)) {}
    wait(vm)
}

/// Waits until the typing thread has let go of the VM, which it holds for moments only.
fn wait(mut vm: Arc<RunningVm>) -> Result<ExitReason, Box<dyn std::error::Error>> {
    loop {
        match Arc::try_unwrap(vm) {
            Ok(vm) => return Ok(vm.wait()?),
            Err(shared) => vm = shared,
        }
        thread::yield_now();
    }
}
