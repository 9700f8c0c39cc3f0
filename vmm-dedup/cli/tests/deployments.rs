//! What docs/deployments.md says, run as it stands there: in a mount namespace with a /run, an /etc and devices of its own, so that the host
//! stays as it is.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use vmm_dedup_integration_tests::unmodified::library;

const TEXT: &str = include_str!("../../../docs/deployments.md");
const PACKAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging");

/// Where the package puts what the text names.
const INSTALLED: &str = "/usr/lib/vmm-dedup";

/// Where it lies here: in /usr, of which containers have all.
const HERE: &str = "/usr/src";

/// What the VMs have in common are 16 MiB. Under Cloud Hypervisor some pages of that are not in one piece with the rest.
const SHARED_MIB: u32 = 15;

/// Prepares a host as the package does, and defines what the checks use.
const HOST: &str = r#"
set -euo pipefail
mount --make-rprivate /
cp -a /etc "$work/etc" && mount --bind "$work/etc" /etc
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir /run/lock
rule=$package/debian/vmm-dedup.udev
systemd-sysusers "$package/sysusers.d/vmm-dedup.conf"
systemd-tmpfiles --create "$package/debian/vmm-dedup.tmpfiles"
mount -t tmpfs -o mode=0755 tmpfs /mnt
device() {
    mknod -m "$2" "/mnt/$1" c $((0x$(stat -c %t "/dev/$1"))) $((0x$(stat -c %T "/dev/$1")))
    chgrp "$3" "/mnt/$1"
    mount --bind "/mnt/$1" "/dev/$1"
}
said() { sed -n "s/^KERNEL==\"userfaultfd\".*$1=\"\([^\"]*\)\".*/\1/p" "$rule"; }
device kvm 0660 kvm
device userfaultfd "$(said MODE)" "$(said GROUP)"
umount -l /mnt
mount --bind "$work/installed" /usr/src
mkdir -p /etc/vmm-dedup
# Two VMs that share what they have in common with each other.
until_shared() {
    local i pages
    for i in $(seq 600); do
        pages=$(vmm-dedup stat --json --store "$1" | grep -o '"pages_mapped": *[0-9]*' | grep -o '[0-9]*$' || true)
        if [[ $(wc -w <<<"$pages") == 2 ]] && awk -v least=$((shared * 256)) '$1 < least { few = 1 } END { exit few }' <<<"$pages"; then
            return 0
        fi
        sleep 0.2
    done
    echo "nothing is shared: $pages" >&2
    vmm-dedup stat --store "$1" >&2 || true
    return 1
}
# Processes whose command line has this in it.
running() {
    local process line
    for process in /proc/[0-9]*; do
        { line=$(tr '\0' ' ' <"$process/cmdline"); } 2>/dev/null || continue
        [[ $line != *"$1"* ]] || echo "${process#/proc/}"
    done
}
none_running() {
    local i
    for i in $(seq 100); do
        [[ -n $(running "$1") ]] || return 0
        sleep 0.1
    done
    echo "still there:" >&2
    for i in $(running "$1"); do tr '\0' ' ' <"/proc/$i/cmdline" >&2 || true; done
    return 1
}
"#;

/// The blocks of a kind under a heading, in order.
fn blocks(heading: &str, kind: &str) -> Vec<String> {
    let section = TEXT.split("\n## ").find(|section| section.starts_with(heading));
    let section = section.unwrap_or_else(|| panic!("no heading {heading}"));
    let fences = section.split("```").skip(1).step_by(2);
    fences
        .filter_map(|block| block.strip_prefix(&format!("{kind}\n")))
        .map(str::to_owned)
        .collect()
}

fn program_at(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).map(|folder| folder.join(name));
    places.into_iter().find(|program| program.is_file())
}

fn is_program(name: &str) -> bool {
    program_at(name).is_some()
}

/// Whether this can be played here; says why not.
fn can_be_played(programs: &[&str]) -> bool {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can prepare a host");
        return false;
    }
    let devices = ["/dev/kvm", "/dev/userfaultfd"].map(Path::new);
    if let Some(missing) = devices.into_iter().find(|path| !path.exists()) {
        assert!(std::env::var_os("CI").is_none(), "no {} in CI", missing.display());
        eprintln!("SKIPPED: no {}", missing.display());
        return false;
    }
    let always = ["setpriv", "systemd-sysusers", "systemd-tmpfiles"];
    if let Some(missing) = always.iter().chain(programs).find(|name| !is_program(name)) {
        eprintln!("SKIPPED: {missing} is missing");
        return false;
    }
    true
}

