//! An engine's answers to searches, checked once for all callers.

use super::{Answer, Engine, Error, Meanwhile, PageId, Pages, Searched, TreeSearch};
use vmm_dedup_protocol::stats::DeviceWork;
use vmm_dedup_protocol::tree::TreeReader;

/// A searching engine whose answers can be used without looking: one for each question, places within the set that was
/// searched. What breaks that is [`Error::Device`], after which the engine is to be dropped. A page that is not there is
/// no answer (`None`), e.g. since its segment was retired.
pub struct CheckedSearch {
    engine: Box<dyn TreeSearch>,
    name: &'static str,
}

impl CheckedSearch {
    /// Takes an engine over.
    #[must_use]
    pub fn new(engine: Box<dyn TreeSearch>) -> Self {
        let name = engine.name();
        Self { engine, name }
    }

    /// The engine's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The engine, to give it files.
    pub fn engine(&mut self) -> &mut dyn Engine {
        &mut *self.engine
    }

    /// CPU time of threads of the engine's own, ns.
    #[must_use]
    pub fn helper_cpu_ns(&self) -> u64 {
        self.engine.helper_cpu_ns()
    }

    /// What the engine's device was given to do.
    #[must_use]
    pub fn device_work(&self) -> DeviceWork {
        self.engine.device_work()
    }

    /// As [`super::Keys::keys`].
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Answer<Vec<Option<u64>>> {
        each(self.engine.keys(pages, of), of.len())
    }

    /// As [`TreeSearch::search_keyed`]. When it returns, `meanwhile` is done, also on failure.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn search(
        &mut self,
        pages: &dyn Pages,
        tree: TreeReader<'_>,
        candidates: &[PageId],
        meanwhile: &mut Meanwhile<'_>,
    ) -> Answer<Vec<Option<Searched>>> {
        let searched = self.engine.search_keyed(pages, tree, candidates, meanwhile);
        meanwhile.run();
        each(searched, candidates.len())
    }

    /// As [`TreeSearch::among`].
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn among(&mut self, pages: &dyn Pages, candidate: PageId, set: &[PageId]) -> Answer<Option<usize>> {
        match passed(self.engine.among(pages, candidate, set))?.flatten() {
            Some(at) if at >= set.len() => Err(Error::Device(format!(
                "it found page {at} of a set of {}",
                set.len()
            ))),
            found => Ok(found),
        }
    }
}

impl std::fmt::Debug for CheckedSearch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CheckedSearch").field(&self.name).finish()
    }
}

/// The answers to so many questions.
fn each<T>(answers: Vec<Answer<T>>, asked: usize) -> Answer<Vec<Option<T>>> {
    if answers.len() != asked {
        let given = answers.len();
        return Err(Error::Device(format!("{given} answers to {asked} questions")));
    }
    answers.into_iter().map(passed).collect()
}

fn passed<T>(answer: Answer<T>) -> Answer<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(Error::Fault(_) | Error::Address(_)) => Ok(None),
        Err(error @ Error::Device(_)) => Err(error),
    }
}
