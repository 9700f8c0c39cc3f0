//! Files that guests read and drop again: how much of what `estimate` sees just before they are dropped is shared by then.
//!
//! Three quarters of each guest hold programs, which are the same in no two; a quarter holds files, each fourth 2 MiB. All guests read the
//! same files at the same time, keep them for a while, and drop them; what is read next takes their frames. Services run all the time, as
//! they do: nothing tells them when a round begins. Agents do not tell at once, since a real one is on its round.

use crate::{Args, CHUNK, GUEST, Hints, cpu_ns, until};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vmm_dedup::{AgentSocket, Config, DedupService};
use vmm_dedup_agent_wire::message::Sources;
use vmm_dedup_agent_wire::said::{Kind, Said};
use vmm_dedup_estimate::{Memory, Reading, Sample, estimate};
use vmm_dedup_integration_tests::agent::Agent;
use vmm_dedup_integration_tests::memory::Pages;
use vmm_dedup_integration_tests::store::StoreThread;
use vmm_dedup_protocol::PAGE_SIZE;

/// After files were dropped, and before others are read.
const BETWEEN: Duration = Duration::from_secs(5);
/// Before the first: by then services have seen all programs.
const FIRST: Duration = Duration::from_secs(20);

pub(crate) fn measure_all(args: &Args, life: Duration) {
    println!(
        "hints   round   saved at half of the life, at its end   estimate sees   found   CPU s of the life"
    );
    for hints in [Hints::None, Hints::Reads, Hints::Agents] {
        let mut guests = Guests::start(args, hints);
        std::thread::sleep(FIRST);
        for round in 1..=args.rounds {
            guests.measure(args, round, life);
        }
        guests.stop();
    }
}

struct Guests {
    hints: Hints,
    services: Vec<(Pages, DedupService)>,
    agents: Vec<Agent>,
    /// Chunks of each guest.
    chunks: usize,
    // Behind what uses them.
    folder: tempfile::TempDir,
    _store: StoreThread,
}

impl Guests {
    fn start(args: &Args, hints: Hints) -> Self {
        let store = StoreThread::start();
        let folder = tempfile::tempdir().expect("a folder");
        let config = Config {
            cpu_percent: args.cpu_percent,
            ..Config::default()
        };
        let (mut services, mut agents) = (Vec::new(), Vec::new());
        for guest in 0..args.guests {
            let pages = Pages::map(args.mib << 8);
            for page in 0..pages.count() {
                pages.fill(page, (guest as u64 + 1) << 40 | page as u64);
            }
            let mut service = pages
                .serve_at(&store.socket(), config.clone(), GUEST)
                .expect("dedup starts");
            // As a VMM does: what the kernel copied can be merged again only then.
            service.vouch_for_pins();
            if hints == Hints::Agents {
                let socket = folder.path().join(format!("{guest}.vsock"));
                service
                    .listen_to_agent(AgentSocket::Hybrid(socket.clone()))
                    .expect("a thread");
                let socket = folder.path().join(format!("{guest}.vsock_9755"));
                let stream = until("a socket", || UnixStream::connect(&socket).ok());
                let mut agent = Agent::greet(stream, Sources::default(), GUEST);
                for chunk in 0..args.mib / 2 {
                    let kind = if is_files(chunk) {
                        Kind::Free
                    } else {
                        Kind::Anonymous
                    };
                    agent.say_of(chunk * CHUNK..(chunk + 1) * CHUNK, Said::new(kind));
                }
                agents.push(agent);
            }
            services.push((pages, service));
        }
        Self {
            hints,
            services,
            agents,
            chunks: args.mib / 2,
            folder,
            _store: store,
        }
    }

