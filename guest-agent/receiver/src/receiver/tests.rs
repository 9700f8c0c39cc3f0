use super::*;
use proptest::prelude::*;
use vmm_dedup_agent_wire::frame::BLOCK;
use vmm_dedup_agent_wire::message::{BlocksBuilder, MOST_PAYLOAD, NOTHING, Sources, StretchesBuilder};
use vmm_dedup_agent_wire::said::Kind;

/// Four blocks of memory.
const BLOCKS: u32 = 4;
const END: u64 = BLOCKS as u64 * BLOCK as u64;
const START: Duration = Duration::from_secs(1000);
const CLEAN: Said = Said::new(Kind::FileClean);

/// A guest that says what it likes, and hears the answers.
struct Guest {
    receiver: Receiver,
    now: Duration,
    number: u32,
    answers: Vec<u8>,
}

impl Guest {
    fn new() -> Self {
        Self {
            receiver: Receiver::new(END, Limits::default(), START),
            now: START,
            number: 0,
            answers: Vec::new(),
        }
    }

    fn connect(&mut self) {
        self.receiver.connected(self.now).unwrap();
        self.number = 0;
        self.say(&Message::Hello(hello(1, 1))).unwrap();
    }

    fn connected() -> Self {
        let mut guest = Self::new();
        guest.connect();
        guest.answers.clear();
        guest
    }

    fn say(&mut self, message: &Message<'_>) -> Result<(), Violation> {
        let mut bytes = Vec::new();
        message.encode(self.number, &mut bytes);
        self.number += 1;
        self.receiver.received(&bytes, self.now, &mut self.answers)
    }

    fn block(&mut self, number: u32, frames: &Frames) {
        let mut blocks = BlocksBuilder::default();
        blocks.push(Block::try_new(u64::from(number)).unwrap(), frames);
        self.say(&Message::Blocks(blocks.list())).unwrap();
    }

    fn mark(&mut self, serial: u32, mark: Mark, set: bool, first: u64, count: u64) -> Result<(), Violation> {
        let mut stretches = StretchesBuilder::default();
        stretches.push(Stretch::try_new(first, count).unwrap());
        let stretches = stretches.list();
        self.say(&Message::Marks {
            serial,
            mark,
            set,
            stretches,
        })
    }

    fn snapshot(&mut self, number: u32, all_marks: bool, tell: impl FnOnce(&mut Self)) {
        let (snapshot, blocks) = (number, BLOCKS);
        self.say(&Message::Begin { snapshot, blocks }).unwrap();
        tell(self);
        self.say(&Message::End { snapshot, all_marks }).unwrap();
    }

    fn heard(&mut self) -> Vec<String> {
        let mut heard = Vec::new();
        let answers = std::mem::take(&mut self.answers);
        let mut stream = Stream::default();
        let all = stream.take(&answers, |header, payload| {
            heard.push(format!("{:?}", Message::parse(header.kind, payload)?));
            Ok::<(), Malformed>(())
        });
        all.unwrap();
        heard
    }

    fn said(&self, frame: u64) -> Said {
        self.receiver.said(Gfn::try_new(frame).unwrap())
    }

    fn is_never(&self, frame: u64) -> bool {
        self.receiver.marks(Gfn::try_new(frame).unwrap()).has(Mark::Never)
    }
}

fn hello(lowest: u8, highest: u8) -> Hello {
    Hello {
        lowest,
        highest,
        sources: Sources(Sources::FLAGS),
        boot: [1; 16],
        run: 1,
        blocks: BLOCKS,
    }
}

#[test]
fn what_is_said_of_a_frame_is_known_until_something_else_is_said() {
    let mut guest = Guest::connected();
    let mut frames = NOTHING;
    frames[7] = CLEAN;
    guest.block(2, &frames);
    assert_eq!(guest.said(2 * 512 + 7), CLEAN);
    assert_eq!(guest.said(2 * 512 + 8), Said::UNKNOWN);
    let block = Block::try_new(2).unwrap();
    assert_eq!(guest.receiver.frames(block), frames);
    assert_eq!(guest.receiver.counts(block).file_clean, 1);
    assert!(guest.receiver.take_changed().eq([block]));
    // The same again is no change.
    guest.block(2, &frames);
    assert_eq!(guest.receiver.take_changed().count(), 0);
    guest.block(2, &NOTHING);
    assert_eq!(guest.said(2 * 512 + 7), Said::UNKNOWN);
}

