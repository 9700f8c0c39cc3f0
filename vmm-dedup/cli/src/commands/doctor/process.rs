//! A running VMM: what would keep its VM from being deduplicated.

use super::finding::{Finding, Verdict};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use vmm_dedup_host::Failure;
use vmm_dedup_host::process::Stat;
use vmm_dedup_host::units::count;

/// O_DIRECT on x86-64, in the octal flags of fdinfo.
const O_DIRECT: u32 = 0o40_000;

pub(super) fn findings(pid: u64) -> Result<Vec<Finding>, Failure> {
    let stat = Stat::of(pid).filter(|stat| !stat.has_ended());
    let stat = stat.ok_or_else(|| Failure::new(format!("there is no process {pid}")))?;
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let program = fs::read_link(folder.join("exe")).map_err(|e| {
        let advice = match rustix::process::geteuid().is_root() {
            true => {
                "root may not here, as in a container without CAP_SYS_PTRACE: run this on the host itself"
            }
            false => "run this as root, or as its user",
        };
        Failure::new(format!("process {pid} may not be looked at ({e}): {advice}"))
    })?;
    let maps = fs::read_to_string(folder.join("maps")).unwrap_or_default();
    let limits = fs::read_to_string(folder.join("limits")).unwrap_or_default();
    let mut findings = vec![match stat.is_stopped() {
        true => Finding::new(
            Verdict::Warn,
            "process",
            format!("{pid} is stopped"),
            format!("`kill -CONT {pid}` lets it go on"),
        ),
        false => Finding::ok(
            "process",
            format!("{pid} runs {}{}", program.display(), as_user(&folder)),
        ),
    }];
    findings.push(service(&maps, has_userfaultfd(&folder)));
    findings.extend(mappings(maps.lines().count()));
    findings.extend(open_files(&limits));
    findings.extend(memory(&maps));
    findings.extend(files(&folder));
    Ok(findings)
}

/// Who a process runs as, with which rights beyond that user's.
fn as_user(process: &Path) -> String {
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    let field = |key: &str, at: usize| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().nth(at)
    };
    let Some(user) = field("Uid:", 1) else {
        return String::new();
    };
    let capabilities = field("CapEff:", 0).and_then(|mask| u64::from_str_radix(mask, 16).ok());
    match capabilities {
        Some(0) => format!(" as user {user}, without capabilities"),
        _ => format!(" as user {user}"),
    }
}

/// Whether the service is in the process.
fn service(maps: &str, has_userfaultfd: bool) -> Finding {
    let what = "service";
    if maps.contains("libvmm_dedup_preload.so") {
        return Finding::ok(what, "the preload library is loaded");
    }
    if maps.contains("vmm-dedup") {
        return Finding::ok(what, "built in");
    }
    // A VMM that embeds the engine has its own name; what it shares is tracked with a userfaultfd. Others have one while
    // memory comes in on demand.
    if has_userfaultfd {
        return Finding::ok(what, "built in, to judge by the userfaultfd that is open");
    }
    Finding::new(
        Verdict::Warn,
        what,
        "neither the preload library nor the program of this project is there",
        "start the VMM with LD_PRELOAD=.../libvmm_dedup_preload.so and VMM_DEDUP_STORE, unless it embeds the engine; programs that are \
         linked statically or have file capabilities ignore LD_PRELOAD",
    )
}

fn has_userfaultfd(process: &Path) -> bool {
    let entries = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let mut files = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    files.any(|file| file.to_string_lossy() == "anon_inode:[userfaultfd]")
}

fn mappings(now: usize) -> Option<Finding> {
    let most: usize = fs::read_to_string("/proc/sys/vm/max_map_count")
        .ok()?
        .trim()
        .parse()
        .ok()?;
    let found = format!("{now} of {most} mappings are in use");
    Some(match now * 10 > most * 9 {
        false => Finding::ok("mappings of the VMM", found),
        true => Finding::new(
            Verdict::Warn,
            "mappings of the VMM",
            found,
            "raise vm.max_map_count, and restart the VM when it suits",
        ),
    })
}

fn open_files(limits: &str) -> Option<Finding> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    let soft: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(match soft {
        4096.. => Finding::ok("open files of the VMM", soft.to_string()),
        _ => Finding::new(
            Verdict::Note,
            "open files of the VMM",
            soft.to_string(),
            "one is needed for each 16 MiB of the store: LimitNOFILE=65536, or `ulimit -n 65536`",
        ),
    })
}

/// Large writable mappings are guest memory, most likely.
fn memory(maps: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (Some(range), Some(rights)) = (fields.next(), fields.next()) else {
            continue;
        };
        let path = fields.nth(3).unwrap_or_default();
        let ends = range.split_once('-');
        let ends = ends.map(|(a, b)| (u64::from_str_radix(a, 16), u64::from_str_radix(b, 16)));
        let Some((Ok(start), Ok(end))) = ends else {
            continue;
        };
        if end - start < 32 << 20 || !rights.starts_with("rw") || path.contains("vmm-dedup") {
            continue;
        }
        if rights.ends_with('s') {
            findings.push(Finding::new(
                Verdict::Warn,
                "guest memory",
                format!(
                    "{} MiB are shared with other processes ({path})",
                    (end - start) >> 20
                ),
                "start the VM with private memory: no shared=on, share=on, vhost-user or vfio-user devices",
            ));
        } else if path.contains("huge") {
            findings.push(Finding::new(
                Verdict::Warn,
                "guest memory",
                format!("{} MiB are of {path}", (end - start) >> 20),
                "start the VM without hugepages; transparent huge pages are fine",
            ));
        }
    }
    findings
}

