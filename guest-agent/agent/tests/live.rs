//! The program itself: on a made-up guest whose frames are known, and on this machine, which is a Linux of its own.
//!
//! The made-up guest is a folder with the files of /proc. On this machine, programs mark real memory; that takes root, and skips
//! visibly without.

use std::cell::Cell;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vmm_dedup_agent_receiver::listen::{Connection, Listener};
use vmm_dedup_agent_receiver::receiver::{Limits, Receiver};
use vmm_dedup_agent_wire::PORT;
use vmm_dedup_agent_wire::frame::{BLOCK, Block, Gfn};
use vmm_dedup_agent_wire::message::Mark;
use vmm_dedup_agent_wire::said::{Kind, Said};
use vmm_dedup_hints::{Error, Hints, Mark as Say, Status};

const PATIENCE: Duration = Duration::from_secs(30);
/// Flags of kpageflags: a free page, and one of a file.
const FREE: u64 = 1 << 10;
const CLEAN: u64 = 1 << 3 | 1 << 5;
/// Blocks of the made-up guest.
const BLOCKS: u32 = 64;

/// A guest made of files.
struct MadeUp(TempDir);

impl MadeUp {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let last = u64::from(BLOCKS) * BLOCK as u64 * 4096 - 1;
        let memory = format!("00000000-{last:08x} : System RAM\n");
        std::fs::write(folder.path().join("iomem"), memory).unwrap();
        let guest = Self(folder);
        guest.put("kpageflags", |_| FREE);
        guest.put("kpagecount", |_| 0);
        guest
    }

    fn put(&self, file: &str, word: impl Fn(u64) -> u64) {
        let frames = u64::from(BLOCKS) * BLOCK as u64;
        let words: Vec<u8> = (0..frames).flat_map(|frame| word(frame).to_ne_bytes()).collect();
        std::fs::write(self.0.path().join(file), words).unwrap();
    }

    fn arguments(&self) -> [String; 2] {
        ["--proc".into(), self.0.path().display().to_string()]
    }
}

