//! How soon files that several guests have read are shared, and for what: without hints, by what the VMM notes of its reads, and by what
//! agents say. Memory of this process stands for the guests'; a quarter of it holds the same files in all of them, each fourth 2 MiB.
//!
//! `cargo run --release -p vmm-dedup-integration-tests --bin hints -- --rounds 3`
//!
//! With `--life` files are dropped again after some seconds; see [`short_lived`].

mod short_lived;

use clap::Parser;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vmm_dedup::{AgentSocket, Config, DedupService};
use vmm_dedup_agent_wire::message::Sources;
use vmm_dedup_agent_wire::said::{Kind, Said};
use vmm_dedup_integration_tests::agent::Agent;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;

const CHUNK: usize = 512;
/// Where guests see their memory.
const GUEST: u64 = 0x4000_0000;
/// Nothing takes longer.
const PATIENCE: Duration = Duration::from_secs(300);

#[derive(Parser)]
#[command(about)]
struct Args {
    /// Guests.
    #[arg(long, default_value_t = 4)]
    guests: usize,
    /// MiB of each.
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// CPU budget of each service.
    #[arg(long, default_value_t = Config::default().cpu_percent)]
    cpu_percent: u32,
    /// How often all is measured.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Files are read again and again, and dropped after so many seconds: how much of what `estimate` sees then is shared.
    #[arg(long)]
    life: Option<f64>,
    /// How long after a read agents tell of it, with --life: a round over 256 MiB at an agent's share takes 5 s.
    #[arg(long, default_value_t = 5.0)]
    agents_after: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hints {
    None,
    Reads,
    Agents,
}

/// What a 2 MiB of a guest holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    Files,
    /// What programs and files have left, the same in all guests.
    Free,
    Programs,
}

fn holds(chunk: usize) -> Holds {
    match chunk % 4 {
        3 => Holds::Files,
        1 => Holds::Free,
        _ => Holds::Programs,
    }
}

fn main() {
    let args = Args::parse();
    if let Some(life) = args.life {
        short_lived::measure_all(&args, Duration::from_secs_f64(life));
        return;
    }
    println!("hints   seconds to nine tenths   CPU s   pages keyed   merged   of files");
    for _ in 0..args.rounds {
        for hints in [Hints::None, Hints::Reads, Hints::Agents] {
            measure(&args, hints);
        }
    }
}

fn measure(args: &Args, hints: Hints) {
    let store = StoreThread::start();
    let config = Config {
        cpu_percent: args.cpu_percent,
        ..Config::default()
    };
    let folder = tempfile::tempdir().expect("a folder");
    let mut guests: Vec<(Pages, DedupService)> = Vec::new();
    let mut agents = Vec::new();
    let chunks = args.mib / 2;
    for guest in 0..args.guests {
        let pages = Pages::map(args.mib << 8);
        for page in 0..pages.count() {
            let own = match holds(page / CHUNK) {
                Holds::Programs => (guest as u64 + 1) << 40,
                _ => 0,
            };
            pages.fill(page, own + page as u64 + 1);
        }
        let mut service = pages
            .serve_at(&store.socket(), config.clone(), GUEST)
            .expect("dedup starts");
        service.pause();
        if hints == Hints::Agents {
            let socket = folder.path().join(format!("{guest}.vsock"));
            service
                .listen_to_agent(AgentSocket::Hybrid(socket.clone()))
                .expect("a thread");
            let socket = folder.path().join(format!("{guest}.vsock_9755"));
            let stream = until("a socket", || UnixStream::connect(&socket).ok());
            agents.push(Agent::greet(stream, Sources::default(), GUEST));
        }
        guests.push((pages, service));
    }
    for chunk in 0..chunks {
        let pages = chunk * CHUNK..(chunk + 1) * CHUNK;
        for agent in &mut agents {
            let kind = match holds(chunk) {
                Holds::Files => Kind::FileClean,
                Holds::Free => Kind::Free,
                Holds::Programs => Kind::Anonymous,
            };
            agent.say_of(pages.clone(), Said::new(kind));
        }
        if hints == Hints::Reads && holds(chunk) == Holds::Files {
            for (memory, service) in &guests {
                let start = memory.address(pages.start);
                service.note_read(start..start + (2 << 20));
            }
        }
    }
    if hints == Hints::Agents {
        let files = (chunks / 4 * CHUNK) as u64;
        until("word of files", || {
            let heard = |(_, service): &(Pages, DedupService)| service.stats().hints.file_clean >= files;
            guests.iter().all(heard).then_some(())
        });
    }
    let (start, cpu) = (Instant::now(), cpu_ns());
    guests.iter().for_each(|(_, service)| service.resume());
    let all = args.guests * (chunks / 4 * CHUNK);
    until("nine tenths", || {
        let shared: usize = guests.iter().map(|(pages, _)| shared_of_files(pages)).sum();
        (shared * 10 >= all * 9).then_some(())
    });
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_ns() - cpu);
    guests.iter().for_each(|(_, service)| service.pause());
    // In the middle of a pass the account is an old one.
    let accounts = guests
        .iter()
        .map(|(_, service)| service.pass().expect("it stands by"));
    let (keyed, merged) = accounts.fold((0, 0), |(keyed, merged), account| {
        (keyed + account.pages_keyed_total, merged + account.merges_total)
    });
    let of_files: usize = guests.iter().map(|(pages, _)| shared_of_files(pages)).sum();
    assert!(
        merged >= of_files as u64,
        "{merged} pages merged, {of_files} of files are"
    );
    let cpu = Duration::from_nanos(cpu).as_secs_f64();
    println!("{hints:?}   {seconds:.2}   {cpu:.3}   {keyed}   {merged}   {of_files}");
    for (pages, service) in guests {
        service.stop(false).expect("it stops");
        pages.renew();
    }
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "no {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a word of pagemap says that the store's file is in a page's place. All pages were written before, so that what is not present
/// was mapped since.
fn is_of_store(word: u64) -> bool {
    /// Documentation/admin-guide/mm/pagemap.rst: the page is present; it is a file's, or shared memory.
    const PRESENT: u64 = 1 << 63;
    const OF_FILE: u64 = 1 << 61;
    word & (PRESENT | OF_FILE) != PRESENT
}

/// Pages of files in whose place the store's file is.
fn shared_of_files(pages: &Pages) -> usize {
    let pagemap = File::open("/proc/self/pagemap").expect("/proc is there");
    let chunks = (0..pages.count() / CHUNK).filter(|chunk| holds(*chunk) == Holds::Files);
    let shared = chunks.map(|chunk| {
        let mut words = vec![0; CHUNK * 8];
        let at = pages.address(chunk * CHUNK) / 4096 * 8;
        pagemap
            .read_exact_at(&mut words, at as u64)
            .expect("our own memory");
        let words = words
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight")));
        words.filter(|word| is_of_store(*word)).count()
    });
    shared.sum()
}

/// CPU time of all threads but this one: services and store.
fn cpu_ns() -> u64 {
    let own = std::process::id().to_string();
    let tasks = std::fs::read_dir("/proc/self/task")
        .expect("/proc is there")
        .flatten();
    let others = tasks.filter(|task| task.file_name().to_string_lossy() != own);
    let times = others.filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    times.sum()
}
