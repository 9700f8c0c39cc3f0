//! The host: kernel, rights, limits, memory.

use super::finding::{Finding, Verdict};
use rustix::fs::{Access, access};
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use vmm_dedup_host::units::short;
use vmm_dedup_host::userfaultfd::{self, Way};
use vmm_dedup_host::{kvm, memory, runtime};

/// Settings of transparent huge pages.
const HUGE: &str = "/sys/kernel/mm/transparent_hugepage";

/// The oldest kernel that has what the engine needs.
const OLDEST: (u32, u32) = (6, 8);
/// From here on pages that are being swapped out can be taken without trouble.
const SWAP: (u32, u32) = (6, 16);
/// From here on KVM pins what it uses of guests that run guests; before it uses that without a trace.
const NESTED: (u32, u32) = (6, 13);
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
        nested(
            &release,
            [
                read("/sys/module/kvm_intel/parameters/nested"),
                read("/sys/module/kvm_amd/parameters/nested"),
            ],
        ),
        userfaultfd(),
        pagemap(),
        known("mappings", "/proc/sys/vm/max_map_count", max_map_count),
        open_files(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)),
        known("swap", "/proc/swaps", |swaps| swap(&release, swaps)),
        known("ksm", "/sys/kernel/mm/ksm/run", ksm),
        known("huge pages", &format!("{HUGE}/enabled"), huge_pages),
        known(
            "large folios",
            &format!("{HUGE}/hugepages-64kB/shmem_enabled"),
            folios,
        ),
        runtime_folder(),
    ];
    findings.push(available());
    findings
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// What is found of a file of the kernel's; of nothing, where the kernel has no such file. What cannot be known is not well.
fn known(what: &str, path: &str, finding: impl FnOnce(&str) -> Finding) -> Finding {
    // What is there wherever these are mounted.
    let mark = match path.starts_with("/proc/") {
        true => "/proc/self/stat",
        false => "/sys/kernel",
    };
    match fs::read_to_string(path) {
        Ok(text) => finding(text.trim()),
        Err(e) if e.kind() == ErrorKind::NotFound && Path::new(mark).exists() => finding(""),
        Err(e) => Finding::new(
            Verdict::Note,
            what,
            format!("is not known: {path} cannot be read: {e}"),
            "run this where /proc and /sys are mounted, and may be read",
        ),
    }
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
    match kvm::open() {
        Ok(()) => Finding::ok("kvm", "/dev/kvm can be used"),
        Err(e) => Finding::new(
            Verdict::Bad,
            "kvm",
            format!("/dev/kvm cannot be used: {e}"),
            "load kvm-intel or kvm-amd, or enable nested virtualisation, and give this user access (group kvm)",
        ),
    }
}

/// `settings`: of kvm_intel and kvm_amd, empty where the module is not there.
fn nested(release: &str, settings: [String; 2]) -> Finding {
    // What does not say that it is off may be on.
    let off = settings
        .iter()
        .any(|setting| ["N", "0"].contains(&setting.as_str()));
    let old = version(release).is_none_or(|version| version < NESTED);
    match (!off, old) {
        (false, _) => Finding::ok("nested", "guests cannot run guests of their own"),
        (true, false) => Finding::ok("nested", "guests can run guests of their own"),
        (true, true) => Finding::new(
            Verdict::Note,
            "nested",
            format!("guests can run guests of their own, with Linux {release}"),
            "before 6.13 KVM uses their memory without a trace, so that such VMs are refused: start them with `--cpus nested=off` or \
             `-cpu host,-vmx,-svm`, or load kvm_intel or kvm_amd with nested=0",
        ),
    }
}

