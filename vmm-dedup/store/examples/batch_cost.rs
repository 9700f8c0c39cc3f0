//! What the store's work costs, through a real socket: CPU nanoseconds of the store's process per sighting, per
//! withdrawal and per published page. `cargo run --release -p vmm-dedup-store --example batch_cost`
//!
//! The store runs in a process of its own (this program, started again), so that its CPU time is its own.

use std::process::{Command, Stdio};
use std::time::Duration;
use vmm_dedup_store::{Config, Store};

#[path = "../tests/support/mod.rs"]
mod support;
use support::{Client, page, stats};

const ROUNDS: u64 = 480;
const BATCH: u64 = 2048;

fn main() {
    if let Some(path) = std::env::args().nth(1) {
        let config = Config {
            socket: path.into(),
            metrics: None,
            max_vm_pages: 1 << 30,
            ..Config::default()
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let store = Store::bind(config).expect("a store");
            store.run(std::future::pending()).await.expect("a running store");
        });
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("store.sock");
    let mut store = Command::new(std::env::current_exe().expect("this program"))
        .arg(&socket)
        .stdin(Stdio::null())
        .spawn()
        .expect("the store's process");
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut client = Client::connect_with(&socket, "bench", 1 << 28);
    let cpu = || stats(&socket).store.cpu_ns;
    let measure = |what: &str, n: u64, work: &mut dyn FnMut()| {
        let before = cpu();
        work();
        #[allow(clippy::cast_precision_loss)]
        let each = (cpu() - before) as f64 / n as f64;
        println!("{what:<28} {each:8.1} ns CPU of the store each ({n})");
    };
    let key = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 17;
    let keys = |round: u64, full: u64| -> Vec<u64> {
        (round * BATCH..(round + 1) * BATCH)
            .map(|n| key(n) | full << 47)
            .collect()
    };
    let n = ROUNDS * BATCH;
    measure("line key sighted first", n, &mut || {
        (0..ROUNDS).for_each(|round| _ = client.batch(&keys(round, 0), &[], &[]));
    });
    measure("line key withdrawn", n, &mut || {
        (0..ROUNDS).for_each(|round| _ = client.batch(&[], &keys(round, 0), &[]));
    });
    measure("whole-page key sighted first", n, &mut || {
        (0..ROUNDS).for_each(|round| _ = client.batch(&keys(round, 1), &[], &[]));
    });
    measure("line key marked (2 sightings)", n / 4, &mut || {
        for round in (0..ROUNDS / 4).flat_map(|round| [round, round]) {
            let _ = client.batch(&keys(round, 0), &[], &[]);
        }
    });
    let mut slots = Vec::new();
    measure("page published, new memory", 200 * 512, &mut || {
        for round in 0..200 {
            let pages: Vec<_> = (round * 512..(round + 1) * 512).map(page).collect();
            slots.extend(client.publish(&pages).into_iter().flatten());
        }
    });
    let changes = |delta: i32| slots.iter().map(move |slot| (*slot, delta)).collect::<Vec<_>>();
    let (more, less) = (changes(1), changes(-1));
    measure("reference taken", slots.len() as u64, &mut || {
        more.chunks(2048)
            .for_each(|some| _ = client.batch(&[], &[], some));
    });
    measure("reference dropped", slots.len() as u64, &mut || {
        less.chunks(2048)
            .for_each(|some| _ = client.batch(&[], &[], some));
    });
    // One slot in 4096 stays, so that the segments, and their memory, stay too.
    let less: Vec<_> = less
        .into_iter()
        .filter(|(slot, _)| !slot.number().is_multiple_of(4096))
        .collect();
    measure("slot dropped and freed", less.len() as u64, &mut || {
        less.chunks(2048)
            .for_each(|some| _ = client.batch(&[], &[], some));
        client.acknowledge();
    });
    measure("page published, warm memory", 190 * 512, &mut || {
        for round in 200..390 {
            let pages: Vec<_> = (round * 512..(round + 1) * 512).map(page).collect();
            assert!(client.publish(&pages).iter().all(Option::is_some));
        }
    });
    store.kill().expect("the store's process ends");
    store.wait().expect("it has ended");
}
