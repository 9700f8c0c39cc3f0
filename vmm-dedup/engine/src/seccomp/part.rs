//! Who makes system calls.

/// A part of the engine that makes system calls: a thread of its own, or what it does in a thread of the VMM's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Part {
    /// The supervisor's thread.
    Supervisor,
    /// A service's scanning thread.
    Scan,
    /// With managed breaks: the thread that serves writers.
    Fault,
    /// If pages are packed: the thread that rebuilds them.
    Pack,
    /// Asks the kernel how many pages are pinned, or which files are open; a thread each.
    Count,
    /// Tells the store why a VM is not deduplicated.
    Refused,
    /// Asks DAMON which memory is used.
    Damon,
    /// Listens to the guest's agent.
    Agent,
    /// A caller of [`DedupService::start`](crate::DedupService::start), and of what else a service is told, without a supervisor.
    Start,
    /// A caller of [`Refused::announce`](crate::Refused::announce), without a supervisor.
    Announce,
    /// A caller of a [`Supervisor`](crate::Supervisor) or a [`Discarder`](crate::Discarder), but for what its allocator does.
    Call,
}

impl Part {
    /// All of them.
    pub const ALL: &'static [Part] = &[
        Part::Supervisor,
        Part::Scan,
        Part::Fault,
        Part::Pack,
        Part::Count,
        Part::Refused,
        Part::Damon,
        Part::Agent,
        Part::Start,
        Part::Announce,
        Part::Call,
    ];

    /// The thread's name, or what is called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Part::Supervisor => "dedup-supervisor",
            Part::Scan => "dedup-scan",
            Part::Fault => "dedup-fault",
            Part::Pack => "dedup-pack",
            Part::Count => "dedup-count",
            Part::Refused => "dedup-refused",
            Part::Damon => "dedup-damon",
            Part::Agent => "dedup-agent",
            Part::Start => "start",
            Part::Announce => "announce",
            Part::Call => "call",
        }
    }

    /// The threads that it starts.
    #[must_use]
    pub const fn starts(self) -> &'static [Part] {
        match self {
            Part::Supervisor => &[Part::Scan, Part::Fault, Part::Pack, Part::Refused, Part::Agent],
            Part::Start => &[Part::Scan, Part::Fault, Part::Pack, Part::Agent],
            Part::Announce => &[Part::Refused],
            Part::Scan => &[Part::Count, Part::Damon],
            Part::Fault
            | Part::Pack
            | Part::Count
            | Part::Refused
            | Part::Damon
            | Part::Agent
            | Part::Call => &[],
        }
    }
}
