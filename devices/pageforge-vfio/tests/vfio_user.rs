//! The device through its socket, with the vfio-user crate's own client.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::thread;
use vfio_user::Client;
use vmm_dedup::compare::{Answer, Arena, Engine, Error, Keys, PageId, conformance};
use vmm_dedup_pageforge::driver::{PageForgeEngine, PageForgeVerifier, VfioUser};
use vmm_dedup_pageforge::registers as reg;
use vmm_dedup_pageforge::server::{Server, ServerConfig, ServerError};
use vmm_dedup_vfio_user::ServerError as SocketError;

const BAR0: u32 = 0;
const CONFIG: u32 = 7;

/// A server in this process, for as long as the test runs.
struct Running {
    folder: tempfile::TempDir,
}

impl Running {
    fn start(config: ServerConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::bind(&folder.path().join("device"), config).unwrap();
        thread::spawn(move || server.run());
        Self { folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("device")
    }

    fn port(&self, arena: &Arena) -> VfioUser {
        let mut port = VfioUser::connect(&self.socket()).unwrap();
        port.map_arena(arena).unwrap();
        port
    }

    fn engine(&self, arena: &Arena) -> PageForgeEngine<VfioUser> {
        PageForgeEngine::new(self.port(arena))
    }
}

fn keys(engine: &mut impl Keys, arena: &Arena) -> Vec<Answer<u64>> {
    engine.keys(arena, &[PageId(0)])
}

#[test]
fn the_engine_conforms_over_the_socket() {
    let running = Running::start(ServerConfig {
        modules: 4,
        max_clients: 64,
    });
    conformance::keys(&mut |arena| Box::new(running.engine(arena)));
    conformance::tree_search(&mut |arena| Box::new(running.engine(arena)));
}

#[test]
fn the_verifier_conforms_over_the_socket() {
    let running = Running::start(ServerConfig {
        modules: 4,
        max_clients: 64,
    });
    conformance::verify(&mut |arena| Box::new(PageForgeVerifier::new(running.port(arena)).unwrap()));
}

#[test]
fn several_clients_have_devices_of_their_own() {
    let running = Running::start(ServerConfig::default());
    let arenas: Vec<Arena> = (0..4).map(|_| Arena::new(1).unwrap()).collect();
    let mut keys_of = Vec::new();
    let mut engines: Vec<_> = arenas.iter().map(|arena| running.engine(arena)).collect();
    for (n, (arena, engine)) in (0..).zip(arenas.iter().zip(&mut engines)) {
        arena.write(0, &[1 << n; 512]);
        keys_of.push(keys(engine, arena)[0].clone().unwrap());
    }
    keys_of.dedup();
    assert_eq!(keys_of.len(), 4, "each device reads its own client's memory");
    assert!(engines.iter().all(|engine| engine.account().bytes == 256));
}

#[test]
fn more_clients_than_allowed_are_hung_up_on_until_one_leaves() {
    let running = Running::start(ServerConfig {
        modules: 1,
        max_clients: 1,
    });
    let first = Client::new(&running.socket()).unwrap();
    assert!(Client::new(&running.socket()).is_err());
    drop(first);
    let start = std::time::Instant::now();
    while Client::new(&running.socket()).is_err() {
        assert!(start.elapsed().as_secs() < 60, "the place stays taken");
        thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn memory_that_is_unmapped_is_not_read_any_more() {
    let running = Running::start(ServerConfig::default());
    let arena = Arena::new(1).unwrap();
    let mut client = Client::new(&running.socket()).unwrap();
    let (bar0, at) = (BAR0, u64::from(reg::MODULES));
    let call = |client: &mut Client, function: u32| {
        client
            .region_write(bar0, at + u64::from(reg::FUNCTION), &function.to_le_bytes())
            .unwrap();
    };
    let run = |client: &mut Client| {
        // A candidate on page 0 and nothing else: its key, or a fault.
        client
            .region_write(bar0, at + u64::from(reg::LAST_REFILL), &1u32.to_le_bytes())
            .unwrap();
        call(client, reg::Function::InsertPfe as u32);
        client
            .region_write(bar0, reg::DOORBELL.into(), &1u32.to_le_bytes())
            .unwrap();
        loop {
            call(client, reg::Function::GetPfeInfo as u32);
            let mut info = [0; 4];
            client
                .region_read(bar0, at + u64::from(reg::INFO), &mut info)
                .unwrap();
            let info = u32::from_le_bytes(info);
            if info & 1 == 1 {
                return info >> 16;
            }
        }
    };
    client.dma_map(0, 0, 4096, arena.file().as_raw_fd()).unwrap();
    assert_eq!(run(&mut client), 0);
    client.dma_unmap(0, 4096).unwrap();
    assert_eq!(run(&mut client), 1, "the candidate cannot be read");
}

#[test]
fn a_reset_keeps_the_clients_memory() {
    let running = Running::start(ServerConfig::default());
    let arena = Arena::new(1).unwrap();
    let mut client = Client::new(&running.socket()).unwrap();
    client.dma_map(0, 0, 4096, arena.file().as_raw_fd()).unwrap();
    client
        .region_write(BAR0, reg::ENABLE.into(), &7u32.to_le_bytes())
        .unwrap();
    client.region_write(CONFIG, 4, &6u16.to_le_bytes()).unwrap();
    client.reset().unwrap();
    let (mut enabled, mut command) = ([0; 4], [0; 2]);
    client
        .region_read(BAR0, reg::ENABLE.into(), &mut enabled)
        .unwrap();
    client.region_read(CONFIG, 4, &mut command).unwrap();
    assert_eq!((enabled, command), ([0; 4], [0; 2]));
}

#[test]
fn a_server_that_is_gone_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let error = VfioUser::connect(&folder.path().join("nothing")).unwrap_err();
    assert!(
        error.to_string().contains("start a PageForge device there"),
        "{error}"
    );
}

#[test]
fn pages_that_the_device_was_not_given_are_faults() {
    let running = Running::start(ServerConfig::default());
    let arena = Arena::new(1).unwrap();
    let mut engine = PageForgeEngine::new(VfioUser::connect(&running.socket()).unwrap());
    assert_eq!(keys(&mut engine, &arena), [Err(Error::Fault(PageId(0)))]);
}

#[test]
fn a_path_in_use_is_refused_and_the_socket_goes_with_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device");
    let server = Server::bind(&path, ServerConfig::default()).unwrap();
    let second = Server::bind(&path, ServerConfig::default());
    assert!(matches!(second, Err(ServerError::Socket(SocketError::Exists(_)))));
    drop(server);
    assert!(!path.exists());
    let none = ServerConfig {
        modules: 0,
        ..ServerConfig::default()
    };
    assert!(matches!(Server::bind(&path, none), Err(ServerError::Modules(0))));
}
