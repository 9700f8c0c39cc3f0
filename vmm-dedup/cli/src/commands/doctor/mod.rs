//! `doctor`: looks at the host, its stores and a running VMM, and says what to change.

mod host;
mod process;
mod stores;

use crate::which_store::WhichStore;
use clap::Args;
use serde_json::{Value, json};
use vmm_dedup_host::table::{self, wrapped};
use vmm_dedup_host::view::HostView;
use vmm_dedup_host::{Failure, say};

/// Look at this host, its stores and, if one is named, a running VMM, and say what to change.
///
/// Nothing is changed. Exit code 0: all is well, or could only be better; 1: something is wrong, but others go on; 2: dedup does
/// not work here until that is changed.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// A VM, as `vmm-dedup stat` shows it: its VMM is looked at, too.
    #[arg(conflicts_with = "pid")]
    vm: Option<String>,
    /// The VMM of this process number, whether it is known to a store or not.
    #[arg(long)]
    pid: Option<u64>,
    #[command(flatten)]
    store: WhichStore,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// How bad something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Ok,
    /// It could be better.
    Note,
    /// Something does not work, or will not for long.
    Warn,
    /// Nothing works.
    Bad,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warn => "warn",
            Self::Bad => "BAD",
        }
    }
}

/// What was found of one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    verdict: Verdict,
    /// What was looked at; stable, for machines.
    what: String,
    found: String,
    /// What to do; empty if all is well.
    change: String,
}

impl Finding {
    fn ok(what: &str, found: impl Into<String>) -> Self {
        Self::new(Verdict::Ok, what, found, "")
    }

    fn new(verdict: Verdict, what: &str, found: impl Into<String>, change: impl Into<String>) -> Self {
        Self {
            verdict,
            what: what.to_owned(),
            found: found.into(),
            change: change.into(),
        }
    }

    fn json(&self) -> Value {
        json!({
            "what": self.what,
            "verdict": self.verdict.word().to_ascii_lowercase(),
            "found": self.found,
            "change": self.change,
        })
    }

    fn lines(&self, width: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let mut head = format!("{:<5}", self.verdict.word());
        for line in wrapped(&format!("{}: {}", self.what, self.found), width.saturating_sub(5)) {
            lines.push(format!("{head}{line}"));
            head = " ".repeat(5);
        }
        if !self.change.is_empty() {
            lines.extend(wrapped(&format!("     -> {}", self.change), width));
        }
        lines
    }
}

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let mut findings = host::findings();
    let view = HostView::even_silent(&args.store.selection());
    findings.extend(stores::findings(view.as_ref()));
    let pid = match (&args.vm, args.pid) {
        (Some(name), _) => Some(view?.vm(name)?.1.pid),
        (None, pid) => pid,
    };
    if let Some(pid) = pid {
        findings.extend(process::findings(pid)?);
    }
    let worst = findings
        .iter()
        .map(|finding| finding.verdict)
        .max()
        .unwrap_or(Verdict::Ok);
    if args.json {
        let all = json!({
            "verdict": worst.word().to_ascii_lowercase(),
            "findings": findings.iter().map(Finding::json).collect::<Vec<_>>(),
        });
        say!(
            "{}",
            serde_json::to_string_pretty(&all).map_err(Failure::from_error)?
        );
    } else {
        let width = table::width().unwrap_or(usize::MAX);
        findings
            .iter()
            .flat_map(|finding| finding.lines(width))
            .for_each(|line| say!("{line}"));
    }
    let wrong = findings
        .iter()
        .filter(|finding| finding.verdict >= Verdict::Warn)
        .count();
    match worst {
        Verdict::Ok | Verdict::Note => Ok(()),
        Verdict::Warn => Err(Failure::new(format!("{wrong} to be changed, see above"))),
        Verdict::Bad => Err(Failure::missing(format!(
            "dedup does not work here: {wrong} to be changed, see above"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_fit_the_terminal() {
        let finding = Finding::new(
            Verdict::Warn,
            "swap",
            "is on and the kernel is too old for that",
            "switch it off, or run a newer kernel",
        );
        for width in 40..=200 {
            assert!(
                finding
                    .lines(width)
                    .iter()
                    .all(|line| line.chars().count() <= width)
            );
        }
        assert_eq!(
            finding.lines(200),
            [
                "warn swap: is on and the kernel is too old for that",
                "     -> switch it off, or run a newer kernel",
            ]
        );
    }
}
