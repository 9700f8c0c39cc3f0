//! What the store tells observers of itself and its VMs.

use crate::name::Name;
use crate::stats::ServiceStats;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Asks for the statistics of the next VM of the store's list; the answer is a [`Stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct StatsRequest {
    /// 0 for the first VM, then [`Stats::next`]. A number of the store's that stays a VM's while it is connected, not a
    /// position: VMs that come and go between two questions hide no other.
    pub from: u32,
    /// Zero.
    pub reserved: u32,
}

/// The store's own account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct StoreStats {
    /// Slots in use (KSM: pages_shared).
    pub pages_shared: u64,
    /// Pages that map a slot, beyond the first of each slot (KSM: pages_sharing).
    pub pages_sharing: u64,
    /// Slots whose last reference went and which wait for the services' epochs.
    pub slots_limbo: u64,
    /// Slots the store may have.
    pub slots_max: u64,
    /// Bytes of slots that are resident, in use or not.
    pub resident_bytes: u64,
    /// Keys sighted once.
    pub sightings: u64,
    /// Line keys marked as ambiguous.
    pub marks: u64,
    /// Bytes of index, sightings, references and slot bookkeeping.
    pub metadata_bytes: u64,
    /// CPU nanoseconds of the store process, user and system.
    pub cpu_ns: u64,
    /// Publications refused since the store is full.
    pub refused_full_total: u64,
    /// Connections closed because of malformed messages.
    pub malformed_total: u64,
    /// Pages published.
    pub published_total: u64,
    /// Net bytes saved: what sharing, zero pages and packed pages save, less all metadata of store and services and the kernel
    /// memory of the VMAs. Negative as two's complement.
    pub saved_net_bytes: u64,
    /// The current epoch.
    pub epoch: u64,
    /// 1 if the store shares securely, else 0.
    pub secure: u64,
}

/// Answer to a [`StatsRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Stats {
    /// Number of VMs connected, refused ones among them.
    pub vms: u32,
    /// Where to ask for the next VM; 0 if there was none at or after the place asked for, and this is of no VM.
    pub next: u32,
    /// The store.
    pub store: StoreStats,
    /// The VM's name.
    pub name: Name,
    /// The VM's process.
    pub pid: u64,
    /// Why the VM is refused: the number of a [`crate::refusal::Reason`]; 0 if it is not.
    pub reason: u64,
    /// Net bytes that the VM saves: its part of the store's `saved_net_bytes`. Negative as two's complement.
    pub saved_net_bytes: u64,
    /// The VM, as it reported last.
    pub vm: ServiceStats,
}
