//! The connection to the page store. Synchronous: the scanning thread asks and waits. What the store pushes
//! (segments, a new index) is taken in whenever it arrives.

use crate::compare::PageView;
use crate::error::Error;
use crate::store::stranger;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vmm_dedup_protocol::control::{self, Explanation, NotDone, Set};
use vmm_dedup_protocol::index::IndexReader;
use vmm_dedup_protocol::key::{PAGE_WORDS, Salt};
use vmm_dedup_protocol::mapping::Mapping;
use vmm_dedup_protocol::message::{
    Hello, Kind, Message, NO_SLOT, RefDelta, Role, Staged, aligned_buffer, encode, encode_batch,
};
use vmm_dedup_protocol::socket::{self, Received};
use vmm_dedup_protocol::stats::ServiceStats;
use vmm_dedup_protocol::{SEGMENT_FILE_BYTES, STAGING_PAGES, Slot, forward};
use zerocopy::IntoBytes;

/// A store that does not answer for this long is given up; a new connection is tried later.
const PATIENCE: Duration = Duration::from_secs(5);

/// Counts the segments of all connections of this process: whoever was told of one store's segments does not take
/// another store's for them.
static SEGMENT_CHANGES: AtomicU64 = AtomicU64::new(0);

fn next_change() -> u64 {
    SEGMENT_CHANGES.fetch_add(1, Ordering::Relaxed)
}

/// Questions that may wait for an answer: a store asks fewer at a time.
const MAX_QUESTIONS: usize = 64;
/// Passes without a page staged after which the staging buffer's memory, 2 MiB at most, is given back.
const STAGING_KEPT: u32 = 4;

/// What became of pages, and what keeps the service from merging (empty if nothing does).
pub(crate) type Explained = Result<(Explanation, String), Error>;

/// What somebody asks through the store.
#[derive(Debug)]
pub(crate) enum Question {
    Set(Set),
    /// Guest physical addresses; `None`: all.
    Explain {
        serial: u64,
        addresses: Option<Range<u64>>,
    },
}

#[derive(Debug)]
struct Segment {
    file: OwnedFd,
    pages: Arc<Mapping>,
    /// Tells it from an earlier one of the same number.
    serial: u64,
    /// Its file was given out to be mapped over guest memory, or a slot of it is held.
    mapped: AtomicBool,
}

/// A segment that went.
#[derive(Debug)]
pub(crate) struct RetiredSegment {
    pub(crate) number: u32,
    pub(crate) file: OwnedFd,
    /// It was mapped over guest memory, if it still is or not. If it was not, no mapping needs to be looked for.
    pub(crate) was_mapped: bool,
}

/// Names a connection's membership among those of all stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Membership {
    /// The store's process.
    pub(crate) incarnation: u64,
    number: u64,
}

/// A slot in which a page of the guest is kept whose place is empty: mapped here, and nowhere in the guest. As long as this is there
/// the page is, whatever becomes of the store and its process: the mapping keeps the memory.
#[cfg_attr(not(feature = "pack"), allow(dead_code))]
#[derive(Clone, Debug)]
pub(crate) struct HeldSlot {
    pub(crate) slot: Slot,
    /// The connection over which it was had, which has a reference for it.
    pub(crate) membership: Membership,
    segment: Arc<Mapping>,
}

#[cfg_attr(not(feature = "pack"), allow(dead_code))]
impl HeldSlot {
    /// Where its page is, to be read only.
    pub(crate) fn address(&self) -> usize {
        self.segment.address() + self.slot.offset()
    }
}

/// What the store has said of segments whose pages have moved.
#[derive(Debug, Default)]
struct Evacuated {
    /// Those that have not gone yet.
    numbers: BTreeSet<u32>,
    /// How often it has said that of one. Numbers come again.
    told: u64,
}

/// A live connection.
#[derive(Debug)]
pub(crate) struct Store {
    socket: OwnedFd,
    buffer: Vec<u64>,
    index: IndexReader,
    staging: Mapping,
    staging_file: OwnedFd,
    /// Passes until the memory of the staging buffer is given back; 0 if there is none.
    staging_kept: u32,
    segments: Vec<Option<Segment>>,
    evacuated: Evacuated,
    /// Segments that went, which this process may still map.
    retired: Vec<RetiredSegment>,
    /// Changes of these.
    segment_changes: u64,
    salt: Salt,
    membership: Membership,
    secure: bool,
    questions: VecDeque<Question>,
    /// Serial numbers of those who wait for memory to be brought back.
    pub(crate) unmerging: Vec<u64>,
}

