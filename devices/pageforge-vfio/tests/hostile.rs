//! A client that means harm: whatever it sends, the server goes on serving others, and no thread of it panics or hangs.

use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use vfio_user::Client;
use vmm_dedup_pageforge::registers as reg;
use vmm_dedup_pageforge::server::{Server, ServerConfig};
use vmm_dedup_protocol::mapping::staging_memfd;

/// How long the server may take to hang up on a client that has closed its side.
const PATIENCE: Duration = Duration::from_secs(60);

/// Panics of the server's threads, which run in this process.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn server(folder: &Path) -> PathBuf {
    static COUNT: Once = Once::new();
    COUNT.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let name = thread::current().name().unwrap_or_default().to_owned();
            if name.starts_with("vu-") || name == "pageforge" {
                PANICS.fetch_add(1, Ordering::AcqRel);
            }
            default(panic);
        }));
    });
    let path = folder.join("device");
    let server = Server::bind(
        &path,
        ServerConfig {
            modules: 2,
            max_clients: 4,
        },
    )
    .unwrap();
    thread::spawn(move || server.run());
    path
}

/// A client of good will is served.
fn assert_serves(path: &Path) {
    let start = std::time::Instant::now();
    let mut client = loop {
        match Client::new(path) {
            Ok(client) => break client,
            Err(error) => assert!(start.elapsed() < PATIENCE, "nobody is served any more: {error}"),
        }
        thread::sleep(Duration::from_millis(1));
    };
    let mut magic = [0; 4];
    client.region_read(0, 0, &mut magic).unwrap();
    assert_eq!(u32::from_le_bytes(magic), reg::MAGIC);
    assert_eq!(
        PANICS.load(Ordering::Acquire),
        0,
        "a thread of the server panicked"
    );
}

/// Something that a client sends.
#[derive(Clone, Debug)]
enum Sent {
    /// Bytes without any sense.
    Noise(Vec<u8>),
    /// A message whose header says what the case draws.
    Message {
        command: u16,
        /// What the size is off by.
        off: i32,
        flags: u32,
        body: Vec<u8>,
        fds: Vec<Descriptor>,
    },
}

/// What a client may send along.
#[derive(Clone, Copy, Debug)]
enum Descriptor {
    Sealed,
    Shrinking,
    Event,
    Pipe,
}

impl Descriptor {
    fn make(self) -> OwnedFd {
        match self {
            Descriptor::Sealed => staging_memfd(4096).unwrap().0,
            Descriptor::Shrinking => {
                let file = memfd_create("shrinking", MemfdFlags::CLOEXEC).unwrap();
                rustix::fs::ftruncate(&file, 4096).unwrap();
                file
            }
            Descriptor::Event => eventfd(u32::MAX, EventfdFlags::CLOEXEC).unwrap(),
            Descriptor::Pipe => {
                rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
                    .unwrap()
                    .1
            }
        }
    }
}

/// A message that says it has `size` bytes.
fn message(command: u16, size: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(7u16.to_ne_bytes());
    bytes.extend(command.to_ne_bytes());
    bytes.extend(size.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    bytes.extend(body);
    bytes
}

fn true_size(body: &[u8]) -> u32 {
    16 + u32::try_from(body.len()).unwrap()
}

fn version() -> Vec<u8> {
    let mut body = vec![0, 0, 1, 0];
    body.extend(b"{\"capabilities\":{}}\0");
    message(1, true_size(&body), 0, &body)
}

impl Sent {
    /// Sends it; the server may have hung up already.
    fn send(&self, stream: &UnixStream) {
        let (bytes, fds) = match self {
            Sent::Noise(bytes) => (bytes.clone(), Vec::new()),
            Sent::Message {
                command,
                off,
                flags,
                body,
                fds,
            } => {
                let size = true_size(body).wrapping_add_signed(*off);
                let fds = fds.iter().map(|fd| fd.make()).collect();
                (message(*command, size, *flags, body), fds)
            }
        };
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)));
        }
        let _ = sendmsg(
            stream,
            &[IoSlice::new(&bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        );
    }
}

