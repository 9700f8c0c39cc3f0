//! Compiles the guest (`guest/`): a freestanding program, so it goes to the compiler directly and not through
//! cargo, which would give it the host's runtime. The crate of PageForge's registers is compiled the same way before.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::Command;

/// The guest's name for the crate of PageForge's registers, which is the crate's own.
const REGISTERS: &str = "vmm_dedup_pageforge_registers";

fn main() {
    let guest = from_cargo("CARGO_MANIFEST_DIR").join("guest");
    let out = from_cargo("OUT_DIR");
    println!("cargo::rerun-if-changed=guest");
    // Besides, cargo runs this again when the crate of registers changes: it is a dependency of this program.

    let target = env::var("TARGET").unwrap_or_default();
    assert!(
        target.starts_with("x86_64-") && target.contains("linux"),
        "the payload guest is an x86-64 ELF image: build it on x86-64 Linux, not for {target}"
    );

    let registers = out.join(format!("lib{REGISTERS}.rlib"));
    run(rustc(&target)
        .arg(vmm_dedup_pageforge_registers::SOURCE)
        .args(["--crate-name", REGISTERS, "--crate-type", "rlib", "-o"])
        .arg(&registers));

    let mut script = OsString::from("link-arg=-Wl,-T,");
    script.push(guest.join("link.ld"));
    let mut extern_registers = OsString::from(format!("{REGISTERS}="));
    extern_registers.push(&registers);
    run(rustc(&target)
        .arg(guest.join("main.rs"))
        .args(["--crate-name", "payload", "--crate-type", "bin"])
        .args(codegen([
            "link-arg=-nostdlib",
            "link-arg=-static",
            "link-arg=-no-pie",
        ]))
        .args(codegen([
            "link-arg=-Wl,--build-id=none,-z,norelro,-z,max-page-size=4096",
            "strip=symbols",
        ]))
        .arg("-C")
        .arg(script)
        .arg("--extern")
        .arg(extern_registers)
        .arg("-o")
        .arg(out.join("payload.elf")));
}

fn from_cargo(name: &str) -> PathBuf {
    PathBuf::from(env::var_os(name).unwrap_or_else(|| panic!("{name} is not set: build with cargo")))
}

/// The compiler, with what all parts of the guest have in common.
fn rustc(target: &str) -> Command {
    let mut command = Command::new(from_cargo("RUSTC"));
    command
        .args(["--edition", "2024", "--target", target])
        .args(codegen(["panic=abort", "relocation-model=static", "opt-level=2"]));
    command
}

fn codegen<const N: usize>(options: [&str; N]) -> impl Iterator<Item = &OsStr> {
    options
        .into_iter()
        .flat_map(|option| [OsStr::new("-C"), OsStr::new(option)])
}

fn run(command: &mut Command) {
    let status = command
        .status()
        .unwrap_or_else(|error| panic!("cannot run the compiler for the guest: {error}"));
    assert!(
        status.success(),
        "the payload guest does not build; the compiler's messages are above"
    );
}
