//! Without the feature `pack` nothing is packed, whatever is called: there is nobody of these types.
#![allow(clippy::unused_self, clippy::needless_pass_by_value)] // as what they stand for

use crate::error::Error;
use crate::memory::layout::{Memory, Page};
use crate::memory::page_map::PageMap;
use crate::pack::figures::{Figures, Packed};
use crate::store::connection::{HeldSlot, Membership, Store};
use crate::sys::pagemap::Pagemap;
use crate::sys::uffd::Uffd;
use crate::track::access::Probes;
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use vmm_dedup_protocol::Slot;

#[derive(Debug)]
pub(crate) enum Packer {}

impl Packer {
    pub(crate) fn new(_: Arc<Uffd>, _: Arc<Memory>) -> Result<Self, Error> {
        Err(Error::Config {
            field: "pack.on",
            value: true.to_string(),
            rule: "this program was built without the feature `pack` of vmm-dedup",
        })
    }

    pub(crate) fn figures(&self) -> Figures {
        match *self {}
    }

    pub(crate) fn cpu_ns(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn set_memory(&self, _: Arc<Memory>) {
        match *self {}
    }

    pub(crate) fn discard(&self, _: &Range<Page>) {
        match *self {}
    }

    pub(crate) fn forget(&self, _: &Range<usize>) {
        match *self {}
    }

    pub(crate) fn bring_back(&self, _: &Range<Page>, _: Duration) -> bool {
        match *self {}
    }

    pub(crate) fn go_home(&self, _: &mut PageMap, _: Vec<Page>) {
        match *self {}
    }

    pub(crate) fn let_go(&self, _: &Range<usize>, _: Duration) {
        match *self {}
    }

    pub(crate) fn end(&self) {
        match *self {}
    }
}

#[derive(Debug)]
pub(crate) enum Packing {}

impl Packing {
    pub(crate) fn new(packer: Arc<Packer>, _: Duration, _: u64) -> Result<Self, Error> {
        match *packer {}
    }

    pub(crate) fn take_home(&mut self, _: &mut PageMap) {
        match *self {}
    }

    pub(crate) fn early(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn bytes(&self) -> usize {
        match *self {}
    }

    pub(crate) fn next_chunk(&mut self, _: &mut PageMap) -> Option<usize> {
        match *self {}
    }

    pub(crate) fn look(
        &mut self,
        _: &mut PageMap,
        _: &mut Pagemap,
        _: Probes,
        _: usize,
    ) -> Result<Vec<Page>, Error> {
        match *self {}
    }

    pub(crate) fn prepare(&mut self, _: &PageMap, _: &[Page]) {
        match *self {}
    }

    pub(crate) fn pack(&mut self, _: &mut PageMap, _: &mut Pagemap, _: u64) -> Packed {
        match *self {}
    }

    pub(crate) fn prepare_slots(&mut self, _: &Store, _: &[(Page, Slot)]) -> Vec<Slot> {
        match *self {}
    }

    pub(crate) fn give_up_prepared(&mut self) {
        match *self {}
    }

    pub(crate) fn take_freed(&mut self) -> Vec<HeldSlot> {
        match *self {}
    }

    pub(crate) fn follow(&mut self, _: &Store) -> Vec<Slot> {
        match *self {}
    }

    pub(crate) fn pages_of_earlier(&self, _: Membership) -> std::iter::Empty<Page> {
        match *self {}
    }

    pub(crate) fn is_over_budget(&self) -> bool {
        match *self {}
    }

    pub(crate) fn clean_up(&mut self) {
        match *self {}
    }
}

pub(crate) struct Server(Arc<Packer>);

impl Server {
    pub(crate) fn of(packer: Arc<Packer>) -> (Self, mpsc::Receiver<()>) {
        (Self(packer), mpsc::channel().1)
    }

    pub(crate) fn serve(self) {
        match *self.0 {}
    }
}
