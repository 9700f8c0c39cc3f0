//! What sharing a page was worth lately. One byte a page, beside the page's state in its word.
//!
//! Merging a page and breaking it again costs CPU time, and a writer's time. Sharing pays if it lasts for some passes. A page
//! whose sharing ends sooner is left alone for as long, the next time for twice as long, and so on up to [`MOST_LEVEL`]. While
//! the page stays shared the pause that it would get next halves, each time that the sharing has paid again.
//!
//! ```text
//!   Calm --shared--> Young --ticks--> Calm                     (it paid; at a level above 0: one level less, and Young again)
//!    ^                 `--broken--> Paused, one level more --ticks--> Calm
//!    `------------ the page has another content, by what is said: Young and Paused end, the level stays
//! ```
//!
//! Time is counted in ticks. [`TICKS`] of them are the time in which sharing pays.

/// Ticks from the beginning of sharing until it has paid.
pub(crate) const TICKS: u8 = 4;
/// The longest pause is `1 << (MOST_LEVEL - 1)` times the first.
const MOST_LEVEL: u8 = 6;

/// What a page does that time changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// Nothing.
    #[default]
    Calm,
    /// It is shared, and that has not paid yet. So many ticks are left.
    Young(u8),
    /// It is left alone for so many units of time, which grow with its level.
    Paused(u8),
}

/// See the module's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Worth {
    /// How often sharing ended too soon, less how often it paid.
    level: u8,
    phase: Phase,
}

const LEVEL_SHIFT: u32 = 4;

impl Worth {
    /// Packs into a byte; 0 is the default.
    pub(super) fn encode(self) -> u8 {
        let phase = match self.phase {
            Phase::Calm => 0,
            Phase::Young(left) => left,
            Phase::Paused(left) => TICKS + left,
        };
        self.level << LEVEL_SHIFT | phase
    }

    /// What [`Self::encode`] made.
    #[inline]
    pub(super) fn decode(byte: u8) -> Self {
        let phase = match byte & ((1 << LEVEL_SHIFT) - 1) {
            0 => Phase::Calm,
            young if young <= TICKS => Phase::Young(young),
            paused => Phase::Paused(paused - TICKS),
        };
        Self {
            level: byte >> LEVEL_SHIFT,
            phase,
        }
    }

    /// The page begins to be shared.
    pub(super) fn shared(self) -> Self {
        self.at(Phase::Young(TICKS))
    }

    /// Somebody wrote the page, and sharing ended.
    pub(super) fn broken(self) -> Self {
        match self.phase {
            Phase::Young(_) => Self {
                level: (self.level + 1).min(MOST_LEVEL),
                phase: Phase::Paused(TICKS),
            },
            Phase::Calm | Phase::Paused(_) => self,
        }
    }

    /// Sharing ended for another reason.
    pub(super) fn ended(self) -> Self {
        match self.phase {
            Phase::Young(_) => self.at(Phase::Calm),
            Phase::Calm | Phase::Paused(_) => self,
        }
    }

    /// The page holds another content than the one that was shared, or soon will: neither how long that one was shared nor a pause
    /// says anything of the new one. The level stays, for a page whose contents all end soon.
    pub(super) fn replaced(self) -> Self {
        self.at(Phase::Calm)
    }

    /// A tick has passed, of this number.
    pub(super) fn tick(self, number: u64) -> Self {
        match self.phase {
            Phase::Young(1) if self.level > 0 => Self {
                level: self.level - 1,
                phase: Phase::Young(TICKS),
            },
            Phase::Young(1) => self.at(Phase::Calm),
            Phase::Young(left) => self.at(Phase::Young(left - 1)),
            Phase::Paused(left) if number.is_multiple_of(self.unit()) => self.at(match left {
                1 => Phase::Calm,
                left => Phase::Paused(left - 1),
            }),
            Phase::Calm | Phase::Paused(_) => self,
        }
    }

    /// Whether the page is to be left alone.
    pub(super) fn is_paused(self) -> bool {
        matches!(self.phase, Phase::Paused(_))
    }

    /// Whether time changes nothing.
    pub(super) fn is_calm(self) -> bool {
        self.phase == Phase::Calm
    }

    /// Ticks of which a pause has [`TICKS`].
    fn unit(self) -> u64 {
        1 << self.level.saturating_sub(1)
    }

    fn at(self, phase: Phase) -> Self {
        Self { phase, ..self }
    }
}

