//! PageForge as a guest sees it: other people's VMMs attach the device over vfio-user, and the payload guest drives it.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vmm_dedup_integration_tests::need_kvm;
use vmm_dedup_pageforge::server::{Server, ServerConfig};
use vmm_dedup_payload::{Device, PayloadConfig, Report};

/// A guest takes some seconds where KVM emulates; more on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// What the guest checks, in order.
const CHECKS: [&str; 12] = [
    "found",
    "twin",
    "key",
    "stranger",
    "refill",
    "refill-key",
    "offsets",
    "bad-page",
    "bad-entry",
    "msix",
    "msix-twin",
    "ring",
];

/// A program named by a variable, or on PATH.
fn find(program: &str, variable: &str) -> Option<PathBuf> {
    let executable = |path: &PathBuf| {
        path.metadata()
            .is_ok_and(|file| file.permissions().mode() & 0o111 != 0)
    };
    let named = std::env::var_os(variable).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join(program));
    named.into_iter().chain(on_path).find(executable)
}

/// A VMM that is ended with the test.
struct Vmm(Child);

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves a device, boots the payload under a VMM that attaches it, and returns what the guest said.
fn drive(command: impl FnOnce(&Path, &Path, &str) -> Command) -> String {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let (socket, kernel) = (folder.path().join("device"), folder.path().join("payload.elf"));
    let (serial, errors) = (folder.path().join("serial"), folder.path().join("errors"));
    std::fs::write(&kernel, vmm_dedup_payload::ELF).expect("the payload is written");
    let server = Server::bind(&socket, ServerConfig::default()).expect("the device listens");
    std::thread::spawn(move || server.run());
    let payload = PayloadConfig::default().device(Device::PageForge);
    let mut command = command(&kernel, &socket, &payload.command_line());
    command
        .stdin(Stdio::null())
        .stdout(File::create(&serial).expect("a file is made"))
        .stderr(File::create(&errors).expect("a file is made"));
    let mut vmm = Vmm(command.spawn().expect("the VMM starts"));
    let start = Instant::now();
    loop {
        let output = String::from_utf8_lossy(&std::fs::read(&serial).expect("it is there")).into_owned();
        let ended = vmm.0.try_wait().expect("the VMM is ours").is_some();
        if ended || output.contains("@payload done ") {
            return output;
        }
        let said = || std::fs::read_to_string(&errors).unwrap_or_default();
        assert!(
            start.elapsed() < PATIENCE,
            "the guest hangs: {output}\n{}",
            said()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn assert_all_right(output: &str) {
    let reports = Report::parse_all(output).unwrap_or_else(|error| panic!("{error}: {output}"));
    let mut checked = Vec::new();
    for report in &reports {
        if let Report::Check { name, ok, got } = report {
            assert!(ok, "{name} is wrong: {got:#x}\n{output}");
            checked.push(name.as_str());
        }
    }
    assert_eq!(checked, CHECKS, "{output}");
    assert!(
        matches!(reports.last(), Some(Report::Done { ok: true })),
        "{output}"
    );
}

#[test]
fn a_guest_of_cloud_hypervisor_drives_the_device() {
    need_kvm!();
    let Some(program) = find("cloud-hypervisor", "CLOUD_HYPERVISOR") else {
        eprintln!("SKIPPED: no cloud-hypervisor on PATH, and CLOUD_HYPERVISOR does not name one");
        return;
    };
    let output = drive(|kernel, socket, line| {
        let mut device = OsString::from("socket=");
        device.push(socket);
        let mut command = Command::new(program);
        command.arg("--kernel").arg(kernel).args(["--cmdline", line]);
        command.args(["--memory", "size=64M,shared=on", "--cpus", "boot=1"]);
        command.args(["--serial", "tty", "--console", "off", "--user-device"]);
        command.arg(device);
        command
    });
    assert_all_right(&output);
}

#[test]
fn a_guest_of_qemu_drives_the_device() {
    let Some(program) = find("qemu-system-x86_64", "QEMU") else {
        eprintln!("SKIPPED: no qemu-system-x86_64 on PATH, and QEMU does not name one");
        return;
    };
    let mut help = Command::new(&program);
    let help = help
        .args(["-device", "help"])
        .stdin(Stdio::null())
        .output()
        .expect("QEMU runs");
    if !String::from_utf8_lossy(&help.stdout).contains("\"vfio-user-pci\"") {
        eprintln!(
            "SKIPPED: {} has no vfio-user-pci: that came with 10.1",
            program.display()
        );
        return;
    }
    let output = drive(|kernel, socket, line| {
        let device = format!(
            "{{\"driver\":\"vfio-user-pci\",\"socket\":{{\"type\":\"unix\",\"path\":\"{}\"}}}}",
            socket.display()
        );
        let mut command = Command::new(program);
        command
            .arg("-kernel")
            .arg(kernel)
            .args(["-append", line, "-device", &device]);
        command.args([
            "-machine",
            "q35,memory-backend=ram",
            "-m",
            "64M",
            "-nodefaults",
            "-no-reboot",
        ]);
        command.args(["-object", "memory-backend-memfd,id=ram,size=64M,share=on"]);
        command.args(["-accel", "tcg", "-display", "none", "-serial", "stdio"]);
        command
    });
    assert_all_right(&output);
}
