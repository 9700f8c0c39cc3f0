//! The text format of old, for who does not ask for OpenMetrics.

use std::fmt::Write;

/// OpenMetrics text as the older text format, which names counters with their suffix and has no units, no info type
/// and no end mark.
pub(crate) fn classic(openmetrics: &str) -> String {
    let mut out = String::with_capacity(openmetrics.len());
    // HELP comes before TYPE, which tells the suffix.
    let mut help: Option<(&str, &str)> = None;
    for line in openmetrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                other => ("", other),
            };
            if let Some((_, text)) = help.take().filter(|(of, _)| *of == name) {
                let _ = writeln!(out, "# HELP {name}{suffix} {text}");
            }
            let _ = writeln!(out, "# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with('#') {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_classic_format_names_counters_in_full() {
        let text = "# HELP a_seconds What.\n# TYPE a_seconds counter\n# UNIT a_seconds seconds\n\
                    a_seconds_total 1\n# HELP b That\n# TYPE b info\nb_info{v=\"1\"} 1\n# EOF\n";
        let expected = "# HELP a_seconds_total What.\n# TYPE a_seconds_total counter\na_seconds_total 1\n\
                        # HELP b_info That\n# TYPE b_info gauge\nb_info{v=\"1\"} 1\n";
        assert_eq!(classic(text), expected);
    }
}
