#![allow(unsafe_code)] // sockets and memory of the tests' own

use super::*;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::uffd::{self, Uffd};
use crate::sys::vma::Anonymous;
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

fn open(path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
}

fn pinners() -> Pinners {
    let mut pinners = Pinners::new().unwrap();
    pinners.start();
    pinners
}

fn judge(fd: RawFd, told: Told) -> Result<(), Pinner> {
    let known = HashMap::new();
    let mut look = Look {
        fuse_pins: true,
        known: &known,
        met: HashMap::new(),
        told,
        frozen: None,
    };
    look.judge(fd)
}

fn pins(fd: &OwnedFd) -> bool {
    judge(fd.as_raw_fd(), Told::Count).is_err()
}

#[test]
fn files_pipes_and_sockets_pin_nothing() {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::DIRECT).unwrap();
    let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    let plain = [
        open("/proc/self/status", OFlags::RDONLY).unwrap(),
        open("/dev/null", OFlags::RDWR).unwrap(),
        open("/proc", OFlags::RDONLY | OFlags::DIRECTORY).unwrap(),
        read,
        write,
        one.into(),
        other.into(),
        event,
    ];
    for fd in &plain {
        assert_eq!(judge(fd.as_raw_fd(), Told::Nothing), Ok(()));
    }
    assert_eq!(judge(1_000_000, Told::Nothing), Ok(()));
}

#[test]
fn direct_io_and_unknown_devices_may_pin() {
    let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
    let path = folder.path().join("disk").to_str().unwrap().to_owned();
    match open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT) {
        Ok(direct) => {
            assert!(pins(&direct));
            assert!(pinners().look(Told::Count, PATIENCE).is_err());
            assert_eq!(judge(direct.as_raw_fd(), Told::Fork), Ok(()));
        }
        Err(error) => eprintln!("SKIPPED: no O_DIRECT in {path}: {error}"),
    }
    assert!(!pins(&open(&path, OFlags::RDWR | OFlags::CREATE).unwrap()));
    if let Ok(kmsg) = open("/dev/kmsg", OFlags::RDONLY) {
        assert!(pins(&kmsg), "a device that is not in the list");
    }
    // SAFETY: a new socket that nobody else owns.
    let xdp = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW, 0) };
    if xdp >= 0 {
        // SAFETY: as above.
        assert!(pins(&unsafe { OwnedFd::from_raw_fd(xdp) }));
    }
}

#[test]
fn no_fork_tells_of_who_writes_a_process_s_memory() {
    let reads = open("/proc/self/mem", OFlags::RDONLY).unwrap();
    assert_eq!(judge(reads.as_raw_fd(), Told::Nothing), Ok(()));
    let mut fuse = vec![open("/proc/self/mem", OFlags::RDWR).unwrap()];
    fuse.extend(open("/dev/fuse", OFlags::RDWR));
    for fd in fuse {
        let refused = judge(fd.as_raw_fd(), Told::Fork);
        assert!(
            matches!(
                refused,
                Err(Pinner::File {
                    holds: Holds::Unseen,
                    ..
                })
            ),
            "{refused:?}"
        );
    }
}

#[test]
fn while_pages_are_frozen_files_are_known_from_before_and_there_is_no_time_for_many() {
    let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
    let path = folder.path().join("disk").to_str().unwrap().to_owned();
    let file = open(&path, OFlags::RDWR | OFlags::CREATE).unwrap();
    let later = Instant::now() + std::time::Duration::from_secs(3600);
    let known = HashMap::new();
    let mut frozen = Look {
        fuse_pins: true,
        known: &known,
        met: HashMap::new(),
        told: Told::Fork,
        frozen: Some(later),
    };
    assert!(matches!(frozen.judge(file.as_raw_fd()), Err(Pinner::Unknown(_))));
    let mut before = Look {
        frozen: None,
        ..frozen
    };
    assert_eq!(before.judge(file.as_raw_fd()), Ok(()));
    let met = before.met;
    let mut frozen = Look {
        fuse_pins: true,
        known: &met,
        met: HashMap::new(),
        told: Told::Fork,
        frozen: Some(later),
    };
    assert_eq!(frozen.judge(file.as_raw_fd()), Ok(()));
    let path = folder.path().join("another").to_str().unwrap().to_owned();
    let another = open(&path, OFlags::RDWR | OFlags::CREATE).unwrap();
    let of_overlayfs = file_system(another.as_raw_fd()).unwrap() == Some(OVERLAYFS);
    assert_eq!(frozen.judge(another.as_raw_fd()).is_err(), of_overlayfs);
    let too_late = pinners().look_again(Told::Fork, Instant::now());
    assert_eq!(too_late.unwrap_err(), Pinner::TooSlow);
    if pinners().look(Told::Fork, PATIENCE).is_ok() {
        assert_eq!(pinners().look(Told::Fork, Duration::ZERO), Err(Pinner::TooSlow));
    }
}

