//! Real Linux under the reference VMM, on any machine: QEMU emulates a CPU with AMD-V (L0), in it runs a Debian
//! kernel with KVM (L1), in it the reference VMM's example `boot` starts the same kernel once more (L2), with a
//! busybox initramfs, to userland and to a power-off through ACPI.
//!
//! Needs qemu-system-x86_64, apt-get with package lists (Debian or Ubuntu) and dpkg-deb; skips visibly where one
//! is missing, unless CI=true, which makes that a failure. Nothing here is timed: the emulation decides.

mod cpio;
mod debian;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cpio::Archive;
use debian::Debian;

/// L1 boots in seconds, each L2 in some more; this is the end of all patience.
const TIMEOUT: Duration = Duration::from_secs(100);

const L2_INIT: &str = "#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
echo \"L2 userland: $(/bin/busybox nproc) CPUs, $(/bin/busybox cat /proc/cmdline)\"
echo 'L2 asks for input'
answer=
while [ \"$answer\" != hello ]; do read answer; done
echo \"L2 was told $answer\"
/bin/busybox poweroff -f
";

/// Types until it is heard: what arrives while the serial driver starts is flushed, maybe in the middle of a word.
const L1_INIT: &str = "#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in irqbypass kvm kvm-amd; do
    [ ! -e /modules/$module.ko ] || /bin/busybox insmod /modules/$module.ko
done
echo 'L1 userland'
for vcpus in 1 2; do
    while /bin/busybox sleep 1; do echo hello; done | /bin/boot /vmlinuz /l2.cpio 'console=ttyS0 panic=-1 quiet' 256 $vcpus
    echo \"L1: boot with $vcpus vCPUs ended with $?\"
done
/bin/busybox poweroff -f
";

#[test]
fn linux_boots_to_userland_and_powers_off() {
    let prepared = match prepare() {
        Ok(prepared) => prepared,
        Err(missing) if std::env::var("CI").is_ok_and(|ci| ci == "true") => panic!("{missing}"),
        Err(missing) => {
            eprintln!("SKIPPED linux_boots_to_userland_and_powers_off: {missing}");
            return;
        }
    };

    let clock = Instant::now();
    let output = run_qemu(&prepared);
    eprintln!("QEMU ran for {:?}", clock.elapsed());

    for expected in [
        "L1 userland",
        "L2 userland: 1 CPUs",
        "L1: boot with 1 vCPUs ended with 0",
        "L2 userland: 2 CPUs",
        "L2 was told hello",
        "L1: boot with 2 vCPUs ended with 0",
    ] {
        assert!(output.contains(expected), "no \"{expected}\" in:\n{output}");
    }
}

/// What QEMU boots.
struct Prepared {
    kernel: PathBuf,
    initramfs: PathBuf,
}

/// Builds the images, or says what is missing for that.
fn prepare() -> Result<Prepared, String> {
    let version = Command::new("qemu-system-x86_64").arg("--version").output();
    version.map_err(|error| format!("qemu-system-x86_64 cannot be run ({error}): install it"))?;
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("linux_nested");
    let debian = Debian::fetch(&cache)?;
    let boot = build_boot_example();

    let mut l2 = base_archive(&debian, L2_INIT);
    let mut l1 = base_archive(&debian, L1_INIT);
    l1.directory("modules");
    for module in debian.modules()? {
        let name = module
            .file_name()
            .expect("modules have names")
            .to_string_lossy()
            .into_owned();
        l1.file(&format!("modules/{name}"), 0o644, &read(&module));
    }
    l1.file("bin/boot", 0o755, &read(&boot));
    for library in libraries_of(&boot) {
        let inside = library.to_string_lossy().trim_start_matches('/').to_owned();
        l1.file(&inside, 0o755, &read(&library));
    }
    l1.file("vmlinuz", 0o644, &read(&debian.kernel()?));
    l1.file("l2.cpio", 0o644, &l2.finish());
    let initramfs = cache.join("l1.cpio");
    fs::write(&initramfs, l1.finish()).expect("the cache directory is writable");
    Ok(Prepared {
        kernel: debian.kernel()?,
        initramfs,
    })
}

fn base_archive(debian: &Debian, init: &str) -> Archive {
    let mut archive = Archive::default();
    archive.directory("bin");
    archive.directory("dev");
    archive.console("dev/console");
    archive.file("bin/busybox", 0o755, &read(&debian.busybox()));
    archive.file("init", 0o755, init.as_bytes());
    archive
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// `cargo test --test linux_nested` does not build examples, so it is done here; usually there is nothing to do.
fn build_boot_example() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its path");
    let profile = test.ancestors().nth(2).expect("tests are in PROFILE/deps");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--example", "boot", "--manifest-path"]);
    cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    cargo
        .arg("--target-dir")
        .arg(profile.parent().expect("profiles are in the target directory"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(
        cargo
            .status()
            .expect("cargo runs the tests, so it can be run")
            .success()
    );
    profile.join("examples/boot")
}

/// The shared libraries of a program, and its loader.
fn libraries_of(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd")
        .arg(program)
        .output()
        .expect("ldd comes with the C library");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

fn run_qemu(prepared: &Prepared) -> String {
    let mut qemu = Command::new("qemu-system-x86_64")
        .args([
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "qemu64,+svm,+npt,+nrip-save,-cx16",
        ])
        .args([
            "-smp",
            "2",
            "-m",
            "1536",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
        ])
        .args(["-serial", "stdio", "-append", "console=ttyS0 panic=-1 quiet"])
        .arg("-kernel")
        .arg(&prepared.kernel)
        .arg("-initrd")
        .arg(&prepared.initramfs)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("QEMU could be run before");
    let mut stdout = qemu.stdout.take().expect("it is piped");
    let reader = thread::spawn(move || {
        let mut output = Vec::new();
        let _ = stdout.read_to_end(&mut output);
        String::from_utf8_lossy(&output).into_owned()
    });
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline && qemu.try_wait().expect("it is our child").is_none() {
        thread::sleep(Duration::from_millis(100));
    }
    // Both do nothing to a QEMU that has ended.
    let _ = qemu.kill();
    let _ = qemu.wait();
    reader.join().expect("reading does not panic")
}
