//! Memory of segments that went: as long as anybody maps a segment's file or has a descriptor of it, its memory stays, and nobody
//! can take it from there. (The seal that keeps members from writing forbids to punch holes, also to the store. A file that is cut
//! kills who reads it. And a member that is merely slow, or was stopped, would read zeros.)
//!
//! What members say about it is no account: one may say that it has let go, and have the file mapped. So the kernel is asked. An
//! inotify watch does not keep a file's memory, and tells when the last mapping and the last descriptor of a file without a name
//! have gone, those of O_PATH among them.
//!
//! Where the kernel has no more watches (`fs.inotify.max_user_watches`), there is only what members say. Those that lost their connections
//! say nothing until their processes have ended.

use crate::ledger::epochs::MemberId;
use crate::memory::segment::SegmentFile;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use std::collections::{BTreeSet, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes for events that are read at once.
const EVENTS: usize = 4096;

/// What tells of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Witness {
    /// The kernel, by the number of a watch.
    Watch(i32),
    /// Those who know it, by a number of its own.
    Members(u64),
}

/// Files of segments that went, and that somebody keeps.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// Made when it is needed.
    inotify: Option<OwnedFd>,
    /// What the pages of each cost.
    files: HashMap<Witness, u64>,
    bytes: u64,
    /// Files without a watch: their witnesses' numbers, their segments' numbers, and who has not said that it knows them no more.
    unwatched: Vec<(u64, u32, BTreeSet<MemberId>)>,
    unwatched_total: u64,
}

impl Held {
    /// The store has done with a file, which these members know, those among them that lost their connections.
    pub(super) fn let_go(&mut self, number: u32, file: SegmentFile, known_to: BTreeSet<MemberId>) {
        let bytes = file.resident_bytes();
        if let Some(watch) = self.watch(&file) {
            self.insert(Witness::Watch(watch), bytes);
        } else if !known_to.is_empty() {
            self.believe(number, bytes, known_to);
        }
        drop(file);
        self.look();
    }

    fn believe(&mut self, number: u32, bytes: u64, known_to: BTreeSet<MemberId>) {
        self.unwatched_total += 1;
        self.insert(Witness::Members(self.unwatched_total), bytes);
        self.unwatched.push((self.unwatched_total, number, known_to));
    }

    /// A member has said that it knows a segment no more. (Segments of the same number that went before are known to none that can say so.)
    pub(super) fn said(&mut self, id: MemberId, number: u32) {
        self.strike(id, |of| of == number);
    }

    /// A member has gone, with its process.
    pub(super) fn ended(&mut self, id: MemberId) {
        self.strike(id, |_| true);
    }

    fn strike(&mut self, id: MemberId, is_meant: impl Fn(u32) -> bool) {
        for (_, number, known_to) in &mut self.unwatched {
            if is_meant(*number) {
                known_to.remove(&id);
            }
        }
        let unknown = self
            .unwatched
            .extract_if(.., |(.., known_to)| known_to.is_empty());
        let unknown: Vec<u64> = unknown.map(|(witness, ..)| witness).collect();
        unknown.into_iter().for_each(|n| self.remove(Witness::Members(n)));
    }

    /// Files, and what their pages cost, as of the last look.
    pub(super) fn sum(&self) -> (u64, u64) {
        (self.files.len() as u64, self.bytes)
    }

    /// Takes in what the kernel has to tell.
    pub(super) fn look(&mut self) {
        let Some(inotify) = self.inotify.take() else {
            return;
        };
        let mut space = [MaybeUninit::uninit(); EVENTS];
        let mut events = Reader::new(&inotify, &mut space);
        let mut missed = false;
        // Until there is nothing to be read.
        while let Ok(event) = events.next() {
            missed |= event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            if event.events().contains(ReadFlags::DELETE_SELF) {
                self.remove(Witness::Watch(event.wd()));
            }
        }
        if missed {
            self.count_again(&inotify);
        }
        self.inotify = Some(inotify);
    }

    /// The number of a watch, if there is one to be had. It has no name in common with another one as long as it is there.
    fn watch(&mut self, file: &SegmentFile) -> Option<i32> {
        if self.inotify.is_none() {
            self.inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        }
        let path = format!("/proc/self/fd/{}", file.file.as_raw_fd());
        inotify::add_watch(self.inotify.as_ref()?, path, WatchFlags::DELETE_SELF).ok()
    }

