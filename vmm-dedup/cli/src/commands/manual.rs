//! What the command line knows of itself, for shells, for `man`, and for whoever packs it.

use clap::{Arg, ArgGroup, Args, Command};
use clap_complete::{Shell, generate};
use std::io;
use std::path::PathBuf;
use vmm_dedup_host::{Failure, output};

const NAME: &str = "vmm-dedup";

/// Print completions for a shell.
///
/// For bash: `vmm-dedup completions bash > /etc/bash_completion.d/vmm-dedup`. The Debian package has them for bash, zsh and
/// fish.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Write what a package has besides this program: man pages, completions, the test guest (for packages).
#[derive(Args, Debug)]
pub(crate) struct FilesArgs {
    /// A folder, which is there.
    folder: PathBuf,
}

/// Prints completions of `whole`.
pub(crate) fn completions(args: &CompletionsArgs, whole: Command) -> Result<(), Failure> {
    output::bytes(&completed(args.shell, &whole));
    Ok(())
}

/// What completes the commands and options that are not hidden.
fn completed(shell: Shell, whole: &Command) -> Vec<u8> {
    let mut shown = without_hidden(whole).version(env!("CARGO_PKG_VERSION"));
    shown = shown.propagate_version(true);
    let mut script = Vec::new();
    generate(shell, &mut shown, NAME, &mut script);
    match (shell, String::from_utf8(script)) {
        (Shell::Bash, Ok(script)) => without_placeholders(&script).into_bytes(),
        (_, script) => script.map_or_else(|e| e.into_bytes(), String::into_bytes),
    }
}

/// The same commands, but those that are hidden, which the generators do not leave out; nothing of it but for them.
fn without_hidden(command: &Command) -> Command {
    // Names are static, unless clap is built to own them; this runs once.
    let name: &'static str = command.get_name().to_owned().leak();
    let shown: Vec<&Arg> = command.get_arguments().filter(|arg| !arg.is_hide_set()).collect();
    let is_shown = |id: &clap::Id| shown.iter().any(|arg| arg.get_id() == id);
    let groups = command.get_groups().map(|group| {
        let args: Vec<_> = group.get_args().filter(|id| is_shown(id)).cloned().collect();
        ArgGroup::new(group.get_id().clone()).args(args).multiple(true)
    });
    let inner = command.get_subcommands().filter(|inner| !inner.is_hide_set());
    let mut fresh = Command::new(name)
        .groups(groups)
        .args(shown.iter().copied())
        .subcommands(inner.map(without_hidden));
    if let Some(about) = command.get_about() {
        fresh = fresh.about(about.clone());
    }
    fresh
}

/// A script for bash that does not offer what stands for values, such as `<VM>`, as if it was to be typed.
fn without_placeholders(script: &str) -> String {
    let line = |line: &str| {
        let Some(words) = line
            .trim_start()
            .strip_prefix("opts=\"")
            .and_then(|rest| rest.strip_suffix('"'))
        else {
            return line.to_owned();
        };
        let indent = &line[..line.len() - line.trim_start().len()];
        let mut inside = false;
        let kept = words.split(' ').filter(|word| {
            let begins = word.starts_with(['<', '[']);
            let is_kept = !inside && !begins;
            inside = (inside || begins) && !word.trim_end_matches('.').ends_with(['>', ']']);
            is_kept
        });
        let kept: Vec<&str> = kept.collect();
        format!("{indent}opts=\"{}\"", kept.join(" "))
    };
    let lines: Vec<String> = script.lines().map(line).collect();
    lines.join("\n") + "\n"
}

/// Writes the files. Hidden commands have no man page.
pub(crate) fn files(args: &FilesArgs, whole: Command) -> Result<(), Failure> {
    write(args, whole)
        .map_err(|error| Failure::new(format!("cannot write to {}: {error}", args.folder.display())))
}

fn write(args: &FilesArgs, whole: Command) -> io::Result<()> {
    let (pages, completions) = (args.folder.join("man"), args.folder.join("completions"));
    std::fs::create_dir_all(&pages)?;
    std::fs::create_dir_all(&completions)?;
    // Names by which each shell finds them.
    for (shell, name) in [
        (Shell::Bash, "vmm-dedup"),
        (Shell::Zsh, "_vmm-dedup"),
        (Shell::Fish, "vmm-dedup.fish"),
    ] {
        std::fs::write(completions.join(name), completed(shell, &whole))?;
    }
    #[cfg(feature = "demo")]
    std::fs::write(args.folder.join("payload.elf"), vmm_dedup_payload::ELF)?;
    clap_mangen::generate_to(without_help(whole), pages)
}

/// `help` tells what the pages do.
fn without_help(command: Command) -> Command {
    let names: Vec<String> = { command.get_subcommands() }
        .map(|inner| inner.get_name().to_owned())
        .collect();
    let command = { names.into_iter() }.fold(command, |command, name| {
        command.mut_subcommand(name, without_help)
    });
    command.disable_help_subcommand(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn completions_offer_nothing_that_is_hidden_or_stands_for_a_value() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(completed(shell, &crate::Cli::command())).expect("UTF-8");
            for hidden in ["die-with-parent", "package-files", "mixed-worker", "churn-guest"] {
                assert!(!script.contains(hidden), "{shell}: {hidden}");
            }
            for shown in ["explain", "restart", "unmerge", "html", "version"] {
                assert!(script.contains(shown), "{shell}: {shown}");
            }
        }
        let bash = String::from_utf8(completed(Shell::Bash, &crate::Cli::command())).expect("UTF-8");
        let offered = bash
            .lines()
            .filter(|line| line.trim_start().starts_with("opts=\""));
        let odd: Vec<&str> = offered.filter(|line| line.contains(['<', '>', '['])).collect();
        assert!(odd.is_empty(), "{odd:#?}");
        // Values that there are to choose from are offered.
        assert!(
            bash.lines()
                .any(|line| line.trim_start().starts_with("opts=") && line.contains(" zsh"))
        );
    }
}
