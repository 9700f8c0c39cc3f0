//! Compiles the guest (`guest/`): a freestanding program, so it goes to the compiler directly and not through
//! cargo, which would give it the host's runtime.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    let from_cargo = |name: &str| {
        PathBuf::from(env::var_os(name).unwrap_or_else(|| panic!("{name} is not set: build with cargo")))
    };
    let guest = from_cargo("CARGO_MANIFEST_DIR").join("guest");
    let elf = from_cargo("OUT_DIR").join("payload.elf");
    println!("cargo::rerun-if-changed=guest");
    println!("cargo::rerun-if-changed=../../devices/pageforge-vfio/src/registers.rs");

    let target = env::var("TARGET").unwrap_or_default();
    assert!(
        target.starts_with("x86_64-") && target.contains("linux"),
        "the payload guest is an x86-64 ELF image: build it on x86-64 Linux, not for {target}"
    );

    let mut script = std::ffi::OsString::from("link-arg=-Wl,-T,");
    script.push(guest.join("link.ld"));
    let status = Command::new(from_cargo("RUSTC"))
        .arg(guest.join("main.rs"))
        .args([
            "--crate-name",
            "payload",
            "--crate-type",
            "bin",
            "--edition",
            "2024",
            "--target",
            &target,
        ])
        .args([
            "-C",
            "panic=abort",
            "-C",
            "relocation-model=static",
            "-C",
            "opt-level=2",
        ])
        .args([
            "-C",
            "link-arg=-nostdlib",
            "-C",
            "link-arg=-static",
            "-C",
            "link-arg=-no-pie",
        ])
        .args([
            "-C",
            "link-arg=-Wl,--build-id=none,-z,norelro,-z,max-page-size=4096",
            "-C",
            "strip=symbols",
        ])
        .arg("-C")
        .arg(script)
        .arg("-o")
        .arg(&elf)
        .status()
        .unwrap_or_else(|error| panic!("cannot run the compiler for the guest: {error}"));
    assert!(
        status.success(),
        "the payload guest does not build; the compiler's messages are above"
    );
}
