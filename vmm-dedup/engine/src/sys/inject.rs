//! The seam at which tests make system calls fail.
//!
//! Every call on guest memory, and every call that may be made while guest pages are away, asks [`before`] first. In a
//! product that is nothing. With the feature `inject`, and in the engine's own tests, an `Injection` says which calls of
//! one kind, or from one place in the engine, end with an errno instead of being made. A `Watch` says from which places calls are
//! made: the functions that make them name their callers (`track_caller`) where there are injections.

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
    }
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

    /// As [`before`], for a call that maps something over a range.
    #[allow(clippy::unnecessary_wraps)]
    #[inline(always)]
    pub(crate) const fn before_mapping(_: Call, _: usize, _: usize) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(not(any(test, feature = "inject")))]
pub(crate) use product::{before, before_mapping};

#[cfg(any(test, feature = "inject"))]
#[cfg_attr(not(feature = "inject"), allow(unused_imports))] // the engine's own tests need some
pub use armed::{Injection, Site, Times, Watch};
#[cfg(any(test, feature = "inject"))]
pub(crate) use armed::{before, before_mapping};

#[cfg(any(test, feature = "inject"))]
mod armed {
    use super::call::Call;
    use std::collections::BTreeMap;
    use std::fmt;
    use std::io;
    use std::panic::Location;
    use std::sync::atomic::{AtomicBool, Ordering};
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
    }

    impl fmt::Display for Site {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{:?} at {}:{}", self.call, self.file, self.line)
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
            };
            self.failed += u64::from(fails);
            fails
        }
    }

    /// Calls from each place, while somebody watches.
    static SEEN: Mutex<Option<BTreeMap<Site, u64>>> = Mutex::new(None);
    /// Whether there is a plan, or somebody watches.
    static ARMED: AtomicBool = AtomicBool::new(false);
    static PLAN: Mutex<Option<Plan>> = Mutex::new(None);

    fn plan() -> MutexGuard<'static, Option<Plan>> {
        PLAN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen() -> MutexGuard<'static, Option<BTreeMap<Site, u64>>> {
        SEEN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arm(plan: &Option<Plan>, seen: &Option<BTreeMap<Site, u64>>) {
        ARMED.store(plan.is_some() || seen.is_some(), Ordering::Release);
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
            let (plan, mut seen) = (plan(), seen());
            assert!(seen.replace(BTreeMap::new()).is_none(), "one watch at a time");
            arm(&plan, &seen);
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
            let (plan, mut seen) = (plan(), seen());
            *seen = None;
            arm(&plan, &seen);
        }
    }

    /// Calls of one kind fail while this lives, whoever of the process makes them. There is one at a time.
    #[derive(Debug)]
    pub struct Injection(());

    impl Injection {
        /// Lets calls of a kind end with an errno.
        ///
        /// # Panics
        /// If there is an injection already.
        #[must_use]
        pub fn begin(call: Call, errno: i32, times: Times) -> Self {
            Self::with(call, None, errno, times, false)
        }

        /// As [`Self::begin`], for calls that map something over a range: before they fail they unmap the range, as the
        /// kernel may.
        ///
        /// # Panics
        /// If there is an injection already.
        #[must_use]
        pub fn leaving_holes(call: Call, errno: i32, times: Times) -> Self {
            Self::with(call, None, errno, times, true)
        }

        /// As [`Self::begin`], for the calls from one place.
        ///
        /// # Panics
        /// If there is an injection already.
        #[must_use]
        pub fn at(site: Site, errno: i32, times: Times) -> Self {
            Self::with(site.call, Some(site), errno, times, false)
        }

        fn with(call: Call, site: Option<Site>, errno: i32, times: Times, hole: bool) -> Self {
            let mut plan = plan();
            assert!(plan.is_none(), "one injection at a time");
            *plan = Some(Plan {
                call,
                site,
                errno,
                times,
                hole,
                seen: 0,
                failed: 0,
            });
            arm(&plan, &seen());
            Self(())
        }

        /// Calls that failed by it so far.
        #[must_use]
        pub fn failed(&self) -> u64 {
            plan().as_ref().map_or(0, |plan| plan.failed)
        }
    }

    impl Drop for Injection {
        fn drop(&mut self) {
            let mut plan = plan();
            *plan = None;
            arm(&plan, &seen());
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
        if !ARMED.load(Ordering::Acquire) {
            return Ok(());
        }
        let place = Location::caller();
        let site = Site {
            call,
            file: place.file(),
            line: place.line(),
        };
        let mut plan = plan();
        if let Some(seen) = &mut *seen() {
            *seen.entry(site).or_default() += 1;
        }
        let meant = |plan: &&mut Plan| plan.call == call && plan.site.is_none_or(|at| at == site);
        let Some(plan) = plan.as_mut().filter(meant) else {
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
        fn the_calls_that_were_named_fail() {
            let (t, f) = (true, false);
            assert_eq!(fails(Times::Always), [t; 6]);
            assert_eq!(fails(Times::First(2)), [t, t, f, f, f, f]);
            assert_eq!(fails(Times::Every(3)), [f, f, t, f, f, t]);
        }
    }
}
