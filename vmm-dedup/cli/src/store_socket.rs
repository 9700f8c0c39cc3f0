//! Which store a command asks.

use clap::Args;
use std::path::PathBuf;
use vmm_dedup_host::store::DEFAULT_SOCKET;

/// Where to find the store, for commands that ask it.
#[derive(Args, Debug)]
pub(crate) struct StoreSocket {
    /// The store's socket.
    #[arg(long = "store", visible_alias = "socket", value_name = "SOCKET", default_value = DEFAULT_SOCKET)]
    pub(crate) path: PathBuf,
}
