//! What the stages behind the keys work on.

use crate::account::Account;
use crate::memory::page_map::PageMap;
use crate::store::session::Session;
use crate::sys::direct_io::DirectIo;
use crate::thp::monitor::Monitor;
use crate::unmerge::address_space::AddressSpace;

/// What all of them share: each borrows it for one step.
pub(crate) struct Context<'a> {
    pub(crate) map: &'a mut PageMap,
    pub(crate) space: &'a mut AddressSpace,
    pub(crate) session: &'a mut Session,
    pub(crate) account: &'a mut Account,
    pub(crate) monitor: &'a Monitor,
    pub(crate) direct_io: &'a mut DirectIo,
    /// The number of the pass.
    pub(crate) pass: u64,
}

impl Context<'_> {
    /// Whether the service breaks sharing.
    pub(crate) fn managed(&self) -> bool {
        self.space.breaker.managed()
    }
}
