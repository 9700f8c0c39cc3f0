//! What /proc tells: limits, memory, faults, and what a range of addresses is.

use crate::error::{Backing, Error};
use rustix::time::{ClockId, clock_gettime};
use std::fs;
use std::ops::Range;
use vmm_dedup_protocol::SEGMENT_NAME;

/// vm.max_map_count.
pub(crate) fn max_map_count() -> Result<usize, Error> {
    let path = "/proc/sys/vm/max_map_count";
    let text = fs::read_to_string(path).map_err(|e| Error::Proc(path, e))?;
    text.trim()
        .parse()
        .map_err(|_| Error::Proc(path, std::io::ErrorKind::InvalidData.into()))
}

/// One line of /proc/self/maps.
#[derive(Debug, PartialEq, Eq)]
struct Vma {
    range: Range<usize>,
    /// It can be read and written.
    usable: bool,
    shared: bool,
    anonymous: bool,
    /// Of the file, or 0.
    inode: u64,
    path: String,
}

fn parse_vma(line: &str) -> Option<Vma> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    let access = fields.next()?;
    let (usable, shared) = (access.starts_with("rw"), access.ends_with('s'));
    let inode = fields.nth(2)?.parse().ok()?;
    let path = fields.next().unwrap_or("").to_owned();
    Some(Vma {
        range,
        usable,
        shared,
        anonymous: inode == 0 && !path.starts_with('/'),
        inode,
        path,
    })
}

fn vmas() -> Result<Vec<Vma>, Error> {
    let path = "/proc/self/maps";
    let text = fs::read_to_string(path).map_err(|e| Error::Proc(path, e))?;
    Ok(text.lines().filter_map(parse_vma).collect())
}

/// What this process maps of files: addresses and inode numbers.
pub(crate) fn mapped_files() -> Result<Vec<(Range<usize>, u64)>, Error> {
    let mapped = vmas()?.into_iter().map(|vma| (vma.range, vma.inode));
    Ok(mapped.filter(|(_, inode)| *inode != 0).collect())
}

/// VMAs of this process.
pub(crate) fn vma_count() -> Result<usize, Error> {
    Ok(vmas()?.len())
}

/// VMAs that a range lies in.
#[cfg(test)]
pub(crate) fn mappings_within(range: &Range<usize>) -> Result<usize, Error> {
    let within = |vma: &Vma| vma.range.start < range.end && range.start < vma.range.end;
    Ok(vmas()?.into_iter().filter(within).count())
}

/// Checks that a range is mapped without gaps, private and anonymous, readable and writable: what the engine may work on.
pub(crate) fn check_private_anonymous(range: &Range<usize>) -> Result<(), Error> {
    let mut at = range.start;
    for vma in vmas()?
        .into_iter()
        .filter(|v| v.range.end > range.start && v.range.start < range.end)
    {
        if vma.range.start > at {
            break;
        }
        if vma.shared || !vma.anonymous {
            let backing = if has_large_pages(vma.range.start) {
                Backing::Hugetlb
            } else if vma.shared {
                Backing::Shared
            } else if vma.path.contains(SEGMENT_NAME) {
                Backing::Store
            } else {
                Backing::File
            };
            return Err(Error::NotPrivate {
                start: range.start,
                backing,
                path: vma.path,
            });
        }
        if !vma.usable {
            return Err(Error::Protected(vma.range.start.max(range.start)));
        }
        at = vma.range.end;
    }
    if at < range.end {
        Err(Error::NotMapped {
            start: range.start,
            end: range.end,
        })
    } else {
        Ok(())
    }
}

/// Whether the mapping at an address has pages larger than 4 KiB by itself. (Those of hugetlbfs; transparent huge pages do not
/// count.)
fn has_large_pages(start: usize) -> bool {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let begins = format!("{start:x}-");
    let mapping = smaps.lines().skip_while(|line| !line.starts_with(&begins));
    let size = mapping
        .into_iter()
        .find_map(|line| line.strip_prefix("KernelPageSize:"));
    size.is_some_and(|size| size.trim() != "4 kB")
}

