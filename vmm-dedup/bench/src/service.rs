//! What benches do with a service of our own.

use vmm_dedup::{Breaks, DedupService, ServiceStats};
use vmm_dedup_host::Failure;

/// State of a service that has lost its store: a number of `vmm_dedup_protocol::stats::STATES`.
const WITHOUT_STORE: u64 = 3;

/// Breaks by the service, with a reserve that small benches do not use up.
pub(crate) fn managed_breaks() -> Breaks {
    Breaks::managed(4096, 256 << 20)
}

/// Runs one pass; fails without a store, since nothing would be measured.
pub(crate) fn pass(service: &DedupService) -> Result<ServiceStats, Failure> {
    let stats = service.pass().map_err(Failure::from_error)?;
    if stats.state == WITHOUT_STORE {
        return Err(Failure::new("the store went away during the measurement"));
    }
    Ok(stats)
}
