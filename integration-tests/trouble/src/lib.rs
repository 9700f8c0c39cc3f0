//! What tests make trouble with. A crate of its own, so that unit tests of the engine can use it as well.
//!
//! [`Swap`] gives the machine swap for as long as a test runs, [`Pager`] is a thread that pages memory out all the time,
//! as reclaim may at any moment, [`MemoryGroup`] is short of memory, [`UsedUp`] uses all mappings of the process up, and [`Watchdog`] ends the process of a test that hangs: a thread that waits for a page
//! for ever cannot be ended otherwise.

mod mappings;
mod memory_group;
mod pager;
mod swap;
mod watchdog;

pub use mappings::UsedUp;
pub use memory_group::MemoryGroup;
pub use pager::{Pager, page_out, swapped_out};
pub use swap::Swap;
pub use watchdog::Watchdog;

/// Memory or swap that makes trouble, or returns from the test, saying why there is none.
#[macro_export]
macro_rules! or_skip {
    ($trouble:expr) => {
        match $trouble {
            Ok(trouble) => trouble,
            Err(reason) => {
                eprintln!("SKIPPED: {}: {reason}", stringify!($trouble));
                return;
            }
        }
    };
}

/// Swap for the rest of the test, or returns from it, saying why there is none.
#[macro_export]
macro_rules! swap_or_skip {
    () => {
        $crate::swap_or_skip!($crate::Swap::on())
    };
    ($swap:expr) => {
        match $swap {
            Ok(swap) => swap,
            Err(reason) => {
                eprintln!("SKIPPED: no swap: {reason}");
                return;
            }
        }
    };
}
