//! The program where something is wrong: a service of another version, clocks that jump, no vsock, no rights, no memory, and its own
//! death at any time.

mod support;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{BLOCKS, CLEAN, FREE, MadeUp, Running, Service, agent, kind_at, said, sees_frames};
use vmm_dedup_agent_receiver::receiver::{Limits, Receiver};
use vmm_dedup_agent_wire::VERSION;
use vmm_dedup_agent_wire::frame::{BLOCK, Block};
use vmm_dedup_agent_wire::message::{HEADER, Header, Mark, Message, Refusal};
use vmm_dedup_agent_wire::said::{Kind, Said};
use vmm_dedup_hints::{Error, Hints, Mark as Say, Status};

const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

/// Ends an agent; what it said.
fn end(mut agent: Running) -> String {
    agent.0.kill().unwrap();
    agent.0.wait().unwrap();
    let mut text = String::new();
    agent.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

fn spawn(command: &mut Command) -> Running {
    Running(command.stderr(Stdio::piped()).spawn().unwrap())
}

/// CPU time of a process, and the most memory that it had, in KiB.
fn cost(agent: &Running) -> (Duration, u64) {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{}/{file}", agent.0.id())).unwrap();
    let ns = read("schedstat").split(' ').next().unwrap().parse().unwrap();
    let status = read("status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    let kib = line.trim().trim_end_matches(" kB").parse().unwrap();
    (Duration::from_nanos(ns), kib)
}

/// A service that answers each greeting with this, and closes; how often an agent came within some seconds, and what it said.
fn answered(answer: &Message<'_>, time: Duration) -> (usize, String) {
    let guest = MadeUp::new();
    let service = Service::new(0);
    let settings = service.settings("");
    drop(service.listener);
    let listener = UnixListener::bind(service.folder.path().join("vsock_9755")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let agent = spawn(agent().args(guest.arguments()).arg("--config").arg(settings));
    let (start, mut came) = (Instant::now(), 0);
    while start.elapsed() < time {
        if let Ok((mut stream, _)) = listener.accept() {
            came += 1;
            stream.set_nonblocking(false).unwrap();
            let mut header = [0; HEADER];
            stream.read_exact(&mut header).unwrap();
            let header = Header::parse(header).unwrap();
            let mut payload = vec![0; header.len];
            stream.read_exact(&mut payload).unwrap();
            let Message::Hello(hello) = Message::parse(header.kind, &payload).unwrap() else {
                panic!("not a greeting");
            };
            assert_eq!((hello.lowest, hello.highest), (VERSION, VERSION));
            let mut bytes = Vec::new();
            answer.encode(0, &mut bytes);
            stream.write_all(&bytes).unwrap();
            // It closes first if the answer is no good.
            let _ = stream.read(&mut [0; 64]);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    (came, end(agent))
}

/// What a service does that knows only later versions, or earlier ones.
#[test]
fn a_service_without_a_version_in_common_is_left_alone_for_a_minute() {
    let (reason, seconds) = (Refusal::Version, 60);
    let (came, text) = answered(&Message::Refuse { reason, seconds }, Duration::from_secs(4));
    assert_eq!(came, 1, "{text}");
    assert!(text.contains("refuses (Version); trying again in 60 s"), "{text}");
}

#[test]
fn a_service_that_does_not_keep_to_the_versions_is_asked_less_and_less_often() {
    let (version, credit) = (VERSION + 1, 1 << 20);
    let (came, text) = answered(&Message::Welcome { version, credit }, Duration::from_secs(6));
    // After 0, 1 and 3 s, and maybe after 5 s.
    assert!((2..=4).contains(&came), "{came} times: {text}");
    assert_eq!(text.matches("something else than a welcome").count(), 1, "{text}");
}

#[test]
fn without_vsock_the_agent_says_so_once_and_rests() {
    let guest = MadeUp::new();
    let service = Service::new(0);
    let settings = service.settings("");
    // No such guest: whatever this machine has of vsock, nobody listens there.
    let agent = spawn(
        agent()
            .args(guest.arguments())
            .args(["--connect", "vsock:4294967290:9755", "--config"])
            .arg(settings),
    );
    std::thread::sleep(Duration::from_secs(5));
    let (cpu, _) = cost(&agent);
    // Programs are served all the same.
    let hints = Hints::connect_to(&service.hints());
    let text = end(agent);
    let said = |what: &str| text.matches(what).count();
    assert_eq!(
        said("there is no way to the service") + said("no service listens"),
        1,
        "{text}"
    );
    assert!(hints.is_ok(), "{text}");
    assert!(cpu < Duration::from_millis(100), "{cpu:?}");
}

#[test]
fn who_lacks_rights_is_told_which() {
    if !sees_frames() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let program = folder.path().join("agent");
    std::fs::copy(env!("CARGO_BIN_EXE_vmm-dedup-agent"), &program).unwrap();
    let output = Command::new(program).arg("--print").uid(65_534).output().unwrap();
    let text = said(&output);
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("/proc/iomem") && text.contains("CAP_SYS_ADMIN"),
        "{text}"
    );
}

/// Newer kernels show where memory lies to whoever has CAP_SYS_ADMIN: there marks hold without the other right.
#[test]
fn without_the_right_to_see_a_programs_memory_it_hears_so_and_the_rest_is_told() {
    if !sees_frames() {
        return;
    }
    let mut service = Service::new(1 << 26);
    let settings = service.settings("");
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]);
    command.arg(env!("CARGO_BIN_EXE_vmm-dedup-agent"));
    let mut command = match Command::new("setpriv").arg("--version").output() {
        Ok(_) => command,
        Err(error) => return eprintln!("SKIPPED: setpriv cannot be run: {error}"),
    };
    let agent = spawn(command.arg("--config").arg(settings));
    service.until("a greeting", |receiver| receiver.agent().is_some());
    service.until("blocks", |receiver| receiver.tally().blocks > 0);
    let hints = Hints::connect_to(&service.hints()).unwrap();
    let memory = vec![1_u8; 1 << 16];
    let result = std::thread::spawn(move || (hints.mark(Say::Never, &memory), memory, hints));
    service.until("an answer", |_| result.is_finished());
    // The mark goes with the connection.
    let (result, _memory, _hints) = result.join().unwrap();
    let text = end(agent);
    let is_held = service.receiver.marked(Mark::Never) > 0;
    assert!(
        matches!(&result, Err(Error::Refused(Status::Rights))) && !is_held || result.is_ok() && is_held,
        "{result:?}: {text}"
    );
}

/// A guest whose time of day jumps: set by hand, by NTP, or after it stood still. And one whose other clocks jump ahead, as after a
/// snapshot.
#[test]
fn clocks_that_jump_do_not_change_when_the_agent_tells() {
    if !Path::new(FAKETIME).exists() {
        return eprintln!("SKIPPED: libfaketime is missing (Debian package libfaketime)");
    }
    const DAY: i64 = 24 * 3600;
    // The time of day goes both ways; that since the boot never goes back.
    let jumps = [
        (true, [10 * 365 * DAY, -10 * 365 * DAY, 0]),
        (false, [3600, 30 * DAY, 400 * DAY]),
    ];
    for (only_time_of_day, jumps) in jumps {
        let guest = MadeUp::new();
        let mut service = Service::new(u64::from(BLOCKS) * BLOCK as u64);
        let settings = service.settings("");
        let clock = service.folder.path().join("clock");
        let set = |ahead: i64| {
            let fresh = clock.with_extension("new");
            std::fs::write(&fresh, format!("{ahead:+}\n")).unwrap();
            std::fs::rename(fresh, &clock).unwrap();
        };
        let under_clock = |command: &mut Command| {
            command
                .env("LD_PRELOAD", FAKETIME)
                .env("FAKETIME_TIMESTAMP_FILE", &clock)
                .env("FAKETIME_NO_CACHE", "1")
                .env("DONT_FAKE_MONOTONIC", u8::from(only_time_of_day).to_string());
        };
        set(0);
        let mut command = agent();
        under_clock(command.args(guest.arguments()).arg("--config").arg(settings));
        let agent = spawn(&mut command);
        service.until("a snapshot", |receiver| receiver.tally().snapshots == 1);
        let mut last = 5000;
        for ahead in jumps {
            set(ahead);
            let mut date = Command::new("date");
            under_clock(date.arg("+%s"));
            let text = said(&date.output().unwrap());
            let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
            let shown = text.trim().parse::<u64>().unwrap();
            assert!(
                shown.abs_diff(now.saturating_add_signed(ahead)) < 60,
                "the clock is not {ahead} s ahead: {text}"
            );
            let start = Instant::now();
            // In three rounds in a row, of at least a second each.
            for _ in 0..3 {
                last += 1;
                guest.put("kpageflags", |frame| if frame == last { CLEAN } else { FREE });
                service.until("a change", |receiver| kind_at(receiver, last) == Kind::FileClean);
            }
            let time = start.elapsed();
            assert!(
                time < Duration::from_secs(10),
                "{time:?} for three changes, {ahead} s ahead"
            );
            assert!(
                time > Duration::from_secs(1),
                "{time:?} for three changes, {ahead} s ahead"
            );
        }
        // A round is looked at once a second at most, whatever the clock says.
        let (cpu, _) = cost(&agent);
        let text = end(agent);
        assert!(cpu < Duration::from_secs(1), "{cpu:?}: {text}");
    }
}

#[test]
fn while_the_guest_waits_for_memory_the_agent_rests() {
    let guest = MadeUp::new();
    let folder = guest.0.path().join("pressure");
    std::fs::create_dir(&folder).unwrap();
    let press = |percent: u32| {
        let text = format!(
            "some avg10={percent}.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"
        );
        std::fs::write(folder.join("memory"), text).unwrap();
    };
    press(0);
    let mut service = Service::new(u64::from(BLOCKS) * BLOCK as u64);
    let settings = service.settings("");
    let agent = spawn(agent().args(guest.arguments()).arg("--config").arg(settings));
    service.until("a snapshot", |receiver| receiver.tally().snapshots == 1);
    press(80);
    service.until("pressure", |receiver| {
        receiver.pressure().is_some_and(|pressure| pressure.some == 8000)
    });
    guest.put("kpageflags", |frame| if frame == 5000 { CLEAN } else { FREE });
    // Rounds begin once a second without pressure, of which it hears every five seconds.
    let (start, before) = (Instant::now(), cost(&agent).0);
    while start.elapsed() < Duration::from_secs(8) {
        service.turn();
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(
        kind_at(&service.receiver, 5000),
        Kind::Free,
        "it looks at memory all the same"
    );
    let used = cost(&agent).0 - before;
    assert!(used < Duration::from_millis(50), "{used:?}");
    press(0);
    service.until("a change", |receiver| kind_at(receiver, 5000) == Kind::FileClean);
    end(agent);
}

/// The kernel ends it first, under pressure; whoever comes next tells everything anew.
#[test]
fn it_may_be_killed_at_any_time_and_the_next_one_tells_everything() {
    const ROUNDS: u64 = 40;
    let guest = MadeUp::new();
    let frames = u64::from(BLOCKS) * BLOCK as u64;
    let mut service = Service::new(frames);
    let limits = Limits {
        connections: 2 * ROUNDS,
        ..Limits::default()
    };
    service.receiver = Receiver::new(frames, limits, Duration::ZERO);
    let settings = service.settings("share = 0.5\n");
    let mut ended_early = 0;
    for round in 0..ROUNDS {
        guest.put(
            "kpageflags",
            |frame| if frame % 512 == round { CLEAN } else { FREE },
        );
        let snapshots = service.receiver.tally().snapshots;
        let agent = Running(
            agent()
                .args(guest.arguments())
                .arg("--config")
                .arg(&settings)
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        );
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(round * 2) {
            service.turn();
        }
        drop(agent);
        // What is on its way is heard, and that it has gone.
        (0..20).for_each(|_| service.turn());
        ended_early += u64::from(service.receiver.tally().snapshots == snapshots);
    }
    assert!(
        (1..ROUNDS).contains(&ended_early),
        "{ended_early} were killed before they had told all"
    );
    guest.put("kpageflags", |frame| if frame % 30 == 0 { CLEAN } else { FREE });
    let snapshots = service.receiver.tally().snapshots;
    let _agent = Running(
        agent()
            .args(guest.arguments())
            .arg("--config")
            .arg(&settings)
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    service.until("a snapshot", |receiver| receiver.tally().snapshots > snapshots);
    for block in 0..u64::from(BLOCKS) {
        let said = service.receiver.frames(Block::try_new(block).unwrap());
        for (frame, said) in (block * BLOCK as u64..).zip(said) {
            let kind = if frame % 30 == 0 {
                Kind::FileClean
            } else {
                Kind::Free
            };
            assert_eq!(said, Said::new(kind), "frame {frame}");
        }
    }
}

/// A guest of 16 GiB, of which every frame is used differently from the next; all of its memory is told with little memory.
#[test]
fn an_agent_of_a_big_guest_is_small() {
    const GIB: u64 = 16;
    /// Pages of the C library are in it, which the packaged agent has not.
    const MOST_KIB: u64 = 4 << 10;
    let guest = MadeUp::new();
    let frames = GIB << 18;
    let memory = format!("00000000-{:08x} : System RAM\n", (GIB << 30) - 1);
    std::fs::write(guest.0.path().join("iomem"), memory).unwrap();
    for file in ["kpageflags", "kpagecount"] {
        let file = std::fs::File::create(guest.0.path().join(file)).unwrap();
        let piece: Vec<u8> = (0..frames / 16)
            .flat_map(|n: u64| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40).to_ne_bytes())
            .collect();
        (0..16).for_each(|_| (&file).write_all(&piece).unwrap());
    }
    let mut service = Service::new(frames);
    let settings = service.settings("share = 1.0\n");
    let agent = spawn(agent().args(guest.arguments()).arg("--config").arg(settings));
    service.until("a snapshot", |receiver| receiver.tally().snapshots == 1);
    let (_, kib) = cost(&agent);
    println!(
        "{kib} KiB, {} bytes of a snapshot of {GIB} GiB",
        service.receiver.tally().bytes
    );
    assert!(kib < MOST_KIB, "{kib} KiB");
    assert!(
        service.receiver.tally().bytes < GIB << 16,
        "{:?}",
        service.receiver.tally()
    );
    end(agent);
}
