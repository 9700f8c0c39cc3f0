use super::*;
use proptest::prelude::*;
use std::time::Duration;
use vmm_dedup_agent_receiver::receiver::{Limits, Receiver};
use vmm_dedup_agent_wire::frame::Gfn;
use vmm_dedup_agent_wire::message::Sources;
use vmm_dedup_agent_wire::said::{Kind, Said};

const BLOCKS: u32 = 6;

/// An agent and a service, a guest that changes, and a line between them that breaks.
struct Both {
    teller: Teller,
    receiver: Receiver,
    guest: Vec<Frames>,
    never: FrameSet,
    now: Duration,
}

impl Both {
    fn new(limits: Limits) -> Self {
        let frames = u64::from(BLOCKS) * BLOCK as u64;
        Self {
            teller: Teller::new(BLOCKS, u64::from(BLOCKS)),
            receiver: Receiver::new(frames, limits, Duration::ZERO),
            guest: vec![NOTHING; BLOCKS as usize],
            never: FrameSet::default(),
            now: Duration::ZERO,
        }
    }

    fn connect(&mut self) {
        // Long enough for any number of connections.
        self.now += Duration::from_secs(60);
        self.receiver.connected(self.now).unwrap();
        self.teller.connected(Hello {
            lowest: 1,
            highest: 1,
            sources: Sources::default(),
            boot: [0; 16],
            run: 1,
            blocks: BLOCKS,
        });
    }

    /// What was said comes to the service, and its answers back.
    fn exchange(&mut self) {
        self.now += Duration::from_secs(1);
        let mut answers = Vec::new();
        let bytes = std::mem::take(self.teller.out());
        self.receiver.received(&bytes, self.now, &mut answers).unwrap();
        while let Some(withheld) = self.receiver.take_withheld() {
            self.receiver.in_force(&withheld, &mut answers);
        }
        self.receiver.tick(self.now, &mut answers);
        self.teller.received(&answers).unwrap();
    }

    fn round(&mut self) {
        for block in 0..BLOCKS {
            let frames = self.guest[block as usize];
            self.teller.tell(block, &frames);
        }
        self.teller.flush();
        let marks = self.teller.mark(Mark::Never, &self.never);
        self.teller.end_snapshot(marks);
    }

    fn check(&self) {
        for (block, frames) in (0_u64..).zip(&self.guest) {
            let known = self.receiver.frames(Block::try_new(block).unwrap());
            assert!(known == *frames, "block {block}");
        }
        let is_never = |frame: u64| self.receiver.marks(Gfn::try_new(frame).unwrap()).has(Mark::Never);
        let known = (0..u64::from(BLOCKS) * BLOCK as u64).filter(|frame| is_never(*frame));
        assert!(FrameSet::of(known.map(|frame| frame..frame + 1).collect()) == self.never);
    }
}

#[derive(Clone, Debug)]
enum Act {
    Change(usize, u8),
    Never(Vec<(u64, u64)>),
    Round,
    Lose,
    Reconnect,
    Resync,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..BLOCKS as usize, 0_u8..6).prop_map(|(block, bits)| Act::Change(block, bits)),
        2 => prop::collection::vec((0_u64..3000, 1_u64..60), 0..5).prop_map(Act::Never),
        4 => Just(Act::Round),
        1 => Just(Act::Lose),
        1 => Just(Act::Reconnect),
        1 => Just(Act::Resync),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Whatever is lost on the way, after some rounds the service knows what the guest is.
    #[test]
    fn both_agree_in_the_end(acts in prop::collection::vec(act(), 0..40), burst in 4000_u64..20_000) {
        // Little credit, so that much is told later.
        let mut both = Both::new(Limits { burst, bytes_per_second: burst / 2, ..Limits::default() });
        both.connect();
        both.teller.know_all_marks();
        for (number, act) in (0_usize..).zip(acts) {
            match act {
                Act::Change(block, bits) => both.guest[block][number] = Said::from_bits(bits).unwrap(),
                Act::Never(ranges) => {
                    both.never = FrameSet::of(ranges.into_iter().map(|(start, len)| start..start + len).collect());
                }
                Act::Round => {
                    both.round();
                    both.exchange();
                }
                // A message that is on its way is lost, and that costs a snapshot.
                Act::Lose => {
                    both.now += Duration::from_secs(60);
                    both.round();
                    both.exchange();
                    both.teller.pressure(Pressure::default());
                    both.teller.out().clear();
                }
                Act::Reconnect => both.connect(),
                Act::Resync => {
                    both.now += Duration::from_secs(60);
                    let mut out = Vec::new();
                    both.receiver.resync(&mut out);
                    both.teller.received(&out).unwrap();
                }
            }
        }
        // The last may have been lost without a sign: the next message gives it.
        for _ in 0..60 {
            both.now += Duration::from_secs(2);
            both.teller.pressure(Pressure::default());
            both.round();
            both.exchange();
        }
        both.check();
        prop_assert!(both.teller.is_done(both.teller.awaited()));
    }
}

#[test]
fn a_guest_that_does_not_change_says_nothing() {
    let mut both = Both::new(Limits::default());
    both.guest[2] = [Said::new(Kind::FileClean); BLOCK];
    both.connect();
    for _ in 0..4 {
        both.exchange();
        both.round();
    }
    both.teller.out().clear();
    both.round();
    assert!(both.teller.out().is_empty());
    both.check();
}

#[test]
fn before_all_marks_are_known_a_predecessors_stay() {
    let mut both = Both::new(Limits::default());
    let rounds = |both: &mut Both| {
        for _ in 0..4 {
            both.exchange();
            both.round();
        }
        both.exchange();
    };
    both.never = FrameSet::of(std::iter::once(7..9).collect());
    both.connect();
    both.teller.know_all_marks();
    rounds(&mut both);
    both.check();
    // Another agent, which knows of nothing yet.
    let before = std::mem::take(&mut both.never);
    both.teller = Teller::new(BLOCKS, u64::from(BLOCKS));
    both.connect();
    rounds(&mut both);
    let kept = both.never.clone();
    both.never = before;
    both.check();
    both.never = kept;
    both.now += Duration::from_secs(60);
    both.teller.know_all_marks();
    rounds(&mut both);
    both.check();
}

#[test]
fn services_that_do_not_know_the_protocol_are_left() {
    let answer = |messages: &[Message<'_>]| {
        let mut both = Both::new(Limits::default());
        both.connect();
        let mut bytes = Vec::new();
        messages.iter().for_each(|message| message.encode(0, &mut bytes));
        both.teller.received(&bytes)
    };
    let welcome = |version| Message::Welcome { version, credit: 1 };
    assert!(answer(&[welcome(VERSION)]).is_ok());
    assert!(answer(&[welcome(VERSION + 1)]).is_err());
    assert!(answer(&[welcome(VERSION), welcome(VERSION)]).is_err());
    assert!(answer(&[Message::Resync]).is_err());
    assert!(answer(&[welcome(VERSION), Message::Bye]).is_err());
    let (reason, seconds) = (Refusal::Off, 9);
    assert_eq!(
        answer(&[Message::Refuse { reason, seconds }]),
        Err(Error::Refused { reason, seconds })
    );
}
