//! The modules that work on the ring of jobs.

use crate::hash_key::EccOffsets;
use crate::memory::Memory;
use crate::module::Module;
use crate::timing::Account;
use crate::window::{Info, JobError, Window};

/// Several modules that take jobs in turn.
#[derive(Clone, Debug)]
pub struct Ring {
    modules: Vec<Module>,
    head: u32,
}

impl Ring {
    /// A ring for `modules` modules (at least 1 is made), with no job done.
    pub fn new(modules: usize) -> Self {
        Self {
            modules: vec![Module::default(); modules.max(1)],
            head: 0,
        }
    }

    /// Jobs done, modulo 2^32.
    pub fn head(&self) -> u32 {
        self.head
    }

    /// `update_ECC_offset` of all modules.
    pub fn update_ecc_offset(&mut self, offsets: EccOffsets) {
        for module in &mut self.modules {
            module.update_ecc_offset(offsets);
        }
    }

    /// Does the next job. The caller knows that there is one, and publishes the head.
    pub fn step(&mut self, window: Window<'_>, memory: &impl Memory) {
        let modules = self.modules.len();
        let module = &mut self.modules[self.head as usize % modules];
        let job = window.job(self.head);
        module.insert_pfe(job.candidate);
        let info = match window.table(job.table) {
            Some(others) => {
                module.load(others);
                module.run(memory);
                module.pfe_info().map(Info::from)
            }
            None => None,
        };
        let info = info.unwrap_or(Info {
            hash_key: None,
            ptr: job.candidate.ptr,
            scanned: true,
            duplicate: false,
            error: Some(JobError::Table),
        });
        window.set_outcome(self.head, &info);
        self.head = self.head.wrapping_add(1);
    }

    /// What all modules have done. They work at the same time, so the time that all took is that of one on average.
    pub fn account(&self) -> Account {
        let mut sum = Account::default();
        self.modules.iter().for_each(|module| sum.add(module.account()));
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::{Job, WINDOW_BYTES};
    use crate::{Candidate, EntryIndex, Line, OtherPage, Pointer, Ppn};
    use std::sync::atomic::AtomicU64;

    /// Page n holds n in every word.
    struct Numbered;

    impl Memory for Numbered {
        fn line(&self, page: Ppn, _line: usize) -> Option<Line> {
            (page.number() < 100).then(|| [page.number().to_be(); 8])
        }
    }

    fn job(page: u64, table: u32) -> Job {
        let candidate = Candidate {
            ppn: Ppn::try_new(page).unwrap(),
            last_refill: false,
            ptr: Pointer::ROOT,
        };
        Job { candidate, table }
    }

    #[test]
    fn modules_take_turns_and_outcomes_are_their_jobs() {
        let words: Vec<AtomicU64> = (0..WINDOW_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let window = Window::new(&words);
        let mut ring = Ring::new(3);
        let entry = OtherPage {
            ppn: Ppn::try_new(5).unwrap(),
            less: Pointer::new(31),
            more: Pointer::new(32),
        };
        window.set_entry(2, EntryIndex::try_new(0).unwrap(), Some(entry));
        for (number, page) in (0..).zip([4, 5, 6, 100]) {
            window.set_job(number, &job(page, 2));
        }
        window.set_job(4, &job(1, u32::MAX));
        (0..5).for_each(|_| ring.step(window, &Numbered));
        let outcomes: Vec<_> = (0..5).map(|number| window.outcome(number)).collect();
        let ends = outcomes.iter().map(|info| info.ptr.bits()).collect::<Vec<_>>();
        assert_eq!(ends, [31, 0, 32, 0, 0]);
        assert!(outcomes.iter().all(|info| info.scanned));
        assert_eq!(
            outcomes.iter().map(|info| info.duplicate).collect::<Vec<_>>(),
            [false, true, false, false, false]
        );
        assert_eq!(
            outcomes[3].error,
            Some(JobError::Run(crate::RunError::CandidateFault))
        );
        assert_eq!(outcomes[4].error, Some(JobError::Table));
        assert_eq!((ring.head(), ring.account().tables), (5, 4));
    }
}
