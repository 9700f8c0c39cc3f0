//! Each mistake is found before anything starts, and told in one line.

use crate::host::{Host, kvm_is_there};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::process::{Command, Output};

const REFERENCE: &str = "[[vm]]\nname = \"a\"\ntemplate = \"payload\"\nvmm = \"reference\"\n";
const PRELOADED: &str = "preload = \"library.so\"\n[[vm]]\nname = \"a\"\ntemplate = \"payload\"\n";

/// Exit code 1, or 2 where the host lacks something; one line that has all these parts; nothing was started.
fn refused(host: &Host, output: &Output, code: i32, parts: &[&str]) {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(errors.starts_with("vmm-dedup: "), "{errors}");
    for part in parts {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    assert_eq!(output.status.code(), Some(code), "{errors}");
    assert!(output.stdout.is_empty());
    host.assert_nothing_left(&BTreeSet::new());
}

fn up_is_refused(toml: &str, parts: &[&str]) {
    let host = Host::new(toml);
    refused(&host, &host.run("up", &[]), 1, parts);
}

#[test]
fn broken_toml_and_unknown_keys_are_refused_with_line_and_column() {
    up_is_refused("name = ", &["fleet.toml:1:8: "]);
    up_is_refused(
        "nmae = \"f\"",
        &["fleet.toml:1:1: unknown field `nmae`", "`name`"],
    );
    up_is_refused(
        &format!("{REFERENCE}kernal = \"k\"\n"),
        &["fleet.toml:5:1: unknown field `kernal`", "`kernel`"],
    );
}

#[test]
fn two_vms_of_one_name_are_refused() {
    up_is_refused(&REFERENCE.repeat(2), &["two VMs have the name \"a\""]);
}

#[test]
fn a_size_is_refused_in_the_file_as_the_reference_vmm_would_refuse_it() {
    if !kvm_is_there() {
        return;
    }
    for (key, option, less, least, most, more) in [
        ("cpus", "--vcpus", 0, 1, 64, 65),
        ("memory_mib", "--memory-mib", 3, 4, 1_048_576, 1_048_577),
    ] {
        for value in [less, more] {
            up_is_refused(
                &format!("{REFERENCE}{key} = {value}\n"),
                &[&format!("{key} is {value}: give {least} to {most}")],
            );
            let run = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
                .args(["run", "--payload", option, &value.to_string()])
                .output()
                .expect("a run");
            let said = String::from_utf8_lossy(&run.stderr).into_owned();
            let limits = format!("out of range: give between {least} and {most}");
            assert!(said.contains(&limits), "{said}");
        }
    }
}

#[test]
fn a_missing_fleet_file_is_named() {
    let host = Host::new(REFERENCE);
    let missing = host.path("missing.toml");
    for command in ["up", "status", "down"] {
        let output = Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
            .args(["fleet", command])
            .arg(&missing)
            .output();
        refused(
            &host,
            &output.expect("a run"),
            1,
            &["cannot read the fleet file", "missing.toml"],
        );
    }
}

#[test]
fn a_missing_kernel_initramfs_or_disk_is_named_with_its_vm() {
    if !kvm_is_there() {
        return;
    }
    for (lines, part) in [
        ("kernel = \"missing\"", "cannot open the kernel"),
        ("kernel = \".\"", "is not a file"),
        ("initramfs = \"missing\"", "cannot open the initramfs"),
    ] {
        up_is_refused(&format!("{REFERENCE}{lines}\n"), &["VM \"a\": ", part]);
    }
    let mut host = Host::new(
        "[[vm]]\nname = \"a\"\ntemplate = \"payload\"\ndisks = [{ path = \"missing\" }]\ndedup = { mode = \"off\" }\n",
    );
    let vmm = host.add("vmm", b"");
    let output = host
        .command("up")
        .env("CLOUD_HYPERVISOR", vmm)
        .output()
        .expect("up");
    refused(&host, &output, 1, &["VM \"a\": ", "cannot open the disk"]);
}

#[test]
fn a_plan_of_what_cannot_start_ends_as_the_start_would() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(&format!("{REFERENCE}kernel = \"missing\"\n"));

    let output = host.run("up", &["--plan"]);

    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    let up = Host::failure(&host.run("up", &[]));
    assert_eq!(Host::failure(&output), up);
    assert!(
        up.0.contains("VM \"a\": cannot open the kernel") && up.1 == 1,
        "{up:?}"
    );
    host.assert_nothing_left(&BTreeSet::new());
}

