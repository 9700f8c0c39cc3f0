//! Peers that die, and peers that live on without their socket.

mod support;

use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Duration;
use support::{Client, HELPER_SOCKET, Helper, Server, eventually, page, stats};
use vmm_dedup_protocol::message::Kind;

/// Not a test but the part that helper processes play: publishes pages and does as it is told.
#[test]
fn helper() {
    let Ok(path) = std::env::var(HELPER_SOCKET) else {
        return;
    };
    let mut client = Some(Client::connect(Path::new(&path), "helper"));
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
                if client.is_some() { "connected" } else { "refused" }.into()
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
