//! The seam at which tests make system calls fail.
//!
//! Every call on guest memory, and every call that may be made while guest pages are away, asks [`before`] first. In a
//! product that is nothing. With the feature `inject`, and in the engine's own tests, an `Injection` says which calls of
//! one kind, or from one place in the engine, end with an errno instead of being made. A `Watch` says from which places calls are
//! made, and an `Observer` is told of each before it is made: the functions that make them name their callers
//! (`track_caller`) where there are injections.

mod call {
    /// Kinds of system calls.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Call {
        /// UFFDIO_REGISTER.
        Register,
        /// UFFDIO_UNREGISTER.
        Unregister,
        /// UFFDIO_WAKE.
        Wake,
        /// UFFDIO_COPY.
        Copy,
        /// UFFDIO_ZEROPAGE.
        ZeroPage,
        /// UFFDIO_MOVE.
        Move,
        /// UFFDIO_WRITEPROTECT.
        WriteProtect,
        /// UFFDIO_POISON.
        Poison,
        /// read() of a userfaultfd.
        ReadFaults,
        /// poll() of a userfaultfd.
        PollFaults,
        /// PAGEMAP_SCAN.
        PagemapScan,
        /// read() of pagemap.
        PagemapRead,
        /// clone() of a child.
        Fork,
        /// mincore().
        Mincore,
        /// mmap() of a segment of the store.
        MapSegment,
        /// mmap() of anonymous memory.
        MapAnonymous,
        /// mremap().
        Remap,
        /// munmap().
        Unmap,
        /// mprotect().
        Protect,
        /// madvise(MADV_POPULATE_WRITE).
        Populate,
        /// madvise(MADV_POPULATE_READ).
        PopulateRead,
        /// madvise(MADV_DONTNEED), and its form for locked memory.
        Discard,
        /// madvise(MADV_COLD), by which huge pages are split.
        Split,
        /// madvise() that repeats what the VMM had advised.
        Advise,
        /// brk(), which waits for whoever holds the lock of the mappings.
        Brk,
        /// sched_setscheduler().
        Schedule,
    }

    #[cfg(feature = "inject")]
    impl Call {
        /// All kinds.
        pub const ALL: [Self; 26] = [
            Self::Register,
            Self::Unregister,
            Self::Wake,
            Self::Copy,
            Self::ZeroPage,
            Self::Move,
            Self::WriteProtect,
            Self::Poison,
            Self::ReadFaults,
            Self::PollFaults,
            Self::PagemapScan,
            Self::PagemapRead,
            Self::Fork,
            Self::Mincore,
            Self::MapSegment,
            Self::MapAnonymous,
            Self::Remap,
            Self::Unmap,
            Self::Protect,
            Self::Populate,
            Self::PopulateRead,
            Self::Discard,
            Self::Split,
            Self::Advise,
            Self::Brk,
            Self::Schedule,
        ];
    }

    // Each in its place: a kind that is added is added there.
    #[cfg(feature = "inject")]
    const _: () = {
        let mut n = 0;
        while n < Call::ALL.len() {
            assert!(Call::ALL[n] as usize == n);
            n += 1;
        }
        assert!(Call::Schedule as usize + 1 == n);
    };
}

pub use call::Call;

#[cfg(not(any(test, feature = "inject")))]
mod product {
    use super::call::Call;
    use std::io;

    /// Whether a call is to be made: always.
    #[allow(clippy::unnecessary_wraps)] // tests make it fail
    #[inline(always)]
    pub(crate) const fn before(_: Call) -> io::Result<()> {
        Ok(())
    }

    /// While it lives, calls of one kind that this thread makes are done in another way should they fail, and nothing is told of that.
    pub(crate) struct AnotherWay(());

    impl AnotherWay {
        #[inline(always)]
        pub(crate) const fn of(_: Call) -> Self {
            Self(())
        }
    }

    impl Drop for AnotherWay {
        #[inline(always)]
        fn drop(&mut self) {}
    }