#[test]
fn without_permission_on_kvm_nothing_starts() {
    if !kvm_is_there() {
        return;
    }
    let host = Host::new(REFERENCE);
    // Device files do not work on a mount with nodev: even root is refused.
    let script =
        "mount --bind /dev/kvm /dev/kvm && mount -o remount,bind,nodev /dev/kvm || exit 77; exec \"$@\"";
    let up = host.command("up");
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(up.get_program())
        .args(up.get_args())
        .output();
    match output {
        Ok(output) if output.status.code() != Some(77) && !output.stderr.starts_with(b"unshare") => {
            refused(
                &host,
                &output,
                2,
                &[
                    "/dev/kvm cannot be used (Permission denied",
                    "give this user access",
                ],
            );
        }
        _ => eprintln!("SKIPPED: a mount namespace cannot be had"),
    }
}

#[test]
fn a_metrics_port_in_use_is_refused() {
    if !kvm_is_there() {
        return;
    }
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let store = format!("[store]\nsocket = \"store.sock\"\nmetrics = \"{address}\"\n");
    up_is_refused(
        &format!("{REFERENCE}{store}"),
        &["cannot serve metrics on", &address, "choose another address"],
    );
}

#[test]
fn a_store_socket_that_cannot_be_or_is_somebody_elses_is_refused() {
    if !kvm_is_there() {
        return;
    }
    let store = |socket: &str| format!("{REFERENCE}[store]\nmetrics = \"none\"\nsocket = \"{socket}\"\n");
    up_is_refused(
        &store("missing/store.sock"),
        &["store of domain \"default\"", "does not exist: create it"],
    );
    up_is_refused(&store("payload.elf"), &["payload.elf exists and is not a socket"]);
    up_is_refused(
        &store(&"x".repeat(120)),
        &["107 are possible: choose a shorter one"],
    );
    let mut host = Host::new(&store("other.sock"));
    host.add("other.sock", b"");
    fs::remove_file(host.path("other.sock")).expect("a file");
    let other = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    let address = SocketAddrUnix::new(host.path("other.sock")).expect("an address");
    rustix::net::bind(&other, &address).expect("bind");
    rustix::net::listen(&other, 8).expect("listen");
    let output = host.run("up", &[]);
    drop(other);
    refused(
        &host,
        &output,
        1,
        &[
            "store of domain \"default\"",
            "does not answer",
            "choose another socket",
        ],
    );
}

#[test]
fn a_runtime_directory_with_other_files_is_refused_and_kept() {
    if !kvm_is_there() {
        return;
    }
    let mut host = Host::new(REFERENCE);
    fs::create_dir(host.path("run")).expect("a folder");
    let mine = host.path("run/mine");
    host.add("run/mine", b"");
    let output = host.run("up", &[]);
    assert!(mine.exists());
    fs::remove_dir_all(host.path("run")).expect("a folder");
    let (error, code) = Host::failure(&output);
    assert!(
        error.contains("is not empty and no fleet's") && code == 1,
        "{error}"
    );
}

