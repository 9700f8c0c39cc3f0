//! Peers that die, and peers that live on without their socket.

mod support;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::{Client, HELPER_SOCKET, Helper, Server, eventually, page, stats, stats_from};
use vmm_dedup_protocol::message::{Kind, aligned_buffer};
use vmm_dedup_protocol::{peer, socket};

/// Not a test but the part that helper processes play: publishes pages and does as it is told.
#[test]
fn helper() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let mut client = Some(Client::connect(Path::new(&path), "helper"));
    let mut memberships = vec![client.as_ref().unwrap().membership];
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match word {
            "publish" => {
                let pages: Vec<_> = (0..rest.parse().unwrap()).map(page).collect();
                let slots = client.as_mut().unwrap().publish(&pages);
                slots.iter().flatten().count().to_string()
            }
            "close" => {
                client = None;
                "closed".into()
            }
            "goodbye" => {
                client.as_ref().unwrap().send(Kind::Goodbye, &[]);
                "said".into()
            }
            "connect" => {
                client = Client::try_connect(Path::new(&path), "helper");
                memberships.extend(client.iter().map(|client| client.membership));
                if client.is_some() { "connected" } else { "refused" }.into()
            }
            // The connection stays open all the same.
            "connect-beside" => {
                std::mem::forget(client.take());
                client = Some(Client::connect(Path::new(&path), "helper"));
                memberships.push(client.as_ref().unwrap().membership);
                "connected".into()
            }
            "membership" => memberships.last().unwrap().to_string(),
            "take-over" => {
                let earlier = &memberships[..memberships.len() - 1];
                let client = client.as_mut().unwrap();
                earlier
                    .iter()
                    .for_each(|earlier| client.send(Kind::TakeOver, &earlier.to_ne_bytes()));
                client.acknowledge();
                "told".into()
            }
            other => panic!("{other}"),
        };
        println!("\n> {answer}");
        std::io::stdout().flush().unwrap();
    }
}

/// Kills a VM, and waits until its slots are free; how long it took until nothing references them.
fn a_killed_vm_frees_its_slots_within() -> Duration {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let mut vm = Helper::start("helper", &server.socket);
    assert_eq!(vm.ask("publish 500"), "500");
    assert_eq!(stats(&server.socket).store.pages_shared, 500);
    vm.kill();
    let took = eventually(|| stats(&server.socket).store.slots_limbo == 500);
    println!("in limbo after {took:?}");
    a.acknowledge();
    let account = stats(&server.socket).store;
    assert_eq!((account.pages_shared, account.slots_limbo), (0, 0));
    eventually(|| {
        a.acknowledge();
        a.release();
        stats(&server.socket).store.resident_bytes == 0
    });
    took
}

/// A busy machine may hold up one of them.
#[test]
fn a_killed_vm_frees_its_slots_within_a_second() {
    let mut three = (0..3).map(|_| a_killed_vm_frees_its_slots_within());
    assert!(three.any(|took| took < Duration::from_secs(1)));
}

#[test]
fn a_process_that_lost_its_socket_keeps_its_slots_until_it_ends() {
    let server = Server::start(|config| config.max_bytes = 10 * 4096);
    let mut a = Client::connect(&server.socket, "a");
    let mut vm = Helper::start("helper", &server.socket);
    assert_eq!(vm.ask("publish 4"), "4");
    // The VM may have found this page and mapped it without having been able to tell.
    let found = a.publish(&[page(100)])[0].unwrap();
    assert_eq!(vm.ask("close"), "closed");
    assert_eq!(vm.ask("connect"), "connected");
    a.batch(&[], &[], &[(found, -1)]);
    a.acknowledge();
    std::thread::sleep(Duration::from_millis(1200));
    a.acknowledge();
    let account = stats(&server.socket).store;
    assert_eq!((account.pages_shared, account.slots_limbo), (4, 1));
    assert_eq!(a.content(found), page(100));
    assert_eq!(
        a.publish(&(200..210).map(page).collect::<Vec<_>>())
            .iter()
            .flatten()
            .count(),
        5
    );
    vm.kill();
    eventually(|| {
        a.acknowledge();
        let account = stats(&server.socket).store;
        (account.pages_shared, account.slots_limbo) == (5, 0)
    });
}

