//! What one measurement tells, from its process to the report.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One measurement of one side.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) cpu_s: f64,
    pub(super) wall_s: f64,
    pub(super) saved_pages: u64,
    pub(super) idle_pass_cpu_s: f64,
    pub(super) dirty_pass_cpu_s: f64,
    pub(super) freed_bytes: i64,
    pub(super) claimed_bytes: i64,
    pub(super) metadata_bytes_per_page: f64,
    pub(super) vmas: u64,
    pub(super) vmas_per_merged_page: f64,
    pub(super) stop_p99_us: u64,
    pub(super) stop_max_us: u64,
    pub(super) cpu_stages_s: BTreeMap<String, f64>,
}
