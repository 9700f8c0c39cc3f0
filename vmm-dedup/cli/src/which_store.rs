//! Which stores a command asks.

use clap::Args;
use std::path::PathBuf;
use vmm_dedup_host::Failure;
use vmm_dedup_host::units::quoted;
use vmm_dedup_host::view::{HostView, Selection};

/// Where to find the stores, for commands that ask them.
#[derive(Args, Debug)]
pub(crate) struct WhichStore {
    /// Ask only the store at this socket [default: as VMM_DEDUP_STORE says, else all stores of this host]
    #[arg(long = "store", visible_alias = "socket", value_name = "SOCKET")]
    path: Option<PathBuf>,
}

impl WhichStore {
    /// The stores that are meant.
    pub(crate) fn selection(&self) -> Selection {
        Selection::of(self.path.as_deref())
    }

    /// What a command that is proposed must say to ask the same, also where the variable is not set: nothing, or the option with a
    /// space before it.
    pub(crate) fn words(&self) -> String {
        match self.selection() {
            Selection::One(path) => format!(" --store {}", quoted(&path.to_string_lossy())),
            Selection::All => String::new(),
        }
    }

    /// What they say, for commands that show them: also if none says anything.
    pub(crate) fn look(&self) -> Result<HostView, Failure> {
        HostView::even_silent(&self.selection())
    }

    /// What they say; it fails if there is but one, and it says nothing.
    pub(crate) fn ask(&self) -> Result<HostView, Failure> {
        HostView::of(&self.selection())
    }
}
