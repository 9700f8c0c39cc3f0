//! How the VMMs are called.

use super::library;
use super::options::Options;
use super::program::Program;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is preloaded: the library under test, unless the VMM has the service in it, and what goes behind it.
pub(super) fn preloaded(program: &Program, options: &Options) -> OsString {
    let ours = match (program, &options.store) {
        (Program::Embedded(_), _) | (_, None) => None,
        (Program::CloudHypervisor(_) | Program::Qemu(_), Some(_)) => Some(library::path()),
    };
    let all: Vec<PathBuf> = ours.into_iter().chain(options.behind.clone()).collect();
    std::env::join_paths(all).expect("no colon in it")
}

/// Cloud Hypervisor's arguments.
pub(super) fn cloud_hypervisor(
    path: &Path,
    folder: &Path,
    kernel: &Path,
    line: &str,
    serial: &Path,
    options: &Options,
) -> Command {
    let mut command = Command::new(path);
    command.arg("--api-socket").arg(folder.join("api.sock")).arg("-v");
    command.args(["--seccomp", "true"]);
    if let Some((_, snapshot)) = &options.restore {
        let source = format!(
            "source_url=file://{}{}",
            snapshot.display(),
            options.memory_options
        );
        command.arg("--restore").arg(source);
        return command;
    }
    if options.receive.is_some() {
        return command;
    }
    // Snapshots and the other VMs' folders lie in the folder above.
    let folders = format!("path={},access=rw", folder.parent().unwrap_or(folder).display());
    command.args(["--landlock", "--landlock-rules", &folders]);
    let mut memory = format!("size={}M{}", options.memory_mib, options.memory_options);
    if options.hotplug_mib > 0 {
        memory += &format!(",hotplug_size={}M", options.hotplug_mib);
    }
    let serial = format!("socket={}", serial.display());
    command.arg("--kernel").arg(kernel).args(["--cmdline", line]);
    command.args([
        "--memory",
        &memory,
        "--cpus",
        "boot=1",
        "--serial",
        &serial,
        "--console",
        "off",
    ]);
    command
}

/// QEMU's arguments.
pub(super) fn qemu(path: &Path, folder: &Path, kernel: &Path, line: &str, options: &Options) -> Command {
    // qboot is part of QEMU and starts a PVH image at once; SeaBIOS takes ten seconds where CPL0 is emulated.
    let mut command = Command::new(path);
    command.args(["-bios", "qboot.rom"]);
    let mut memory = format!("{}", options.memory_mib);
    if options.hotplug_mib > 0 {
        memory += &format!(",slots=1,maxmem={}M", options.memory_mib + options.hotplug_mib);
    }
    command.args([
        "-accel",
        "kvm",
        "-m",
        &memory,
        "-nodefaults",
        "-display",
        "none",
        "-serial",
        "stdio",
    ]);
    command.arg("-kernel").arg(kernel).args(["-append", line]);
    command.arg("-qmp").arg(format!(
        "unix:{},server=on,wait=off",
        folder.join("api.sock").display()
    ));
    if let Some((_, snapshot)) = &options.restore {
        let uri = format!("exec:cat {}", snapshot.join("state").display());
        command.args(["-incoming", &uri]);
    }
    if options.receive.is_some() {
        let uri = format!("unix:{}", folder.join("migration.sock").display());
        command.args(["-incoming", &uri]);
    }
    command
}
