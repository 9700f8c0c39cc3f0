//! VMs that run as users of their own.

use crate::host::{COMMON_PAGES, Devices, Host, kvm_is_there, wait_until};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// The group of the devices, and the first user; neither is in /etc/passwd or /etc/group.
const GROUP: u32 = 61_000;
const FIRST: u32 = 61_001;

/// As the udev rule of the package gives them.
const DEVICES: Devices = Devices {
    group: GROUP,
    modes: ["0660", "0640"],
};

/// Two VMs, each of a user of its own.
const TWO: &str = "user = \"{index+61001}\"\ngroups = [\"61000\"]\n[[vm]]\nname = \"pay\"\ncount = 2\ntemplate = \"payload\"\n\
                   vmm = \"reference\"\ndedup = { pass_period_ms = 200 }\n";

/// A line of a process's status.
fn status_of(pid: &Value, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(key))
        .expect("a line");
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether a user can open a file, or list a folder.
fn can_read(user: u32, path: &Path) -> bool {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let user = Uid::from_raw(user);
            set_thread_res_uid(user, user, user).expect("another user");
            match path.is_dir() {
                true => fs::read_dir(path).is_ok(),
                false => fs::File::open(path).is_ok(),
            }
        });
        thread.join().expect("no panic")
    })
}

#[test]
fn vms_of_two_users_share_without_any_capability_and_leave_nothing() {
    if !kvm_is_there() || !DEVICES.are_possible() {
        return;
    }
    let mut host = Host::new(TWO);
    host.open_to_all();
    let up = host.command_with(&DEVICES, "up").output().expect("up");
    assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
    let status = host.status();
    for (vm, user) in status["vms"].as_array().expect("VMs").iter().zip(FIRST..) {
        assert_eq!(
            (&vm["state"], &vm["user"]),
            (&"running".into(), &user.to_string().into()),
            "{vm:#}"
        );
        let pid = &vm["pid"];
        let user = user.to_string();
        assert_eq!(status_of(pid, "Uid:"), [user.as_str(); 4].join(" "));
        assert_eq!(status_of(pid, "Gid:"), [user.as_str(); 4].join(" "));
        assert_eq!(status_of(pid, "Groups:"), format!("{GROUP} {user}"));
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(status_of(pid, set), "0000000000000000", "{set}");
        }
        assert_eq!(status_of(pid, "NoNewPrivs:"), "1");
    }
    let files = [
        "state.json",
        "store-default.log",
        "vm",
        "vm/pay-0",
        "vm/pay-0/vmm.log",
        "vm/pay-0/dedup.toml",
        "vm/pay-0/serial.log",
    ];
    for (file, by_owner) in files
        .into_iter()
        .zip([false, false, false, true, false, true, true])
    {
        let path = host.path("run").join(file);
        assert!(
            !can_read(FIRST + 1, &path),
            "{file} can be read by the other VM's user"
        );
        assert_eq!(can_read(FIRST, &path), by_owner, "{file}, by the VM's own user");
    }
    wait_until("both share what they have in common", || {
        let status = host.status();
        let vms = status["vms"].as_array().expect("VMs").clone();
        vms.iter()
            .all(|vm| vm["dedup"]["pages_mapped"].as_u64() >= Some(COMMON_PAGES))
    });
    let table = host.must("status", &[]);
    assert!(table.contains("USER") && table.contains("61002"), "{table}");
    let listed = host
        .command_with(&DEVICES, "up")
        .arg("--plan")
        .output()
        .expect("a plan");
    assert!(
        String::from_utf8_lossy(&listed.stdout).contains("nothing to do"),
        "{listed:?}"
    );
    let memfds = Host::memfds_of(&status["stores"][0]["pid"]);
    host.must("down", &[]);
    host.assert_nothing_left(&memfds);
}

#[test]
fn a_vm_that_crashed_is_started_anew_as_its_user() {
    if !kvm_is_there() || !DEVICES.are_possible() {
        return;
    }
    let mut host = Host::new(TWO);
    host.open_to_all();
    let up = || host.command_with(&DEVICES, "up").output().expect("up");
    assert!(up().status.success());
    crate::host::send(&host.vm("pay-1")["pid"], rustix::process::Signal::KILL);
    wait_until("it has crashed", || host.vm("pay-1")["state"] == "crashed");
    // What its user left there leads elsewhere.
    let (log, victim) = (host.path("run/vm/pay-1/vmm.log"), host.path("victim"));
    fs::write(&victim, "as it was").expect("a file");
    fs::remove_file(&log)
        .and_then(|()| std::os::unix::fs::symlink(&victim, &log))
        .expect("a link");
    let again = up();
    assert!(
        again.status.success(),
        "{}",
        String::from_utf8_lossy(&again.stderr)
    );
    assert_eq!(fs::read_to_string(&victim).expect("the file"), "as it was");
    fs::remove_file(&victim).expect("removed");
    let vm = host.vm("pay-1");
    assert_eq!(status_of(&vm["pid"], "Uid:").split(' ').next(), Some("61002"));
    let folder = fs::metadata(host.path("run/vm/pay-1")).expect("a folder");
    assert_eq!((folder.uid(), folder.mode() & 0o777), (61_002, 0o700));
    host.must("down", &[]);
}

