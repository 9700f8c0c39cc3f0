//! What this process logs, kept for tests.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Warnings and errors, shown as well.
#[derive(Debug)]
pub struct Logged(Mutex<Vec<String>>);

static LOGGED: Logged = Logged(Mutex::new(Vec::new()));

impl Logged {
    /// Begins to keep what is logged, or begins anew.
    #[must_use]
    pub fn begin() -> &'static Self {
        // An earlier test may have set it.
        let _ = log::set_logger(&LOGGED);
        log::set_max_level(log::LevelFilter::Warn);
        LOGGED.clear();
        &LOGGED
    }

    /// Forgets all lines.
    pub fn clear(&self) {
        self.lines().clear();
    }

    /// Whether a line names an error of the kernel.
    #[must_use]
    pub fn names(&self, errno: i32) -> bool {
        let error = io::Error::from_raw_os_error(errno).to_string();
        self.lines().iter().any(|line| line.contains(&error))
    }

    /// Whether one line has all of these texts.
    #[must_use]
    pub fn says(&self, texts: &[&str]) -> bool {
        let has_all = |line: &String| texts.iter().all(|text| line.contains(text));
        self.lines().iter().any(has_all)
    }

    /// How many lines have this text.
    #[must_use]
    pub fn count(&self, text: &str) -> usize {
        self.lines().iter().filter(|line| line.contains(text)).count()
    }

    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl log::Log for Logged {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = record.args().to_string();
        eprintln!("{line}");
        self.lines().push(line);
    }

    fn flush(&self) {}
}