/// Everything that the text names, where every user can reach it.
struct Installed {
    folder: tempfile::TempDir,
}

impl Installed {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let installed = folder.path().join("installed");
        let everybody = fs::Permissions::from_mode(0o755);
        fs::create_dir(&installed).expect("a folder");
        for folder in [folder.path(), &installed] {
            fs::set_permissions(folder, everybody.clone()).expect("a mode");
        }
        let program = PathBuf::from(env!("CARGO_BIN_EXE_vmm-dedup"));
        let mut programs = vec![
            (program, "vmm-dedup"),
            (library::path(), "libvmm_dedup_preload.so"),
        ];
        programs.extend(program_at("cloud-hypervisor").map(|path| (path, "cloud-hypervisor")));
        for (from, name) in programs {
            let to = installed.join(name);
            fs::copy(from, &to).expect("a copy");
            fs::set_permissions(&to, everybody.clone()).expect("a mode");
        }
        fs::write(installed.join("payload.elf"), vmm_dedup_payload::ELF).expect("a kernel");
        Self { folder }
    }

    /// Runs a script on the host that the text is for.
    fn play(&self, script: &str) {
        let folder = self.folder.path();
        let file = folder.join("script");
        fs::write(&file, format!("{HOST}\n{script}\n")).expect("a file");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let places = std::iter::once(PathBuf::from(HERE)).chain(std::env::split_paths(&path));
        let output = Command::new("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "bash",
            ])
            .arg(&file)
            .env("PATH", std::env::join_paths(places).expect("a path"))
            .env("work", folder)
            .env("package", PACKAGE)
            .env("shared", SHARED_MIB.to_string())
            .env("VMM_DEDUP_PRELOAD", format!("{HERE}/libvmm_dedup_preload.so"))
            .env_remove("VMM_DEDUP_RUNTIME_DIR")
            .env_remove("XDG_RUNTIME_DIR")
            .stdin(std::process::Stdio::null())
            .output()
            .expect("it runs");
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{}\n{}\n{}",
            output.status,
            said(&output.stdout),
            said(&output.stderr)
        );
    }
}

/// A part of the text, with what the package installs taken from where it lies here.
fn here(part: &str) -> String {
    part.replace(INSTALLED, HERE)
}

/// Cloud Hypervisor where it is there; says so if not.
fn is_cloud_hypervisor_there() -> bool {
    let there = is_program("cloud-hypervisor");
    if !there {
        eprintln!("SKIPPED: cloud-hypervisor is not on PATH: the reference VMM stands in for it");
    }
    there
}

/// The containers' block with the reference VMM, which needs no library.
fn with_the_reference_vmm(block: &str) -> String {
    let (before, rest) = block
        .split_once("        --setenv LD_PRELOAD")
        .expect("a library");
    let (_, command) = rest.split_once("cloud-hypervisor --kernel").expect("a VMM");
    let command = command
        .replace(
            "--memory size=64M --cpus boot=1",
            "--memory-mib 64 --store $dir/store/store.sock --name $box",
        )
        .replace("--serial file=", "--serial-log ")
        .replace(" --console off", "");
    format!("{before}        vmm-dedup run --kernel{command}")
}

/// The containers' block's way to start something in a VM's container, which `$box` names.
fn in_a_box(block: &str) -> &str {
    let (_, body) = block.split_once("; do\n    $contain").expect("a loop");
    let (container, _) = body.split_once("\\\n        --setenv").expect("a command");
    container
}

