//! Which huge pages to split and which to build again.

use crate::config::Policy;
use crate::memory::thp_state::HugeState;
use crate::sys::page_size::CHUNK_PAGES;
use crate::thp::pressure::Pressure;
use crate::track::access::PROBES;

/// Samples from which it is known how often a huge page is used.
const SAMPLES_OF_RARE_USE: u8 = 3;
/// Twins that make a huge page worth splitting although it is used, if rarely: a quarter of it.
const TWINS_FOR_RARE_USE: u32 = 128;

/// The thresholds of slide 13, which follow the host's memory. Without pressure, speed comes first: only what is not used
/// at all is split, or what is used rarely and has many twins, and two intervals of use bring a huge page back. Under
/// pressure memory comes first. Between cold and hot lies a band in which nothing changes, so that a range on the edge
/// does not go back and forth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Thresholds {
    /// Frequencies below this are cold.
    cold: u32,
    /// Frequencies from this on are hot.
    hot: u32,
    /// What is used after so many microseconds, or later, is used rarely. At one access a millisecond small pages cost some
    /// hundredths of a per cent of a core in TLB misses.
    rare_us: u32,
    /// Subpages that must have a twin.
    twins: u32,
}

impl Thresholds {
    /// `split_pages`: twins that a huge page needs while there is no pressure.
    pub(crate) fn new(pressure: Pressure, split_pages: usize) -> Self {
        let pages = u32::try_from(split_pages.min(CHUNK_PAGES)).unwrap_or(u32::MAX);
        Self {
            cold: pressure.between(1, 3),
            hot: pressure.between(2, 6),
            rare_us: pressure.between(1000, 300),
            twins: pressure.between(pages, pages.div_ceil(4)),
        }
    }

    /// How many subpages of a huge page must have a twin for it to be split; `None` if it is to stay.
    pub(crate) fn twins_wanted(self, policy: Policy, state: &HugeState) -> Option<u32> {
        let cold = !self.is_used(policy, state);
        match policy {
            Policy::Smartmd if cold => {
                let most = u32::try_from(CHUNK_PAGES - PROBES.len()).unwrap_or(0);
                Some(self.twins.min(most))
            }
            Policy::Smartmd => {
                let rare = state.pace.us() >= self.rare_us && state.samples >= SAMPLES_OF_RARE_USE;
                rare.then_some(self.twins.max(TWINS_FOR_RARE_USE))
            }
            Policy::Ksm => Some(1),
            Policy::NoSplitting => u32::try_from(CHUNK_PAGES).ok(),
            Policy::Ingens => cold.then_some(0),
        }
    }

    /// Whether samples found a huge page in use.
    pub(crate) fn is_used(self, policy: Policy, state: &HugeState) -> bool {
        policy.watches_access() && state.frequency.value() >= self.cold
    }

    /// Whether to build a huge page again.
    pub(crate) fn rebuild(self, policy: Policy, state: &HugeState) -> bool {
        policy.watches_access() && state.frequency.value() >= self.hot
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::thp_state::Use;
    use proptest::prelude::*;
    use std::time::Duration;

    const OFTEN: Use = Use::AT_ONCE;
    const RARE: Use = Use::After(Duration::from_millis(3));

    fn after(intervals: &[Use]) -> HugeState {
        let mut state = HugeState::default();
        intervals.iter().for_each(|used| state.note_use(*used));
        state
    }

    #[test]
    fn two_intervals_of_use_bring_a_huge_page_back() {
        let t = Thresholds::new(Pressure::NONE, 16);
        assert!(!t.rebuild(Policy::Smartmd, &after(&[OFTEN])));
        assert!(t.rebuild(Policy::Smartmd, &after(&[OFTEN, RARE])));
        assert!(!t.rebuild(Policy::Ksm, &after(&[OFTEN; 7])));
    }

    #[test]
    fn policies_split_what_their_names_say() {
        let t = Thresholds::new(Pressure::NONE, 16);
        let histories = [&[][..], &[OFTEN; 3], &[RARE; 3]];
        let wanted = |policy| histories.map(|used| t.twins_wanted(policy, &after(used)));
        assert_eq!(wanted(Policy::Smartmd), [Some(16), None, Some(128)]);
        assert_eq!(wanted(Policy::Ksm), [Some(1); 3]);
        assert_eq!(wanted(Policy::NoSplitting), [Some(512); 3]);
        assert_eq!(wanted(Policy::Ingens), [Some(0), None, None]);
    }

    #[test]
    fn one_sample_does_not_tell_rare_use() {
        let t = Thresholds::new(Pressure::NONE, 16);
        assert_eq!(t.twins_wanted(Policy::Smartmd, &after(&[RARE])), None);
    }

    #[test]
    fn pressure_splits_more_and_rebuilds_less() {
        let (easy, tight) = (
            Thresholds::new(Pressure::NONE, 16),
            Thresholds::new(Pressure::FULL, 16),
        );
        let some = after(&[OFTEN, OFTEN]);
        assert_eq!(easy.twins_wanted(Policy::Smartmd, &some), None);
        assert_eq!(tight.twins_wanted(Policy::Smartmd, &some), Some(4));
        assert!(easy.rebuild(Policy::Smartmd, &some) && !tight.rebuild(Policy::Smartmd, &some));
        assert!(tight.rebuild(Policy::Smartmd, &after(&[OFTEN; 6])));
    }

    proptest! {
        /// Hysteresis: what was built again stays while it is used, and what was split waits for new use.
        #[test]
        fn no_range_goes_back_and_forth(
            tight in any::<bool>(),
            history in proptest::collection::vec(any::<bool>(), 0..20),
            more in 0..20,
        ) {
            let t = Thresholds::new(if tight { Pressure::FULL } else { Pressure::NONE }, 16);
            let used = |used: &bool| if *used { OFTEN } else { Use::None };
            let state = after(&history.iter().map(used).collect::<Vec<_>>());
            for policy in [Policy::Smartmd, Policy::Ingens] {
                let mut state = state;
                if t.rebuild(policy, &state) {
                    state.rebuilt();
                    (0..more).for_each(|_| state.note_use(OFTEN));
                    prop_assert_eq!(t.twins_wanted(policy, &state), None);
                } else {
                    state.split_by_us();
                    prop_assert!(!t.rebuild(policy, &state));
                }
            }
        }

        /// Uses at random, 300 a second or 5000: the mean tells them apart in nearly all intervals.
        #[test]
        fn rare_use_is_told_from_frequent_use(seed in any::<u64>()) {
            let t = Thresholds::new(Pressure::NONE, 16);
            let intervals = 1000;
            let rare = |per_second: f64| {
                let mut n = seed;
                let mut state = HugeState::default();
                let mut rare = 0;
                for _ in 0..intervals {
                    n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let uniform = ((n >> 40) as f64 + 1.0) / f64::from(1 << 24);
                    state.note_use(Use::After(Duration::from_secs_f64(-uniform.ln() / per_second)));
                    rare += usize::from(t.twins_wanted(Policy::Smartmd, &state) == Some(128));
                }
                rare
            };
            prop_assert!(rare(300.0) > intervals * 9 / 10, "{}", rare(300.0));
            prop_assert!(rare(5000.0) < intervals / 100, "{}", rare(5000.0));
        }
    }
}