    fn files(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.chunks).filter(|chunk| is_files(*chunk))
    }

    fn measure(&mut self, args: &Args, round: usize, life: Duration) {
        let (start, cpu) = (Instant::now(), cpu_ns());
        self.read(round);
        if self.hints == Hints::Agents {
            sleep_until(start + Duration::from_secs_f64(args.agents_after).min(life));
            self.tell(Kind::FileClean);
        }
        sleep_until(start + life / 2);
        let half = self.saved();
        sleep_until(start + life);
        let saved = self.saved();
        let cpu = Duration::from_nanos(cpu_ns() - cpu).as_secs_f64();
        // Nothing changes what pages hold until the next are read, so that looking may take its time.
        let seen = self.estimate();
        let found = saved as f64 / seen as f64 * 100.0;
        println!(
            "{:?}   {round}   {half}, {saved}   {seen}   {found:.1} %   {cpu:.3}",
            self.hints
        );
        self.tell(Kind::Free);
        std::thread::sleep(BETWEEN);
    }

    /// Every guest reads the files of a round; its VMM notes it, if it does.
    fn read(&self, round: usize) {
        for (memory, service) in &self.services {
            for chunk in self.files() {
                for page in chunk * CHUNK..(chunk + 1) * CHUNK {
                    memory.fill(page, (round as u64) << 32 | page as u64);
                }
                if self.hints == Hints::Reads {
                    let start = memory.address(chunk * CHUNK);
                    service.note_read(start..start + CHUNK * PAGE_SIZE);
                }
            }
        }
    }

    /// Agents, if there are some, say what the files' frames are.
    fn tell(&mut self, kind: Kind) {
        for chunk in self.files() {
            for agent in &mut self.agents {
                agent.say_of(chunk * CHUNK..(chunk + 1) * CHUNK, Said::new(kind));
            }
        }
        self.agents.iter_mut().for_each(Agent::listen);
    }

    /// Pages that sharing of files has freed: of each file's page, those that are shared but for the one that the store has.
    fn saved(&self) -> u64 {
        let pagemap = File::open("/proc/self/pagemap").expect("/proc is there");
        let shared: Vec<Vec<bool>> = self
            .services
            .iter()
            .map(|(pages, _)| shared(&pagemap, pages))
            .collect();
        let files = self.files().flat_map(|chunk| chunk * CHUNK..(chunk + 1) * CHUNK);
        let saved = files.map(|page| {
            let sharing = shared.iter().filter(|shared| shared[page]).count() as u64;
            sharing.saturating_sub(1)
        });
        saved.sum()
    }

    /// Pages that sharing would free, as `estimate` says of the guests' memory.
    fn estimate(&self) -> u64 {
        let dump = |(guest, (pages, _)): (usize, &(Pages, DedupService))| {
            let path = self.folder.path().join(format!("{guest}.raw"));
            let mut out = BufWriter::new(File::create(&path).expect("there is room"));
            for page in 0..pages.count() {
                for word in 0..PAGE_SIZE / 8 {
                    out.write_all(&pages.load(page, word).to_le_bytes())
                        .expect("there is room");
                }
            }
            out.flush().expect("there is room");
            Memory::of_file(&path).expect("it was just written")
        };
        let memories: Vec<Memory> = self.services.iter().enumerate().map(dump).collect();
        let reading = Reading {
            threads: 1,
            progress: &|_, _| (),
        };
        let report = estimate(&memories, Sample::ALL, &reading).expect("they can be read");
        report.total.duplicates.pages
    }

    fn stop(self) {
        for (pages, service) in self.services {
            service.stop(false).expect("it stops");
            pages.renew();
        }
    }
}

fn is_files(chunk: usize) -> bool {
    chunk % 4 == 3
}

fn sleep_until(at: Instant) {
    std::thread::sleep(at.saturating_duration_since(Instant::now()));
}

/// For each page, whether the store's file is in its place.
fn shared(pagemap: &File, pages: &Pages) -> Vec<bool> {
    let mut words = vec![0; pages.count() * 8];
    let at = (pages.address(0) / PAGE_SIZE * 8) as u64;
    pagemap.read_exact_at(&mut words, at).expect("our own memory");
    let words = words
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().expect("eight")));
    words.map(crate::is_of_store).collect()
}