#[test]
fn a_process_takes_over_what_it_had_before_its_connection_broke() {
    // As an orphan's, and while the store takes the connection for a live one.
    for parts in [["close", "connect"].as_slice(), &["connect-beside"]] {
        let server = Server::start(|_| ());
        let mut a = Client::connect(&server.socket, "a");
        let mut vm = Helper::start("helper", &server.socket);
        assert_eq!(vm.ask("publish 4"), "4");
        let found = a.publish(&[page(100)])[0].unwrap();
        for part in parts {
            vm.ask(part);
        }
        // What it maps over the new connection stays.
        assert_eq!(vm.ask("publish 2"), "2");
        a.batch(&[], &[], &[(found, -1)]);
        a.acknowledge();
        std::thread::sleep(Duration::from_millis(1200));
        a.acknowledge();
        let account = stats(&server.socket).store;
        assert_eq!((account.pages_shared, account.slots_limbo), (4, 1));
        assert_eq!(vm.ask("take-over"), "told");
        eventually(|| {
            a.acknowledge();
            vm.ask("take-over"); // once more is no mistake
            let account = stats(&server.socket).store;
            (account.pages_shared, account.slots_limbo) == (2, 0)
        });
        // So often a process may come again.
        for _ in 0..50 {
            assert_eq!(vm.ask("close"), "closed");
            eventually(|| vm.ask("connect") == "connected");
            vm.ask("take-over");
        }
    }
}

#[test]
fn nobody_takes_over_what_another_process_has_or_its_own_place() {
    let server = Server::start(|_| ());
    let mut vm = Helper::start("helper", &server.socket);
    assert_eq!(vm.ask("publish 4"), "4");
    let theirs: u64 = vm.ask("membership").parse().unwrap();
    vm.ask("close");
    for own in [false, true] {
        let mut evil = Client::connect(&server.socket, "evil");
        let membership = if own { evil.membership } else { theirs };
        evil.send(Kind::TakeOver, &membership.to_ne_bytes());
        assert!(evil.error().contains("of the same process"));
    }
    // Who is no member has no such number: an observer of the same process stays.
    let mut observer = support::Observer::connect(&server.socket);
    let mut other = Client::connect(&server.socket, "other");
    other.send(Kind::TakeOver, &0u64.to_ne_bytes());
    other.acknowledge();
    observer.explain("nobody", 1);
    observer.refusal();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(stats(&server.socket).store.pages_shared, 4);
}

/// The kernel says first that not all was read that the store had sent.
#[test]
fn a_goodbye_is_heard_of_who_read_nothing() {
    let server = Server::start(|_| ());
    let mut other = Client::connect(&server.socket, "other");
    other.publish(&[page(1)]);
    // More than a store lets in of one process.
    for _ in 0..50 {
        eventually(|| {
            let vm = Client::try_connect(&server.socket, "vm");
            vm.map(|vm| vm.send(Kind::Goodbye, &[])).is_some()
        });
    }
}

#[test]
fn a_process_that_says_goodbye_holds_back_nothing() {
    let server = Server::start(|_| ());
    let mut a = Client::connect(&server.socket, "a");
    let mut vm = Helper::start("helper", &server.socket);
    assert_eq!(vm.ask("publish 4"), "4");
    let found = a.publish(&[page(100)])[0].unwrap();
    assert_eq!(vm.ask("goodbye"), "said");
    a.batch(&[], &[], &[(found, -1)]);
    let took = eventually(|| {
        a.acknowledge();
        let account = stats(&server.socket).store;
        (account.pages_shared, account.slots_limbo) == (0, 0)
    });
    println!("free after {took:?}");
    // The process lives, and may come again.
    assert_eq!(vm.ask("connect"), "connected");
    assert_eq!(vm.ask("publish 3"), "3");
    assert_eq!(stats(&server.socket).store.pages_shared, 3);
}