#[test]
fn frames_beyond_memory_are_counted_and_nothing_else() {
    let mut guest = Guest::connected();
    let before = guest.receiver.memory_bytes();
    guest.block(BLOCKS, &[CLEAN; BLOCK]);
    guest.block((1 << 31) - 1, &[CLEAN; BLOCK]);
    guest.mark(1, Mark::Never, true, END - 1, 100).unwrap();
    assert_eq!(guest.receiver.tally().beyond, 3);
    assert!(guest.is_never(END - 1) && !guest.is_never(END));
    guest.mark(2, Mark::Never, false, 0, END).unwrap();
    assert_eq!(guest.receiver.memory_bytes(), before);
}

#[test]
fn blocks_that_a_snapshot_leaves_out_are_forgotten_at_its_end() {
    let mut guest = Guest::connected();
    guest.block(0, &[CLEAN; BLOCK]);
    guest.block(1, &[CLEAN; BLOCK]);
    guest.snapshot(1, true, |guest| {
        guest.block(1, &[CLEAN; BLOCK]);
        assert_eq!(guest.said(0), CLEAN);
    });
    assert_eq!((guest.said(0), guest.said(512)), (Said::UNKNOWN, CLEAN));
    assert_eq!(guest.receiver.tally().snapshots, 1);
}

#[test]
fn a_missing_message_asks_for_everything_once() {
    let mut guest = Guest::connected();
    guest.block(0, &[CLEAN; BLOCK]);
    for _ in 0..3 {
        guest.number += 1;
        guest.block(1, &[CLEAN; BLOCK]);
    }
    assert_eq!(guest.heard(), ["Resync"]);
    assert_eq!(guest.said(0), CLEAN, "what was known stays");
    guest.snapshot(1, true, |_| {});
    assert_eq!(guest.said(0), Said::UNKNOWN);
    guest.number += 1;
    guest.block(1, &[CLEAN; BLOCK]);
    assert_eq!(guest.heard(), ["Resync"]);
}

#[test]
fn a_snapshot_with_a_message_missing_changes_nothing_at_its_end() {
    let mut guest = Guest::connected();
    guest.block(0, &[CLEAN; BLOCK]);
    guest.snapshot(1, true, |guest| guest.number += 1);
    assert_eq!(guest.said(0), CLEAN);
    assert_eq!(guest.receiver.tally().snapshots, 0);
}

#[test]
fn a_mark_that_forbids_counts_at_once_and_is_acknowledged_when_it_is_in_force() {
    let mut guest = Guest::connected();
    guest.mark(41, Mark::Never, true, 600, 2).unwrap();
    assert!(guest.is_never(600) && guest.is_never(601) && !guest.is_never(602));
    assert_eq!(guest.heard(), Vec::<String>::new());
    let withheld = guest.receiver.take_withheld().unwrap();
    assert_eq!(withheld.blocks, [Block::try_new(1).unwrap()]);
    // Another one comes before the first is in force.
    guest.mark(42, Mark::Never, true, 3, 1).unwrap();
    guest.receiver.in_force(&withheld, &mut guest.answers);
    assert_eq!(guest.heard(), ["Done { serial: 41 }"]);
    let withheld = guest.receiver.take_withheld().unwrap();
    assert_eq!(withheld.blocks, [Block::try_new(0).unwrap()]);
    guest.receiver.in_force(&withheld, &mut guest.answers);
    assert_eq!(guest.heard(), ["Done { serial: 42 }"]);
    assert!(guest.receiver.take_withheld().is_none());
}

#[test]
fn an_acknowledgement_for_an_agent_that_has_gone_is_not_sent_to_the_next() {
    let mut guest = Guest::connected();
    guest.mark(1, Mark::Never, true, 600, 2).unwrap();
    let withheld = guest.receiver.take_withheld().unwrap();
    guest.receiver.disconnected(guest.now);
    guest.connect();
    guest.answers.clear();
    guest.mark(1, Mark::Never, true, 700, 2).unwrap();
    guest.receiver.in_force(&withheld, &mut guest.answers);
    assert!(guest.heard().is_empty());
    assert!(guest.receiver.take_withheld().is_some());
}