/// Lasting advice, by its name in smaps. (MADV_NOHUGEPAGE is missing: memory of ours has it anyway.)
const ADVICE: [(&str, i32); 5] = [
    ("hg", libc::MADV_HUGEPAGE),
    ("dd", libc::MADV_DONTDUMP),
    ("dc", libc::MADV_DONTFORK),
    ("wf", libc::MADV_WIPEONFORK),
    ("mg", libc::MADV_MERGEABLE),
];

/// Addresses, and what madvise was told of them.
pub(crate) type Advised = (Range<usize>, Vec<i32>);

/// What madvise was told of the mappings in a range, for good: parts of the range, in order.
pub(crate) fn advice_of(range: &Range<usize>) -> Result<Vec<Advised>, Error> {
    let path = "/proc/self/smaps";
    let text = fs::read_to_string(path).map_err(|e| Error::Proc(path, e))?;
    let mut part = 0..0;
    let mut parts = Vec::new();
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let given = |flag: &str| flags.split_ascii_whitespace().any(|f| f == flag);
            let advice = ADVICE.iter().filter(|(flag, _)| given(flag)).map(|(_, a)| *a);
            if !part.is_empty() {
                parts.push((std::mem::take(&mut part), advice.collect()));
            }
        } else if let Some(vma) = parse_vma(line) {
            part = vma.range.start.max(range.start)..vma.range.end.min(range.end);
        }
    }
    Ok(parts)
}

/// Bytes that can be allocated without swapping (MemAvailable); `None` if /proc does not say.
pub(crate) fn mem_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim()
        .strip_suffix(" kB")?
        .trim()
        .parse::<u64>()
        .ok()
        .map(|kib| kib * 1024)
}

/// Pages of anonymous memory of this process that are in memory; 0 if /proc does not say.
pub(crate) fn anonymous_pages() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) / 4
}

/// CPU nanoseconds of the calling thread.
pub(crate) fn thread_cpu_ns() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// Minor faults of the whole process so far, less those of the calling thread. Every first write to a protected
/// page and every copy-on-write is one, also when KVM or the kernel's I/O raises it for a guest.
#[allow(unsafe_code)] // getrusage
pub(crate) fn faults_of_others() -> u64 {
    let minflt = |who| {
        // SAFETY: all-zero is a valid rusage, which the kernel then fills.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: usage is a valid, exclusive rusage.
        unsafe { libc::getrusage(who, &mut usage) };
        u64::try_from(usage.ru_minflt).unwrap_or(0)
    };
    minflt(libc::RUSAGE_SELF).wrapping_sub(minflt(libc::RUSAGE_THREAD))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_maps_is_understood() {
        let line = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0                          [anon:guest]";
        let vma = parse_vma(line).unwrap();
        assert_eq!(vma.range, 0x7f00_0000_0000..0x7f00_0020_0000);
        assert!(vma.anonymous && !vma.shared && vma.usable);
        let line = "7f0000000000-7f0000200000 rw-s 00000000 00:01 77   /memfd:ch_ram (deleted)";
        let vma = parse_vma(line).unwrap();
        assert!(vma.shared && !vma.anonymous && vma.path == "/memfd:ch_ram");
        let line = "7f0000000000-7f0000200000 rw-p 00000000 00:0f 77   /anon_hugepage (deleted)";
        assert!(!parse_vma(line).unwrap().anonymous);
        for access in ["r--p", "---p", "-w-p"] {
            let line = format!("7f0000000000-7f0000200000 {access} 00000000 00:00 0");
            assert!(!parse_vma(&line).unwrap().usable, "{access}");
        }
    }

    #[test]
    #[allow(unsafe_code)] // writes memory of its own
    fn other_threads_faults_are_counted() {
        // Not from the allocator, which may have memory that was used before.
        let fresh = crate::sys::vma::Anonymous::new(1).unwrap();
        let before = faults_of_others();
        let at = fresh.base();
        // SAFETY: the page is ours alone.
        let write = move || unsafe { crate::sys::guest::store_page(at, &[1; 512]) };
        std::thread::spawn(write).join().unwrap();
        assert!(faults_of_others() > before);
    }

    #[test]
    fn unmapped_ranges_are_refused() {
        assert!(matches!(
            check_private_anonymous(&(4096..8192)),
            Err(Error::NotMapped { .. })
        ));
    }
}
