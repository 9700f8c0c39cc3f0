//! The program; see the library.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use vmm_dedup_agent::agent::{Agent, Mode};
use vmm_dedup_agent::config::{Config, FILE};
use vmm_dedup_agent::source::Roots;

const HELP: &str = "\
Tells the dedup service of this VM what the guest knows of its memory.

Usage: vmm-dedup-agent [OPTIONS]

  --config FILE      settings; without it /etc/vmm-dedup-agent.toml, if there is one
  --connect ADDRESS  \"vsock\", \"vsock:CID:PORT\" or \"unix:PATH\", instead of what the file says
  --once             end after one round over memory
  --print            print what would be told, and tell nobody
  --proc DIR         another /proc
  --sys DIR          another /sys
  --version
  --help

It takes CAP_SYS_ADMIN to see what frames are, and CAP_SYS_PTRACE to find memory that programs mark.
";

/// What the command line says.
#[derive(Default)]
struct Arguments {
    config: Option<PathBuf>,
    connect: Option<String>,
    roots: Roots,
    mode: Mode,
}

enum Asked {
    Run(Arguments),
    Text(String),
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut arguments = Arguments::default();
    while let Some(word) = words.next() {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        let mut value = || {
            value
                .clone()
                .or_else(|| words.next())
                .ok_or(format!("{name} needs a value"))
        };
        match name.as_str() {
            "--config" => arguments.config = Some(value()?.into()),
            "--connect" => arguments.connect = Some(value()?),
            "--proc" => arguments.roots.proc = value()?.into(),
            "--sys" => arguments.roots.sys = value()?.into(),
            "--once" => arguments.mode.once = true,
            "--print" => arguments.mode.print = true,
            "--help" | "-h" => return Ok(Asked::Text(HELP.into())),
            "--version" | "-V" => {
                return Ok(Asked::Text(
                    concat!("vmm-dedup-agent ", env!("CARGO_PKG_VERSION"), "\n").into(),
                ));
            }
            other => {
                return Err(format!(
                    "there is no option {other}; --help tells which there are"
                ));
            }
        }
    }
    Ok(Asked::Run(arguments))
}

fn run(arguments: Arguments) -> Result<(), String> {
    let mut config = match &arguments.config {
        Some(path) => Config::read(path).map_err(|e| e.to_string())?,
        None if Path::new(FILE).exists() => Config::read(Path::new(FILE)).map_err(|e| e.to_string())?,
        None => Config::default(),
    };
    if let Some(address) = arguments.connect {
        config.connect = address;
        config.validate().map_err(|e| e.to_string())?;
    }
    let (mut agent, lacks) =
        Agent::new(arguments.roots, config, arguments.mode).map_err(|e| e.to_string())?;
    for lack in lacks {
        eprintln!("vmm-dedup-agent: {lack}");
    }
    agent.run().map_err(|e| e.to_string())
}

fn main() -> ExitCode {
    let result = match parse(std::env::args().skip(1)) {
        Ok(Asked::Text(text)) => {
            print!("{text}");
            Ok(())
        }
        Ok(Asked::Run(arguments)) => run(arguments),
        Err(error) => Err(error),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vmm-dedup-agent: {error}");
            ExitCode::FAILURE
        }
    }
}
