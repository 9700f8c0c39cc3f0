//! The pool: every page that can be shared. It is the one owner of a slot's three sides and keeps them in step: the
//! bytes ([`Segments`]), the entry in the index ([`Catalog`]) and the account of who maps it ([`Lifetime`]).
//!
//! The pool sends nothing. What services must be told (a new segment, one that is gone, a new index file) is collected,
//! and whoever called the pool sends it before the answer: [`Pool::take_announcements`].

use crate::config::Config;
use crate::error::Error;
use crate::ledger::allocator::{Purpose, Run};
use crate::ledger::epochs::{EpochViolation, Epochs, MemberId};
use crate::ledger::lifetime::{Change, Lifetime, ReferenceViolation};
use crate::ledger::references::References;
use crate::memory::catalog::Catalog;
use crate::memory::collapse::CollapseQueue;
use crate::memory::segments::Segments;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vmm_dedup_protocol::index::{IndexReader, Line};
use vmm_dedup_protocol::key::{Key, Salt};
use vmm_dedup_protocol::{SLOTS_PER_SEGMENT, Slot};

/// What all services must be told, in this order.
#[derive(Clone, Debug)]
pub(crate) enum Announcement {
    /// A segment was made.
    Segment(u32, Arc<OwnedFd>),
    /// A segment is gone.
    SegmentRetired(u32),
    /// The pages of a segment have moved.
    Evacuated(u32),
    /// The index has moved to a file of so many bytes.
    Index(u64, Arc<OwnedFd>),
}

/// What became of a page that was to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Publication {
    /// The page does not have the announced key.
    Unverified,
    /// The index has no place for it.
    NoPlace,
    /// The page with this line key has entered the index in the slot that was given. Its publisher has a reference.
    New(Key),
    /// A slot in the index holds this page. Nobody has a reference to it for that.
    Hit {
        /// The page's line key.
        line: Key,
        /// That slot.
        twin: Slot,
    },
}

/// A shorter run than this, if more is wanted, is taken only when no segment can be made.
pub(super) const SHORT_RUN: u32 = 8;

/// The slots of a segment.
fn slots_of(number: u32) -> impl Iterator<Item = Slot> {
    let numbers = number * SLOTS_PER_SEGMENT..(number + 1) * SLOTS_PER_SEGMENT;
    numbers.filter_map(Slot::try_new)
}

/// What is being emptied.
#[derive(Debug, Default)]
pub(super) struct Evacuation {
    /// A segment, and where in it to go on.
    pub(super) current: Option<(u32, u32)>,
    /// Slots that came back to life in segments whose pages have moved.
    pub(super) stragglers: Vec<Slot>,
    pub(super) moved: u64,
    /// Moving failed when it was last tried: that was logged once.
    pub(super) failing: bool,
}

/// All shared pages.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(super) salt: Salt,
    /// Whether the slots are also kept in the order of their pages' bytes.
    pub(super) ordered: bool,
    secure: bool,
    pub(super) catalog: Catalog,
    pub(super) segments: Segments,
    pub(super) lifetime: Lifetime,
    pub(super) collapse_queue: CollapseQueue,
    pub(super) evacuation: Evacuation,
    pub(super) announcements: Vec<Announcement>,
    /// The kernel refused a new segment when it was last asked: that was logged once.
    short_of_memory: bool,
}

impl Pool {
    /// An empty pool, whose keys and hashes are salted with this.
    pub(crate) fn new(config: &Config, salt: Salt) -> Result<Self, Error> {
        let catalog = Catalog::new()?;
        Ok(Self {
            salt,
            ordered: config.ordered,
            secure: config.secure,
            segments: Segments::new(config.max_slots(), config.secure),
            lifetime: Lifetime::new(catalog.reader().epoch()),
            catalog,
            collapse_queue: CollapseQueue::default(),
            evacuation: Evacuation::default(),
            announcements: Vec::new(),
            short_of_memory: false,
        })
    }

    pub(crate) fn salt(&self) -> Salt {
        self.salt
    }

    /// Whether guests are to learn nothing of sharing by timing.
    pub(crate) fn is_secure(&self) -> bool {
        self.secure
    }

    /// What services see of the index.
    pub(crate) fn index(&self) -> &IndexReader {
        self.catalog.reader()
    }

    pub(crate) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    pub(crate) fn segments(&self) -> &Segments {
        &self.segments
    }

