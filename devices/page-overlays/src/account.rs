//! What the model counts. All cycles are the CPU's.

use serde::Serialize;

/// A struct of counters that can be subtracted.
macro_rules! counters {
    ($(#[$about:meta])* $name:ident { $($(#[$what:meta])* $field:ident,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct $name {
            $($(#[$what])* pub $field: u64,)*
        }

        impl $name {
            /// What was counted since an earlier state of the same counters.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($field: self.$field - earlier.$field,)* }
            }
        }
    };
}

counters! {
    /// A core's work.
    CoreCounters {
        /// Cycles until now.
        cycles,
        /// Instructions.
        instructions,
        /// Cycles in which the window was full.
        window_stall_cycles,
        /// Cycles in which the store buffer was full.
        store_stall_cycles,
        /// Cycles in traps, and waiting for shootdowns.
        trap_cycles,
    }
}

counters! {
    /// The TLBs of all cores.
    TlbCounters {
        /// Hits of the first level.
        l1_hits,
        /// Hits of the second level.
        l2_hits,
        /// Misses: the page table was walked.
        misses,
        /// Cycles that misses waited for the `OBitVector`, besides their walk.
        obits_wait_cycles,
        /// Entries in which an overlaying read-exclusive message set a bit.
        bits_set_by_messages,
    }
}

counters! {
    /// A level of caches.
    CacheCounters {
        /// Hits.
        hits,
        /// Misses.
        misses,
        /// Dirty lines that were evicted.
        write_backs,
    }
}

counters! {
    /// The stream prefetcher, and the one that follows overlays.
    PrefetchCounters {
        /// Lines fetched into the L3.
        fetched,
        /// Lines that were not fetched, because no overlay has them or memory does not have them.
        dropped,
        /// Hits in the L3 on lines that a prefetch brought.
        used,
    }
}

counters! {
    /// DRAM.
    DramCounters {
        /// Lines read.
        reads,
        /// Reads that the write buffer answered.
        forwarded,
        /// Lines written.
        writes,
        /// Accesses to an open row.
        row_hits,
        /// Accesses to a bank without an open row.
        row_closed,
        /// Accesses that closed another row first.
        row_conflicts,
        /// Times the write buffer was full and drained.
        drains,
        /// Cycles from request to last byte, of all reads.
        read_cycles,
    }
}

counters! {
    /// The Overlay Mapping Table and its cache.
    OmtCounters {
        /// Hits of the OMT cache.
        hits,
        /// Misses: the table was walked.
        misses,
        /// Lines of segment metadata read from memory.
        metadata_reads,
        /// Lines of segment metadata written to memory.
        metadata_writes,
        /// Entries of the table written to memory.
        entry_writes,
    }
}

counters! {
    /// The Overlay Memory Store.
    StoreCounters {
        /// Lines that came to the store for the first time.
        lines_placed,
        /// Overlays that moved to a larger segment.
        migrations,
        /// Lines that were read and written for that.
        lines_migrated,
        /// Segments taken from the free lists.
        segments_taken,
        /// Segments that were split into two.
        splits,
        /// Times that the controller asked the operating system for pages.
        requests_to_os,
    }
}

counters! {
    /// What happened to pages and overlays.
    EventCounters {
        /// Overlaying writes: each sends one overlaying read-exclusive message.
        overlaying_writes,
        /// Writes to lines that the overlay had.
        simple_overlay_writes,
        /// Copy-on-write faults.
        faults,
        /// Pages that a fault copied; the others had no other owner left.
        pages_copied,
        /// Overlays that became pages: copy-and-commit, or commit.
        promotions,
        /// Overlays that were discarded.
        discards,
        /// Loads of metadata.
        metadata_loads,
        /// Loads of metadata for which no overlay has a line: they end in the TLB.
        metadata_loads_absent,
        /// Stores of metadata.
        metadata_stores,
    }
}

/// All counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Account {
    /// The core that was asked about.
    pub core: CoreCounters,
    /// All TLBs.
    pub tlb: TlbCounters,
    /// All L1 caches.
    pub l1: CacheCounters,
    /// All L2 caches.
    pub l2: CacheCounters,
    /// The L3 cache.
    pub l3: CacheCounters,
    /// The prefetchers.
    pub prefetch: PrefetchCounters,
    /// DRAM.
    pub dram: DramCounters,
    /// The Overlay Mapping Table.
    pub omt: OmtCounters,
    /// The Overlay Memory Store.
    pub store: StoreCounters,
    /// Pages and overlays.
    pub events: EventCounters,
}

impl Account {
    /// What was counted since an earlier state of the same counters.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            core: self.core.since(&earlier.core),
            tlb: self.tlb.since(&earlier.tlb),
            l1: self.l1.since(&earlier.l1),
            l2: self.l2.since(&earlier.l2),
            l3: self.l3.since(&earlier.l3),
            prefetch: self.prefetch.since(&earlier.prefetch),
            dram: self.dram.since(&earlier.dram),
            omt: self.omt.since(&earlier.omt),
            store: self.store.since(&earlier.store),
            events: self.events.since(&earlier.events),
        }
    }
}

/// Memory that is in use at one moment, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryInUse {
    /// Pages of processes.
    pub pages: u64,
    /// Lines in overlays, as the paper counts them: 64 each, wherever they are.
    pub overlay_lines: u64,
    /// Segments that hold overlays, with metadata and free slots.
    pub segments: u64,
    /// Pages that the operating system gave to the Overlay Memory Store.
    pub store: u64,
    /// Nodes of the Overlay Mapping Table.
    pub omt: u64,
}
