//! Code of the VMM's that runs in the supervisor's thread: closures that it gave, and the Drop of memory that is kept for it. A panic of
//! it, which the process's panic hook tells, ends what it was for and nothing else.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs some of it; `None` if it panicked. What it leaves half done is the VMM's: nothing of ours is changed in it.
pub(crate) fn run<T>(code: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(code)).ok()
}

/// What keeps memory alive.
pub(crate) struct Keep(Option<Box<dyn Any + Send>>);

impl Keep {
    pub(crate) fn new(memory: impl Any + Send) -> Self {
        Self(Some(Box::new(memory)))
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        let memory = self.0.take();
        let _ = run(|| drop(memory));
    }
}

impl fmt::Debug for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keep")
    }
}