    pub(crate) fn lifetime(&self) -> &Lifetime {
        &self.lifetime
    }

    pub(crate) fn epochs(&self) -> &Epochs {
        self.lifetime.epochs()
    }

    /// Takes out what services must be told because of the last calls.
    pub(crate) fn take_announcements(&mut self) -> Vec<Announcement> {
        std::mem::take(&mut self.announcements)
    }

    /// A service of a user is given the index and the segments.
    pub(crate) fn join(&mut self, id: MemberId, user: u32) {
        self.lifetime.join(id, user);
    }

    /// A member acknowledges an epoch.
    pub(crate) fn acknowledge(&mut self, id: MemberId, epoch: u64) -> Result<(), EpochViolation> {
        self.lifetime.acknowledge(id, epoch)
    }

    /// References of a member.
    pub(crate) fn references(&self, id: MemberId) -> u64 {
        self.lifetime.references(id).map_or(0, References::total)
    }

    /// Makes room for so many entries in the index.
    pub(crate) fn reserve(&mut self, entries: usize) -> Result<(), Error> {
        if self.catalog.reserve(entries)? {
            self.announce_index();
        }
        Ok(())
    }

    fn announce_index(&mut self) {
        let (file, bytes) = self.catalog.file();
        self.announcements.push(Announcement::Index(bytes, file));
    }

    /// Applies a change that a member reports. If it brings a slot back into the index, the answer is its line key.
    pub(crate) fn apply(
        &mut self,
        id: MemberId,
        slot: Slot,
        delta: i32,
    ) -> Result<Option<Key>, ReferenceViolation> {
        self.lifetime.apply(id, slot, delta)?;
        let entered = self.draw_consequences();
        if delta > 0 {
            self.collapse_queue.note_shared(slot, &self.segments);
        }
        Ok(entered)
    }

    /// A member's connection has ended, and it can tell nothing any more: nothing waits for it. What it references stays.
    pub(crate) fn lose(&mut self, id: MemberId) {
        self.lifetime.lose(id);
        self.segments.lose(id);
        self.reclaim();
    }

    /// Counts what a member references as an orphan's, some at a time, since its connection broke. Returns whether there is more to do.
    pub(crate) fn orphan_some(&mut self, id: MemberId) -> bool {
        self.lifetime.orphan_some(id)
    }

    /// Drops references of a member whose process has ended or maps nothing, some at a time. Returns whether there is
    /// more to do.
    pub(crate) fn leave_some(&mut self, id: MemberId) -> bool {
        let more = self.lifetime.leave_some(id);
        self.draw_consequences();
        if !more {
            self.segments.ended(id);
        }
        self.reclaim();
        more
    }

    /// Draws the consequences of what became of slots, for the index and the segments. Returns the line key of a slot that
    /// came back to the index.
    pub(super) fn draw_consequences(&mut self) -> Option<Key> {
        let mut entered = None;
        for change in self.lifetime.take_changes() {
            match change {
                Change::Died { slot, listed } => {
                    if listed {
                        self.remove(slot);
                    }
                    let empty = self.segments.bury(slot);
                    self.retire(empty);
                }
                Change::Revived { slot, listed } => {
                    self.segments.allocator_mut().revive(slot);
                    // Where the segment has gone, the slot is counted for who maps it, and found by nobody.
                    let there = self.segments.has_file(slot);
                    if listed && there {
                        let line = self.segments.line_key(slot, self.salt);
                        self.enter(line, slot);
                        entered = Some(line);
                    } else if listed {
                        self.lifetime.unlist(slot);
                    }
                    if there {
                        self.note_straggler(slot);
                    }
                }
            }
        }
        entered
    }

    /// A slot came back to life. If it is in a segment whose pages have moved, it must follow them.
    fn note_straggler(&mut self, slot: Slot) {
        if self.segments.allocator().is_leaving(slot) && self.lifetime.moved_to(slot).is_none() {
            self.evacuation.stragglers.push(slot);
        }
    }

    /// A segment without a live slot goes.
    fn retire(&mut self, empty: Option<u32>) {
        if let Some(number) = empty {
            let (known_to, waiting) = (self.lifetime.members(), self.lifetime.epochs().members());
            self.segments
                .retire(number, known_to.collect(), waiting.collect());
            self.announcements.push(Announcement::SegmentRetired(number));
        }
    }

