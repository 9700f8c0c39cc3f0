//! How many mappings the service has added to the process, about, and how many it may add.

/// The kernel refused a mapping: it may have lacked memory only, or others may give theirs back. So it is asked again, ever
/// more seldom while it refuses.
#[derive(Clone, Copy, Debug)]
struct Refused {
    /// Mappings that there may be until it is asked again.
    most: i64,
    /// The pass in which it is.
    until: u64,
    /// Passes from the refusal to that.
    patience: u64,
}

/// Passes for which the kernel is not asked for another mapping, after its first refusal and after many.
const REFUSED_PASSES: std::ops::RangeInclusive<u64> = 2..=1024;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Mappings {
    /// Added by the service, about.
    pub(super) added: i64,
    /// The most that it may add.
    most: i64,
    /// What holds since the kernel refused one.
    refused: Option<Refused>,
    /// Mappings that the process had before.
    before: usize,
}

impl Mappings {
    /// `most`: that the service may add to those that the process has now, `before`.
    pub(super) fn new(most: i64, before: usize) -> Self {
        Self {
            added: 0,
            most,
            refused: None,
            before,
        }
    }

    /// Of the process, about.
    pub(super) fn all(&self) -> u64 {
        self.before as u64 + u64::try_from(self.added).unwrap_or(0)
    }

    /// The most that the service may add, as of now.
    pub(super) fn most(&self) -> i64 {
        self.refused
            .map_or(self.most, |refused| refused.most.min(self.most))
    }

    /// The process's mappings were counted.
    pub(super) fn set_counted(&mut self, counted: usize) {
        self.added = i64::try_from(counted.saturating_sub(self.before)).unwrap_or(i64::MAX);
    }

    /// The kernel has refused one more.
    pub(super) fn note_refusal(&mut self, pass: u64) {
        let patience = match self.refused {
            Some(again) if pass < again.until => again.patience,
            Some(again) if pass < again.until + again.patience => {
                (2 * again.patience).min(*REFUSED_PASSES.end())
            }
            _ => *REFUSED_PASSES.start(),
        };
        self.refused = Some(Refused {
            most: self.added,
            until: pass + patience,
            patience,
        });
    }

    /// Whether the kernel may be asked for more again from this pass on; told once after a refusal.
    pub(super) fn asks_again(&mut self, pass: u64) -> bool {
        let due = |refused: &&mut Refused| refused.until <= pass && refused.most != i64::MAX;
        let again = self.refused.as_mut().filter(due);
        again.map(|refused| refused.most = i64::MAX).is_some()
    }
}
