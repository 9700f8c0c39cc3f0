//! Metrics, encoded from the state when they are asked for.
//!
//! Host series have no VM label (`vmmdedup_merges_total`); the same per VM are named `vmmdedup_vm_*{vm="..."}` and
//! vanish with the VM. Host counters are kept by the store, so they do not go back then. Names that KSM has mean
//! what KSM's mean.

mod classic;
mod fields;
mod of_host;
mod of_store;
mod per_vm;
mod pressure;
mod snapshot;
mod writer;

use crate::state::{Shared, lock};
pub(crate) use classic::classic;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
use snapshot::Snapshot;
use std::borrow::Cow;
use std::fmt::Error;
use writer::Writer;

/// The registry behind /metrics.
pub(crate) fn registry(shared: Shared) -> Registry {
    let domain = lock(&shared).config.domain.clone();
    let labels = [(Cow::Borrowed("domain"), Cow::Owned(domain))];
    let mut registry = Registry::with_prefix_and_labels("vmmdedup", labels.into_iter());
    registry.register_collector(Box::new(StateCollector(shared)));
    registry
}

#[derive(Debug)]
struct StateCollector(Shared);

impl Collector for StateCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let snapshot = Snapshot::of(&lock(&self.0));
        let mut writer = Writer(encoder);
        of_store::write(&mut writer, &snapshot)?;
        of_host::write(&mut writer, &snapshot)?;
        pressure::write(&mut writer)?;
        per_vm::write(&mut writer, &snapshot)
    }
}