fn agent() -> Command {
    Command::new(env!("CARGO_BIN_EXE_vmm-dedup-agent"))
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// A running agent; ended when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A service that listens where a VMM's vsock leads.
struct Service {
    folder: TempDir,
    listener: Listener,
    connection: Option<Connection>,
    receiver: Receiver,
    start: Instant,
}

impl Service {
    fn new(frames: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::hybrid(&folder.path().join("vsock"), PORT).unwrap();
        Self {
            folder,
            listener,
            connection: None,
            receiver: Receiver::new(frames, Limits::default(), Duration::ZERO),
            start: Instant::now(),
        }
    }

    fn settings(&self, more: &str) -> PathBuf {
        let path = self.folder.path().join("agent.toml");
        let folder = self.folder.path().display();
        let text = format!(
            "connect = \"unix:{folder}/vsock_{PORT}\"\nhints_socket = \"{folder}/hints\"\ntemperature = \"off\"\n\
             interval_seconds = 1\n{more}"
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    fn hints(&self) -> PathBuf {
        self.folder.path().join("hints")
    }

    /// Serves until something is so.
    fn until(&mut self, what: &str, is_so: impl Fn(&Receiver) -> bool) {
        let start = Instant::now();
        while !is_so(&self.receiver) {
            assert!(
                start.elapsed() < PATIENCE,
                "not in time: {what}; {:?}",
                self.receiver.tally()
            );
            self.turn();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn turn(&mut self) {
        let now = self.start.elapsed();
        if let Some(connection) = self.listener.accept().unwrap()
            && self.receiver.connected(now).is_ok()
        {
            self.connection = Some(connection);
        }
        let Some(connection) = &mut self.connection else {
            return;
        };
        let (mut out, mut buffer) = (Vec::new(), [0; 4096]);
        match connection.read(&mut buffer) {
            Ok(0) => {
                self.connection = None;
                self.receiver.disconnected(now);
                return;
            }
            Ok(read) => self.receiver.received(&buffer[..read], now, &mut out).unwrap(),
            Err(_) => self.receiver.tick(now, &mut out),
        }
        while let Some(withheld) = self.receiver.take_withheld() {
            self.receiver.in_force(&withheld, &mut out);
        }
        // Small, and read at once.
        connection.write_all(&out).unwrap();
    }
}

fn kind_at(receiver: &Receiver, frame: u64) -> Kind {
    receiver.said(Gfn::try_new(frame).unwrap()).kind()
}

#[test]
fn what_is_printed_is_what_the_guest_is() {
    let guest = MadeUp::new();
    guest.put("kpageflags", |frame| if frame < 1000 { CLEAN } else { FREE });
    let output = agent()
        .args(guest.arguments())
        .args(["--print", "--once"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let text = said(&output);
    let line = |name: &str| {
        text.lines()
            .find(|line| line.starts_with(name))
            .unwrap()
            .to_owned()
    };
    assert!(line("file, clean").contains(" 1000 frames"), "{text}");
    assert!(line("free").contains(" 31768 frames"), "{text}");
    assert!(text.contains("pressure/memory"), "says what it lacks: {text}");
}

#[test]
fn options_and_settings_that_there_are_not_are_refused_by_name() {
    for (arguments, named) in [
        (&["--colour"][..], "--colour"),
        (&["--config", "/nonexistent.toml"], "/nonexistent.toml"),
        (&["--connect", "tcp:1"], "vsock:CID:PORT"),
        (&["--connect"], "needs a value"),
        (&["--proc", "/nonexistent"], "/nonexistent/iomem"),
    ] {
        let output = agent().args(arguments).output().unwrap();
        assert!(
            !output.status.success() && said(&output).contains(named),
            "{}",
            said(&output)
        );
    }
    let help = agent().arg("--help").output().unwrap();
    assert!(help.status.success() && said(&help).contains("CAP_SYS_ADMIN"));
}

#[test]
fn a_service_hears_what_changes_also_after_it_was_away() {
    let guest = MadeUp::new();
    let mut service = Service::new(u64::from(BLOCKS) * BLOCK as u64);
    let settings = service.settings("");
    let _agent = Running(
        agent()
            .args(guest.arguments())
            .arg("--config")
            .arg(settings)
            .spawn()
            .unwrap(),
    );
    service.until("a snapshot", |receiver| receiver.tally().snapshots == 1);
    assert_eq!(kind_at(&service.receiver, 5000), Kind::Free);
    guest.put("kpageflags", |frame| if frame == 5000 { CLEAN } else { FREE });
    service.until("a change", |receiver| kind_at(receiver, 5000) == Kind::FileClean);
    assert_eq!(kind_at(&service.receiver, 5001), Kind::Free);
    // The service goes, and another one, which knows nothing, listens in its place.
    service.connection = None;
    service.receiver = Receiver::new(
        u64::from(BLOCKS) * BLOCK as u64,
        Limits::default(),
        Duration::ZERO,
    );
    service.until("another snapshot", |receiver| receiver.tally().snapshots == 1);
    assert_eq!(kind_at(&service.receiver, 5000), Kind::FileClean);
    let last = Block::try_new(u64::from(BLOCKS) - 1).unwrap();
    assert_eq!(service.receiver.frames(last), [Said::new(Kind::Free); BLOCK]);
}

#[test]
fn once_ends_when_the_service_has_heard_everything() {
    let guest = MadeUp::new();
    let mut service = Service::new(u64::from(BLOCKS) * BLOCK as u64);
    let settings = service.settings("");
    let mut agent = Running(
        agent()
            .args(guest.arguments())
            .args(["--once", "--config"])
            .arg(settings)
            .spawn()
            .unwrap(),
    );
    service.until("a snapshot", |receiver| receiver.tally().snapshots == 1);
    assert!(agent.0.wait().unwrap().success());
}

/// Whether this process may see frames; says so if not.
fn sees_frames() -> bool {
    let mut word = [0; 8];
    let file = std::fs::File::open("/proc/kpageflags");
    let sees = file.and_then(|mut file| file.read_exact(&mut word)).is_ok();
    if !sees {
        eprintln!("SKIPPED: /proc/kpageflags cannot be read: that takes root, and a kernel that has it");
    }
    sees
}

/// Where a page of this process is.
fn frame_of(address: usize) -> u64 {
    use std::os::unix::fs::FileExt;
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    let mut word = [0; 8];
    pagemap
        .read_exact_at(&mut word, address as u64 / 4096 * 8)
        .unwrap();
    u64::from_ne_bytes(word) & ((1 << 55) - 1)
}

#[test]
fn a_program_marks_its_memory_and_the_mark_goes_with_it() {
    if !sees_frames() {
        return;
    }
    // All that this machine may have: marks lie where the program's memory is.
    let mut service = Service::new(1 << 26);
    let settings = service.settings("");
    // Blocks of frames are of no interest here: a round over a big machine takes long.
    let _agent = Running(agent().arg("--config").arg(settings).spawn().unwrap());
    service.until("a greeting", |receiver| receiver.agent().is_some());
    let socket = service.hints();
    let (tell, told) = std::sync::mpsc::channel();
    let (go, gone) = std::sync::mpsc::channel::<()>();
    let program = std::thread::spawn(move || {
        let key = vec![7_u8; 8 * 4096];
        let hints = Hints::connect_to(&socket).unwrap();
        let pages = hints.mark(Say::Never, &key).unwrap();
        let frame = frame_of(key.as_ptr().addr() + 4096);
        tell.send((pages, frame)).unwrap();
        gone.recv().unwrap();
        assert_eq!(key[5], 7);
    });
    let marked = Cell::new(None);
    service.until("marks to be in force", |_| {
        marked.set(marked.get().or(told.try_recv().ok()));
        marked.get().is_some()
    });
    let (pages, frame) = marked.get().unwrap();
    // Eight pages, and one more if they do not begin with one.
    assert!((8..=9).contains(&pages), "{pages}");
    let is_never = move |receiver: &Receiver| receiver.marks(Gfn::try_new(frame).unwrap()).has(Mark::Never);
    assert!(is_never(&service.receiver));
    go.send(()).unwrap();
    program.join().unwrap();
    service.until("marks to be lifted", |receiver| !is_never(receiver));
}

#[test]
fn without_a_service_a_mark_is_kept_and_a_program_may_not_mark_all_it_likes() {
    if !sees_frames() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("agent.toml");
    let socket = folder.path().join("hints");
    let text = format!(
        "connect = \"unix:/nonexistent\"\nhints_socket = \"{}\"\ntemperature = \"off\"\nhints_mib = 1\n",
        socket.display()
    );
    std::fs::write(&settings, text).unwrap();
    let _agent = Running(agent().arg("--config").arg(settings).spawn().unwrap());
    let start = Instant::now();
    let hints = loop {
        match Hints::connect_to(&socket) {
            Ok(hints) => break hints,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let memory = vec![1_u8; 2 << 20];
    let status = |length: usize| match hints.mark(Say::Worth, &memory[..length]) {
        Err(Error::Refused(status)) => status,
        other => panic!("{other:?}"),
    };
    assert_eq!(status(4096), Status::NoService);
    assert_eq!(status(0), Status::Range);
    assert_eq!(status(2 << 20), Status::TooMuch);
    // Nothing was lost by that.
    assert_eq!(status(8192), Status::NoService);
}

/// Compiles the example in C; `None`, and the reason on standard error, without a compiler.
fn example_in_c(folder: &Path) -> Option<PathBuf> {
    let hints = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hints");
    let program = folder.join("secret");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-std=gnu11", "-o"])
        .arg(&program);
    cc.arg("-I")
        .arg(hints.join("include"))
        .arg(hints.join("examples/secret.c"));
    match cc.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", said(&output));
            Some(program)
        }
        Err(error) => {
            eprintln!("SKIPPED: the example in C: no compiler: {error}");
            None
        }
    }
}

#[test]
fn a_program_in_c_has_a_secret() {
    if !sees_frames() {
        return;
    }
    let mut service = Service::new(1 << 26);
    let Some(program) = example_in_c(service.folder.path()) else {
        return;
    };
    let settings = service.settings("");
    let _agent = Running(agent().arg("--config").arg(settings).spawn().unwrap());
    service.until("a greeting", |receiver| receiver.agent().is_some());
    let mut command = Command::new(program);
    let command = command
        .arg(service.hints())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut program = Running(command.spawn().unwrap());
    let mut stdout = program.0.stdout.take().unwrap();
    let line = std::thread::spawn(move || {
        let mut text = [0; 9];
        stdout.read_exact(&mut text).map(|()| text)
    });
    service.until("the mark to be in force", |_| line.is_finished());
    assert_eq!(&line.join().unwrap().unwrap(), b"status 0\n");
    // Sixteen pages.
    let never = |receiver: &Receiver| receiver.marked(Mark::Never);
    assert_eq!(never(&service.receiver), 16);
    program.0.kill().unwrap();
    service.until("the mark to be lifted", |receiver| never(receiver) == 0);
}
