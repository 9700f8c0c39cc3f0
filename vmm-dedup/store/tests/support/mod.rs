//! A store in a thread of its own, and a client that speaks the protocol directly.
#![allow(dead_code, unused_imports, unreachable_pub)] // each test binary uses its part

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::io::{self, BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use vmm_dedup_protocol::control::{Explain, Explained, NotDone, Set, Settings};
use vmm_dedup_protocol::index::{IndexReader, Line};
use vmm_dedup_protocol::key::{Key, PAGE_WORDS, PageHash, PageWords, Salt, line_words};
use vmm_dedup_protocol::mapping::Mapping;
use vmm_dedup_protocol::message::{
    Hello, Kind, Message, NO_SLOT, RefDelta, Role, Stats, StatsRequest, aligned_buffer, encode, encode_batch,
};
use vmm_dedup_protocol::name::Name;
use vmm_dedup_protocol::refusal::{Refusal, Refused};
use vmm_dedup_protocol::socket::{self, Received};
use vmm_dedup_protocol::{PAGE_SIZE, SEGMENT_FILE_BYTES, SLOTS_PER_SEGMENT, STAGING_PAGES, Slot, forward};
use vmm_dedup_store::{Config, Store};
use zerocopy::IntoBytes;

/// Pages that test VMs announce.
pub const PAGES: u64 = 100_000;

pub struct Server {
    pub dir: tempfile::TempDir,
    pub socket: PathBuf,
    pub metrics: Option<SocketAddr>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    pub fn start(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("store.sock");
        let mut config = Config {
            socket: socket.clone(),
            metrics: None,
            ..Config::default()
        };
        change(&mut config);
        let (stop, stopped) = oneshot::channel();
        let (started, wait) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let store = Store::bind(config).unwrap();
                started.send(store.metrics_address()).unwrap();
                store.run(async { _ = stopped.await }).await.unwrap();
            });
        });
        let metrics = wait.recv().unwrap();
        Self {
            dir,
            socket,
            metrics,
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        let done = self.thread.take().unwrap().join();
        assert!(std::thread::panicking() || done.is_ok(), "the store panicked");
    }
}

pub struct Client {
    pub socket: OwnedFd,
    buffer: Vec<u64>,
    pub index: IndexReader,
    pub index_file: OwnedFd,
    pub staging: Mapping,
    pub segments: Vec<Option<(OwnedFd, Mapping)>>,
    /// Segments that went, and were not released.
    pub retired: Vec<u32>,
    /// Whether it keeps the files of segments that went, and what it has kept.
    pub keeps: bool,
    pub kept: Vec<(OwnedFd, Mapping)>,
    /// Segments whose pages have moved, as often as that was told.
    pub evacuated: Vec<u32>,
    pub salt: Salt,
    /// Names this membership.
    pub membership: u64,
}

impl Client {
    pub fn connect(path: &Path, name: &str) -> Self {
        Self::over(socket::connect(path).unwrap(), name)
    }

    pub fn connect_with(path: &Path, name: &str, pages: u64) -> Self {
        Self::greet(socket::connect(path).unwrap(), name, pages).unwrap()
    }

