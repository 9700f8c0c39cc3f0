//! Where the launcher's asynchronous work runs.

use vmm_dedup_host::Failure;

/// Runs a future, and the local tasks that it spawns, to its end.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::from_error)?;
    tokio::task::LocalSet::new().block_on(&runtime, work)
}