#[test]
fn marks_outlive_their_agent_until_one_knows_all() {
    let mut guest = Guest::connected();
    guest.block(0, &[CLEAN; BLOCK]);
    guest.mark(1, Mark::Never, true, 5, 1).unwrap();
    guest.receiver.disconnected(guest.now);
    guest.now += Limits::default().stale_after;
    guest.receiver.tick(guest.now, &mut guest.answers);
    assert_eq!(guest.said(0), Said::UNKNOWN, "stale");
    assert!(guest.is_never(5));
    guest.connect();
    guest.snapshot(1, false, |_| {});
    assert!(guest.is_never(5), "the agent has just started");
    // The next snapshot of the same connection has its price.
    guest.snapshot(2, true, |guest| guest.mark(1, Mark::Never, true, 6, 1).unwrap());
    assert!(guest.is_never(6) && !guest.is_never(5));
    assert!(guest.receiver.take_changed().any(|block| block.number() == 0));
}

#[test]
fn versions_without_one_in_common_are_refused_with_a_reason() {
    let mut guest = Guest::new();
    guest.receiver.connected(guest.now).unwrap();
    let violation = guest
        .say(&Message::Hello(hello(VERSION + 1, VERSION + 3)))
        .unwrap_err();
    assert!(
        violation.to_string().contains("update the older one"),
        "{violation}"
    );
    assert_eq!(guest.heard(), ["Refuse { reason: Version, seconds: 60 }"]);
    assert_eq!(
        guest.receiver.received(&[0], guest.now, &mut Vec::new()),
        Err(Violation::Nobody)
    );
    // A newer agent that still speaks ours.
    guest.receiver.connected(guest.now).unwrap();
    guest.say(&Message::Hello(hello(VERSION, VERSION + 3))).unwrap();
    assert!(guest.heard()[0].starts_with("Welcome { version: 1"));
    assert!(guest.receiver.agent().is_some());
}

#[test]
fn nothing_comes_before_the_greeting_and_the_greeting_comes_once() {
    let mut guest = Guest::new();
    guest.receiver.connected(guest.now).unwrap();
    let early = guest.say(&Message::Bye).unwrap_err();
    assert!(matches!(early, Violation::Order(_)));
    let mut guest = Guest::connected();
    let second = guest.say(&Message::Hello(hello(1, 1))).unwrap_err();
    assert!(matches!(second, Violation::Order(_)));
    let mut guest = Guest::connected();
    assert!(guest.say(&Message::Resync).is_err());
}

#[test]
fn who_sends_more_than_the_credit_is_cut_off_and_in_the_long_run_it_is_the_rate() {
    let mut guest = Guest::connected();
    // Malformed or not, it is bytes; here, messages without effect.
    let mut bytes = Vec::new();
    (0..2048).for_each(|at| Message::Bye.encode(guest.number + at, &mut bytes));
    let limits = Limits::default();
    let mut sent = 0;
    let violation = loop {
        sent += bytes.len() as u64;
        if let Err(violation) = guest.receiver.received(&bytes, guest.now, &mut Vec::new()) {
            break violation;
        }
        assert!(sent < 2 * limits.burst, "there is no end");
    };
    assert!(matches!(violation, Violation::Credit { .. }), "{violation}");
    assert!(sent >= limits.burst);
}

#[test]
fn credit_comes_back_with_time() {
    let mut guest = Guest::connected();
    let limits = Limits::default();
    let mut bytes = Vec::new();
    (0..2048).for_each(|at| Message::Bye.encode(guest.number + at, &mut bytes));
    // At the rate all goes well, for long.
    let each = Duration::from_secs(bytes.len() as u64) / u32::try_from(limits.bytes_per_second).unwrap();
    for _ in 0..1000 {
        guest.now += each;
        guest
            .receiver
            .received(&bytes, guest.now, &mut guest.answers)
            .unwrap();
    }
    assert!(guest.heard().iter().any(|answer| answer.starts_with("Grant")));
}

#[test]
fn marks_of_much_memory_cost_more_than_their_bytes() {
    let mut guest = Guest::connected();
    let mut serial = 0;
    let violation = loop {
        serial += 1;
        let result = guest.mark(serial, Mark::Worth, serial % 2 == 0, 0, 1 << 39);
        if let Err(violation) = result {
            break violation;
        }
    };
    assert!(matches!(violation, Violation::Credit { .. }));
    assert_eq!(serial, 1, "2^30 blocks are more than any credit");
}