fn userfaultfd() -> Finding {
    match userfaultfd::usable() {
        Ok(Way::Device) => Finding::ok("userfaultfd", "/dev/userfaultfd can be opened"),
        Ok(Way::Call) => Finding::ok(
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
    let found = match text {
        "" => "this kernel does not tell vm.max_map_count".to_owned(),
        number => format!("vm.max_map_count is {number}"),
    };
    match text.parse::<u64>() {
        Ok(count) if count >= MAPPINGS => Finding::ok("mappings", found),
        _ => Finding::new(
            Verdict::Note,
            "mappings",
            found,
            "scattered pages of large VMs need more: `sysctl -w vm.max_map_count=1048576`, and a line in /etc/sysctl.d",
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
            "a VMM started from here has room for little of a store, one file for each 16 MiB: `ulimit -n 65536`, or LimitNOFILE=65536",
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
             6.12 and 6.15 as of July 2025: run one of those, or `swapoff -a`",
        ),
    }
}

fn ksm(run: &str) -> Finding {
    match run {
        "1" => Finding::new(
            Verdict::Note,
            "ksm",
            "runs",
            "on the same memory it is of no use: `echo 0 > /sys/kernel/mm/ksm/run`, or leave mergeable=on out",
        ),
        _ => Finding::ok("ksm", "does not run"),
    }
}

/// The word in brackets.
fn chosen(setting: &str) -> Option<&str> {
    setting.split(' ').find(|word| word.starts_with('['))
}

fn huge_pages(setting: &str) -> Finding {
    match chosen(setting) {
        Some("[always]") => Finding::ok("huge pages", format!("guest memory may have them: {setting}")),
        Some("[madvise]") => Finding::ok(
            "huge pages",
            format!("guest memory may have them where its VMM asks for them: {setting}"),
        ),
        Some(_) => Finding::new(
            Verdict::Note,
            "huge pages",
            format!("guest memory has none: {setting}"),
            format!(
                "huge_policy has nothing to choose from, guests run on 4 KiB pages: `(cd {HUGE} && echo madvise > enabled)`"
            ),
        ),
        None => Finding::new(
            Verdict::Note,
            "huge pages",
            "this kernel has no setting for them",
            "guests run on 4 KiB pages: build it with CONFIG_TRANSPARENT_HUGEPAGE",
        ),
    }
}

fn folios(setting: &str) -> Finding {
    match chosen(setting) {
        Some("[advise]" | "[always]" | "[within_size]" | "[inherit]") => {
            Finding::ok("large folios", format!("the store may have them: {setting}"))
        }
        Some(_) => Finding::new(
            Verdict::Note,
            "large folios",
            format!("are off for shared memory: {setting}"),
            format!(
                "publishing costs half with them: `(cd {HUGE} && echo advise > hugepages-64kB/shmem_enabled)`"
            ),
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
    match can_be_written(&folder) {
        Ok(()) => Finding::ok(what, found),
        Err(e) => Finding::new(
            Verdict::Warn,
            what,
            format!("{found} cannot be written: {e}"),
            match e.kind() {
                ErrorKind::PermissionDenied => format!(
                    "run this as the user that runs stores and fleets, or name another folder with {}",
                    runtime::VARIABLE
                ),
                _ => format!(
                    "make room there, or name another folder with {}",
                    runtime::VARIABLE
                ),
            },
        ),
    }
}

/// Whether files can be made in this folder, or the folder itself where it is to be; it is not made.
fn can_be_written(folder: &Path) -> std::io::Result<()> {
    if folder.is_dir() {
        return tempfile_in(folder);
    }
    let there = folder
        .ancestors()
        .find(|folder| folder.symlink_metadata().is_ok());
    let there = there.unwrap_or(Path::new("/"));
    if !there.is_dir() {
        return Err(ErrorKind::NotADirectory.into());
    }
    Ok(access(there, Access::WRITE_OK | Access::EXEC_OK)?)
}

fn tempfile_in(folder: &Path) -> std::io::Result<()> {
    let path = folder.join(format!(".doctor-{}", std::process::id()));
    let written = fs::write(&path, "x");
    let _ = fs::remove_file(&path);
    written
}

fn available() -> Finding {
    let bytes = match memory::available() {
        Ok(bytes) => bytes,
        Err(e) => {
            let found = format!("what is available is not known: {e}");
            return Finding::new(Verdict::Note, "memory", found, "run this where /proc is mounted");
        }
    };
    let found = format!(
        "{} are available",
        short(i64::try_from(bytes).unwrap_or(i64::MAX))
    );
    // What managed breaks keep free by default.
    match bytes {
        268_435_456.. => Finding::ok("memory", found),
        _ => Finding::new(
            Verdict::Warn,
            "memory",
            found,
            "writers of shared pages may wait, or the kernel kill: free memory, or move VMs away",
        ),
    }
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
    fn guests_of_guests_matter_where_kvm_leaves_no_trace() {
        let verdict = |release, intel: &str, amd: &str| {
            let finding = nested(release, [intel.to_owned(), amd.to_owned()]);
            (finding.verdict, finding.change.contains("nested=0"))
        };
        assert_eq!(verdict("6.12.1", "Y", ""), (Verdict::Note, true));
        assert_eq!(verdict("6.12.1", "", "1"), (Verdict::Note, true));
        assert_eq!(verdict("6.12.1", "", ""), (Verdict::Note, true));
        assert_eq!(verdict("6.12.1", "N", ""), (Verdict::Ok, false));
        assert_eq!(verdict("6.13.0", "Y", ""), (Verdict::Ok, false));
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
        for well in ["[always] madvise never", "always [madvise] never"] {
            assert_eq!(huge_pages(well).verdict, Verdict::Ok);
        }
        let never = huge_pages("always madvise [never]");
        assert!(never.verdict == Verdict::Note && never.change.contains("echo madvise > enabled"));
        assert_eq!(huge_pages("").verdict, Verdict::Note);
    }

    #[test]
    fn what_cannot_be_read_is_not_well() {
        // Neither is there where nothing is mounted; this one is, and is no file.
        let unreadable = known("swap", "/proc/self", |_| Finding::ok("swap", "is off"));
        assert_eq!(unreadable.verdict, Verdict::Note);
        assert!(unreadable.found.contains("is not known"), "{unreadable:?}");
        // A kernel that was built without it.
        let absent = known("swap", "/proc/no-swaps", |text| swap("6.8.0", text));
        assert_eq!((absent.verdict, &*absent.found), (Verdict::Ok, "is off"));
    }

    #[test]
    fn a_runtime_folder_is_looked_at_and_not_made() {
        let folder = tempfile::tempdir().expect("a folder");
        let below = folder.path().join("none/vmm-dedup");
        assert!(can_be_written(&below).is_ok() && !folder.path().join("none").exists());
        assert!(can_be_written(folder.path()).is_ok());
        assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);
        fs::write(folder.path().join("file"), "").expect("a file");
        assert!(can_be_written(&folder.path().join("file/vmm-dedup")).is_err());
    }
}