    /// The kernel had more to tell than it keeps: of watches that are not there any more the files have gone.
    fn count_again(&mut self, inotify: &OwnedFd) {
        let path = format!("/proc/self/fdinfo/{}", inotify.as_raw_fd());
        let Ok(text) = std::fs::read_to_string(path) else {
            return;
        };
        let there: Vec<i32> = text.lines().filter_map(watch_of_line).collect();
        let gone = |witness: &Witness| matches!(witness, Witness::Watch(watch) if !there.contains(watch));
        let gone: Vec<Witness> = self.files.keys().copied().filter(gone).collect();
        gone.into_iter().for_each(|witness| self.remove(witness));
    }

    fn insert(&mut self, witness: Witness, bytes: u64) {
        self.remove(witness);
        self.files.insert(witness, bytes);
        self.bytes += bytes;
    }

    fn remove(&mut self, witness: Witness) {
        self.bytes -= self.files.remove(&witness).unwrap_or(0);
    }
}

/// The watch that a line of /proc/self/fdinfo tells of: `inotify wd:3 ino:9e7e sdev:800013 mask:...`.
fn watch_of_line(line: &str) -> Option<i32> {
    let number = line.strip_prefix("inotify wd:")?.split(' ').next()?;
    i32::from_str_radix(number, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use vmm_dedup_protocol::PAGE_SIZE;
    use vmm_dedup_protocol::mapping::Mapping;

    /// A file with some memory, and a descriptor of it as members have.
    fn file() -> (SegmentFile, std::sync::Arc<OwnedFd>) {
        let file = SegmentFile::new().unwrap();
        file.map.populate(0, 3).unwrap();
        let descriptor = file.file.clone();
        (file, descriptor)
    }

    fn members<const N: usize>(ids: [u16; N]) -> BTreeSet<MemberId> {
        ids.map(MemberId).into()
    }

    fn count(held: &mut Held) -> u64 {
        held.look();
        held.sum().0
    }

    #[test]
    fn a_file_is_held_as_long_as_anybody_maps_it_or_can_open_it() {
        let mut held = Held::default();
        let (nobodys, descriptor) = file();
        drop(descriptor);
        held.let_go(1, nobodys, members([1]));
        assert_eq!(held.sum(), (0, 0));
        let (kept, descriptor) = file();
        let map = Mapping::read_only(&descriptor, PAGE_SIZE).unwrap();
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let by_name = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        held.let_go(1, kept, BTreeSet::new());
        assert!(held.sum().1 >= 3 * PAGE_SIZE as u64, "{:?}", held.sum());
        held.ended(MemberId(1));
        assert_eq!(count(&mut held), 1, "words do not count");
        drop(descriptor);
        assert_eq!(count(&mut held), 1, "it is mapped");
        drop(map);
        assert_eq!(count(&mut held), 1, "it can be opened");
        drop(by_name);
        assert_eq!((count(&mut held), held.sum().1), (0, 0));
    }

    #[test]
    fn what_was_missed_is_counted_again() {
        let mut held = Held::default();
        let files: Vec<_> = (0..20).map(|_| file()).collect();
        let mut descriptors = Vec::new();
        for (file, descriptor) in files {
            held.let_go(0, file, members([1]));
            descriptors.push(descriptor);
        }
        assert_eq!(count(&mut held), 20);
        descriptors.truncate(7);
        let inotify = held.inotify.take().unwrap();
        held.count_again(&inotify);
        assert_eq!(held.sum().0, 7);
    }

    #[test]
    fn without_watches_members_are_believed() {
        let mut held = Held::default();
        held.believe(3, 4096, members([1, 2]));
        held.said(MemberId(1), 3);
        assert_eq!((count(&mut held), held.sum().1), (1, 4096));
        // The second lost its connection, and the number is another segment's.
        held.believe(3, 8192, members([1, 2]));
        held.said(MemberId(1), 3);
        assert_eq!(held.sum(), (2, 12_288));
        held.ended(MemberId(2));
        assert_eq!(held.sum(), (0, 0));
    }
}
