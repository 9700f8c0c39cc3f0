//! The host's memory.

use crate::failure::Failure;
use std::fs;

const MEMINFO: &str = "/proc/meminfo";

/// Bytes that programs can have without swapping: the kernel's MemAvailable.
///
/// # Errors
/// A [`Failure`] if /proc does not tell.
pub fn available() -> Result<u64, Failure> {
    let text =
        fs::read_to_string(MEMINFO).map_err(|e| Failure::new(format!("cannot read {MEMINFO}: {e}")))?;
    parse(&text).ok_or_else(|| Failure::new(format!("{MEMINFO} has no MemAvailable")))
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal:        8000 kB\nMemAvailable:    4711 kB\nBuffers: 1 kB\n";
        assert_eq!(parse(text), Some(4711 * 1024));
        assert_eq!(parse("MemTotal:        8000 kB\n"), None);
        assert_eq!(parse("MemAvailable:    18446744073709551615 kB\n"), None);
    }
}
