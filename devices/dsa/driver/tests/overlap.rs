//! What the device has to do while the driver waits for it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use vmm_dedup::compare::{Arena, Engine, Keys, PageId};
use vmm_dedup_dsa::{DsaEngine, InProcess, Options, QueueLimits, Reach, Trouble, Wanted, WorkQueue};
use vmm_dedup_dsa_abi::{Descriptor, DeviceAddress};
use vmm_dedup_dsa_model::{Faults, Shape, Timing};
use vmm_dedup_protocol::key::PAGE_WORDS;

const PAGES: usize = 64;

/// The model, which counts how often it is waited for with less on its way than it could have.
struct Watched {
    model: InProcess,
    /// Most descriptors on their way.
    most: u64,
    submitted: u64,
    lonely: Arc<AtomicUsize>,
}

impl WorkQueue for Watched {
    fn name(&self) -> &str {
        "wq0.0"
    }

    fn limits(&self) -> QueueLimits {
        self.model.limits()
    }

    fn uses_process_addresses(&self) -> bool {
        self.model.uses_process_addresses()
    }

    fn submit(&mut self, descriptor: &Descriptor) -> Result<bool, Trouble> {
        let submitted = self.model.submit(descriptor);
        self.submitted += u64::from(submitted == Ok(true));
        submitted
    }

    /// The model works when it is waited for, or given something: between these nothing ends.
    fn relax(&mut self, status: &AtomicU64) {
        let on_their_way = self.submitted - self.model.account().descriptors;
        let all = self.submitted == PAGES as u64;
        let lonely = !all && on_their_way < self.most;
        self.lonely.fetch_add(lonely.into(), Ordering::Relaxed);
        self.model.relax(status);
    }

    fn trouble(&mut self) -> Option<Trouble> {
        self.model.trouble()
    }

    fn reset(&mut self) -> Result<(), Trouble> {
        self.model.reset()
    }

    fn map(
        &mut self,
        at: DeviceAddress,
        bytes: usize,
        file: BorrowedFd<'_>,
        writable: bool,
    ) -> Result<(), Trouble> {
        self.model.map(at, bytes, file, writable)
    }

    fn unmap(&mut self, at: DeviceAddress, bytes: usize) -> Result<(), Trouble> {
        self.model.unmap(at, bytes)
    }

    fn borrowed_cpu_ns(&self) -> u64 {
        self.model.borrowed_cpu_ns()
    }
}

#[test]
fn the_device_has_the_next_page_while_one_is_waited_for() {
    let arena = Arena::new(PAGES).unwrap();
    (0..PAGES).for_each(|page| arena.write(page, &[page as u64; PAGE_WORDS]));
    // So slow that nothing ends between a submission and the wait for it, nor two pages at once: 1 ms for each.
    let timing = Timing {
        latency_ns: 1_000_000,
        bytes_per_us: 4,
        ..Timing::PUBLISHED
    };
    let model = InProcess::new(
        Shape::sapphire_rapids(),
        timing,
        Faults::default(),
        Reach::Process,
        Wanted::default(),
    );
    let lonely = Arc::new(AtomicUsize::new(0));
    let queue = Watched {
        model: model.unwrap(),
        most: 2,
        submitted: 0,
        lonely: lonely.clone(),
    };
    let options = Options {
        batch: 1,
        in_flight: 2,
        time_limit: Duration::from_secs(5),
        ..Options::default()
    };
    let mut engine = DsaEngine::new(vec![Box::new(queue)], options).unwrap();
    engine.map(PageId(0), arena.pages(), arena.file()).unwrap();
    let ids: Vec<PageId> = (0..PAGES as u64).map(PageId).collect();
    assert!(engine.keys(&arena, &ids).iter().all(Result::is_ok));
    assert_eq!(lonely.load(Ordering::Relaxed), 0);
}
