//! Which stores a command asks.

use clap::Args;
use std::path::PathBuf;
use vmm_dedup_host::Failure;
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

    /// What they say.
    pub(crate) fn ask(&self) -> Result<HostView, Failure> {
        HostView::of(&self.selection())
    }
}