#[test]
fn agents_that_come_too_often_are_told_to_wait() {
    let mut guest = Guest::new();
    let limits = Limits::default();
    let accepted = (0..1_000_000).filter(|_| guest.receiver.connected(guest.now).is_ok());
    assert_eq!(accepted.count() as u64, limits.connections);
    guest.answers = guest.receiver.connected(guest.now).unwrap_err();
    assert_eq!(guest.heard(), ["Refuse { reason: Often, seconds: 2 }"]);
    guest.now += Duration::from_secs(limits.seconds_per_connection);
    assert!(guest.receiver.connected(guest.now).is_ok());
}

#[test]
fn a_guest_that_shrinks_loses_what_was_said_of_the_rest() {
    let mut guest = Guest::connected();
    guest.block(3, &[CLEAN; BLOCK]);
    guest.mark(1, Mark::Never, true, 3 * 512, 1).unwrap();
    guest.receiver.resize(END - 512);
    assert!(!guest.is_never(3 * 512));
    assert_eq!(guest.said(3 * 512), Said::UNKNOWN);
    assert!(guest.receiver.take_changed().all(|block| block.number() < 3));
    guest.receiver.resize(END);
    assert_eq!(guest.said(3 * 512), Said::UNKNOWN);
}

#[test]
fn what_16_gib_say_takes_less_than_three_mebibytes() {
    let blocks = 8192;
    let mut receiver = Receiver::new(blocks * 512, Limits::default(), START);
    receiver.limits.burst = 1 << 40;
    receiver.bytes = Bucket::new(1, 1 << 40, START);
    let mut guest = Guest {
        receiver,
        ..Guest::new()
    };
    guest.connect();
    // Nothing fits: the longest blocks that there are. And each block has marks.
    let kinds = [
        CLEAN,
        Said::new(Kind::Free),
        Said::new(Kind::Anonymous),
        Said::new(Kind::Kernel),
    ];
    let frames: Frames = std::array::from_fn(|at| kinds[at * at % 11 % 4]);
    for block in 0..8192 {
        guest.block(block, &frames);
    }
    guest.mark(1, Mark::Worth, true, 0, blocks * 512).unwrap();
    let bytes = guest.receiver.memory_bytes();
    assert!(bytes < 3 << 20, "{bytes}");
}

/// What a guest does, in words of its own.
#[derive(Clone, Debug)]
enum Act {
    Block(u32, Vec<(u8, usize)>),
    Mark(u8, bool, u64, u64),
    Snapshot(bool),
    End,
    Reconnect,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0..BLOCKS + 1, prop::collection::vec((0_u8..6, 1_usize..300), 1..5)).prop_map(|(b, r)| Act::Block(b, r)),
        4 => (1_u8..4, any::<bool>(), 0..END + 100, 1_u64..700).prop_map(|(m, s, f, c)| Act::Mark(m, s, f, c)),
        1 => any::<bool>().prop_map(Act::Snapshot),
        1 => Just(Act::End),
        1 => Just(Act::Reconnect),
    ]
}

/// The plainest model: a value and three bits for every frame.
struct Model {
    said: Vec<Said>,
    marks: Vec<[bool; 3]>,
    fresh: [bool; BLOCKS as usize],
    snapshot: Option<(bool, Vec<[bool; 3]>)>,
}

impl Model {
    fn apply(&mut self, act: &Act) {
        match act {
            Act::Block(block, runs) => {
                if let Some(fresh) = self.fresh.get_mut(*block as usize) {
                    *fresh = true;
                    let start = *block as usize * BLOCK;
                    self.said[start..start + BLOCK].copy_from_slice(&frames_of(runs));
                }
            }
            Act::Mark(mark, set, first, count) => {
                for frame in (*first..first + count).filter(|frame| *frame < END) {
                    let at = usize::try_from(frame).unwrap();
                    self.marks[at][usize::from(mark - 1)] = *set;
                    if let Some((_, marks)) = &mut self.snapshot {
                        marks[at][usize::from(mark - 1)] = *set;
                    }
                }
            }
            Act::Snapshot(all_marks) => {
                self.fresh = Default::default();
                self.snapshot = Some((*all_marks, vec![[false; 3]; self.marks.len()]));
            }
            Act::End => {
                let Some((all_marks, marks)) = self.snapshot.take() else {
                    return;
                };
                for (block, fresh) in self.fresh.into_iter().enumerate() {
                    if !fresh {
                        self.said[block * BLOCK..(block + 1) * BLOCK].fill(Said::UNKNOWN);
                    }
                }
                if all_marks {
                    self.marks = marks;
                }
            }
            Act::Reconnect => self.snapshot = None,
        }
    }
}

