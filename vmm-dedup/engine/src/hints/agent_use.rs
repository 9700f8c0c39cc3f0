//! The guest's agent, which tells of each frame when the guest used it last.
//!
//! It is asked first, range by range. What it does not tell, the next source samples; so it does all while no agent speaks. The
//! agent's interval may be longer than the monitor's: then its last word counts in several of them.
//!
//! # Trust
//!
//! A guest that calls everything hot keeps its huge pages, and shares less. One that calls everything cold gets small pages. One
//! that says this and that has its huge pages split and built again, as one that uses its memory so: within the CPU time that its
//! service may take, and no sooner than use itself would.

use crate::hints::line::AgentLine;
use crate::memory::layout::{Memory, Page};
use crate::memory::thp_state::Use;
use std::ops::Range;
use std::sync::Arc;
use vmm_dedup_agent_receiver::map::Counts;
use vmm_dedup_agent_receiver::receiver::NoUse;
use vmm_dedup_agent_wire::frame::BLOCK;

/// Frames that make 2 MiB hot. Where a guest uses fewer of its frames, small pages cost it no more entries of a TLB than that.
const HOT_FRAMES: usize = 16;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct AgentUse {
    line: Arc<AgentLine>,
    /// Whether an agent tells use, or why none does.
    speaks: Result<(), NoUse>,
}

impl AgentUse {
    /// No agent has spoken yet.
    pub(crate) fn new(line: Arc<AgentLine>) -> Self {
        Self {
            line,
            speaks: Err(NoUse::Nobody),
        }
    }

    /// Looks whether an agent tells use now; whether that is another answer than before.
    pub(crate) fn look(&mut self) -> bool {
        let now = self.line.tells_use();
        std::mem::replace(&mut self.speaks, now) != now
    }

    /// Whether one told use at the last look.
    pub(crate) fn speaks(&self) -> Result<(), NoUse> {
        self.speaks
    }

    /// How the guest uses some neighbours; `None` if no agent tells.
    pub(crate) fn use_of(&self, memory: &Memory, pages: &Range<Page>) -> Option<Use> {
        self.speaks.ok()?;
        let addresses = memory.guest_addresses(pages)?;
        use_of(&self.line.counts(&addresses))
    }
}

/// Of a range that lies in several blocks, the hottest counts. It is in use, and nothing tells how often.
fn use_of(blocks: &[Counts]) -> Option<Use> {
    let uses = blocks.iter().map(|counts| {
        let told = counts.free + counts.hot + counts.warm + counts.cold;
        let unknown = BLOCK.saturating_sub(usize::from(told));
        match usize::from(counts.hot) {
            HOT_FRAMES.. => Some(Use::AT_ONCE),
            hot if hot + unknown < HOT_FRAMES => Some(Use::None),
            _ => None,
        }
    });
    let uses: Vec<Option<Use>> = uses.collect();
    if uses.contains(&Some(Use::AT_ONCE)) {
        return Some(Use::AT_ONCE);
    }
    (!uses.is_empty() && !uses.contains(&None)).then_some(Use::None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(hot: u16, cold: u16, free: u16) -> Counts {
        Counts {
            hot,
            cold,
            free,
            ..Counts::default()
        }
    }

    #[test]
    fn some_hot_frames_make_a_range_hot_and_nearly_all_must_be_known_for_it_to_be_cold() {
        assert_eq!(use_of(&[of(16, 496, 0)]), Some(Use::AT_ONCE));
        assert_eq!(use_of(&[of(15, 497, 0)]), Some(Use::None));
        assert_eq!(use_of(&[of(0, 100, 412)]), Some(Use::None));
        // The kernel's own frames have no temperature: they might be hot.
        assert_eq!(use_of(&[of(0, 496, 0)]), None);
        assert_eq!(use_of(&[of(10, 496, 0)]), None);
        assert_eq!(use_of(&[of(16, 0, 0)]), Some(Use::AT_ONCE));
        assert_eq!(use_of(&[Counts::default()]), None);
        assert_eq!(use_of(&[]), None);
    }

    #[test]
    fn of_several_blocks_the_hottest_counts() {
        let (hot, cold, unknown) = (of(512, 0, 0), of(0, 512, 0), Counts::default());
        assert_eq!(use_of(&[cold, hot]), Some(Use::AT_ONCE));
        assert_eq!(use_of(&[unknown, hot]), Some(Use::AT_ONCE));
        assert_eq!(use_of(&[cold, cold]), Some(Use::None));
        assert_eq!(use_of(&[cold, unknown]), None);
    }
}