/// `up`, and its plan, end with 1 and one line that has these parts; nothing was started.
fn refused(host: &Host, devices: &Devices, parts: &[&str]) {
    for more in [&["--plan"][..], &[]] {
        let output = host.command_with(devices, "up").args(more).output().expect("up");
        let (said, code) = Host::failure(&output);
        assert_eq!(code, 1, "{said}");
        for part in parts {
            assert!(said.contains(part), "{more:?}: {part:?} is not in: {said}");
        }
    }
    host.assert_nothing_left(&std::collections::BTreeSet::new());
}

fn one(lines: &str) -> Host {
    let mut host = Host::new(&format!(
        "[[vm]]\nname = \"a\"\ntemplate = \"payload\"\nvmm = \"reference\"\n{lines}\n"
    ));
    host.open_to_all();
    host
}

#[test]
fn what_a_user_lacks_is_told_before_anything_starts() {
    if !kvm_is_there() || !DEVICES.are_possible() {
        return;
    }
    for (lines, parts) in [
        (
            "user = \"no-such-user\"",
            [
                "VM \"a\": there is no user no-such-user",
                "useradd --system no-such-user",
            ],
        ),
        (
            "user = \"61001\"\ngroups = [\"no-such-group\"]",
            ["there is no group no-such-group", "groupadd"],
        ),
        ("user = \"root\"", ["user is root", "leave it out"]),
        (
            "user = \"61001\"",
            ["as user 61001: cannot open /dev/kvm", "groups = [\"kvm\"]"],
        ),
    ] {
        refused(&one(lines), &DEVICES, &parts);
    }
    let user = "user = \"61001\"\ngroups = [\"61000\"]";
    let closed = Devices {
        modes: ["0660", "0600"],
        ..DEVICES
    };
    refused(
        &one(user),
        &closed,
        &["as user 61001: cannot open /dev/userfaultfd", "udev rule"],
    );
    let host = one(user);
    let private = fs::Permissions::from_mode(0o600);
    fs::set_permissions(host.path("payload.elf"), private).expect("a mode");
    refused(
        &host,
        &DEVICES,
        &["as user 61001: cannot open the kernel", "payload.elf"],
    );
    let host = one(user);
    fs::set_permissions(host.path(""), fs::Permissions::from_mode(0o700)).expect("a mode");
    refused(&host, &DEVICES, &["VM \"a\": as user 61001: cannot"]);
}

#[test]
fn groups_without_a_user_are_refused_in_the_file() {
    let host = one("groups = [\"kvm\"]");
    let output = host.run("up", &["--plan"]);
    let (said, code) = Host::failure(&output);
    assert!(
        said.contains("it has groups and no user") && said.contains("fleet.toml:5:") && code == 1,
        "{said}"
    );
}

#[test]
fn a_store_that_runs_for_others_is_told_before_anything_starts() {
    if !kvm_is_there() || !DEVICES.are_possible() {
        return;
    }
    let mut host = Host::new(TWO);
    host.open_to_all();
    let mut store = std::process::Command::new(env!("CARGO_BIN_EXE_vmm-dedup"))
        .args([
            "store",
            "--metrics",
            "none",
            "--max-mib",
            "64",
            "--socket-mode",
            "0666",
            "--join-user",
            "61001",
        ])
        .arg("--socket")
        .arg(host.path("store.sock"))
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("a store");
    wait_until("it listens", || {
        vmm_dedup_host::store::listens(&host.path("store.sock"))
    });
    let output = host.command_with(&DEVICES, "up").output().expect("up");
    let (said, code) = Host::failure(&output);
    store.kill().and_then(|()| store.wait()).expect("its end");
    assert!(
        code == 1 && said.contains("as user 61002: ") && said.contains("user 61002 may not join this store"),
        "{said}"
    );
}

#[test]
fn doctor_looks_with_a_users_rights() {
    if !kvm_is_there() || !DEVICES.are_possible() {
        return;
    }
    let mut host = Host::new(TWO);
    host.open_to_all();
    let found = |more: &[&str], what: &str| {
        let output = host
            .doctor(&DEVICES)
            .args(["--user", "61001", "--json"])
            .args(more)
            .output()
            .expect("doctor");
        let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let findings = json["findings"].as_array().expect("findings").clone();
        let finding = findings
            .into_iter()
            .find(|finding| finding["what"] == what)
            .expect("a finding");
        finding["verdict"].as_str().expect("a verdict").to_owned()
    };
    for what in ["kvm", "userfaultfd"] {
        assert_eq!(
            (found(&[], what), found(&["--groups", "61000"], what)),
            ("bad".into(), "ok".into()),
            "{what}"
        );
    }
}