    /// `None` if the store refuses the connection, or closes it.
    pub fn try_connect(path: &Path, name: &str) -> Option<Self> {
        use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, UnexpectedEof};
        let refused = [BrokenPipe, ConnectionRefused, ConnectionReset, UnexpectedEof];
        match Self::greet(socket::connect(path).unwrap(), name, PAGES) {
            Err(e) if refused.contains(&e.kind()) => None,
            greeted => Some(greeted.unwrap()),
        }
    }

    pub fn over(socket: OwnedFd, name: &str) -> Self {
        Self::greet(socket, name, PAGES).unwrap()
    }

    fn greet(socket: OwnedFd, name: &str, pages: u64) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).unwrap();
        let hello = Hello::new(Role::Service, name, pages);
        socket::send(&socket, &encode(Kind::Hello, &[hello.as_bytes()]), &[])?;
        let mut buffer = aligned_buffer();
        let mut answer = socket::receive(&socket, &mut buffer)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let Message::Welcome(welcome) = answer.parse(&buffer).unwrap() else {
            return Err(io::ErrorKind::ConnectionRefused.into());
        };
        let (staging, index) = (answer.fds.pop().unwrap(), answer.fds.pop().unwrap());
        Ok(Self {
            index: reader(&index, welcome.index_bytes),
            index_file: index,
            staging: Mapping::read_write(&staging, STAGING_PAGES * PAGE_SIZE).unwrap(),
            segments: Vec::new(),
            retired: Vec::new(),
            keeps: false,
            kept: Vec::new(),
            evacuated: Vec::new(),
            salt: Salt(welcome.salt),
            membership: welcome.membership,
            socket,
            buffer,
        })
    }

    /// Says that these line keys are ambiguous.
    pub fn ambiguous(&mut self, keys: &[u64]) {
        let record = encode_batch(0, &[], &[], keys, &[]);
        socket::send(&self.socket, &record, &[]).unwrap();
        assert!(self.batch_reply().is_empty());
    }

    pub fn send_batch(&self, epoch: u64, sightings: &[u64], withdrawals: &[u64], refs: &[(Slot, i32)]) {
        let refs: Vec<_> = refs
            .iter()
            .map(|(s, d)| RefDelta {
                slot: s.number(),
                delta: *d,
            })
            .collect();
        socket::send(
            &self.socket,
            &encode_batch(epoch, sightings, withdrawals, &[], &refs),
            &[],
        )
        .unwrap();
    }

    pub fn batch(&mut self, sightings: &[u64], withdrawals: &[u64], refs: &[(Slot, i32)]) -> Vec<u32> {
        self.send_batch(self.index.epoch(), sightings, withdrawals, refs);
        self.batch_reply()
    }

    pub fn batch_reply(&mut self) -> Vec<u32> {
        self.answer(|m| match m {
            Message::BatchReply(wanted) => wanted.to_vec(),
            other => panic!("{other:?}"),
        })
    }

    /// Says that it knows the segments that went no more.
    pub fn release(&mut self) {
        for number in self.retired.drain(..) {
            socket::send(&self.socket, &encode(Kind::Released, &[number.as_bytes()]), &[]).unwrap();
        }
    }

    /// Where the page of a slot has moved.
    pub fn forward(&self, slot: Slot) -> Option<Slot> {
        let (_, map) = self.segments[slot.segment() as usize].as_ref()?;
        forward::read(map, slot)
    }

    /// Acknowledges the current epoch.
    pub fn acknowledge(&mut self) {
        assert!(self.batch(&[], &[], &[]).is_empty());
    }

    pub fn publish(&mut self, pages: &[PageWords]) -> Vec<Option<Slot>> {
        let keys: Vec<u64> = pages.iter().map(|p| self.full_key(p)).collect();
        pages
            .iter()
            .enumerate()
            .for_each(|(at, page)| self.staging.write_page(at, page));
        self.publish_staged(&keys)
    }

    pub fn publish_staged_unanswered(&self, keys: &[u64]) {
        socket::send(&self.socket, &encode(Kind::Publish, &[keys.as_bytes()]), &[]).unwrap();
    }

    pub fn publish_staged(&mut self, keys: &[u64]) -> Vec<Option<Slot>> {
        self.publish_staged_unanswered(keys);
        self.answer(|m| match m {
            Message::Published(slots) => slots
                .iter()
                .map(|n| if *n == NO_SLOT { None } else { Slot::try_new(*n) })
                .collect(),
            other => panic!("{other:?}"),
        })
    }

    pub fn line_key(&self, page: &PageWords) -> u64 {
        Key::of_lines(&line_words(|i| page[i]), self.salt).raw()
    }

    pub fn full_key(&self, page: &PageWords) -> u64 {
        PageHash::of(page, self.salt).key().raw()
    }

    pub fn line(&self, page: &PageWords) -> Option<Line> {
        self.index
            .line(Key::of_lines(&line_words(|i| page[i]), self.salt))
    }

    pub fn find(&self, page: &PageWords) -> Option<Slot> {
        match self.line(page) {
            Some(Line::Sole(slot) | Line::Series(slot)) => Some(slot),
            _ => self.index.slot_of(PageHash::of(page, self.salt)),
        }
    }

    /// What a slot holds, through the segment that the store sent.
    pub fn content(&self, slot: Slot) -> PageWords {
        let (_, map) = self.segments[slot.segment() as usize]
            .as_ref()
            .expect("segment was announced");
        let mut page = [0; PAGE_WORDS];
        map.read_page(slot.offset() / PAGE_SIZE, &mut page);
        page
    }

    pub fn answer<T>(&mut self, pick: impl FnOnce(Message<'_>) -> T) -> T {
        loop {
            let received = socket::receive(&self.socket, &mut self.buffer)
                .unwrap()
                .expect("the store hung up");
            if let Some(received) = self.push(received) {
                return pick(received.parse(&self.buffer).unwrap());
            }
        }
    }

    fn push(&mut self, mut received: Received) -> Option<Received> {
        match received.parse(&self.buffer).unwrap() {
            Message::Segment(n) => {
                let file = received.fds.pop().unwrap();
                let map = Mapping::read_only(&file, SEGMENT_FILE_BYTES).unwrap();
                let at = n as usize;
                self.segments
                    .resize_with(self.segments.len().max(at + 1), || None);
                self.segments[at] = Some((file, map));
            }
            Message::SegmentRetired(n) => {
                let gone = self.segments[n as usize].take();
                self.kept.extend(gone.filter(|_| self.keeps));
                self.retired.push(n);
            }
            Message::Evacuated(n) => self.evacuated.push(n),
            Message::Index(bytes) => {
                self.index_file = received.fds.pop().unwrap();
                self.index = reader(&self.index_file, bytes);
            }
            _ => return Some(received),
        }
        None
    }

    /// The serial number of the next question.
    pub fn question(&mut self) -> u64 {
        self.answer(|m| match m {
            Message::Set(set) => set.serial,
            Message::Explain(explain) => explain.serial,
            other => panic!("{other:?}"),
        })
    }

    pub fn send(&self, kind: Kind, body: &[u8]) {
        socket::send(&self.socket, &encode(kind, &[body]), &[]).unwrap();
    }

    /// The error with which the store ends the connection.
    pub fn error(&mut self) -> String {
        let text = self.answer(|m| match m {
            Message::Error(text) => text.to_owned(),
            other => panic!("{other:?}"),
        });
        assert!(socket::receive(&self.socket, &mut self.buffer).unwrap().is_none());
        text
    }
}

