//! What work on mappings of store files that are there already needs: following, and moving copies out.

use crate::account::Account;
use crate::memory::page_map::PageMap;
use crate::merge::verify_engine::VerifyEngine;
use crate::store::connection::Store;
use crate::store::session::Session;
use crate::sys::direct_io::DirectIo;
use crate::unmerge::address_space::AddressSpace;

/// Borrowed for one step.
pub(crate) struct Context<'a> {
    pub(crate) map: &'a mut PageMap,
    pub(crate) space: &'a mut AddressSpace,
    pub(crate) session: &'a mut Session,
    pub(crate) verify: &'a mut VerifyEngine,
    pub(crate) account: &'a mut Account,
    pub(crate) direct_io: &'a mut DirectIo,
    /// The number of the pass.
    pub(crate) pass: u64,
}

/// What replaces pages where they are.
#[derive(Debug)]
pub(crate) struct Tools<'a> {
    pub(crate) store: &'a Store,
    pub(crate) space: &'a mut AddressSpace,
    /// Compares what is frozen with slots.
    pub(crate) verify: &'a mut VerifyEngine,
}
