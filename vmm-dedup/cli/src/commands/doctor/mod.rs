//! `doctor`: looks at the host, its stores and a running VMM, and says what to change.

mod finding;
mod host;
mod process;
mod stores;

use crate::which_store::WhichStore;
use clap::Args;
use finding::{Finding, Verdict};
use serde_json::json;
use vmm_dedup_host::process::number as process_number;
use vmm_dedup_host::table;
use vmm_dedup_host::users::Identity;
use vmm_dedup_host::view::HostView;
use vmm_dedup_host::{Failure, say};
use vmm_dedup_protocol::observer::Vm;

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
    /// Look with the rights of this user, as VMMs have them that run as it: a name or a number.
    #[arg(long)]
    user: Option<String>,
    /// More groups of that user, as a fleet's `groups`: names or numbers, with commas between them.
    #[arg(long, value_delimiter = ',', requires = "user")]
    groups: Vec<String>,
    #[command(flatten)]
    store: WhichStore,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let Some(user) = &args.user else { return look(args) };
    let identity = Identity::of(user, &args.groups).map_err(Failure::usage)?;
    let looked = identity.act(|| look(args));
    looked.unwrap_or_else(|e| {
        let rights = format!(
            "this command cannot have the rights of user {user} ({e}): run it as root, or as that user"
        );
        Err(Failure::new(rights))
    })
}

/// The number of a VM's process, as we see it.
fn seen(vm: &Vm) -> Result<u64, Failure> {
    let outside = || {
        let text = format!(
            "VM {} is in a PID namespace that cannot be seen from here: run this on the host, or beside the VM with --pid",
            vm.name
        );
        Failure::new(text)
    };
    process_number(vm.pid).ok_or_else(outside)
}

fn look(args: &DoctorArgs) -> Result<(), Failure> {
    let mut findings = host::findings();
    let view = HostView::even_silent(&args.store.selection());
    findings.extend(stores::findings(view.as_ref(), &args.store.words()));
    findings.extend(vmm_dedup_fleet::unkept_logs().into_iter().map(|(fleet, change)| {
        let found = "nobody keeps its logs short: they grow in the runtime folder";
        Finding::new(Verdict::Warn, &format!("fleet {fleet}"), found, change)
    }));
    let pid = match (&args.vm, args.pid) {
        (Some(name), _) => view.and_then(|view| Ok(Some(seen(view.vm(name)?.1)?))),
        (None, pid) => Ok(pid),
    };
    // What was found of the host is told also if there is no such VMM.
    let of_process = pid.and_then(|pid| pid.map_or(Ok(Vec::new()), process::findings));
    let failure = of_process.map(|of_process| findings.extend(of_process)).err();
    let worst = findings
        .iter()
        .map(|finding| finding.verdict)
        .chain(failure.iter().map(|_| Verdict::Warn))
        .max()
        .unwrap_or(Verdict::Ok);
    if args.json {
        let all = json!({
            "verdict": worst.word().to_ascii_lowercase(),
            "error": failure.as_ref().map(ToString::to_string),
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
    outcome(worst, wrong, failure.as_ref())
}

/// How the command ends, which is as its verdict says.
fn outcome(worst: Verdict, wrong: usize, failure: Option<&Failure>) -> Result<(), Failure> {
    let text = match (failure, wrong) {
        (Some(failure), 0) => failure.to_string(),
        (Some(failure), _) => format!("{failure}; {wrong} to be changed, see above"),
        (None, _) => format!("{wrong} to be changed, see above"),
    };
    match worst {
        Verdict::Ok | Verdict::Note => Ok(()),
        Verdict::Warn => Err(Failure::new(text)),
        Verdict::Bad => Err(Failure::missing(format!("dedup does not work here: {text}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_says_what_the_verdict_says() {
        let failure = Failure::missing("process 1 may not be looked at");
        let code = |worst, failure| match outcome(worst, 1, failure) {
            Ok(()) => "0".to_owned(),
            Err(failure) => format!("{:?} {failure}", failure.exit_code()),
        };
        let with = |code: u8, text: &str| format!("{:?} {text}", std::process::ExitCode::from(code));
        assert_eq!(code(Verdict::Note, None), "0");
        for (worst, number) in [(Verdict::Warn, 1), (Verdict::Bad, 2)] {
            for failure in [None, Some(&failure)] {
                assert!(code(worst, failure).starts_with(&with(number, "")), "{worst:?}");
            }
        }
        assert_eq!(
            code(Verdict::Warn, Some(&failure)),
            with(1, "process 1 may not be looked at; 1 to be changed, see above")
        );
    }

    #[test]
    fn commands_in_findings_are_not_broken() {
        let finding = Finding::new(
            Verdict::Note,
            "mappings",
            "vm.max_map_count is 65530",
            "scattered pages need more: `sysctl -w vm.max_map_count=1048576`, and a line in /etc/sysctl.d",
        );
        for width in 40..=200 {
            let lines = finding.lines(width);
            let whole = lines
                .iter()
                .any(|line| line.contains("`sysctl -w vm.max_map_count=1048576`"));
            assert!(whole, "{lines:#?}");
        }
    }

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