fn reader(file: &OwnedFd, bytes: u64) -> IndexReader {
    IndexReader::new(Mapping::read_only(file, usize::try_from(bytes).unwrap()).unwrap()).unwrap()
}

/// What an observer gets to hear.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    Done(u64),
    Explained(Explained),
    Refused(Refused),
    NotDone(NotDone),
}

/// A connection that asks.
pub struct Observer {
    pub socket: OwnedFd,
    buffer: Vec<u64>,
}

impl Observer {
    pub fn connect(path: &Path) -> Self {
        let socket = socket::connect(path).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(60))).unwrap();
        let hello = Hello::new(Role::Observer, "test", 0);
        socket::send(&socket, &encode(Kind::Hello, &[hello.as_bytes()]), &[]).unwrap();
        let mut buffer = aligned_buffer();
        socket::receive(&socket, &mut buffer).unwrap().unwrap();
        Self { socket, buffer }
    }

    pub fn set(&self, vm: &str, serial: u64, settings: Settings) {
        let set = Set {
            serial,
            name: Name::new(vm),
            settings,
        };
        socket::send(&self.socket, &encode(Kind::Set, &[&set.body()]), &[]).unwrap();
    }

    pub fn explain(&self, vm: &str, serial: u64) {
        let explain = Explain {
            serial,
            gpa_start: 0,
            gpa_len: 0,
            name: Name::new(vm),
        };
        socket::send(&self.socket, &encode(Kind::Explain, &[explain.as_bytes()]), &[]).unwrap();
    }

    pub fn answer(&mut self) -> Answer {
        let received = socket::receive(&self.socket, &mut self.buffer).unwrap().unwrap();
        match received.parse(&self.buffer).unwrap() {
            Message::Done(serial) => Answer::Done(serial),
            Message::Explained(explained) => Answer::Explained(explained),
            Message::Refused(refused) => Answer::Refused(refused),
            Message::NotDone(not_done) => Answer::NotDone(not_done),
            other => panic!("{other:?}"),
        }
    }

    /// The text of a [`Answer::NotDone`].
    pub fn refusal(&mut self) -> String {
        match self.answer() {
            Answer::NotDone(not_done) => not_done.text,
            other => panic!("{other:?}"),
        }
    }

    /// The error with which the store ends the connection.
    pub fn error(&mut self) -> String {
        let received = socket::receive(&self.socket, &mut self.buffer).unwrap().unwrap();
        match received.parse(&self.buffer).unwrap() {
            Message::Error(text) => text.to_owned(),
            other => panic!("{other:?}"),
        }
    }

    /// Whether nothing has been answered.
    pub fn hears_nothing(&self) -> bool {
        let mut poll = [rustix::event::PollFd::new(
            &self.socket,
            rustix::event::PollFlags::IN,
        )];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut poll, Some(&now)).unwrap() == 0
    }
}

