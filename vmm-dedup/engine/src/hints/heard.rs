//! What was heard of the agent and is not done yet: the scanning thread's part.

use crate::hints::line::{AgentLine, News, SaidOfBlock};
use crate::memory::layout::Page;
use std::collections::BTreeSet;
use std::sync::Arc;
use vmm_dedup_agent_receiver::receiver::Withheld;
use vmm_dedup_agent_wire::frame::Block;
use vmm_dedup_protocol::stats::Hints;

/// Blocks that are taken over at a time: 256 MiB.
const AT_ONCE: usize = 128;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Heard {
    line: Arc<AgentLine>,
    /// Blocks of which something else is said.
    blocks: BTreeSet<Block>,
    /// What the agent waits for.
    withheld: Option<Withheld>,
    /// Shared pages that are not to be.
    pub(crate) to_break: BTreeSet<Page>,
    /// Those of them that could not be made private in this pass.
    pub(crate) stuck: Vec<Page>,
    /// How much of what is said, when all blocks were last taken over.
    said: Hints,
    /// CPU time of the listening thread up to which all is booked, ns.
    booked: u64,
}

impl Heard {
    pub(crate) fn new(line: Arc<AgentLine>) -> Self {
        Self {
            line,
            blocks: BTreeSet::new(),
            withheld: None,
            to_break: BTreeSet::new(),
            stuck: Vec::new(),
            said: Hints::default(),
            booked: 0,
        }
    }

    /// The guest's memory is another one now.
    pub(crate) fn set_memory(&mut self, guest_end: u64) {
        self.blocks = self.line.resize(guest_end).into_iter().collect();
    }

    /// Hears what the agent said since the last call.
    pub(crate) fn hear(&mut self) {
        let News { blocks, withheld } = self.line.news(self.withheld.is_none());
        self.blocks.extend(blocks);
        self.withheld = self.withheld.take().or(withheld);
        self.to_break.extend(self.stuck.drain(..));
    }

    /// Some of what is to be taken over.
    pub(crate) fn next(&mut self) -> Vec<SaidOfBlock> {
        let next = std::iter::from_fn(|| self.blocks.pop_first());
        let some: Vec<Block> = next.take(AT_ONCE).collect();
        if some.is_empty() {
            return Vec::new();
        }
        let read = self.line.read(&some);
        if !self.has_more() {
            self.said = self.line.said();
        }
        read
    }

    /// Whether there is more to be taken over.
    pub(crate) fn has_more(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// What was taken over is in force, and the store was told: the agent is, too, if it waits for that and nothing is left.
    pub(crate) fn done(&mut self) {
        if self.has_more() || !self.to_break.is_empty() || !self.stuck.is_empty() {
            return;
        }
        if let Some(withheld) = self.withheld.take() {
            self.line.in_force(&withheld);
        }
    }

    /// CPU time of the listening thread so far.
    pub(crate) fn cpu_ns(&self) -> u64 {
        self.line.cpu_ns()
    }

    /// CPU time of the listening thread since the last call.
    pub(crate) fn book_cpu_ns(&mut self) -> u64 {
        let now = self.cpu_ns();
        now.saturating_sub(std::mem::replace(&mut self.booked, now))
    }

    /// For the account: what is said and who came, and bytes that this takes.
    pub(crate) fn figures(&self) -> (Hints, usize) {
        let (agent, tally, bytes) = self.line.figures();
        let hints = Hints {
            agent,
            agents_total: tally.connections,
            agents_refused_total: tally.refused,
            agents_cut_off_total: tally.violations,
            ..self.said
        };
        (hints, bytes)
    }
}
