//! Which of the store's segments an engine was given to read.

use crate::compare::{Answer, Engine, PageId};
use crate::store::connection::Store;
use std::os::fd::BorrowedFd;
use vmm_dedup_protocol::SLOTS_PER_SEGMENT;

const PAGES: usize = SLOTS_PER_SEGMENT as usize;

/// The segments of an engine that was just made: none, until it is told.
#[derive(Debug, Default)]
pub(crate) struct ToldSegments {
    /// Serial numbers of segments, by their place.
    given: Vec<Option<u64>>,
    /// [`Store::segment_changes`] then.
    seen: Option<u64>,
}

impl ToldSegments {
    /// Lets the engine read what segments there are now, as pages of the slots' numbers, and nothing else of any store.
    /// Costs nothing as long as there is no change.
    ///
    /// # Errors
    /// If the device cannot be told; then the engine cannot be used.
    pub(crate) fn tell(&mut self, engine: &mut dyn Engine, store: &Store) -> Answer<()> {
        if self.seen == Some(store.segment_changes()) {
            return Ok(());
        }
        self.tell_all(engine, store.segments())?;
        self.seen = Some(store.segment_changes());
        Ok(())
    }

    fn tell_all<'a>(
        &mut self,
        engine: &mut dyn Engine,
        segments: impl Iterator<Item = Option<(u64, BorrowedFd<'a>)>>,
    ) -> Answer<()> {
        let segments: Vec<_> = segments.collect();
        let places = segments.len().max(self.given.len());
        self.given.resize(places, None);
        for (at, given) in self.given.iter_mut().enumerate() {
            let first = PageId((at * PAGES) as u64);
            let segment = segments.get(at).copied().flatten();
            if *given == segment.map(|(serial, _)| serial) {
                continue;
            }
            if given.take().is_some() {
                engine.unmap(first, PAGES)?;
            }
            if let Some((serial, file)) = segment {
                engine.map(first, PAGES, file)?;
                *given = Some(serial);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Account;
    use std::os::fd::AsFd;

    /// Notes what it is told.
    #[derive(Default)]
    struct Told(Vec<(bool, u64)>);

    impl Engine for Told {
        fn name(&self) -> &'static str {
            "told"
        }

        fn map(&mut self, first: PageId, pages: usize, _: BorrowedFd<'_>) -> Answer<()> {
            assert_eq!(pages, PAGES);
            self.0.push((true, first.0 / PAGES as u64));
            Ok(())
        }

        fn unmap(&mut self, first: PageId, _: usize) -> Answer<()> {
            self.0.push((false, first.0 / PAGES as u64));
            Ok(())
        }

        fn account(&self) -> Account {
            Account::default()
        }
    }

    #[test]
    fn an_engine_has_the_segments_there_are_and_no_others() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let segment = |serial| Some((serial, file.as_fd()));
        let (mut told, mut segments) = (Told::default(), ToldSegments::default());
        let mut tell = |now: &[_]| {
            segments.tell_all(&mut told, now.iter().copied()).unwrap();
            std::mem::take(&mut told.0)
        };
        assert_eq!(tell(&[segment(1), None, segment(2)]), [(true, 0), (true, 2)]);
        assert_eq!(tell(&[segment(1), None, segment(2)]), []);
        // One was retired and its place is taken by another one; one is new.
        assert_eq!(
            tell(&[segment(3), segment(4), segment(2)]),
            [(false, 0), (true, 0), (true, 1)]
        );
        // Another store has fewer.
        assert_eq!(
            tell(&[segment(5)]),
            [(false, 0), (true, 0), (false, 1), (false, 2)]
        );
    }
}
