//! The least that shares: memory of which each page is there twice. It says how many pages share the store's, or why none does:
//! `cargo run -p vmm-dedup --example smallest -- /run/vmm-dedup/store.sock`

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_dedup::{Config, DedupService};

const PAGE_SIZE: usize = 4096;
const PAGES: usize = 64;
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let Some(store) = std::env::args_os().nth(1) else {
        eprintln!("usage: smallest SOCKET_OF_A_STORE");
        return ExitCode::FAILURE;
    };
    match share(Path::new(&store)) {
        Ok(shared) => {
            println!("{shared} of {PAGES} pages share memory");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("no dedup: {error}");
            ExitCode::FAILURE
        }
    }
}

fn share(store: &Path) -> Result<u64, Box<dyn std::error::Error>> {
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), PAGES * PAGE_SIZE)])?;
    for page in 0..PAGES {
        let content = format!("page {:060}\n", page / 2).repeat(PAGE_SIZE / 66);
        memory.write_slice(content.as_bytes(), GuestAddress((page * PAGE_SIZE) as u64))?;
    }
    let config = Config {
        name: "smallest".into(),
        pass_period_ms: 20,
        ..Config::default()
    };
    let service = DedupService::start(Arc::new(memory), store, config)?;
    let start = Instant::now();
    while service.stats().pages_mapped < PAGES as u64 && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
    }
    let shared = service.stats().pages_mapped;
    service.stop(true)?;
    Ok(shared)
}
