//! How the guest is off for memory: /proc/pressure/memory, /proc/vmstat and /proc/meminfo.

use super::{Lack, Roots};
use std::path::Path;
use vmm_dedup_agent_wire::message::Pressure;

/// Reads all of it; what is not there is zero.
#[must_use]
pub fn read(roots: &Roots) -> Pressure {
    let text = |name: &str| std::fs::read_to_string(roots.proc.join(name)).unwrap_or_default();
    let (stall, vmstat, meminfo) = (text("pressure/memory"), text("vmstat"), text("meminfo"));
    let pages = |name| field(&meminfo, name).unwrap_or(0) / 4;
    let refaults = ["workingset_refault_anon", "workingset_refault_file"];
    Pressure {
        some: average(&stall, "some"),
        full: average(&stall, "full"),
        available: pages("MemAvailable:"),
        total: pages("MemTotal:"),
        refaults: refaults.iter().filter_map(|name| field(&vmstat, name)).sum(),
    }
}

/// What is missing, if stalls are not to be had.
#[must_use]
pub fn lack(roots: &Roots) -> Option<Lack> {
    let path: &Path = &roots.proc.join("pressure/memory");
    let read = std::fs::read(path);
    read.err()
        .map(|error| Lack::of(path, &error, "CAP_SYS_ADMIN", "stalls for memory"))
}

/// Pages that came and went since the boot: if it stands still, so does memory.
#[must_use]
pub fn activity(roots: &Roots) -> u64 {
    let vmstat = std::fs::read_to_string(roots.proc.join("vmstat")).unwrap_or_default();
    let names = ["pgfree", "pgfault", "pgpgin"];
    names.iter().filter_map(|name| field(&vmstat, name)).sum()
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(name))
            .then(|| words.next()?.parse().ok())
            .flatten()
    })
}

/// "some avg10=1.23 ..." in 1/100 %.
fn average(text: &str, name: &str) -> u16 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|rest| {
        rest.split_ascii_whitespace()
            .find_map(|word| word.strip_prefix("avg10="))
    });
    let Some((whole, part)) = word.and_then(|word| word.split_once('.')) else {
        return 0;
    };
    let hundredths = whole
        .parse::<u16>()
        .ok()
        .zip(part.get(..2).and_then(|part| part.parse().ok()));
    hundredths.map_or(0, |(whole, part): (u16, u16)| {
        whole.saturating_mul(100).saturating_add(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_as_the_files_say_and_zero_where_they_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let roots = Roots {
            proc: folder.path().to_owned(),
            ..Roots::default()
        };
        assert_eq!(read(&roots), Pressure::default());
        assert!(lack(&roots).is_some());
        std::fs::create_dir(folder.path().join("pressure")).unwrap();
        for (name, text) in [
            (
                "pressure/memory",
                "some avg10=12.34 avg60=0.05 avg300=0.36 total=2\nfull avg10=100.00 avg60=0 avg300=0 total=7\n",
            ),
            ("meminfo", "MemTotal:        400 kB\nMemAvailable:    40 kB\n"),
            (
                "vmstat",
                "workingset_refault_anon 5\nworkingset_refault_file 6\npgfree 100\npgfault 20\n",
            ),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let expected = Pressure {
            some: 1234,
            full: 10_000,
            available: 10,
            total: 100,
            refaults: 11,
        };
        assert_eq!(read(&roots), expected);
        assert_eq!(activity(&roots), 120);
        assert_eq!(lack(&roots), None);
    }
}