const _: () = assert!(2 * TICKS < 1 << LEVEL_SHIFT && MOST_LEVEL << LEVEL_SHIFT < 1 << 7);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Ticks of the longest pause.
    const LONGEST: u64 = (TICKS as u64) << (MOST_LEVEL - 1);

    /// A page that is shared whenever it may be, and written every `period` ticks while it is: the ticks in which it is shared
    /// anew.
    fn shared_at(period: u64, ticks: u64) -> Vec<u64> {
        let (mut worth, mut shared, mut all) = (Worth::default(), None, Vec::new());
        for tick in 0..ticks {
            if shared.is_none() && !worth.is_paused() {
                (worth, shared) = (worth.shared(), Some(tick));
                all.push(tick);
            }
            if shared.is_some_and(|since| tick - since == period) {
                (worth, shared) = (worth.broken(), None);
            }
            worth = worth.tick(tick);
        }
        all
    }

    #[test]
    fn what_is_broken_soon_is_shared_ever_more_rarely_and_never_given_up() {
        let times = shared_at(1, 2000);
        let pauses: Vec<u64> = times.windows(2).map(|two| two[1] - two[0]).collect();
        // The first units of a pause have begun before it.
        for (n, pause) in pauses.iter().enumerate() {
            let level = u32::try_from(n).unwrap().min(u32::from(MOST_LEVEL) - 1);
            let most = u64::from(TICKS) << level;
            assert!((most * 3 / 4..=most + 2).contains(pause), "{pauses:?}");
        }
        assert!(pauses.len() > 14 && *pauses.last().unwrap() <= LONGEST + 2);
    }

    #[test]
    fn what_pays_is_shared_at_once_every_time() {
        let period = u64::from(TICKS);
        let times = shared_at(period, 100);
        assert!(
            times.windows(2).all(|two| two[1] - two[0] == period + 1),
            "{times:?}"
        );
    }

    #[test]
    fn the_next_pause_halves_while_a_page_rests() {
        let mut worth = Worth::default();
        (0..MOST_LEVEL).for_each(|_| worth = worth.shared().broken());
        let mut rested = worth.shared();
        let mut levels = Vec::new();
        for tick in 0..u64::from(TICKS) * u64::from(MOST_LEVEL + 1) {
            rested = rested.tick(tick);
            levels.push(rested.level);
        }
        let halved = levels.iter().step_by(usize::from(TICKS)).copied();
        assert!(halved.eq((0..=MOST_LEVEL).rev()), "{levels:?}");
        assert_eq!(rested, Worth::default());
    }

    #[test]
    fn another_content_is_not_held_responsible_for_the_one_before_and_the_level_stays() {
        let broken = Worth::default().shared().broken();
        assert!(broken.is_paused() && broken.replaced().is_calm());
        // What was shared is overwritten: that break is no sign either.
        let overwritten = broken.replaced().shared().replaced().broken();
        assert!(overwritten.is_calm());
        let again = overwritten.shared().broken();
        assert_eq!(again, broken.replaced().shared().broken());
        assert!(again.level > broken.level);
    }

    /// What may happen to a page.
    #[derive(Clone, Copy, Debug)]
    enum Event {
        Share,
        Break,
        End,
        Replace,
        Tick(u64),
    }

    fn events() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Share),
            Just(Event::Break),
            Just(Event::End),
            Just(Event::Replace),
            (0..LONGEST).prop_map(Event::Tick),
        ]
    }

    proptest! {
        /// Whatever happened, the byte holds it, a page that is left alone comes back within the longest pause, and one that stays
        /// shared is as new before long.
        #[test]
        fn nothing_lasts_for_ever(events in proptest::collection::vec(events(), 0..60), begin in 0..1000u64) {
            let mut worth = Worth::default();
            for event in events {
                worth = match event {
                    Event::Share if !worth.is_paused() => worth.shared(),
                    Event::Share => worth,
                    Event::Break => worth.broken(),
                    Event::End => worth.ended(),
                    Event::Replace => worth.replaced(),
                    Event::Tick(number) => worth.tick(number),
                };
                prop_assert_eq!(Worth::decode(worth.encode()), worth);
                prop_assert!(worth.level <= MOST_LEVEL);
            }
            let mut paused = worth;
            (begin..begin + LONGEST).for_each(|number| paused = paused.tick(number));
            prop_assert!(!paused.is_paused());
            let mut resting = paused.shared();
            let ticks = u64::from(TICKS) * u64::from(MOST_LEVEL + 1);
            (begin..begin + ticks).for_each(|number| resting = resting.tick(number));
            prop_assert_eq!(resting, Worth::default());
        }
    }
}