impl Store {
    /// Connects, introduces this VM and takes over what the store shares.
    pub(crate) fn connect(path: &Path, name: &str, pages: usize) -> Result<Self, Error> {
        let connected =
            socket::connect(path).and_then(|socket| stranger::check(path, &socket).map(|()| socket));
        let socket = connected.map_err(|source| Error::Connect {
            path: path.to_owned(),
            source,
        })?;
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, which, Some(PATIENCE)).map_err(std::io::Error::from)?;
        }
        let hello = Hello::new(Role::Service, name, pages as u64);
        socket::send_or_hear_why_not(&socket, &encode(Kind::Hello, &[hello.as_bytes()]))?;
        let mut buffer = aligned_buffer();
        // The store counts whoever has greeted, also if it reads that only later.
        let welcome = Welcomed::wait(&socket, &mut buffer).inspect_err(|_| send_goodbye(&socket))?;
        Ok(Self {
            index: welcome.index,
            staging: welcome.staging,
            staging_file: welcome.staging_file,
            staging_kept: 0,
            segments: Vec::new(),
            evacuated: Evacuated::default(),
            retired: Vec::new(),
            segment_changes: next_change(),
            salt: welcome.salt,
            membership: welcome.membership,
            secure: welcome.secure,
            questions: VecDeque::new(),
            unmerging: Vec::new(),
            socket,
            buffer,
        })
    }

    pub(crate) fn salt(&self) -> Salt {
        self.salt
    }

    pub(crate) fn membership(&self) -> Membership {
        self.membership
    }

    /// Whether nothing of the store may be mapped into the guest.
    pub(crate) fn is_secure(&self) -> bool {
        self.secure
    }

    /// Holds a slot for a page whose place is to be empty, if its segment was announced. The store counts a reference for it.
    #[cfg_attr(not(feature = "pack"), allow(dead_code))]
    pub(crate) fn hold(&self, slot: Slot) -> Option<HeldSlot> {
        let segment = self.segment(slot)?;
        // No goodbye before it is given up.
        segment.mapped.store(true, Ordering::Relaxed);
        Some(HeldSlot {
            slot,
            membership: self.membership,
            segment: segment.pages.clone(),
        })
    }

    /// Tells that this process maps no slot any more that it found over an earlier membership with this store. That ends it: the store
    /// need not wait for the end of the process.
    pub(crate) fn take_over(&mut self, earlier: Membership) -> Result<(), Error> {
        debug_assert_eq!(earlier.incarnation, self.membership.incarnation);
        self.tell(Kind::TakeOver, earlier.number.as_bytes())
    }

    /// The index as last announced. Ask again after every other call.
    pub(crate) fn index(&self) -> &IndexReader {
        &self.index
    }

    fn segment(&self, slot: Slot) -> Option<&Segment> {
        self.segments.get(slot.segment() as usize)?.as_ref()
    }

    /// Address of a slot's page, to be read only, if its segment was announced.
    pub(crate) fn slot(&self, slot: Slot) -> Option<usize> {
        Some(self.segment(slot)?.pages.address() + slot.offset())
    }

    /// The file of a slot's segment, if it was announced, to be mapped over guest memory.
    pub(crate) fn file_to_map(&self, slot: Slot) -> Option<BorrowedFd<'_>> {
        let segment = self.segment(slot)?;
        segment.mapped.store(true, Ordering::Relaxed);
        Some(segment.file.as_fd())
    }

    /// Where the page of a slot has moved, if that is known here. As what the index says, it holds for the epoch that was read
    /// before.
    pub(crate) fn forward(&self, slot: Slot) -> Option<Slot> {
        let segment = self.segment(slot)?;
        forward::read(&segment.pages, slot).filter(|to| self.slot(*to).is_some())
    }

    /// Segments whose pages have moved, and that have not gone yet.
    pub(crate) fn evacuated(&self) -> &BTreeSet<u32> {
        &self.evacuated.numbers
    }

    /// How often the store has said so.
    #[cfg_attr(not(feature = "pack"), allow(dead_code))]
    pub(crate) fn evacuations(&self) -> u64 {
        self.evacuated.told
    }

    /// Segments that went, which this process may still map.
    pub(crate) fn retired(&self) -> &[RetiredSegment] {
        &self.retired
    }

    /// This process maps nothing of a retired segment, and has told all references to it.
    pub(crate) fn release(&mut self, number: u32) -> Result<(), Error> {
        self.retired.retain(|segment| segment.number != number);
        self.tell(Kind::Released, number.as_bytes())
    }

    /// A slot's page, if its segment was announced.
    pub(crate) fn page(&self, slot: Slot) -> Option<&PageView> {
        let segment = self.segment(slot)?;
        let first = slot.offset() / size_of::<u64>();
        segment
            .pages
            .words()
            .get(first..first + PAGE_WORDS)?
            .try_into()
            .ok()
    }

    /// A number that is another one after every change of the segments, and with every store.
    pub(crate) fn segment_changes(&self) -> u64 {
        self.segment_changes
    }

    /// The segments by their numbers, as far as they were announced: a number that no other segment of any
    /// connection has, and the file.
    pub(crate) fn segments(&self) -> impl Iterator<Item = Option<(u64, BorrowedFd<'_>)>> {
        self.segments.iter().map(|segment| {
            segment
                .as_ref()
                .map(|segment| (segment.serial, segment.file.as_fd()))
        })
    }

    /// Reports what happened; returns what the store wants of the sightings: [`Ask`](vmm_dedup_protocol::message::Ask).
    pub(crate) fn batch(
        &mut self,
        epoch: u64,
        sightings: &[u64],
        withdrawals: &[u64],
        ambiguous: &[u64],
        refs: &[RefDelta],
    ) -> Result<Vec<u32>, Error> {
        socket::send(
            &self.socket,
            &encode_batch(epoch, sightings, withdrawals, ambiguous, refs),
            &[],
        )?;
        self.answer(|message| match message {
            Message::BatchReply(asks) => Some(asks.to_vec()),
            _ => None,
        })
    }

    /// Copies a guest page into the staging buffer; torn if the guest writes it meanwhile.
    ///
    /// # Safety
    /// A page must be readable at `address`.
    #[allow(unsafe_code)] // reads guest memory
    pub(crate) unsafe fn stage(&mut self, position: usize, address: usize) {
        self.staging_kept = STAGING_KEPT;
        // SAFETY: as promised by the caller.
        unsafe { self.staging.copy_page_from_address(position, address) };
    }

    /// Publishes the staged pages; returns the slots they got.
    pub(crate) fn publish(&mut self, pages: &[Staged]) -> Result<Vec<Option<Slot>>, Error> {
        let raw: Vec<u64> = pages.iter().map(|page| page.raw()).collect();
        socket::send(&self.socket, &encode(Kind::Publish, &[raw.as_bytes()]), &[])?;
        let slots = self.answer(|message| match message {
            Message::Published(slots) => Some(slots.to_vec()),
            _ => None,
        })?;
        if slots.len() != pages.len() {
            return Err(Error::Unexpected("number of slots"));
        }
        Ok(slots
            .into_iter()
            .map(|n| if n == NO_SLOT { None } else { Slot::try_new(n) })
            .collect())
    }

    /// At the end of a pass: gives the memory of the staging buffer back, if nothing was staged for [`STAGING_KEPT`] passes. To give
    /// it back with each pass takes as long as to stage the pages of the next.
    pub(crate) fn age_staging(&mut self) {
        use rustix::fs::{FallocateFlags, fallocate};
        let had_some = self.staging_kept > 0;
        self.staging_kept = self.staging_kept.saturating_sub(1);
        if had_some && self.staging_kept == 0 {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = fallocate(&self.staging_file, flags, 0, self.staging.len() as u64);
        }
    }

    /// Sends the service's account. Not answered.
    pub(crate) fn report(&mut self, stats: &ServiceStats) -> Result<(), Error> {
        self.tell(Kind::Report, stats.as_bytes())
    }

    /// Tells that this process maps no slot of this connection any more, and hangs up. The store then waits for nothing;
    /// if it does not hear this, it waits for the end of the process.
    pub(crate) fn say_goodbye(mut self) {
        self.segments.clear();
        self.retired.clear();
    }

    /// Whether no file of a segment was given out to be mapped over guest memory, but for those that were released since.
    pub(crate) fn maps_nothing(&self) -> bool {
        let mapped = |segment: &Segment| segment.mapped.load(Ordering::Relaxed);
        !self.segments.iter().flatten().any(mapped) && !self.retired.iter().any(|segment| segment.was_mapped)
    }

    /// The socket, to wait for questions.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether something was asked and not taken yet.
    pub(crate) fn has_questions(&self) -> bool {
        !self.questions.is_empty()
    }

    /// What somebody asked, in order.
    pub(crate) fn next_question(&mut self) -> Option<Question> {
        self.questions.pop_front()
    }

    /// Answers a `Set`.
    pub(crate) fn done(&mut self, serial: u64, done: &Result<(), Error>) -> Result<(), Error> {
        match done {
            Ok(()) => self.tell(Kind::Done, &serial.to_ne_bytes()),
            Err(error) => self.not_done(serial, error),
        }
    }

    /// Answers an `Explain`.
    pub(crate) fn explained(&mut self, serial: u64, explanation: Explained) -> Result<(), Error> {
        match explanation {
            Err(error) => self.not_done(serial, &error),
            Ok((explanation, note)) => {
                let explained = control::Explained {
                    serial,
                    explanation,
                    note,
                };
                self.tell(Kind::Explained, &explained.body())
            }
        }
    }

    fn not_done(&mut self, serial: u64, error: &Error) -> Result<(), Error> {
        let text = error.to_string();
        self.tell(Kind::NotDone, &NotDone { serial, text }.body())
    }

    fn tell(&mut self, kind: Kind, body: &[u8]) -> Result<(), Error> {
        Ok(socket::send(&self.socket, &encode(kind, &[body]), &[])?)
    }

    /// Takes in what the store pushed, without waiting.
    pub(crate) fn take_pushes(&mut self) -> Result<(), Error> {
        loop {
            let mut poll = [rustix::event::PollFd::new(
                &self.socket,
                rustix::event::PollFlags::IN,
            )];
            let now = rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            if rustix::event::poll(&mut poll, Some(&now)).map_err(std::io::Error::from)? == 0 {
                return Ok(());
            }
            let received = socket::receive(&self.socket, &mut self.buffer)?.ok_or(Error::StoreGone)?;
            if let Some(unasked) = self.push(received)? {
                unasked.parse(&self.buffer)?;
                return Err(Error::Unexpected("message"));
            }
        }
    }

    fn answer<T>(&mut self, mut pick: impl FnMut(Message<'_>) -> Option<T>) -> Result<T, Error> {
        loop {
            let received = socket::receive(&self.socket, &mut self.buffer)?.ok_or(Error::StoreGone)?;
            if let Some(received) = self.push(received)? {
                let message = received.parse(&self.buffer)?;
                return pick(message).ok_or(Error::Unexpected("answer"));
            }
        }
    }

    /// Handles a push; gives back anything else.
    fn push(&mut self, mut received: Received) -> Result<Option<Received>, Error> {
        match received.parse(&self.buffer)? {
            Message::Segment(number) => {
                let file = received
                    .fds
                    .pop()
                    .ok_or(Error::Unexpected("segment without descriptor"))?;
                let pages = Arc::new(Mapping::read_only(&file, SEGMENT_FILE_BYTES)?);
                let at = number as usize;
                if self.segments.len() <= at {
                    self.segments.resize_with(at + 1, || None);
                }
                let serial = next_change();
                self.segment_changes = serial;
                let mapped = AtomicBool::new(false);
                self.segments[at] = Some(Segment {
                    file,
                    pages,
                    serial,
                    mapped,
                });
            }
            Message::SegmentRetired(number) => {
                self.evacuated.numbers.remove(&number);
                if let Some(segment) = self.segments.get_mut(number as usize).and_then(Option::take) {
                    self.segment_changes = next_change();
                    self.retired.push(RetiredSegment {
                        number,
                        file: segment.file,
                        was_mapped: segment.mapped.into_inner(),
                    });
                }
            }
            Message::Evacuated(number) => {
                self.evacuated.numbers.insert(number);
                self.evacuated.told += 1;
            }
            Message::Index(bytes) => {
                let file = received
                    .fds
                    .pop()
                    .ok_or(Error::Unexpected("index without descriptor"))?;
                self.index = map_index(&file, bytes)?;
            }
            Message::Set(set) => self.ask(Question::Set(set))?,
            Message::Explain(explain) => {
                let end = explain.gpa_start.saturating_add(explain.gpa_len);
                self.ask(Question::Explain {
                    serial: explain.serial,
                    addresses: (explain.gpa_len > 0).then_some(explain.gpa_start..end),
                })?;
            }
            Message::Error(text) => return Err(Error::StoreRefused(text)),
            _ => return Ok(Some(received)),
        }
        Ok(None)
    }

    fn ask(&mut self, question: Question) -> Result<(), Error> {
        if self.questions.len() + self.unmerging.len() >= MAX_QUESTIONS {
            return Err(Error::Unexpected("number of questions"));
        }
        self.questions.push_back(question);
        Ok(())
    }
}