/// Connects a refused VM; it stays for as long as the socket lives.
pub fn refused(path: &Path, name: &str, refusal: &Refusal) -> OwnedFd {
    let socket = socket::connect(path).unwrap();
    let announcement = Refused {
        serial: 0,
        pages: 512,
        name: Name::new(name),
        refusal: refusal.clone(),
    };
    socket::send(&socket, &encode(Kind::Refused, &[&announcement.body()]), &[]).unwrap();
    let mut buffer = aligned_buffer();
    let answer = socket::receive(&socket, &mut buffer).unwrap().unwrap();
    let message = answer.parse(&buffer).unwrap();
    assert!(
        matches!(message, Message::Welcome(w) if w.salt == 0 && w.index_bytes == 0),
        "{message:?}"
    );
    socket
}

/// An observer's question: the store's account and that of the first VM.
pub fn stats(path: &Path) -> Stats {
    stats_from(path, 0)
}

/// The same, and that of the first VM whose number is not below this one.
pub fn stats_from(path: &Path, from: u32) -> Stats {
    let socket = socket::connect(path).unwrap();
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).unwrap();
    let hello = Hello::new(Role::Observer, "test", 0);
    socket::send(&socket, &encode(Kind::Hello, &[hello.as_bytes()]), &[]).unwrap();
    let request = StatsRequest { from, reserved: 0 };
    socket::send(&socket, &encode(Kind::StatsRequest, &[request.as_bytes()]), &[]).unwrap();
    let mut buffer = aligned_buffer();
    socket::receive(&socket, &mut buffer).unwrap().unwrap();
    let answer = socket::receive(&socket, &mut buffer).unwrap().unwrap();
    match answer.parse(&buffer).unwrap() {
        Message::Stats(stats) => *stats,
        other => panic!("{other:?}"),
    }
}

/// Publishes as many new pages as a segment has slots, and drops them: how many it could publish.
pub fn come_and_go(client: &mut Client, seed: u64) -> usize {
    let mut published = 0;
    for some in 0..u64::from(SLOTS_PER_SEGMENT) / STAGING_PAGES as u64 {
        let first = seed + some * STAGING_PAGES as u64;
        let pages: Vec<_> = (first..first + STAGING_PAGES as u64).map(page).collect();
        let slots: Vec<_> = client.publish(&pages).into_iter().flatten().collect();
        published += slots.len();
        let dropped: Vec<_> = slots.iter().map(|slot| (*slot, -1)).collect();
        client.batch(&[], &[], &dropped);
        client.acknowledge();
        client.release();
    }
    published
}

/// A page unlike those of other seeds.
pub fn page(seed: u64) -> PageWords {
    let mut words = [0; PAGE_WORDS];
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in &mut words {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *word = x;
    }
    words
}

/// Longer than anything takes here on a machine that does other things as well.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The store looks at the time every second: some of these.
pub const TICKS: Duration = Duration::from_secs(4);

/// Waits until a condition holds; how long that took.
pub fn eventually(mut condition: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    start.elapsed()
}

/// A process that connects, can be told what to do in lines, and answers each with a line. It is the test binary
/// itself, started with the name of the test that plays this part.
pub struct Helper {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

/// Tells the helper's part which socket to use; the part does nothing when it is not set.
pub const HELPER_SOCKET: &str = "VMM_DEDUP_TEST_SOCKET";

impl Helper {
    pub fn start(part: &str, socket: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([part, "--exact", "--nocapture", "--test-threads=1"])
            .env(HELPER_SOCKET, socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    pub fn ask(&mut self, line: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
        let mut answer = String::new();
        while !answer.starts_with("> ") {
            answer.clear();
            assert!(
                self.answers.read_line(&mut answer).unwrap() > 0,
                "the helper died"
            );
        }
        answer[2..].trim().to_owned()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A socket whose peer, as far as the store can tell, is a process that has ended: so that closing it ends all.
pub fn connected_by_another_process(path: &Path) -> OwnedFd {
    use rustix::net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
    };
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::empty(),
        None,
    )
    .unwrap();
    let part = "support::lends_its_name";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([part, "--exact", "--nocapture", "--test-threads=1"])
        .env(HELPER_SOCKET, path)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    let mut into = [std::io::IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(&ours, &mut into, &mut ancillary, RecvFlags::empty()).unwrap();
    let mut fds = ancillary.drain().filter_map(|m| match m {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fd = fds.next().unwrap().next().unwrap();
    assert!(child.wait().unwrap().success());
    fd
}

/// The other side of [`connected_by_another_process`].
#[test]
fn lends_its_name() {
    if let Ok(path) = std::env::var(HELPER_SOCKET) {
        let socket = socket::connect(Path::new(&path)).unwrap();
        socket::send(std::io::stdin(), &[1], &[socket.as_fd()]).unwrap();
    }
}
