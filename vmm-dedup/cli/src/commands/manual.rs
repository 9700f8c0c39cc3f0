//! What the command line knows of itself, for shells, for `man`, and for whoever packs it.

use clap::{Args, Command};
use clap_complete::{Shell, generate, generate_to};
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
pub(crate) fn completions(args: &CompletionsArgs, mut whole: Command) -> Result<(), Failure> {
    let mut text = Vec::new();
    generate(args.shell, &mut whole, NAME, &mut text);
    output::bytes(&text);
    Ok(())
}

/// Writes the files. Hidden commands have no man page.
pub(crate) fn files(args: &FilesArgs, whole: Command) -> Result<(), Failure> {
    write(args, whole)
        .map_err(|error| Failure::new(format!("cannot write to {}: {error}", args.folder.display())))
}

fn write(args: &FilesArgs, mut whole: Command) -> io::Result<()> {
    // Before completions add `help` to all commands.
    let of_pages = without_help(whole.clone());
    let (pages, completions) = (args.folder.join("man"), args.folder.join("completions"));
    std::fs::create_dir_all(&pages)?;
    std::fs::create_dir_all(&completions)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut whole, NAME, &completions)?;
    }
    // Names by which each shell finds them.
    std::fs::rename(completions.join("vmm-dedup.bash"), completions.join(NAME))?;
    #[cfg(feature = "demo")]
    std::fs::write(args.folder.join("payload.elf"), vmm_dedup_payload::ELF)?;
    clap_mangen::generate_to(of_pages, pages)
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