#[test]
fn a_vmm_or_library_that_is_missing_is_named_with_what_to_do() {
    if !kvm_is_there() {
        return;
    }
    let mut host = Host::new(PRELOADED);
    let vmm = host.add(
        "vmm",
        &fs::read(env!("CARGO_BIN_EXE_vmm-dedup")).expect("a program"),
    );
    let output = host
        .command("up")
        .env_remove("CLOUD_HYPERVISOR")
        .env("PATH", "/nonexistent")
        .output();
    refused(
        &host,
        &output.expect("up"),
        2,
        &["no cloud-hypervisor on PATH", "set CLOUD_HYPERVISOR"],
    );
    let output = host
        .command("up")
        .env("CLOUD_HYPERVISOR", "/nonexistent/vmm")
        .output();
    refused(
        &host,
        &output.expect("up"),
        2,
        &["CLOUD_HYPERVISOR is /nonexistent/vmm, which is no program"],
    );
    let output = host.command("up").env("CLOUD_HYPERVISOR", &vmm).output();
    refused(
        &host,
        &output.expect("up"),
        2,
        &["preload is", "library.so, which does not exist"],
    );
    let bare = Host::new(&PRELOADED.replace("preload = \"library.so\"\n", ""));
    let output = bare
        .command("up")
        .env("CLOUD_HYPERVISOR", &vmm)
        .env("VMM_DEDUP_PRELOAD", "/nonexistent.so")
        .output();
    refused(
        &bare,
        &output.expect("up"),
        2,
        &["VMM_DEDUP_PRELOAD is /nonexistent.so, which does not exist"],
    );
}

#[test]
fn a_static_vmm_is_refused() {
    if !kvm_is_there() {
        return;
    }
    let mut host = Host::new(PRELOADED);
    host.add("library.so", b"");
    // A freestanding ELF image has no interpreter, like any static program.
    let vmm = host.add("vmm", vmm_dedup_payload::ELF);
    let output = host
        .command("up")
        .env("CLOUD_HYPERVISOR", vmm)
        .output()
        .expect("up");
    refused(
        &host,
        &output,
        1,
        &["vmm is statically linked", "dedup.mode = \"off\""],
    );
}

#[test]
fn a_vmm_with_file_capabilities_is_refused() {
    if !kvm_is_there() {
        return;
    }
    let mut host = Host::new(PRELOADED);
    host.add("library.so", b"");
    let vmm = host.add(
        "vmm",
        &fs::read(env!("CARGO_BIN_EXE_vmm-dedup")).expect("a program"),
    );
    // struct vfs_cap_data, version 2, with CAP_NET_ADMIN (bit 12) permitted and effective: what setcap writes.
    let capabilities: Vec<u8> = [0x0200_0001_u32, 1 << 12, 0, 0, 0]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    let set = rustix::fs::setxattr(
        &vmm,
        "security.capability",
        &capabilities,
        rustix::fs::XattrFlags::empty(),
    );
    if let Err(error) = set {
        eprintln!("SKIPPED: file capabilities cannot be set: {error}");
        return;
    }
    let output = host
        .command("up")
        .env("CLOUD_HYPERVISOR", vmm)
        .output()
        .expect("up");
    refused(&host, &output, 1, &["vmm has file capabilities", "setcap -r"]);
}

#[test]
fn a_hint_takes_a_file_whose_name_begins_with_a_dash_for_a_file() {
    let mut host = Host::new(REFERENCE);
    host.add("-f.toml", format!("name = \"f\"\n{REFERENCE}").as_bytes());
    let fleet = |arguments: &str| {
        let script = format!("exec {} fleet {arguments}", env!("CARGO_BIN_EXE_vmm-dedup"));
        let mut command = Command::new("sh");
        command.args(["-c", &script]).current_dir(host.path(""));
        command.env("VMM_DEDUP_RUNTIME_DIR", host.path("run"));
        Host::failure(&command.output().expect("a run"))
    };

    let (error, code) = fleet("status -- -f.toml");

    assert!(
        error.ends_with("start it with `vmm-dedup fleet up ./-f.toml`") && code == 1,
        "{error}"
    );
    // Pasted it is a command on that file, in which the template is missing.
    let (error, code) = fleet("up ./-f.toml");
    assert!(
        error.starts_with("vmm-dedup: ./-f.toml:4:12: VM \"a\": there is no [template.payload]") && code == 1,
        "{error}"
    );
}

#[test]
fn status_of_a_fleet_that_is_not_up_says_how_to_start_it() {
    let host = Host::new(REFERENCE);
    refused(
        &host,
        &host.run("status", &[]),
        1,
        &["fleet fleet is not up", "vmm-dedup fleet up"],
    );
}
