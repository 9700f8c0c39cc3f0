//! The host's pressure: how long tasks have waited for CPU, memory and I/O (Linux, Documentation/accounting/psi.rst).

use crate::metrics::writer::{Writer, count};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt::Error;

const RESOURCES: [&str; 3] = ["cpu", "memory", "io"];

/// Nothing where the kernel does not tell.
pub(super) fn write(w: &mut Writer<'_>) -> Result<(), Error> {
    let read = |resource| std::fs::read_to_string(format!("/proc/pressure/{resource}")).ok();
    let told: Vec<_> = RESOURCES.iter().filter_map(|r| Some((*r, read(r)?))).collect();
    if told.is_empty() {
        return Ok(());
    }
    let help = "Time that some (or all, full) tasks of the host waited for a resource";
    w.family(
        "host_pressure",
        help,
        Some(&Unit::Seconds),
        MetricType::Counter,
        |mut m| {
            for (resource, text) in &told {
                for (kind, total) in text.lines().filter_map(parse) {
                    let labels = [("resource", *resource), ("kind", kind)];
                    count(&mut m.encode_family(&labels)?, total)?;
                }
            }
            Ok(())
        },
    )
}

/// Kind and seconds in total of a line.
#[allow(clippy::cast_precision_loss)] // metrics are doubles
fn parse(line: &str) -> Option<(&str, f64)> {
    let kind = line
        .split(' ')
        .next()
        .filter(|kind| ["some", "full"].contains(kind))?;
    let total: u64 = line.split("total=").nth(1)?.trim().parse().ok()?;
    Some((kind, total as f64 / 1e6))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_understood() {
        let line = "some avg10=0.00 avg60=1.00 avg300=0.00 total=2500000";
        assert_eq!(parse(line), Some(("some", 2.5)));
        assert_eq!(
            (parse(""), parse("half total=1"), parse("full total=x")),
            (None, None, None)
        );
    }
}
