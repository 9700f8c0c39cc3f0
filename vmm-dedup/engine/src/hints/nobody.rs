//! In the place of the other modules where the crate is built without its feature `agent`: nobody says anything.

pub(crate) mod line {
    use crate::error::Error;
    use crate::memory::hint::Hint;
    use std::ops::Range;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    /// To nobody.
    #[derive(Debug)]
    pub(crate) struct AgentLine;

    /// As with an agent. There is none of them.
    #[allow(dead_code)] // who reads them is built
    #[derive(Debug)]
    pub(crate) struct SaidOfBlock {
        pub(crate) addresses: Range<u64>,
        pub(crate) hints: Box<[Hint]>,
    }

    impl AgentLine {
        pub(crate) fn new(_guest_end: u64, _budget: Arc<AtomicU32>) -> Result<Self, Error> {
            Ok(Self)
        }

        pub(crate) fn end(&self) {}
    }
}

pub(crate) mod agent_use {
    use crate::hints::line::AgentLine;
    use crate::memory::layout::{Memory, Page};
    use crate::memory::thp_state::Use;
    use std::ops::Range;
    use std::sync::Arc;

    /// Why nobody tells.
    #[derive(Clone, Copy, Debug, thiserror::Error)]
    #[error("this VMM was built without the guest's agent")]
    pub(crate) struct NoUse;

    /// Nobody's.
    #[derive(Debug)]
    pub(crate) struct AgentUse;

    impl AgentUse {
        pub(crate) fn new(_line: Arc<AgentLine>) -> Self {
            Self
        }

        pub(crate) fn look(&mut self) -> bool {
            false
        }

        pub(crate) fn speaks(&self) -> Result<(), NoUse> {
            Err(NoUse)
        }

        pub(crate) fn use_of(&self, _memory: &Memory, _pages: &Range<Page>) -> Option<Use> {
            None
        }
    }
}

pub(crate) mod heard {
    use crate::hints::line::{AgentLine, SaidOfBlock};
    use crate::memory::layout::Page;
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use vmm_dedup_protocol::stats::Hints;

    /// Nothing.
    #[derive(Debug, Default)]
    pub(crate) struct Heard {
        pub(crate) to_break: BTreeSet<Page>,
        pub(crate) stuck: Vec<Page>,
    }

    impl Heard {
        pub(crate) fn new(_line: Arc<AgentLine>) -> Self {
            Self::default()
        }

        pub(crate) fn set_memory(&mut self, _guest_end: u64) {}

        pub(crate) fn hear(&mut self) {}

        pub(crate) fn next(&mut self) -> Vec<SaidOfBlock> {
            Vec::new()
        }

        pub(crate) fn has_more(&self) -> bool {
            false
        }

        pub(crate) fn done(&mut self) {}

        pub(crate) fn cpu_ns(&self) -> u64 {
            0
        }

        pub(crate) fn book_cpu_ns(&mut self) -> u64 {
            0
        }

        pub(crate) fn figures(&self) -> (Hints, usize) {
            (Hints::default(), 0)
        }
    }
}

pub(crate) mod listen {
    use crate::config::{AgentSocket, unheard};
    use crate::error::Error;
    use crate::hints::line::AgentLine;
    use std::sync::Arc;
    use std::thread::JoinHandle;

    pub(crate) fn start(_line: &Arc<AgentLine>, at: AgentSocket) -> Result<JoinHandle<()>, Error> {
        Err(unheard(&at))
    }
}
