//! The host: kernel, rights, limits, memory.

use super::finding::{Finding, Verdict};
use rustix::process::{Resource, getrlimit};
use std::fs::{self, OpenOptions};
use vmm_dedup_host::units::short;
use vmm_dedup_host::{memory, runtime};

/// The oldest kernel that has what the engine needs.
const OLDEST: (u32, u32) = (6, 8);
/// From here on pages that are being swapped out can be taken without trouble.
const SWAP: (u32, u32) = (6, 16);
/// Mappings that are enough for scattered pages of some GiB.
const MAPPINGS: u64 = 262_144;
/// Open files that are enough for a store of some GiB: one for each 16 MiB.
const FILES: u64 = 4096;

pub(super) fn findings() -> Vec<Finding> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut findings = vec![
        machine(),
        kernel(&release),
        kvm(),
        userfaultfd(),
        pagemap(),
        max_map_count(&read("/proc/sys/vm/max_map_count")),
        open_files(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)),
        swap(&release, &read("/proc/swaps")),
        ksm(&read("/sys/kernel/mm/ksm/run")),
        folios(&read(
            "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled",
        )),
        runtime_folder(),
    ];
    findings.extend(available());
    findings
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn machine() -> Finding {
    match std::env::consts::ARCH {
        "x86_64" => Finding::ok("machine", "x86_64"),
        other => Finding::new(Verdict::Bad, "machine", other, "the engine runs on x86_64 only"),
    }
}

/// Major and minor number of a release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn kernel(release: &str) -> Finding {
    let found = format!("Linux {release}");
    match version(release) {
        Some(version) if version >= OLDEST => Finding::ok("kernel", found),
        _ => Finding::new(Verdict::Bad, "kernel", found, "run Linux 6.8 or later"),
    }
}

fn kvm() -> Finding {
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Finding::ok("kvm", "/dev/kvm can be used"),
        Err(e) => Finding::new(
            Verdict::Bad,
            "kvm",
            format!("/dev/kvm cannot be used: {e}"),
            "load kvm-intel or kvm-amd, or enable nested virtualisation, and give this user access (group kvm)",
        ),
    }
}

/// CAP_SYS_PTRACE is capability 19.
fn may_trace(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << 19 != 0)
}

fn userfaultfd() -> Finding {
    let device = fs::File::open("/dev/userfaultfd");
    let capable =
        may_trace(&read("/proc/self/status")) || read("/proc/sys/vm/unprivileged_userfaultfd") == "1";
    match device {
        Ok(_) => Finding::ok("userfaultfd", "/dev/userfaultfd can be opened"),
        Err(_) if capable => Finding::ok(
            "userfaultfd",
            "allowed by CAP_SYS_PTRACE or vm.unprivileged_userfaultfd",
        ),
        Err(e) => Finding::new(
            Verdict::Bad,
            "userfaultfd",
            format!("/dev/userfaultfd cannot be opened: {e}"),
            "give the VMMs' user read access to it (udev rule: KERNEL==\"userfaultfd\", GROUP=\"kvm\", MODE=\"0640\"), or CAP_SYS_PTRACE",
        ),
    }
}

fn pagemap() -> Finding {
    match fs::File::open("/proc/self/pagemap") {
        Ok(_) => Finding::ok("pagemap", "/proc/self/pagemap can be opened"),
        Err(e) => Finding::new(
            Verdict::Bad,
            "pagemap",
            format!("/proc/self/pagemap cannot be opened: {e}"),
            "mount /proc; allow access in the sandbox",
        ),
    }
}

fn max_map_count(text: &str) -> Finding {
    let found = format!("vm.max_map_count is {text}");
    match text.parse::<u64>() {
        Ok(count) if count >= MAPPINGS => Finding::ok("mappings", found),
        _ => Finding::new(
            Verdict::Note,
            "mappings",
            found,
            "scattered pages of large VMs need more: sysctl -w vm.max_map_count=1048576, and a line in /etc/sysctl.d",
        ),
    }
}

fn open_files(soft: u64) -> Finding {
    match soft {
        FILES.. => Finding::ok("open files", format!("{soft} for this shell")),
        _ => Finding::new(
            Verdict::Note,
            "open files",
            format!("{soft} for this shell"),
            "a VMM started from here has room for little of a store, one file for each 16 MiB: ulimit -n 65536, or LimitNOFILE=",
        ),
    }
}