#[test]
fn users_of_their_own_share_without_a_capability_and_leave_nothing() {
    if !can_be_played(&[]) {
        return;
    }
    let installed = Installed::new();
    let [toml] = &blocks("Users of their own", "toml")[..] else {
        panic!("one fleet file")
    };
    let [up, down] = &blocks("Users of their own", "sh")[..] else {
        panic!("two blocks")
    };
    let stands_in = ["", "vmm = \"reference\"\n"][usize::from(!is_cloud_hypervisor_there())];
    let toml = here(toml) + stands_in;

    installed.play(&format!(
        r#"cat >/etc/vmm-dedup/tenants.toml <<'FLEET'
{toml}FLEET
{up}
socket=/run/vmm-dedup/tenants/store.sock
until_shared "$socket"
vmm-dedup fleet status /etc/vmm-dedup/tenants.toml
# Who they are, and what they may do.
pids=$(vmm-dedup stat --json --store "$socket" | grep -o '"pid": *[0-9]*' | grep -o '[0-9]*$' | sort -u)
[[ $(wc -w <<<"$pids") == 3 ]]
for pid in $pids; do
    grep -E '^(Uid|CapPrm|CapEff|CapBnd|CapInh|CapAmb|NoNewPrivs):' "/proc/$pid/status" | tr -s '\t\n' '  '
    ! grep -qE '^Uid:\s+0\s' "/proc/$pid/status"
    [[ $(grep -cE '^Cap(Inh|Prm|Eff|Bnd|Amb):\s+0+$' "/proc/$pid/status") == 5 ]]
    grep -qE '^NoNewPrivs:\s+1$' "/proc/$pid/status"
done
[[ $(for pid in $pids; do awk '/^Uid:/ {{ print $2 }}' "/proc/$pid/status"; done | sort -u | wc -l) == 3 ]]
# A user of the group who is not on the list does not get in.
! setpriv --reuid=61002 --regid=61002 --groups vmm-dedup vmm-dedup stat --store "$socket" 2>&1 | tee /dev/stderr | grep -q running
{down}
for user in 61000 61001 "$(id -u vmm-dedup)"; do
    ! grep -lE "^Uid:\s+$user\s" /proc/[0-9]*/status
done
none_running tenants
[[ -z $(find /run/vmm-dedup -mindepth 1) ]] || {{ find /run/vmm-dedup; exit 1; }}
"#
    ));
}

#[test]
fn containers_share_and_leave_nothing() {
    if !can_be_played(&["bwrap"]) {
        return;
    }
    let installed = Installed::new();
    let [up, down] = &blocks("Containers", "sh")[..] else {
        panic!("two blocks")
    };
    let mut up = here(up);
    if !is_cloud_hypervisor_there() {
        up = with_the_reference_vmm(&up);
    }

    installed.play(&format!(
        r#"cat >"$work/as-a-user" <<'USER'
set -euo pipefail
{HOST_FUNCTIONS}
dir=$work/boxes
{up}
until_shared "$dir/store/store.sock"
# Each is the first process of a PID namespace, or the second, and sees no other.
[[ $(for pid in $(running store.sock); do readlink "/proc/$pid/ns/pid"; done | sort -u | wc -l) -ge 2 ]]
for pid in $(running payload.elf); do
    [[ $(readlink "/proc/$pid/ns/user") != $(readlink /proc/self/ns/user) ]] || tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q bwrap
done
# A box has its own folder and its store, and nothing else of whoever runs it.
mkdir -m 0755 "$dir.else"
vmm-dedup store --socket "$dir.else/store.sock" --metrics none --domain elsewhere &
until test -S "$dir.else/store.sock"; do sleep 0.1; done
box=box-0
in_a_box() {{ $contain {container} "$@"; }}
for how in env in_a_box; do
    $how vmm-dedup stat --store "$dir/store/store.sock" >/dev/null
    $how head -c 1 "$dir/box-0/serial.log" >/dev/null
done
vmm-dedup stat --store "$dir.else/store.sock" >/dev/null
! in_a_box vmm-dedup stat --store "$dir.else/store.sock" || exit 1
head -c 1 "$dir/box-1/serial.log" >/dev/null
! in_a_box head -c 1 "$dir/box-1/serial.log" || exit 1
! in_a_box touch "$dir/store/mine" || exit 1
sockets=$(in_a_box find / '(' -path /proc -o -path /sys -o -path /usr ')' -prune -o -type s -print)
[[ $sockets == "$dir/store/store.sock" ]] || {{ echo "sockets in a box: $sockets" >&2; exit 1; }}
kill %4
{down}
none_running boxes/store
[[ ! -e $dir ]]
USER
mkdir "$work/home" && chown 61000 "$work/home"
sed -i 's|^dir=.*|dir=$work/home/boxes|' "$work/as-a-user"
exec setpriv --reuid=61000 --regid=61000 --groups kvm --inh-caps=-all --bounding-set=-all bash "$work/as-a-user"
"#,
        container = in_a_box(&up),
        HOST_FUNCTIONS = HOST.split_once("# Two VMs").expect("functions").1.split_once('\n').expect("lines").1,
    ));
}
