//! What the listening thread and the scanning thread share.

use crate::error::Error;
use crate::memory::hint::Hint;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::sys::bell::Bell;
use crate::sys::page_size::PAGE_SIZE;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup_agent_receiver::map::Counts;
use vmm_dedup_agent_receiver::receiver::{Limits, NoUse, Receiver, Tally, Withheld};
use vmm_dedup_agent_wire::frame::{BLOCK, Block};
use vmm_dedup_agent_wire::message::Mark;
use vmm_dedup_agent_wire::said::{Kind, Said};
use vmm_dedup_protocol::stats::Hints;

/// Whether an agent is heard: its place in [`AGENT_STATES`](vmm_dedup_protocol::stats::AGENT_STATES).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum State {
    /// None is to be heard.
    Off = 0,
    /// None has come, or it has gone.
    Awaited = 1,
    /// One is connected.
    Connected = 2,
    /// None can come: there is no socket.
    Failed = 3,
}

/// What both threads use.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) receiver: Receiver,
    /// What is to be sent to the agent that is connected.
    pub(super) out: Vec<u8>,
    /// The guest's frames end here. The receiver knows once there is somebody to listen.
    end: u64,
}

/// The line to a guest's agent.
#[derive(Debug)]
pub(crate) struct AgentLine {
    inner: Mutex<Inner>,
    pub(super) bell: Bell,
    stop: AtomicBool,
    state: AtomicU64,
    cpu_ns: AtomicU64,
    /// The service's CPU budget, in percent of a core.
    budget: Arc<AtomicU32>,
    /// Times of the receiver count from here.
    began: Instant,
}

/// What came since it was last asked for.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// Blocks of which something else is said.
    pub(crate) blocks: Vec<Block>,
    /// The agent waits until what is marked in these is not shared any more.
    pub(crate) withheld: Option<Withheld>,
}

/// What is said of a block.
#[derive(Debug)]
pub(crate) struct SaidOfBlock {
    /// Its guest physical addresses.
    pub(crate) addresses: Range<u64>,
    /// Frame by frame.
    pub(crate) hints: Box<[Hint; BLOCK]>,
}

/// Frames of a guest whose addresses end here.
fn frames(guest_end: u64) -> u64 {
    guest_end.div_ceil(PAGE_SIZE as u64)
}

impl AgentLine {
    /// To the agent of a guest whose physical addresses end at `guest_end`. Nobody listens yet. `budget`: the CPU budget of the
    /// service, in percent of a core.
    ///
    /// # Errors
    /// [`Error::Eventfd`].
    pub(crate) fn new(guest_end: u64, budget: Arc<AtomicU32>) -> Result<Self, Error> {
        Ok(Self {
            inner: Mutex::new(Inner {
                receiver: Receiver::new(0, Limits::default(), Duration::ZERO),
                out: Vec::new(),
                end: frames(guest_end),
            }),
            bell: Bell::new().map_err(Error::Eventfd)?,
            stop: AtomicBool::new(false),
            state: AtomicU64::new(State::Off as u64),
            cpu_ns: AtomicU64::new(0),
            budget,
            began: Instant::now(),
        })
    }

    /// Somebody is about to listen.
    pub(super) fn begin(&self) {
        let mut inner = self.lock();
        let end = inner.end;
        inner.receiver.resize(end);
        self.set_state(State::Awaited);
    }

