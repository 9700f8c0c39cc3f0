//! The host's pressure stall information (Linux, Documentation/accounting/psi.rst).

/// Shares of the last ten seconds, in percent, in which tasks waited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pressure {
    /// Some task waited for memory.
    pub(crate) memory_some: f64,
    /// All tasks waited for memory.
    pub(crate) memory_full: f64,
    /// Some task waited for a CPU.
    pub(crate) cpu_some: f64,
}

impl Pressure {
    /// Of this host; `None` if its kernel does not tell.
    pub(crate) fn of_host() -> Option<Self> {
        let read = |resource| std::fs::read_to_string(format!("/proc/pressure/{resource}")).ok();
        Self::parse(&read("memory")?, &read("cpu")?)
    }

    fn parse(memory: &str, cpu: &str) -> Option<Self> {
        Some(Self {
            memory_some: average(memory, "some")?,
            memory_full: average(memory, "full")?,
            cpu_some: average(cpu, "some")?,
        })
    }
}

fn average(text: &str, kind: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
    let value = line
        .split_ascii_whitespace()
        .find_map(|f| f.strip_prefix("avg10="))?;
    value.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lines_are_understood() {
        let memory = "some avg10=1.50 avg60=0 avg300=0 total=1\nfull avg10=0.25 avg60=0 avg300=0 total=1\n";
        let cpu = "some avg10=30.00 avg60=0 avg300=0 total=1\n";
        let expected = Pressure {
            memory_some: 1.5,
            memory_full: 0.25,
            cpu_some: 30.0,
        };
        assert_eq!(Pressure::parse(memory, cpu), Some(expected));
        assert_eq!(Pressure::parse("", cpu), None);
    }
}
