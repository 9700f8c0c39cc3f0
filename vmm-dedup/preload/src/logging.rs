//! Log lines: warnings to the VMM's standard error, or everything worth knowing to a file.

use crate::settings::Settings;
use env_logger::{Builder, Target};
use log::LevelFilter;
use std::fs::OpenOptions;
use std::io::Write;
use std::time::SystemTime;

/// Starts logging. A file that cannot be opened is said on standard error, where the rest then goes as well.
pub(crate) fn start(settings: &Settings) {
    let mut builder = Builder::new();
    let open = |path| OpenOptions::new().create(true).append(true).open(path);
    let failed = match settings.log.as_ref().map(open) {
        Some(Ok(file)) => {
            builder
                .filter_level(LevelFilter::Info)
                .target(Target::Pipe(Box::new(file)));
            None
        }
        other => {
            builder.filter_level(LevelFilter::Warn).target(Target::Stderr);
            other.and_then(Result::err)
        }
    };
    builder.format(|out, record| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let seconds = now.map_or(0.0, |d| d.as_secs_f64());
        writeln!(
            out,
            "{seconds:.3} vmm-dedup {}: {}",
            record.level(),
            record.args()
        )
    });
    // The VMM's own logger, if it is written in Rust, is another one.
    let _ = builder.try_init();
    if let (Some(path), Some(error)) = (&settings.log, failed) {
        log::warn!("cannot write to {}: {error}; logging here", path.display());
    }
}