/// Devices that pin memory, and files for direct I/O.
fn files(process: &Path) -> Vec<Finding> {
    let entries = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let (mut devices, mut pinned, mut direct) = (Vec::new(), Vec::new(), Vec::new());
    for entry in entries {
        let Ok(file) = fs::read_link(entry.path()) else {
            continue;
        };
        let text = file.to_string_lossy().into_owned();
        if ["/dev/vfio", "/dev/vhost-vdpa", "/dev/vhost-scsi", "/dev/iommu"]
            .iter()
            .any(|device| text.starts_with(device))
        {
            devices.push(text);
        } else if is_direct(&process.join("fdinfo").join(entry.file_name())) {
            // Through the link in /proc this is the file that is open, whatever its name leads to now.
            match what_pins(&entry.path()) {
                true => pinned.push(text),
                false => direct.push(text),
            }
        }
    }
    let mut findings = Vec::new();
    if !devices.is_empty() {
        findings.push(Finding::new(
            Verdict::Warn,
            "devices",
            format!("{} is open: it has guest memory pinned", devices.join(", ")),
            "detach it: nothing is shared as long as it is there",
        ));
    }
    findings.extend(direct_io(&pinned, true));
    findings.extend(direct_io(&direct, false));
    findings
}

/// Files that are open for direct I/O; `pinned`: the kernel is known to pin or copy what they read and write.
fn direct_io(files: &[String], pinned: bool) -> Option<Finding> {
    let found = format!(
        "{}: {}",
        count(files.len(), "file is open for it", "files are open for it"),
        files.join(", ")
    );
    let finding = match pinned {
        true => Finding::new(
            Verdict::Note,
            "direct I/O",
            found,
            "fine on these file systems and devices, but pages that the kernel copied are merged again by forks only: \
             heal_stall_us, or cache=writeback",
        ),
        false => Finding::new(
            Verdict::Warn,
            "direct I/O",
            format!("{found}; not known to pin guest memory"),
            "nothing is shared as long as that is so, but on FUSE from Linux 6.9 on, and on overlayfs above what pins: \
             cache=writeback, or put the disk on ext4, XFS, btrfs, tmpfs or a block device",
        ),
    };
    (!files.is_empty()).then_some(finding)
}

/// Magic numbers of ext4, XFS, btrfs and tmpfs.
const PINNING: [i64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994];

/// Whether direct I/O to this file or device is known to pin, or to copy, what it reads and writes.
fn what_pins(file: &Path) -> bool {
    let is_block = fs::metadata(file).is_ok_and(|file| file.file_type().is_block_device());
    is_block || rustix::fs::statfs(file).is_ok_and(|fs| PINNING.contains(&fs.f_type))
}

fn is_direct(fdinfo: &Path) -> bool {
    let text = fs::read_to_string(fdinfo).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    flags
        .and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok())
        .is_some_and(|flags| flags & O_DIRECT != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn shared_and_huge_guest_memory_are_told() {
        let maps = "7f0000000000-7f0010000000 rw-s 00000000 00:01 5 /memfd:ch_ram (deleted)\n\
                    7f1000000000-7f1010000000 rw-p 00000000 00:01 5 /anon_hugepage (deleted)\n\
                    7f2000000000-7f2010000000 rw-p 00000000 00:00 0 \n\
                    7f3000000000-7f3000001000 rw-s 00000000 00:01 5 /memfd:small (deleted)\n";
        let found: Vec<String> = memory(maps).into_iter().map(|finding| finding.found).collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("256 MiB are shared") && found[1].contains("/anon_hugepage"));
    }

    #[test]
    fn the_service_is_told_by_what_is_mapped() {
        let verdict = |maps: &str, has_userfaultfd| service(maps, has_userfaultfd).verdict;
        assert_eq!(
            verdict("... /usr/lib/vmm-dedup/libvmm_dedup_preload.so", false),
            Verdict::Ok
        );
        assert_eq!(verdict("... /usr/bin/cloud-hypervisor", false), Verdict::Warn);
        assert_eq!(verdict("... /usr/bin/cloud-hypervisor", true), Verdict::Ok);
    }

    #[test]
    fn direct_io_is_told_by_what_it_goes_to() {
        let memory = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).expect("a tmpfs");
        let memory = format!("/proc/self/fd/{}", memory.as_raw_fd());
        assert!(what_pins(Path::new(&memory)) && !what_pins(Path::new("/proc/self/stat")));
        let files = ["/disk".to_owned()];
        let verdict = |pinned| direct_io(&files, pinned).map(|finding| finding.verdict);
        assert_eq!(
            (verdict(true), verdict(false)),
            (Some(Verdict::Note), Some(Verdict::Warn))
        );
        assert_eq!(direct_io(&[], false), None);
    }

    #[test]
    fn this_process_can_be_looked_at_and_no_other_is_made_up() {
        let findings = findings(std::process::id().into()).expect("findings");
        assert!(findings[0].found.contains("runs"), "{findings:?}");
        assert!(super::findings(u64::MAX).is_err());
    }
}