    /// A member knows a retired segment no more; whether that can be.
    pub(crate) fn released(&mut self, id: MemberId, number: u32) -> bool {
        let references = self.lifetime.references(id);
        let held = references.is_some_and(|all| all.are_to_segment(number));
        !held && self.segments.forget(number, id)
    }

    /// Segments that are being emptied, and those that went and whose numbers are not others' yet; which of both.
    pub(crate) fn gone(&self) -> impl Iterator<Item = (u32, bool)> {
        let leaving = self.segments.allocator().leaving().map(|number| (number, false));
        leaving.chain(self.segments.gone().map(|number| (number, true)))
    }

    /// Segments that stay for a member: those that went and that it knows, and those that are being emptied and of which it references slots.
    pub(crate) fn kept_by(&self, id: MemberId) -> impl Iterator<Item = u32> {
        let references = self.lifetime.references(id);
        let leaving = self.segments.allocator().leaving();
        let referenced =
            leaving.filter(move |number| references.is_some_and(|all| all.are_to_segment(*number)));
        self.segments.known_to(id).chain(referenced)
    }

    /// Lets segments go of which no slot is in use, and gives the numbers of those that nobody knows any more to others from
    /// now on. To be called once a second.
    pub(crate) fn retire_idle(&mut self) {
        self.segments.look_at_held();
        if self.segments.is_let_go() {
            self.short_of_memory = false;
        }
        while let Some(number) = self.segments.retire_idle() {
            self.retire(Some(number));
        }
        let lifetime = &self.lifetime;
        self.segments
            .release(|number| lifetime.are_free(slots_of(number)));
    }

    /// Must follow all calls of [`Self::apply`] for one message, also after a violation: advances the epoch if slots
    /// have left the index, and frees what nobody can map any more.
    pub(crate) fn reclaim(&mut self) {
        loop {
            if let Some(epoch) = self.lifetime.advance() {
                let published = self.catalog.advance_epoch();
                debug_assert_eq!(epoch, published);
            }
            self.lifetime.reclaim();
            self.draw_consequences();
            // What a slot that was freed had led to may have left the index, too.
            if !self.lifetime.is_pending() {
                return;
            }
        }
    }

    /// Slots that new pages may get.
    pub(crate) fn room(&self) -> u32 {
        self.segments.allocator().room()
    }

    /// Of these, those that are for new pages of a member: none while its user has his share, and others may need the rest.
    pub(crate) fn room_for(&self, id: MemberId) -> u32 {
        let shares = self.lifetime.shares();
        shares.room(id, self.secure, self.max_slots(), self.room())
    }

    /// Whether there is room, and none for a member, whose user has more than his share. That is logged once while he has VMs here.
    pub(crate) fn is_beyond_share(&mut self, id: MemberId) -> bool {
        if self.room() == 0 || self.room_for(id) > 0 {
            return false;
        }
        if let Some((user, users, slots)) = self.lifetime.shares_mut().note_refused(id) {
            log::warn!(
                "user {user} keeps {slots} of {} pages, more than an equal part for each of {users} users, and less than a quarter is \
                 free: its VMs share no new pages for now (raise --max-mib?)",
                self.max_slots()
            );
        }
        true
    }

    /// Whether the last page that wanted memory did not get it, although there was room.
    pub(crate) fn is_short_of_memory(&self) -> bool {
        self.short_of_memory
    }

    /// Slots that the store may have.
    pub(crate) fn max_slots(&self) -> u32 {
        self.segments.allocator().max_slots()
    }

    /// Whoever has a page of this key looks it up again, and sights it anew if the index does not have it.
    pub(crate) fn repeat_news(&self, key: Key) {
        self.catalog.repeat_news(key);
    }

    /// A line key is ambiguous: its slots are found by their hashes from now on.
    pub(crate) fn mark(&mut self, line: Key) {
        let (segments, salt) = (&self.segments, self.salt);
        self.catalog.mark(line, |slot| segments.hash(slot, salt));
    }

    /// Takes consecutive slots for up to this many pages of a member. If the kernel has no memory or descriptors left for a new
    /// segment, the store is as large as it can be: no service's fault.
    pub(crate) fn allocate_run(&mut self, id: MemberId, pages: u32) -> Option<Run> {
        self.allocate_run_of(id, pages, SHORT_RUN)
    }