#[test]
fn a_fork_tells_of_direct_io_only_where_the_file_system_is_known_to_pin() {
    let file = open("/proc/self/status", OFlags::RDONLY).unwrap();
    let stat = identify(file.as_raw_fd()).unwrap().unwrap();
    let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
    let path = folder.path().join("disk").to_str().unwrap().to_owned();
    let direct = open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT);
    let mut files = vec![(file.as_raw_fd(), stat, Reads::MayHold as fn(Holds) -> Reads)];
    if let Ok(direct) = &direct {
        let stat = identify(direct.as_raw_fd()).unwrap().unwrap();
        files.push((direct.as_raw_fd(), stat, Reads::CopyUnlessDirect));
    }
    for (fd, stat, reads) in files {
        for (holds, refuses) in [(Holds::Pins, false), (Holds::Unseen, true)] {
            let known = HashMap::from([(identity(&stat), reads(holds))]);
            let mut look = Look {
                fuse_pins: true,
                known: &known,
                met: HashMap::new(),
                told: Told::Fork,
                frozen: Some(Instant::now() + PATIENCE),
            };
            assert_eq!(look.judge(fd).is_err(), refuses, "{holds:?}");
        }
    }
}

#[test]
fn while_pages_are_frozen_a_fork_tells_of_a_file_that_may_pin_if_it_is_known() {
    let file = open("/proc/self/status", OFlags::RDONLY).unwrap();
    let stat = identify(file.as_raw_fd()).unwrap().unwrap();
    let known = HashMap::from([(identity(&stat), Reads::MayHold(Holds::Pins))]);
    for (told, refuses) in [(Told::Fork, false), (Told::Count, true), (Told::Nothing, true)] {
        let mut look = Look {
            fuse_pins: true,
            known: &known,
            met: HashMap::new(),
            told,
            frozen: Some(Instant::now() + PATIENCE),
        };
        assert_eq!(look.judge(file.as_raw_fd()).is_err(), refuses, "{told:?}");
    }
}

/// Two ends of a connection by MPTCP, whose options are told by whoever has the socket's lock.
fn mptcp() -> io::Result<(std::net::TcpStream, std::net::TcpStream)> {
    let socket = || {
        // SAFETY: no memory is given.
        let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP) };
        // SAFETY: a new socket that nobody else owns.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    };
    let socket = || socket().ok_or_else(io::Error::last_os_error);
    let (listener, one) = (socket()?, socket()?);
    rustix::net::listen(&listener, 1)?;
    let listener = std::net::TcpListener::from(listener);
    let port = listener.local_addr()?.port();
    let to = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, port);
    rustix::net::connect(&one, &to)?;
    Ok((one.into(), listener.accept()?.0))
}

#[test]
fn who_receives_into_a_frozen_page_with_the_lock_of_his_socket_is_not_waited_for() {
    let Ok(uffd) = Uffd::breaker() else {
        assert!(std::env::var_os("CI").is_none(), "no userfaultfd in CI");
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let (mut one, other) = match mptcp() {
        Ok(ends) => ends,
        Err(error) => return eprintln!("SKIPPED: no MPTCP: {error}"),
    };
    let area = Anonymous::new(1).unwrap();
    area.populate().unwrap();
    let (page, fd) = (area.base(), other.as_raw_fd());
    let frozen = |frozen| uffd.write_protect(page, PAGE_SIZE, frozen).unwrap();
    uffd.register(page, PAGE_SIZE, uffd::Mode::Wp).unwrap();
    frozen(true);
    let mut looker = Asker::start(|fd| judge(fd, Told::Fork)).unwrap();
    std::thread::scope(|scope| {
        // SAFETY: the page is mapped, and used for nothing else.
        let receives = scope.spawn(move || unsafe { libc::recv(fd, page as *mut libc::c_void, 8, 0) });
        io::Write::write_all(&mut one, &[7; 8]).unwrap();
        assert!(uffd.somebody_waits(Duration::from_secs(10)));
        assert_eq!(looker.ask(fd, Duration::from_millis(20)), Err(NoAnswer::Late));
        frozen(false);
        crate::sys::relocate::wake(&uffd, &(page..page + PAGE_SIZE));
        assert_eq!(receives.join().unwrap(), 8);
    });
    while looker.ask(fd, PATIENCE) != Ok(Ok(())) {
        std::thread::yield_now();
    }
}
