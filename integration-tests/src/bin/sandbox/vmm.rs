//! What threads of the VMM's own do.

use crate::Play;
use crate::guest::{Guest, PAGES, PATIENCE, range, twins};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmm_dedup::seccomp::{Part, restrict_this_thread};
use vmm_dedup::{
    Breaks, Call, Config, DedupService, Injection, Lease, Policy, Refused, Settings, Status, Switch, Times,
    UseSource,
};
use vmm_dedup_integration_tests::seccomp::{Recorder, Seen};

/// Does something in a thread that is recorded and, if wanted, filtered as a part of the engine; what was seen of it. The thread
/// never ends, since ending is the VMM's own business.
pub(crate) fn recorded(
    recorder: Recorder,
    part: Part,
    filtered: bool,
    work: impl FnOnce() + Send + 'static,
) -> Vec<Seen> {
    let (theirs, done) = (recorder.clone(), Arc::new(AtomicBool::new(false)));
    let tell = done.clone();
    let thread = std::thread::Builder::new().name(part.name().into());
    let thread = thread.spawn(move || {
        theirs.record_this_thread();
        if filtered {
            restrict_this_thread(part).expect("a filter");
        }
        theirs.forget();
        work();
        tell.store(true, Ordering::Release);
        loop {
            std::thread::park();
        }
    });
    thread.expect("a thread");
    let start = Instant::now();
    while !done.load(Ordering::Acquire) {
        assert!(start.elapsed() < PATIENCE, "{part:?} does not come to its end");
        std::thread::sleep(Duration::from_millis(1));
    }
    recorder.seen().into_iter().collect()
}

impl Guest {
    /// What a thread of the VMM's does that only calls, whose memory the allocator has.
    pub(crate) fn is_called(&mut self, filtered: bool) -> Vec<Seen> {
        let pages = twins();
        self.attach(Config::default());
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.shares();
        let (supervisor, discarder) = (self.supervisor.clone(), self.supervisor.discarder());
        let (all, at) = (range(&pages, 0, PAGES).addresses(), pages.address(0));
        let (next, new) = (self.setup(Config::default()), twins());
        let [ours, protected] = [0, PAGES / 2].map(|first| range(&new, first, PAGES / 2));
        let confidential = vmm_dedup::refusal::confidential();
        recorded(Recorder::new(), Part::Call, filtered, move || {
            // SAFETY: what it held is not needed any more.
            unsafe { discarder.discard(at, PAGES / 2 * 4096) }.expect("it is freed");
            supervisor.pause();
            supervisor.resume();
            supervisor
                .lend(all.clone(), Lease::UntilTakenBack)
                .expect("it is lent");
            supervisor.take_back(all);
            supervisor.pin().expect("it is given back");
            supervisor.unpin();
            supervisor.direct_io_opened().expect("it looks");
            assert_ne!(supervisor.status(), Status::Detached);
            supervisor.detach(true).expect("it ends");
            // The next VM.
            supervisor.attach(next).expect("it fits");
            for range in [ours, protected] {
                // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
                unsafe { supervisor.add_range(range) };
            }
            supervisor.start().expect("it starts");
            let settings = Settings {
                switch: Some(Switch::On),
                ..Settings::default()
            };
            supervisor.set(settings).expect("it is on");
            supervisor.pass().expect("a pass");
            assert!(supervisor.stats().is_some());
            supervisor
                .leave_alone(protected.addresses(), confidential.clone())
                .expect("it is given back");
            supervisor.remove_range(protected.addresses()).expect("it goes");
            drop(supervisor.pinned().expect("it is given back"));
            supervisor.pin_while(|| false).expect("it is given back");
            // As the kernel is, it is refused or not.
            let _ = supervisor.nested_guests();
            supervisor.refuse(confidential).expect("it is given back");
            supervisor.detach(false).expect("it ends");
        })
    }

    /// What a thread of the VMM's does that frees memory where the kernel lacks some: twice it leaves a hole. The test makes that by a
    /// call of its own (munmap), so this thread is not filtered, and nothing is seen of that.
    pub(crate) fn lacks_memory(&mut self) -> Vec<Seen> {
        let pages = twins();
        self.attach(Config::default());
        self.add(range(&pages, 0, PAGES));
        self.supervisor.start().expect("it starts");
        self.shares();
        self.supervisor.pause();
        let (discarder, at) = (self.supervisor.discarder(), pages.address(0));
        let mut seen = recorded(Recorder::new(), Part::Call, false, move || {
            let lack = Injection::leaving_holes(Call::MapAnonymous, libc::ENOMEM, Times::First(2));
            // SAFETY: what it held is not needed any more.
            unsafe { discarder.discard(at, PAGES / 2 * 4096) }.expect("it is freed");
            assert_eq!(lack.failed(), 2);
        });
        assert!((0..PAGES / 2).all(|page| pages.load(page, 3) == 0));
        seen.retain(|seen| seen.call != libc::SYS_munmap);
        self.supervisor.detach(true).expect("it ends");
        seen
    }

    /// A VMM that starts services itself.
    pub(crate) fn serves_without_a_supervisor(&mut self, play: Play, filtered: bool) -> Vec<Seen> {
        let (store, pages, disk) = (self.store.socket(), twins(), self.disk());
        let recorder = || play.recorder(&self.folder);
        let all = range(&pages, 0, PAGES);
        let mut seen = recorded(recorder(), Part::Start, filtered, move || {
            for use_source in [UseSource::Damon, UseSource::PageIdle] {
                let config = Config {
                    name: "alone".into(),
                    breaks: Breaks::managed(64, 0),
                    huge_policy: Policy::Smartmd,
                    use_source,
                    ..Config::default()
                };
                // SAFETY: tests' pages are never unmapped, and are only reached by volatile accesses.
                let service = unsafe { DedupService::start_on_ranges(&[all], &store, config) };
                let service = service.expect("it starts");
                service.pass().expect("a pass");
                service.pass().expect("another one");
                service.stop(true).expect("it ends");
            }
        });
        drop(disk);
        let store = self.store.socket();
        seen.extend(recorded(recorder(), Part::Announce, filtered, move || {
            let refusal = vmm_dedup::refusal::confidential();
            drop(Refused::announce(&store, "refused", 1, &refusal).expect("it is told"));
        }));
        seen
    }
}
