//! The programs that a fleet needs: those of its VMMs, and the preload library.

mod lookup;
mod tools;

pub(crate) use tools::Tools;