impl Drop for Store {
    /// A connection of which nothing is mapped ends with a goodbye, however it ends: a service that could not be started must not count
    /// for the store until this process ends.
    fn drop(&mut self) {
        if self.maps_nothing() {
            // Our own view of the slots first.
            self.segments.clear();
            send_goodbye(&self.socket);
        }
    }
}

/// What the store gives to whoever has greeted.
struct Welcomed {
    index: IndexReader,
    staging: Mapping,
    staging_file: OwnedFd,
    salt: Salt,
    membership: Membership,
    secure: bool,
}

impl Welcomed {
    fn wait(socket: &OwnedFd, buffer: &mut [u64]) -> Result<Self, Error> {
        let mut answer = socket::receive(socket, buffer)?.ok_or(Error::StoreGone)?;
        let welcome = match answer.parse(buffer)? {
            Message::Welcome(welcome) => welcome,
            Message::Error(text) => return Err(Error::StoreRefused(text)),
            _ => return Err(Error::Unexpected("answer to the greeting")),
        };
        let (Some(staging_file), Some(index)) = (answer.fds.pop(), answer.fds.pop()) else {
            return Err(Error::Unexpected("greeting without descriptors"));
        };
        Ok(Self {
            index: map_index(&index, welcome.index_bytes)?,
            staging: Mapping::read_write(&staging_file, STAGING_PAGES * vmm_dedup_protocol::PAGE_SIZE)?,
            staging_file,
            salt: Salt(welcome.salt),
            membership: Membership {
                incarnation: welcome.incarnation,
                number: welcome.membership,
            },
            secure: welcome.secure != 0,
        })
    }
}

