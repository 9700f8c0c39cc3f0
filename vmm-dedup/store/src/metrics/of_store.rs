//! The series of the store itself.

use crate::metrics::snapshot::Snapshot;
use crate::metrics::writer::{Writer, count, seconds};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt::Error;

pub(super) fn write(w: &mut Writer<'_>, s: &Snapshot) -> Result<(), Error> {
    let (stats, peers, exchange) = (&s.store, &s.peers, &s.exchange);
    w.family(
        "build",
        "The release of the store",
        None,
        MetricType::Info,
        |mut m| m.encode_info(&[("version", env!("CARGO_PKG_VERSION"))]),
    )?;
    let help = "When the store started, Unix time";
    let unit = Some(&Unit::Seconds);
    w.family("start_time", help, unit, MetricType::Gauge, |mut m| {
        m.encode_gauge(&s.times.started())
    })?;
    w.gauge("pages_shared", "Pages of the store in use", stats.pages_shared)?;
    w.gauge(
        "pages_sharing",
        "References to pages of the store beyond the first of each",
        stats.pages_sharing,
    )?;
    w.gauge(
        "slots_limbo",
        "Pages without references that some VM might still map",
        stats.slots_limbo,
    )?;
    slots(w, s)?;
    w.gauge("slots_max", "Pages that the store may hold", stats.slots_max)?;
    w.gauge(
        "secure",
        "Whether the store shares securely: 1, or 0",
        stats.secure,
    )?;
    w.bytes(
        "resident",
        "Memory of the store's pages, in use or not",
        stats.resident_bytes,
    )?;
    w.gauge("sightings", "Keys that were sighted once", stats.sightings)?;
    w.gauge("marks", "Line keys that are known to be ambiguous", stats.marks)?;
    w.bytes(
        "store_metadata",
        "Index, sightings, references and slot states of the store",
        stats.metadata_bytes,
    )?;
    let help = "What sharing saves, less all bookkeeping of store, services and kernel";
    let net = stats.saved_net_bytes.cast_signed();
    w.family(
        "saved_net",
        help,
        Some(&Unit::Bytes),
        MetricType::Gauge,
        |mut m| m.encode_gauge(&net),
    )?;
    let help = "CPU time of the store process, user and system";
    w.family(
        "store_cpu",
        help,
        Some(&Unit::Seconds),
        MetricType::Counter,
        |mut m| count(&mut m, seconds(stats.cpu_ns)),
    )?;
    w.gauge("epoch", "Current epoch of the index", stats.epoch)?;
    w.gauge("vms", "VMs connected", s.vms.len() as u64)?;
    w.gauge(
        "connections",
        "Connections, counting orphans and observers",
        s.connections,
    )?;
    w.gauge(
        "orphans",
        "Broken connections whose processes still live",
        s.orphans.0,
    )?;
    w.gauge("orphan_references", "References that orphans hold", s.orphans.1)?;
    w.counter("connections_accepted", "Connections accepted", peers.connections)?;
    w.counter(
        "malformed",
        "Connections closed because their peer broke the protocol",
        peers.malformed,
    )?;
    w.counter(
        "overflows",
        "Connections closed because their peer did not read",
        peers.overflows,
    )?;
    w.counter(
        "store_published",
        "Pages that were given a slot",
        exchange.published,
    )?;
    w.counter(
        "store_huge_pages",
        "Huge pages that guests share as a whole and that became one in memory",
        s.huge_pages,
    )?;
    w.counter(
        "unverified",
        "Pages whose content did not have the announced key",
        exchange.unverified,
    )?;
    w.counter("sightings_received", "Sightings received", exchange.sightings)?;
    w.counter(
        "withdrawals_received",
        "Withdrawals received",
        exchange.withdrawals,
    )?;
    w.counter("batches", "Batches handled", exchange.batches)
}

/// How memory comes back.
fn slots(w: &mut Writer<'_>, s: &Snapshot) -> Result<(), Error> {
    w.gauge(
        "slots_dead",
        "Pages that nobody uses any more, whose memory returns when their file goes",
        s.slots.staying.dead + s.slots.leaving.dead,
    )?;
    w.gauge(
        "segments",
        "Files of the store, 16 MiB each when full",
        s.segments,
    )?;
    w.gauge(
        "segments_leaving",
        "Files whose pages have moved to others, which VMs have not all followed",
        s.slots.segments_leaving,
    )?;
    w.gauge(
        "segments_held",
        "Files that went, whose memory some VM still keeps",
        s.held.0,
    )?;
    w.bytes(
        "held",
        "Memory of files that went, which some VM still keeps",
        s.held.1,
    )?;
    w.counter(
        "evacuations",
        "Files that were begun to be emptied",
        s.slots.evacuations_total,
    )?;
    w.counter(
        "moved",
        "Pages moved to other files, so that theirs can go",
        s.moved,
    )?;
    w.counter(
        "segments_retired",
        "Files that emptied and went",
        s.slots.segments_retired_total,
    )
}