#[test]
fn one_process_has_only_so_many_connections() {
    let server = Server::start(|config| config.max_connections_per_process = 3);
    let mut vm = Helper::start("helper", &server.socket);
    for _ in 0..2 {
        vm.ask("close");
        assert_eq!(vm.ask("connect"), "connected");
    }
    vm.ask("close");
    let mine = Client::connect(&server.socket, "a");
    drop(mine);
    assert_eq!(vm.ask("connect"), "refused");
}

/// Not a test but the part of a store in a PID namespace of its own.
#[test]
fn store_in_a_namespace() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let _server = Server::start(|config| config.socket = path.into());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

/// What names a process in all PID namespaces, where the kernel has such numbers.
fn number_abroad(pid: u32) -> Option<u64> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).unwrap();
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    peer::number_abroad(pidfd).unwrap()
}

#[test]
fn a_store_in_a_pid_namespace_of_its_own_tells_its_vms_apart_and_notices_their_ends() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("store.sock");
    let store = Command::new("unshare")
        .args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child"])
        .arg(std::env::current_exe().unwrap())
        .args(["store_in_a_namespace", "--exact", "--nocapture"])
        .env(HELPER_SOCKET, &socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn();
    let Ok(mut store) = store else {
        eprintln!("SKIPPED: unshare is missing");
        return;
    };
    let mut early = None;
    eventually(|| {
        early = store.try_wait().unwrap();
        early.is_some() || socket.exists()
    });
    if early.is_some() {
        eprintln!("SKIPPED: no PID namespace can be made here");
        return;
    }
    let Some(own) = number_abroad(std::process::id()) else {
        let ours = socket::connect(&socket).unwrap();
        let mut buffer = aligned_buffer();
        let record = socket::receive(&ours, &mut buffer)
            .unwrap()
            .expect("it is told why");
        let text = format!("{:?}", record.parse(&buffer).unwrap());
        store.kill().and_then(|()| store.wait()).unwrap();
        assert!(text.contains("outside of the store's PID namespace"), "{text}");
        return;
    };
    let mut a = Client::connect(&socket, "helper");
    let mut vm = Helper::start("helper", &socket);
    assert_eq!(vm.ask("publish 500"), "500");
    let (one, other) = (stats(&socket), stats_from(&socket, stats(&socket).next));
    let number = number_abroad(vm.pid()).unwrap();
    let mut vms = [one, other].map(|vm| (vm.pid, vm.name.text().to_owned()));
    vms.sort_by_key(|(pid, _)| *pid != own);
    assert_eq!(
        vms,
        [(own, "helper".to_owned()), (number, format!("helper.{number}"))]
    );
    vm.kill();
    eventually(|| {
        a.acknowledge();
        let account = stats(&socket).store;
        (account.pages_shared, account.slots_limbo) == (0, 0)
    });
    // Connections are counted for each process all the same.
    let many: Vec<_> = (1..32).map(|_| Client::try_connect(&socket, "more")).collect();
    assert!(many.iter().all(Option::is_some));
    assert!(Client::try_connect(&socket, "toomany").is_none());
    assert_eq!(Helper::start("helper", &socket).ask("publish 1"), "1");
    store.kill().and_then(|()| store.wait()).unwrap();
}

#[test]
fn a_name_is_its_first_processs_as_long_as_that_lives() {
    let server = Server::start(|_| ());
    let mut first = Helper::start("helper", &server.socket);
    assert_eq!(first.ask("publish 1"), "1");
    assert_eq!(first.ask("close"), "closed");
    eventually(|| stats(&server.socket).vms == 0);
    let _impostor = Client::connect(&server.socket, "helper");
    let name = stats(&server.socket).name.text().to_owned();
    assert_eq!(name, format!("helper.{}", std::process::id()));
    assert_eq!(first.ask("connect"), "connected");
    let names = || {
        let one = stats(&server.socket);
        let other = stats_from(&server.socket, one.next);
        [one.name.text().to_owned(), other.name.text().to_owned()]
    };
    eventually(|| names().contains(&"helper".to_owned()));
    // Who had to be told apart from it has the name after it: a VM that is started anew may come before its last process has gone.
    first.kill();
    eventually(|| stats(&server.socket).name.text() == "helper");
}