/// Nothing of a connection is mapped any more, or was ever.
fn send_goodbye(socket: &OwnedFd) {
    if let Err(error) = socket::send(socket, &encode(Kind::Goodbye, &[]), &[]) {
        log::debug!("the store does not hear the goodbye: {error}");
    }
}

fn map_index(file: &OwnedFd, bytes: u64) -> Result<IndexReader, Error> {
    let len = usize::try_from(bytes).map_err(|_| Error::Unexpected("index size"))?;
    Ok(IndexReader::new(Mapping::read_only(file, len)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_protocol::message::Welcome;

    /// The next message of somebody who may have gone, but for what the kernel says of that first.
    fn next_of(peer: &OwnedFd) -> Option<Kind> {
        let mut buffer = aligned_buffer();
        let ready = crate::sys::bell::Bell::new().unwrap();
        assert!(ready.wait(Duration::from_secs(60), Some(peer.as_fd())));
        let received = match socket::receive(peer, &mut buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return next_of(peer),
            received => received.unwrap()?,
        };
        match received.parse(&buffer).unwrap() {
            Message::Hello(_) => Some(Kind::Hello),
            Message::Goodbye => Some(Kind::Goodbye),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_store_that_does_not_let_in_is_told_goodbye() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.sock");
        let listener = socket::listen(&path).unwrap();
        // It stalls, and reads later.
        let stalled = Store::connect(&path, "vm", 1);
        assert!(matches!(stalled, Err(Error::StoreIo(_))), "{stalled:?}");
        let peer = socket::accept(&listener).unwrap();
        let heard: Vec<Kind> = std::iter::from_fn(|| next_of(&peer)).collect();
        assert_eq!(heard, [Kind::Hello, Kind::Goodbye]);
        // Its answer lacks something.
        let theirs = path.clone();
        let connects = std::thread::spawn(move || Store::connect(&theirs, "vm", 1).map(drop));
        let ready = crate::sys::bell::Bell::new().unwrap();
        assert!(ready.wait(Duration::from_secs(60), Some(listener.as_fd())));
        let peer = socket::accept(&listener).unwrap();
        assert_eq!(next_of(&peer), Some(Kind::Hello));
        let welcome = Welcome {
            salt: 0,
            incarnation: 0,
            membership: 0,
            index_bytes: 0,
            secure: 0,
        };
        socket::send(&peer, &encode(Kind::Welcome, &[welcome.as_bytes()]), &[]).unwrap();
        let refused = connects.join().unwrap();
        assert!(matches!(refused, Err(Error::Unexpected(_))), "{refused:?}");
        assert_eq!(next_of(&peer), Some(Kind::Goodbye));
    }
}
