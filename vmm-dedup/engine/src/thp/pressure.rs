//! How short the host is of memory: what is available, and pressure stall information.

use std::fs;

/// Share of memory available above which there is no pressure.
const EASY: f64 = 0.25;
/// Share available at which pressure is full.
const TIGHT: f64 = 0.05;
/// Share of time in which some task waited for memory (PSI, 10 s average, percent) at which pressure is full.
const STALLS: f64 = 10.0;

/// Pressure from 0 (plenty of memory) to 1 (none to spare).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pressure(f64);

impl Pressure {
    /// Reads /proc. What cannot be read counts as no pressure: PSI may be switched off.
    pub(crate) fn now() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let psi = fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
        Self::of(&meminfo, &psi)
    }

    fn of(meminfo: &str, psi: &str) -> Self {
        let kib = |name: &str| {
            let line = meminfo.lines().find_map(|l| l.strip_prefix(name))?;
            line.trim_start_matches(':')
                .trim()
                .strip_suffix(" kB")?
                .trim()
                .parse::<f64>()
                .ok()
        };
        let short = match (kib("MemAvailable"), kib("MemTotal")) {
            (Some(available), Some(total)) if total > 0.0 => (EASY - available / total) / (EASY - TIGHT),
            _ => 0.0,
        };
        let some = psi.lines().find_map(|l| l.strip_prefix("some "));
        let stalls = some.and_then(|l| l.split(' ').find_map(|word| word.strip_prefix("avg10=")));
        let stalls = stalls.and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0) / STALLS;
        Self(short.max(stalls).clamp(0.0, 1.0))
    }

    /// A value between `easy` (no pressure) and `tight` (full pressure).
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between two values of the type
    pub(crate) fn between(self, easy: u32, tight: u32) -> u32 {
        (f64::from(easy) + (f64::from(tight) - f64::from(easy)) * self.0).round() as u32
    }
}

#[cfg(test)]
impl Pressure {
    pub(crate) const NONE: Self = Self(0.0);
    pub(crate) const FULL: Self = Self(1.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meminfo(total: u64, available: u64) -> String {
        format!("MemTotal:       {total} kB\nMemFree:   1 kB\nMemAvailable:   {available} kB\n")
    }

    #[test]
    fn pressure_follows_what_is_available() {
        let at = |percent: u64| Pressure::of(&meminfo(1000, percent * 10), "").0;
        assert_eq!([at(50), at(25), at(5), at(1)], [0.0, 0.0, 1.0, 1.0]);
        assert!((at(15) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn stalls_count_as_pressure() {
        let psi = "some avg10=5.00 avg60=0.10 avg300=0.00 total=7\nfull avg10=4.00 avg60=0.00 avg300=0.00 total=1\n";
        assert_eq!(Pressure::of(&meminfo(1000, 900), psi), Pressure(0.5));
        assert_eq!(Pressure::of("", "").0, 0.0);
    }

    #[test]
    fn values_are_interpolated() {
        assert_eq!(Pressure(0.5).between(2, 6), 4);
        assert_eq!(Pressure(0.5).between(16, 4), 10);
    }
}