/// Closes the sending side and reads to the end. A server that hangs is found out here.
fn drain(mut stream: UnixStream) {
    let _ = stream.shutdown(std::net::Shutdown::Write);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
            Err(error) => panic!("the server does not hang up: {error}"),
        }
    }
}

/// Words of a body: small numbers, sizes of pages, and the extremes.
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![
        0..8u32,
        Just(4096),
        Just(u32::MAX),
        (0..0x500u32),
        any::<u32>(),
        Just(1 << 20),
        Just(0x8000_0000)
    ]
}

fn body() -> impl Strategy<Value = Vec<u8>> {
    (proptest::collection::vec(word(), 0..10), 0..4usize).prop_map(|(words, odd)| {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.truncate(bytes.len().saturating_sub(if odd == 3 { 1 } else { 0 }));
        bytes
    })
}

fn sent() -> impl Strategy<Value = Sent> {
    let descriptor = prop_oneof![
        Just(Descriptor::Sealed),
        Just(Descriptor::Shrinking),
        Just(Descriptor::Event),
        Just(Descriptor::Pipe)
    ];
    let any_message = (
        0..17u16,
        prop_oneof![6 => Just(0), 1 => any::<i32>(), 1 => -8..8i32],
        prop_oneof![6 => Just(0u32), 1 => Just(16), 1 => any::<u32>()],
        body(),
        proptest::collection::vec(descriptor, 0..4),
    )
        .prop_map(|(command, off, flags, body, fds)| Sent::Message {
            command,
            off,
            flags,
            body,
            fds,
        });
    prop_oneof![
        1 => proptest::collection::vec(any::<u8>(), 0..100).prop_map(Sent::Noise),
        12 => any_message,
        3 => dma_map(),
        3 => register_write(),
    ]
}

/// A map of a page or more, somewhere low, so that they overlap.
fn dma_map() -> impl Strategy<Value = Sent> {
    (
        0..6u64,
        1..4u64,
        prop_oneof![Just(Descriptor::Sealed), Just(Descriptor::Shrinking)],
    )
        .prop_map(|(page, pages, fd)| {
            let mut body = Vec::new();
            body.extend(32u32.to_ne_bytes());
            body.extend(3u32.to_ne_bytes());
            [0, page * 4096, pages * 4096]
                .iter()
                .for_each(|word| body.extend(word.to_ne_bytes()));
            Sent::Message {
                command: 2,
                off: 0,
                flags: 0,
                body,
                fds: vec![fd],
            }
        })
}

