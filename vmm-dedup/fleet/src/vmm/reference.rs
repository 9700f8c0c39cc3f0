//! The reference VMM, `vmm-dedup run`: it has the engine built in, and no API but signals.

use crate::plan::{StorePlan, VmPlan};
use crate::state::VmFiles;
use std::process::Command;
use std::time::Duration;

pub(crate) fn arguments(vm: &VmPlan, store: Option<&StorePlan>, files: &VmFiles, command: &mut Command) {
    command
        .args([
            "run",
            "--memory-mib",
            &vm.memory_mib.to_string(),
            "--vcpus",
            &vm.cpus.to_string(),
        ])
        .arg("--kernel")
        .arg(&vm.kernel)
        .arg(format!("--cmdline={}", vm.cmdline))
        .arg("--serial-log")
        .arg(files.serial())
        .arg("--pid-file")
        .arg(files.pid());
    if let Some(initramfs) = &vm.initramfs {
        command.arg("--initrd").arg(initramfs);
    }
    if let Some(store) = store {
        command
            .arg("--store")
            .arg(&store.socket)
            .arg("--dedup-config")
            .arg(files.dedup());
    }
    command.args(&vm.extra_args);
}

/// Waits until the VM runs: then it writes its number.
pub(crate) async fn boot(files: &VmFiles) -> Result<(), String> {
    while !files.pid().exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}
