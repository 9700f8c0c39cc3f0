//! Metrics, encoded from a snapshot of the state that is taken when they are asked for.
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

pub(crate) use classic::classic;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
pub(crate) use snapshot::Snapshot;
use std::borrow::Cow;
use std::fmt::Error;
use writer::Writer;

/// The text of what a snapshot shows of a store of this domain, in the form of OpenMetrics.
pub(crate) fn text(domain: &str, snapshot: Snapshot) -> Result<String, Error> {
    let labels = [(Cow::Borrowed("domain"), Cow::Owned(domain.to_owned()))];
    let mut registry = Registry::with_prefix_and_labels("vmmdedup", labels.into_iter());
    registry.register_collector(Box::new(snapshot));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let mut writer = Writer(encoder);
        of_store::write(&mut writer, self)?;
        of_host::write(&mut writer, self)?;
        pressure::write(&mut writer)?;
        per_vm::write(&mut writer, self)
    }
}