fn frames_of(runs: &[(u8, usize)]) -> Frames {
    let mut all = runs
        .iter()
        .flat_map(|(bits, count)| std::iter::repeat_n(Said::from_bits(*bits).unwrap(), *count));
    std::array::from_fn(|_| all.next().unwrap_or(CLEAN))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_receiver_knows_what_the_guest_said(acts in prop::collection::vec(act(), 1..40)) {
        let mut guest = Guest::connected();
        let mut model = Model {
            said: vec![Said::UNKNOWN; usize::try_from(END).unwrap()],
            marks: vec![[false; 3]; usize::try_from(END).unwrap()],
            fresh: Default::default(),
            snapshot: None,
        };
        let mut all_marks = false;
        for (number, act) in (0..).zip(&acts) {
            // Snapshots and connections have their price.
            guest.now += Duration::from_secs(10);
            match act {
                Act::Block(block, runs) => guest.block(*block, &frames_of(runs)),
                Act::Mark(mark, set, first, count) => {
                    let mark = Mark::ALL[usize::from(*mark) - 1];
                    guest.mark(number, mark, *set, *first, *count).unwrap();
                }
                Act::Snapshot(all) => {
                    all_marks = *all;
                    guest.say(&Message::Begin { snapshot: 1, blocks: BLOCKS }).unwrap();
                }
                Act::End => guest.say(&Message::End { snapshot: 1, all_marks }).unwrap(),
                Act::Reconnect => guest.connect(),
            }
            model.apply(act);
        }
        for (frame, (said, marks)) in (0..).zip(model.said.iter().zip(&model.marks)) {
            prop_assert_eq!(guest.said(frame), *said, "frame {}", frame);
            let told = guest.receiver.marks(Gfn::try_new(frame).unwrap());
            for (mark, is) in Mark::ALL.into_iter().zip(marks) {
                prop_assert_eq!(told.has(mark), *is, "frame {} {:?}", frame, mark);
            }
        }
    }

    #[test]
    fn no_bytes_make_it_panic_or_grow(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..20)) {
        let mut guest = Guest::connected();
        for piece in pieces {
            guest.now += Duration::from_secs(10);
            if guest.receiver.received(&piece, guest.now, &mut guest.answers).is_err() {
                guest.connect();
            }
        }
        prop_assert!(guest.receiver.memory_bytes() < 4096 + MOST_PAYLOAD);
    }
}

#[test]
fn use_is_told_by_an_agent_that_sees_it_has_told_everything_and_is_not_silent() {
    let mut guest = Guest::connected();
    assert_eq!(guest.receiver.tells_use(guest.now), Err(NoUse::Sources));
    guest.receiver.disconnected(guest.now);
    assert_eq!(guest.receiver.tells_use(guest.now), Err(NoUse::Nobody));
    guest.receiver.connected(guest.now).unwrap();
    assert_eq!(guest.receiver.tells_use(guest.now), Err(NoUse::Nobody));
    let sources = Sources(Sources::FLAGS | Sources::DAMON);
    guest.number = 0;
    guest
        .say(&Message::Hello(Hello {
            sources,
            ..hello(1, 1)
        }))
        .unwrap();
    assert_eq!(guest.receiver.tells_use(guest.now), Err(NoUse::Incomplete));
    guest.snapshot(1, true, |_| {});
    assert_eq!(guest.receiver.tells_use(guest.now), Ok(()));
    guest.now += SILENT_AFTER;
    assert_eq!(guest.receiver.tells_use(guest.now), Err(NoUse::Silent));
    guest.block(0, &[CLEAN; BLOCK]);
    assert_eq!(guest.receiver.tells_use(guest.now), Ok(()));
}
