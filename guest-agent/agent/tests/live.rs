//! The program itself: on a made-up guest whose frames are known, and on this machine, which is a Linux of its own.
//!
//! The made-up guest is a folder with the files of /proc. On this machine, programs mark real memory; that takes root, and skips
//! visibly without.

mod support;

use std::cell::Cell;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{BLOCKS, CLEAN, FREE, MadeUp, PATIENCE, Running, Service, agent, kind_at, said, sees_frames};
use vmm_dedup_agent_receiver::receiver::{Limits, Receiver};
use vmm_dedup_agent_wire::frame::{BLOCK, Block, Gfn};
use vmm_dedup_agent_wire::message::Mark;
use vmm_dedup_agent_wire::said::{Kind, Said};
use vmm_dedup_hints::{Error, Hints, Mark as Say, Status};

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