    /// As [`Self::allocate_run`]; fewer than `least`, if so many are wanted, only when no segment can be made.
    pub(super) fn allocate_run_of(&mut self, id: MemberId, pages: u32, least: u32) -> Option<Run> {
        let pages = Some(pages.min(self.room_for(id))).filter(|pages| *pages > 0)?;
        let allocated = self.segments.allocate_run(pages, Purpose::New, least);
        if let Err(e) = &allocated
            && !self.short_of_memory
        {
            log::error!("the store cannot grow for now (raise the limits on memory and open files?): {e}");
        }
        self.short_of_memory = allocated.is_err();
        let (run, new) = allocated.ok().flatten()?;
        self.announce_segment(new);
        Some(run)
    }

    /// Takes back slots of runs that were not published.
    pub(crate) fn give_back(&mut self, slots: impl IntoIterator<Item = Slot>) {
        for slot in slots {
            let empty = self.segments.give_back(slot);
            self.retire(empty);
        }
    }

    /// Allocates the memory of a run that is about to be written.
    pub(crate) fn populate(&self, run: &Run) {
        self.segments.populate(run);
    }

    /// Copies page `from` of a service's staging buffer into a slot that nobody knows of, and makes that the place
    /// where everybody finds it. All checks look at the copy: the service may write the staging buffer at any time.
    /// Unless the page is [`Publication::New`], the slot is still its caller's.
    pub(crate) fn publish(
        &mut self,
        id: MemberId,
        slot: Slot,
        announced: Key,
        (staging, from): (&OwnedFd, usize),
    ) -> Publication {
        if let Err(e) = self.segments.fill(slot, staging, from) {
            log::warn!("a page cannot be read from a service's staging buffer: {e}");
            return Publication::Unverified;
        }
        let line = self.segments.line_key(slot, self.salt);
        let found = if announced.is_full() {
            self.segments.hash(slot, self.salt).key()
        } else {
            line
        };
        if found != announced {
            return Publication::Unverified;
        }
        if let Some(twin) = self.twin(line, slot) {
            return Publication::Hit { line, twin };
        }
        if !self.admits(line, slot) {
            return Publication::NoPlace;
        }
        self.lifetime.publish(id, slot);
        self.enter(line, slot);
        Publication::New(line)
    }

    /// A slot in the index that holds the same page as this one, which is not in it.
    pub(super) fn twin(&self, line: Key, slot: Slot) -> Option<Slot> {
        let twin = match self.index().line(line)? {
            Line::Sole(twin) | Line::Series(twin) => twin,
            Line::Marked(_) => self.index().slot_of(self.segments.hash(slot, self.salt))?,
        };
        self.segments.equal(twin, slot).then_some(twin)
    }

    /// Whether a page can be entered so that it is found.
    pub(super) fn admits(&self, line: Key, slot: Slot) -> bool {
        self.catalog.admits(line, || self.segments.hash(slot, self.salt))
    }

    /// Puts a slot into the index.
    pub(super) fn enter(&mut self, line: Key, slot: Slot) {
        let (segments, salt) = (&self.segments, self.salt);
        self.catalog.insert(line, slot, |slot| segments.hash(slot, salt));
        if self.ordered {
            self.catalog.order(slot, |other| segments.compare(slot, other));
        }
    }

    /// A slot takes another one's place in the order; both hold the same page.
    pub(super) fn order_in_place_of(&mut self, old: Slot, new: Slot) {
        if self.ordered {
            let segments = &self.segments;
            self.catalog.unorder(old, |other| segments.compare(old, other));
            self.catalog.order(new, |other| segments.compare(new, other));
        }
    }

    /// Takes a slot out of the index.
    fn remove(&mut self, slot: Slot) {
        let segments = &self.segments;
        self.catalog.remove(segments.line_key(slot, self.salt), slot);
        if self.ordered {
            self.catalog.unorder(slot, |other| segments.compare(slot, other));
        }
    }

    /// Has services told of a segment, if one was made.
    pub(super) fn announce_segment(&mut self, new: Option<u32>) {
        if let Some(number) = new {
            let file = self.segments.file(number);
            self.announcements.push(Announcement::Segment(number, file));
            match self
                .catalog
                .reserve_slots((number as usize + 1) * SLOTS_PER_SEGMENT as usize)
            {
                Ok(true) => self.announce_index(),
                Ok(false) => {}
                // Pages that are found by their hashes alone are not found where they lie in this segment.
                Err(e) => log::error!(
                    "the index cannot grow for now (raise the limits on memory and open files?): {e}"
                ),
            }
        }
    }
}
