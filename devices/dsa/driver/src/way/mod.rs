//! Ways to a device: through Linux's device node, through VFIO, to a model. [`WorkQueue`] is what the rest of the driver
//! knows of them.

mod causes;
mod in_process;
mod node;
mod queue;
mod registers;
mod software;
mod vfio;

pub(crate) use causes::with_causes;
pub use in_process::{InProcess, Reach};
pub use node::{Node, NodeError};
pub use queue::{QueueLimits, Trouble, WorkQueue};
pub use registers::{Registers, SetupError, Wanted, abort, bring_up, command, reset};
pub use software::{Remedy, software_error};
pub use vfio::{Vfio, VfioFailure};