/// A write to a register that has a meaning.
fn register_write() -> impl Strategy<Value = Sent> {
    let register = prop_oneof![
        Just(reg::DOORBELL),
        Just(reg::RING_TAIL),
        Just(reg::ENABLE),
        Just(reg::RESET),
        (0..12u32).prop_map(|n| reg::MODULES + n * 4),
    ];
    (register, word()).prop_map(|(register, value)| {
        let mut body = Vec::new();
        body.extend(u64::from(register).to_ne_bytes());
        body.extend(0u32.to_ne_bytes());
        body.extend(4u32.to_ne_bytes());
        body.extend(value.to_ne_bytes());
        Sent::Message {
            command: 10,
            off: 0,
            flags: 0,
            body,
            fds: Vec::new(),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_client_sends_the_server_goes_on(
        greets in proptest::bool::weighted(0.9),
        messages in proptest::collection::vec(sent(), 0..30),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = server(folder.path());
        let stream = UnixStream::connect(&path).unwrap();
        // The answers are not read meanwhile: they are few enough for the socket.
        if greets {
            Sent::Noise(version()).send(&stream);
        }
        messages.iter().for_each(|message| message.send(&stream));
        drain(stream);
        assert_serves(&path);
    }
}

#[test]
fn a_message_in_pieces_is_one_message() {
    let folder = tempfile::tempdir().unwrap();
    let path = server(folder.path());
    let mut stream = UnixStream::connect(&path).unwrap();
    for byte in version() {
        Sent::Noise(vec![byte]).send(&stream);
    }
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    assert_eq!((header[2], header[8]), (1, 1), "a reply to the version");
}

#[test]
fn claims_of_size_that_would_break_the_crate_end_the_connection() {
    let folder = tempfile::tempdir().unwrap();
    let path = server(folder.path());
    let no_nul = [0, 0, 1, 0, b'{', b'}'];
    let cases = [
        message(1, 16, 0, &[]),          // a version without one
        message(1, 8, 0, &[]),           // smaller than its header
        message(1, 0xffff_ffff, 0, &[]), // 4 GiB
        message(1, 22, 0, &no_nul),      // JSON without its NUL
        message(9, 32, 0, &[0xff; 16]),  // a read before the version
    ];
    for case in cases {
        let stream = UnixStream::connect(&path).unwrap();
        Sent::Noise(case).send(&stream);
        drain(stream);
        assert_serves(&path);
    }
}

#[test]
fn reads_of_four_gigabytes_are_refused_and_the_connection_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = server(folder.path());
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Sent::Noise(version()).send(&stream);
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).unwrap();
    let rest = u32::from_ne_bytes(reply[4..8].try_into().unwrap()) as usize - 16;
    stream.read_exact(&mut vec![0; rest]).unwrap();
    let mut body = 0u64.to_ne_bytes().to_vec();
    body.extend(0u32.to_ne_bytes());
    body.extend(u32::MAX.to_ne_bytes());
    for _ in 0..2 {
        Sent::Noise(message(9, 32, 0, &body)).send(&stream);
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[8] & 0x20, 0x20, "an error");
        assert_eq!(
            u32::from_ne_bytes(reply[12..16].try_into().unwrap()),
            22,
            "EINVAL"
        );
    }
}

#[test]
fn memory_may_shrink_and_be_unmapped_under_a_device_that_works() {
    let folder = tempfile::tempdir().unwrap();
    let path = server(folder.path());
    let file = memfd_create("shrinking", MemfdFlags::CLOEXEC).unwrap();
    let mut client = Client::new(&path).unwrap();
    // A table of 31 entries of the same page, each leading to the next: some 2,000 lines are read in a run.
    let at = u64::from(reg::MODULES);
    let set = |client: &mut Client, register: u32, value: u32| {
        client
            .region_write(0, at + u64::from(register), &value.to_le_bytes())
            .unwrap();
    };
    for index in 0..31 {
        let operands = [
            (reg::PPN_LOW, 1),
            (reg::INDEX, index),
            (reg::LESS, index + 1),
            (reg::MORE, index + 1),
        ];
        operands
            .iter()
            .for_each(|(register, value)| set(&mut client, *register, *value));
        set(&mut client, reg::FUNCTION, reg::Function::InsertPpn as u32);
    }
    let done = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            while !done.load(Ordering::Acquire) {
                rustix::fs::ftruncate(&file, 8192).unwrap();
                rustix::fs::ftruncate(&file, 0).unwrap();
            }
        });
        for round in 0..300u32 {
            client.dma_map(0, 0, 8192, file.as_raw_fd()).unwrap();
            set(&mut client, reg::PPN_LOW, 0);
            set(&mut client, reg::PTR, 0);
            set(&mut client, reg::FUNCTION, reg::Function::InsertPfe as u32);
            client
                .region_write(0, reg::DOORBELL.into(), &1u32.to_le_bytes())
                .unwrap();
            // A reset clears the table, so the runs before it are the long ones.
            if round >= 200 {
                client.reset().unwrap();
            }
            client.dma_unmap(0, 8192).unwrap();
        }
        done.store(true, Ordering::Release);
    });
    assert_serves(&path);
}