    /// Ends the thread that listens.
    pub(crate) fn end(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(super) fn set_state(&self, state: State) {
        self.state.store(state as u64, Ordering::Relaxed);
    }

    /// What the thread that listens may use, in percent of a core: half of the budget, so that a guest that attacks does not end
    /// merging.
    pub(super) fn may_use(&self) -> f64 {
        f64::from(self.budget.load(Ordering::Relaxed)) / 2.0
    }

    pub(super) fn note_cpu_ns(&self, ns: u64) {
        self.cpu_ns.store(ns, Ordering::Relaxed);
    }

    /// CPU time of the thread that listens.
    pub(crate) fn cpu_ns(&self) -> u64 {
        self.cpu_ns.load(Ordering::Relaxed)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// What came since the last call. `withheld`: what was withheld by it is done.
    pub(crate) fn news(&self, withheld: bool) -> News {
        let mut inner = self.lock();
        News {
            // Under one lock, so that the blocks of what is withheld are among those that changed, now or before.
            withheld: withheld.then(|| inner.receiver.take_withheld()).flatten(),
            blocks: inner.receiver.take_changed().collect(),
        }
    }

    /// What is said of some blocks now.
    pub(crate) fn read(&self, blocks: &[Block]) -> Vec<SaidOfBlock> {
        let inner = self.lock();
        let read = |block: &Block| {
            let (said, marked) = (inner.receiver.frames(*block), inner.receiver.marked_in(*block));
            let mut hints = Box::new([Hint::NONE; BLOCK]);
            for (place, (hint, said)) in hints.iter_mut().zip(said).enumerate() {
                *hint = hint_of(said, |mark| marked.has(place, mark));
            }
            let first = block.first().number() * PAGE_SIZE as u64;
            SaidOfBlock {
                addresses: first..first + (BLOCK * PAGE_SIZE) as u64,
                hints,
            }
        };
        blocks.iter().map(read).collect()
    }

    /// Whether the agent tells how the guest uses its memory now.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn tells_use(&self) -> Result<(), NoUse> {
        self.lock().receiver.tells_use(self.now())
    }

    /// How many frames of each block at these guest physical addresses are what.
    pub(crate) fn counts(&self, addresses: &Range<u64>) -> Vec<Counts> {
        const BLOCK_BYTES: u64 = (BLOCK * PAGE_SIZE) as u64;
        let inner = self.lock();
        let blocks = addresses.start / BLOCK_BYTES..addresses.end.div_ceil(BLOCK_BYTES);
        let blocks = blocks.filter_map(|block| Block::try_new(block).ok());
        blocks.map(|block| inner.receiver.counts(block)).collect()
    }

    /// Nothing of what was withheld is shared any more: tells the agent.
    pub(crate) fn in_force(&self, withheld: &Withheld) {
        let mut inner = self.lock();
        let Inner { receiver, out, .. } = &mut *inner;
        receiver.in_force(withheld, out);
        let has_more = !out.is_empty();
        drop(inner);
        if has_more {
            self.bell.ring();
        }
    }

    /// The guest's physical addresses end elsewhere now. All blocks that there are.
    pub(crate) fn resize(&self, guest_end: u64) -> Vec<Block> {
        let mut inner = self.lock();
        inner.end = frames(guest_end);
        if self.state.load(Ordering::Relaxed) == State::Off as u64 {
            return Vec::new();
        }
        let Inner { receiver, out, end } = &mut *inner;
        let old = receiver.frames_end();
        receiver.resize(*end);
        if *end > old {
            // What was said of frames beyond the end was not kept.
            receiver.resync(out);
        }
        let blocks = 0..end.div_ceil(BLOCK as u64);
        drop(inner);
        self.bell.ring();
        blocks.filter_map(|block| Block::try_new(block).ok()).collect()
    }

    /// What is said of how much, for the account.
    pub(crate) fn said(&self) -> Hints {
        let inner = self.lock();
        let receiver = &inner.receiver;
        let mut said = Hints {
            never: receiver.marked(Mark::Never),
            worth: receiver.marked(Mark::Worth),
            soon: receiver.marked(Mark::Soon),
            ..Hints::default()
        };
        let blocks = 0..receiver.frames_end().div_ceil(BLOCK as u64);
        for block in blocks.filter_map(|block| Block::try_new(block).ok()) {
            let counts = receiver.counts(block);
            said.free += u64::from(counts.free);
            said.file_clean += u64::from(counts.file_clean);
            said.file_dirty += u64::from(counts.file_dirty);
            said.anonymous += u64::from(counts.anonymous);
            said.kernel += u64::from(counts.kernel);
        }
        said
    }

    /// Whether an agent is heard, what came of it, and bytes that this takes.
    pub(crate) fn figures(&self) -> (u64, Tally, usize) {
        let inner = self.lock();
        let bytes = inner.receiver.memory_bytes() + inner.out.capacity();
        (self.state.load(Ordering::Relaxed), inner.receiver.tally(), bytes)
    }
}

/// What follows from what is said of a frame and from its marks.
fn hint_of(said: Said, is_marked: impl Fn(Mark) -> bool) -> Hint {
    let when = |so: bool, hint: Hint| if so { hint } else { Hint::NONE };
    let worth = said.kind() == Kind::FileClean || is_marked(Mark::Worth);
    when(is_marked(Mark::Never), Hint::NEVER)
        .and(when(is_marked(Mark::Soon), Hint::SOON))
        .and(when(said.kind() == Kind::Free, Hint::FREE))
        .and(when(worth, Hint::WORTH))
}
