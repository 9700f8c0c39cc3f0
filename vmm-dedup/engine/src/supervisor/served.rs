//! What work in the supervisor's thread may do with the service.

use crate::error::Error;
use crate::service::DedupService;
use std::ops::Range;
use vmm_dedup_protocol::control::Explanation;
use vmm_dedup_protocol::stats::ServiceStats;

/// A service, to be looked at ([`Supervisor::with_service`](crate::Supervisor::with_service)). What changes memory, pauses or stops is told
/// to the supervisor, which has to know how memory stands.
#[derive(Clone, Copy, Debug)]
pub struct Served<'a>(pub(super) &'a DedupService);

impl Served<'_> {
    /// See [`DedupService::explain`].
    ///
    /// # Errors
    /// Those of [`DedupService::explain`].
    pub fn explain(&self, addresses: Option<Range<u64>>) -> Result<(Explanation, String), Error> {
        self.0.explain(addresses)
    }

    /// See [`DedupService::stats`].
    #[must_use]
    pub fn stats(&self) -> ServiceStats {
        self.0.stats()
    }
}
