//! Standard output and standard error: the one place through which commands write.
//!
//! Nothing here panics or fails. What standard output does not take is noted, and [`outcome`] tells it at the end of the
//! command: a reader that has gone (`| head`) is no error worth a word, a full disk is. Commands that go on for long ask
//! [`outcome`] now and then. What standard error does not take is lost: there is nobody left to tell.

use crate::failure::Failure;
use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::{Mutex, PoisonError};

/// The first error of standard output.
static LOST: Mutex<Option<io::Error>> = Mutex::new(None);

/// Writes a line to standard output, see [`say!`](crate::say).
pub fn line(text: Arguments<'_>) {
    to_output(|out| writeln!(out, "{text}"));
}

/// Writes to standard output what may be a part of a line, or several, see [`put!`](crate::put).
pub fn part(text: Arguments<'_>) {
    to_output(|out| write!(out, "{text}").and_then(|()| out.flush()));
}

fn to_output(write: impl FnOnce(&mut io::StdoutLock<'_>) -> io::Result<()>) {
    let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    if lost.is_none() {
        *lost = write(&mut io::stdout().lock()).err();
    }
}

/// Writes bytes to standard output at once, whatever they are.
pub fn bytes(bytes: &[u8]) {
    to_output(|out| out.write_all(bytes).and_then(|()| out.flush()));
}

/// Notes an error of somebody else who wrote to standard output.
pub fn failed(error: io::Error) {
    LOST.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert(error);
}

/// Whether standard output took all that was written.
///
/// # Errors
/// A [`Failure`]: without a word if its reader has gone, with one if there is no room.
pub fn outcome() -> Result<(), Failure> {
    match &*LOST.lock().unwrap_or_else(PoisonError::into_inner) {
        None => Ok(()),
        Some(error) if error.kind() == ErrorKind::BrokenPipe => Err(Failure::reader_gone()),
        Some(error) => Err(Failure::new(format!("cannot write to standard output: {error}"))),
    }
}

/// Writes a line to standard error, see [`note!`](crate::note).
pub fn error_line(text: Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Writes to standard error what is no whole line, see [`hint!`](crate::hint).
pub fn error_part(text: Arguments<'_>) {
    let mut errors = io::stderr().lock();
    let _ = write!(errors, "{text}").and_then(|()| errors.flush());
}

/// Writes a line to standard output, as `println!` does, but never panics.
#[macro_export]
macro_rules! say {
    () => { $crate::output::line(format_args!("")) };
    ($($arguments:tt)*) => { $crate::output::line(format_args!($($arguments)*)) };
}

/// Writes to standard output, as `print!` does, but never panics.
#[macro_export]
macro_rules! put {
    ($($arguments:tt)*) => { $crate::output::part(format_args!($($arguments)*)) };
}

/// Writes a line to standard error, as `eprintln!` does, but never panics.
#[macro_export]
macro_rules! note {
    ($($arguments:tt)*) => { $crate::output::error_line(format_args!($($arguments)*)) };
}

/// Writes to standard error, as `eprint!` does, but never panics.
#[macro_export]
macro_rules! hint {
    ($($arguments:tt)*) => { $crate::output::error_part(format_args!($($arguments)*)) };
}