    /// As [`before`], for a call that maps something over a range.
    #[allow(clippy::unnecessary_wraps)]
    #[inline(always)]
    pub(crate) const fn before_mapping(_: Call, _: usize, _: usize) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(not(any(test, feature = "inject")))]
pub(crate) use product::{AnotherWay, before, before_mapping};

#[cfg(any(test, feature = "inject"))]
pub(crate) use armed::{AnotherWay, before, before_mapping};
#[cfg(any(test, feature = "inject"))]
#[cfg_attr(not(feature = "inject"), allow(unused_imports))] // the engine's own tests need some
pub use armed::{Injection, Observer, Site, Times, Watch};

#[cfg(any(test, feature = "inject"))]
mod armed {
    use super::call::Call;
    use std::cell::Cell;
    use std::collections::BTreeMap;
    use std::fmt;
    use std::io;
    use std::panic::Location;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Which calls of a kind fail.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Times {
        /// All.
        Always,
        /// The first so many.
        First(u64),
        /// The nth, the 2nth, and so on.
        Every(u64),
        /// The nth, counted from 1, and no other.
        Nth(u64),
    }

    /// A place in the engine from which calls of one kind are made.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub struct Site {
        /// What is called.
        pub call: Call,
        /// Source file.
        pub file: &'static str,
        /// Line in it.
        pub line: u32,
        /// What fails here is done in another way, so that nothing is told of it.
        pub has_another_way: bool,
    }

    impl fmt::Display for Site {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{:?} at {}:{}", self.call, self.file, self.line)
        }
    }

    thread_local! {
        static ANOTHER_WAY: Cell<Option<Call>> = const { Cell::new(None) };
    }

    /// While it lives, calls of one kind that this thread makes are done in another way should they fail, and nothing is told of that.
    #[derive(Debug)]
    pub(crate) struct AnotherWay(Option<Call>);

    impl AnotherWay {
        pub(crate) fn of(call: Call) -> Self {
            Self(ANOTHER_WAY.replace(Some(call)))
        }
    }

    impl Drop for AnotherWay {
        fn drop(&mut self) {
            ANOTHER_WAY.set(self.0);
        }
    }

    #[derive(Debug)]
    struct Plan {
        call: Call,
        /// `None`: wherever it is called.
        site: Option<Site>,
        errno: i32,
        times: Times,
        hole: bool,
        seen: u64,
        failed: u64,
    }

    impl Plan {
        /// Counts a call; whether it is to fail.
        fn fails(&mut self) -> bool {
            self.seen += 1;
            let fails = match self.times {
                Times::Always => true,
                Times::First(most) => self.seen <= most,
                Times::Every(n) => self.seen.is_multiple_of(n),
                Times::Nth(n) => self.seen == n,
            };
            self.failed += u64::from(fails);
            fails
        }
    }

    /// Calls from each place, while somebody watches.
    static SEEN: Mutex<Option<BTreeMap<Site, u64>>> = Mutex::new(None);
    /// With a number for each.
    static PLANS: Mutex<Vec<(usize, Plan)>> = Mutex::new(Vec::new());
    static OBSERVER: Mutex<Option<Told>> = Mutex::new(None);
    /// How many of these there are.
    static ARMED: AtomicUsize = AtomicUsize::new(0);

    type Told = Box<dyn FnMut(Site) + Send>;

    fn plans() -> MutexGuard<'static, Vec<(usize, Plan)>> {
        PLANS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen() -> MutexGuard<'static, Option<BTreeMap<Site, u64>>> {
        SEEN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn observer() -> MutexGuard<'static, Option<Told>> {
        OBSERVER.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arm<T>(place: &mut Option<T>, with: T) {
        assert!(place.is_none(), "one of a kind at a time");
        *place = Some(with);
        ARMED.fetch_add(1, Ordering::Release);
    }

    fn disarm<T>(place: &mut Option<T>) {
        *place = None;
        ARMED.fetch_sub(1, Ordering::Release);
    }

    /// Is told of every call, whoever of the process makes it, in the thread that is about to make it. There is one at a time.
    #[derive(Debug)]
    pub struct Observer(());

    impl Observer {
        /// `told` must not make calls of its own that are told of.
        ///
        /// # Panics
        /// If there is one already.
        #[must_use]
        pub fn begin(told: impl FnMut(Site) + Send + 'static) -> Self {
            arm(&mut *observer(), Box::new(told));
            Self(())
        }
    }

    impl Drop for Observer {
        fn drop(&mut self) {
            disarm(&mut *observer());
        }
    }

    /// Notes from where calls are made while this lives, whoever of the process makes them. There is one at a time.
    #[derive(Debug)]
    pub struct Watch(());

    impl Watch {
        /// Begins with none.
        ///
        /// # Panics
        /// If somebody watches already.
        #[must_use]
        pub fn begin() -> Self {
            arm(&mut *seen(), BTreeMap::new());
            Self(())
        }

        /// Places seen so far, and how many calls were made from each.
        #[must_use]
        pub fn sites(&self) -> BTreeMap<Site, u64> {
            seen().clone().unwrap_or_default()
        }
    }

    impl Drop for Watch {
        fn drop(&mut self) {
            disarm(&mut *seen());
        }
    }

    /// Calls of one kind fail while this lives, whoever of the process makes them. Several may live, each for calls of its own.
    #[derive(Debug)]
    pub struct Injection(usize);

    impl Injection {
        /// Lets calls of a kind end with an errno.
        #[must_use]
        pub fn begin(call: Call, errno: i32, times: Times) -> Self {
            Self::with(call, None, errno, times, false)
        }

        /// As [`Self::begin`], for calls that map something over a range: before they fail they unmap the range, as the
        /// kernel may.
        #[must_use]
        pub fn leaving_holes(call: Call, errno: i32, times: Times) -> Self {
            Self::with(call, None, errno, times, true)
        }

        /// As [`Self::begin`], for the calls from one place.
        #[must_use]
        pub fn at(site: Site, errno: i32, times: Times) -> Self {
            Self::with(site.call, Some(site), errno, times, false)
        }

        fn with(call: Call, site: Option<Site>, errno: i32, times: Times, hole: bool) -> Self {
            let plan = Plan {
                call,
                site,
                errno,
                times,
                hole,
                seen: 0,
                failed: 0,
            };
            let mut plans = plans();
            let number = plans.last().map_or(0, |(last, _)| last + 1);
            plans.push((number, plan));
            ARMED.fetch_add(1, Ordering::Release);
            Self(number)
        }

        /// Calls that failed by it so far.
        #[must_use]
        pub fn failed(&self) -> u64 {
            let plans = plans();
            let own = plans.iter().find(|(number, _)| *number == self.0);
            own.map_or(0, |(_, plan)| plan.failed)
        }
    }

    impl Drop for Injection {
        fn drop(&mut self) {
            plans().retain(|(number, _)| *number != self.0);
            ARMED.fetch_sub(1, Ordering::Release);
        }
    }

    /// Whether a call is to be made; if not, the errno that it ends with.
    #[track_caller]
    pub(crate) fn before(call: Call) -> io::Result<()> {
        decide(call, None)
    }

    /// As [`before`], for a call that maps something over a range.
    #[track_caller]
    pub(crate) fn before_mapping(call: Call, at: usize, len: usize) -> io::Result<()> {
        decide(call, Some((at, len)))
    }

    #[allow(unsafe_code)] // unmaps as a failing call would
    #[track_caller]
    fn decide(call: Call, over: Option<(usize, usize)>) -> io::Result<()> {
        if ARMED.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let place = Location::caller();
        let site = Site {
            call,
            file: place.file(),
            line: place.line(),
            has_another_way: ANOTHER_WAY.get() == Some(call),
        };
        if let Some(told) = &mut *observer() {
            told(site);
        }
        if let Some(seen) = &mut *seen() {
            *seen.entry(site).or_default() += 1;
        }
        let mut plans = plans();
        let meant = |plan: &&mut Plan| plan.call == call && plan.site.is_none_or(|at| at == site);
        let Some(plan) = plans.iter_mut().map(|(_, plan)| plan).find(meant) else {
            return Ok(());
        };
        if !plan.fails() {
            return Ok(());
        }
        if let (true, Some((at, len))) = (plan.hole, over) {
            // SAFETY: the caller was about to map something over the range, so nothing refers to what is there.
            unsafe { libc::munmap(at as *mut _, len) };
        }
        Err(io::Error::from_raw_os_error(plan.errno))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn fails(times: Times) -> Vec<bool> {
            let injection = Injection::begin(Call::Poison, libc::ENOMEM, times);
            let failed: Vec<bool> = (0..6).map(|_| before(Call::Poison).is_err()).collect();
            assert!(before(Call::Protect).is_ok(), "of another kind");
            assert_eq!(
                injection.failed(),
                failed.iter().fold(0, |n, f| n + u64::from(*f))
            );
            drop(injection);
            assert!(before(Call::Poison).is_ok(), "after the end");
            failed
        }

        #[test]
        fn calls_from_one_place_fail_and_others_do_not() {
            let watch = Watch::begin();
            let here = || before(Call::Poison);
            let there = || before(Call::Poison);
            assert!(here().is_ok() && there().is_ok() && there().is_ok());
            let sites: Vec<(Site, u64)> = watch.sites().into_iter().collect();
            drop(watch);
            let [(first, 1), (second, 2)] = sites[..] else {
                panic!("{sites:?}");
            };
            assert!(first.line + 1 == second.line && first.file.ends_with("inject.rs"));
            let injection = Injection::at(second, libc::ENOMEM, Times::Always);
            assert!(here().is_ok() && there().is_err());
            assert_eq!(injection.failed(), 1);
        }

        #[test]
        fn what_has_another_way_says_so_of_one_kind_and_as_long_as_it_lasts() {
            let watch = Watch::begin();
            let calls = || [Call::Poison, Call::Protect].map(|call| assert!(before(call).is_ok()));
            {
                let _protect = AnotherWay::of(Call::Protect);
                let poison = AnotherWay::of(Call::Poison);
                calls();
                drop(poison);
                calls();
            }
            calls();
            let other = |call: Call| -> Vec<(bool, u64)> {
                let of_this_file =
                    |(site, _): &(Site, u64)| site.call == call && site.file.ends_with("inject.rs");
                let sites = watch.sites().into_iter().filter(of_this_file);
                sites.map(|(site, count)| (site.has_another_way, count)).collect()
            };
            assert_eq!(other(Call::Poison), [(false, 2), (true, 1)]);
            assert_eq!(other(Call::Protect), [(false, 2), (true, 1)]);
        }

        #[test]
        fn an_observer_is_told_of_each_call_before_it_is_made() {
            let (tell, told) = std::sync::mpsc::channel();
            let observer =
                Observer::begin(move |site: Site| _ = tell.send((site.call, std::thread::current().id())));
            let here = std::thread::current().id();
            assert!(before(Call::Poison).is_ok());
            // Other tests of this process make calls as well.
            let own = || {
                told.try_iter()
                    .filter(|(_, thread)| *thread == here)
                    .map(|(call, _)| call)
            };
            assert_eq!(own().collect::<Vec<_>>(), [Call::Poison]);
            drop(observer);
            assert!(before(Call::Poison).is_ok());
            assert_eq!(own().next(), None);
        }

        #[test]
        fn the_calls_that_were_named_fail() {
            let (t, f) = (true, false);
            assert_eq!(fails(Times::Always), [t; 6]);
            assert_eq!(fails(Times::First(2)), [t, t, f, f, f, f]);
            assert_eq!(fails(Times::Every(3)), [f, f, t, f, f, t]);
            assert_eq!(fails(Times::Nth(3)), [f, f, t, f, f, f]);
        }
    }
}