fn swap(release: &str, swaps: &str) -> Finding {
    let on = swaps.lines().count() > 1;
    let old = version(release).is_none_or(|version| version < SWAP);
    match (on, old) {
        (false, _) => Finding::ok("swap", "is off"),
        (true, false) => Finding::ok("swap", "is on"),
        (true, true) => Finding::new(
            Verdict::Warn,
            "swap",
            format!("is on, with Linux {release}"),
            "before 6.16 taking a page that is being swapped out can crash the kernel or lose the page, but for the stable series \
             6.12 and 6.15 as of July 2025: run one of those, or swapoff -a",
        ),
    }
}

fn ksm(run: &str) -> Finding {
    match run {
        "1" => Finding::new(
            Verdict::Note,
            "ksm",
            "runs",
            "on the same memory it is of no use: echo 0 > /sys/kernel/mm/ksm/run, or leave mergeable=on out",
        ),
        _ => Finding::ok("ksm", "does not run"),
    }
}

fn folios(setting: &str) -> Finding {
    let chosen = setting.split(' ').find(|word| word.starts_with('['));
    match chosen {
        Some("[advise]" | "[always]" | "[within_size]" | "[inherit]") => {
            Finding::ok("large folios", format!("the store may have them: {setting}"))
        }
        Some(_) => Finding::new(
            Verdict::Note,
            "large folios",
            format!("are off for shared memory: {setting}"),
            "publishing costs half with them: echo advise > /sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled",
        ),
        None => Finding::ok("large folios", "this kernel has no setting for them"),
    }
}

fn runtime_folder() -> Finding {
    let what = "runtime folder";
    let folder = match runtime::folder() {
        Ok(folder) => folder,
        Err(failure) => {
            return Finding::new(
                Verdict::Note,
                what,
                failure.to_string(),
                "stores are found only by --store",
            );
        }
    };
    let found = folder.display().to_string();
    let made = fs::create_dir_all(&folder).and_then(|()| tempfile_in(&folder));
    match made {
        Ok(()) => Finding::ok(what, found),
        Err(e) => Finding::new(
            Verdict::Warn,
            what,
            format!("{found} cannot be written: {e}"),
            format!(
                "make room there, or name another folder with {}",
                runtime::VARIABLE
            ),
        ),
    }
}

fn tempfile_in(folder: &std::path::Path) -> std::io::Result<()> {
    let path = folder.join(format!(".doctor-{}", std::process::id()));
    let written = fs::write(&path, "x");
    let _ = fs::remove_file(&path);
    written
}

fn available() -> Option<Finding> {
    let bytes = memory::available().ok()?;
    let found = format!(
        "{} are available",
        short(i64::try_from(bytes).unwrap_or(i64::MAX))
    );
    // What managed breaks keep free by default.
    Some(match bytes {
        268_435_456.. => Finding::ok("memory", found),
        _ => Finding::new(
            Verdict::Warn,
            "memory",
            found,
            "writers of shared pages may wait, or the kernel kill: free memory, or move VMs away",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_by_their_numbers() {
        assert_eq!(version("6.18.44-fc"), Some((6, 18)));
        assert_eq!(version("6.8"), Some((6, 8)));
        assert_eq!(version("next"), None);
        assert_eq!(kernel("6.8.0-31-generic").verdict, Verdict::Ok);
        for old in ["6.7.12", "5.15.0", "?"] {
            assert_eq!(kernel(old).verdict, Verdict::Bad);
        }
    }

    #[test]
    fn what_is_set_wrong_is_told_with_what_to_set() {
        assert_eq!(max_map_count("1048576").verdict, Verdict::Ok);
        assert!(max_map_count("65530").change.contains("vm.max_map_count=1048576"));
        assert_eq!(
            (open_files(1024).verdict, open_files(65_536).verdict),
            (Verdict::Note, Verdict::Ok)
        );
        let swaps = "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2";
        assert_eq!(swap("6.8.0", swaps).verdict, Verdict::Warn);
        assert_eq!(
            (swap("6.16.0", swaps).verdict, swap("6.8.0", "Filename").verdict),
            (Verdict::Ok, Verdict::Ok)
        );
        assert_eq!(
            (ksm("1").verdict, ksm("0").verdict, ksm("").verdict),
            (Verdict::Note, Verdict::Ok, Verdict::Ok)
        );
        assert_eq!(
            folios("always inherit within_size advise [never]").verdict,
            Verdict::Note
        );
        assert_eq!(
            folios("always inherit within_size [advise] never").verdict,
            Verdict::Ok
        );
        assert_eq!(folios("").verdict, Verdict::Ok);
    }

    #[test]
    fn the_capability_to_trace_is_found_in_its_mask() {
        assert!(may_trace("Name:\tx\nCapEff:\t0000000000080000\n"));
        assert!(!may_trace("CapEff:\t0000000000000001\n") && !may_trace(""));
    }
}
