//! The dedup service itself, searching a store of many slots by the hash index, by the CPU in the tree, and by a PageForge
//! over vfio-user: what each takes of the service's CPU.

use super::device::DeviceProcess;
use crate::content::Area;
use crate::service::{Served, with_engines};
use serde::Serialize;
use std::path::{Path, PathBuf};
use vmm_dedup::{Config, Engines, ServiceStats};
use vmm_dedup_host::Failure;
use vmm_dedup_host::store::OwnStore;

/// The name of the store's folder.
const STORE: &str = "engines-store";
/// Passes after which a measurement is given up.
const MOST_PASSES: u32 = 1000;
/// Pages of a MiB.
const MIB_PAGES: usize = 256;

/// One engine. Half of the guest's pages are in the store, half nowhere else.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Service {
    pub(super) engine: String,
    slots: u64,
    pages: u64,
    merged: u64,
    /// Pages that the engine was asked for, and those that it had to be asked for again later.
    searches: u64,
    /// CPU time of the service for a page, ns: copying into the staging buffer, searching, keys for later.
    pub(super) search_ns_per_page: f64,
    /// That, divided by what the tree takes by the CPU.
    pub(super) search_of_cpus: f64,
    /// All CPU time of the service for a page, ns: tracking, keys, merging and telling the store as well.
    pub(super) all_ns_per_page: f64,
    /// That, divided by what the service takes that searches the tree by the CPU.
    pub(super) all_of_cpus: f64,
}

pub(super) fn measure(
    slots: usize,
    candidates: usize,
    device: &DeviceProcess,
) -> Result<Vec<Service>, Failure> {
    let store = OwnStore::start_with(STORE, &["--ordered", "--metrics", "none"])?;
    let slots = slots.next_multiple_of(2 * MIB_PAGES);
    let candidates = candidates.min(slots);
    // Everything twice in one guest, so that all of it is published.
    let known = Area::with_content(false, mib(slots * 2), |page| page % slots)?;
    let teacher = serve(&known, store.socket(), "known", "index", None)?;
    until(&teacher, "the store did not fill", |stats| {
        stats.pages_mapped >= known.pages() as u64
    })?;
    let engines = [
        (0, "index", None),
        (1, "tree", None),
        (2, "pageforge", Some(device.socket())),
    ];
    let mut all: Vec<Service> = Vec::new();
    let run = |(number, search, socket): (usize, &str, Option<&Path>)| {
        let unknown = |page: usize| (page << 8 | 1 << 40) + number;
        let id = |page| {
            if page < candidates / 2 {
                page
            } else {
                unknown(page)
            }
        };
        let area = Area::with_content(false, mib(candidates), id)?;
        let service = serve(&area, store.socket(), "measured", search, socket)?;
        let stats = until(&service, "nothing was merged", |stats| {
            stats.pages_mapped >= candidates as u64 / 2 && stats.pages_keyed_total >= candidates as u64
        })?;
        service.stop(true)?;
        Ok(stats)
    };
    for engine in engines {
        let stats: ServiceStats = run(engine)?;
        let per_page = |ns: u64| ns as f64 / candidates as f64;
        all.push(Service {
            engine: stats.search.text(),
            slots: slots as u64,
            pages: candidates as u64,
            merged: stats.merges_total,
            searches: stats.searches_total,
            search_ns_per_page: per_page(stats.cpu_ns.search),
            search_of_cpus: 0.0,
            all_ns_per_page: per_page(stats.cpu_ns.total()),
            all_of_cpus: 0.0,
        });
    }
    let (search, whole) = (all[1].search_ns_per_page, all[1].all_ns_per_page);
    for service in &mut all {
        service.search_of_cpus = service.search_ns_per_page / search;
        service.all_of_cpus = service.all_ns_per_page / whole;
    }
    teacher.stop(false)?;
    Ok(all)
}

pub(crate) fn mib(pages: usize) -> u32 {
    u32::try_from(pages / MIB_PAGES).unwrap_or(u32::MAX)
}

fn serve(
    area: &Area,
    store: &Path,
    name: &str,
    search: &str,
    socket: Option<&Path>,
) -> Result<Served, Failure> {
    serve_with(area, store, name, search, socket, vmm_dedup_engines::engines())
}

/// A service on an area, which passes when it is told to.
pub(crate) fn serve_with(
    area: &Area,
    store: &Path,
    name: &str,
    search: &str,
    socket: Option<&Path>,
    engines: Engines,
) -> Result<Served, Failure> {
    let config = Config {
        name: name.to_owned(),
        pass_period_ms: 3_600_000, // passes come when they are asked for
        cpu_percent: 100,
        search: search.to_owned(),
        search_socket: socket.map(PathBuf::from),
        ..Config::default()
    };
    Served::area(area, store, config, with_engines(engines))
}

/// Lets passes follow each other until something is so.
pub(crate) fn until(
    service: &Served,
    failure: &str,
    so: impl Fn(&ServiceStats) -> bool,
) -> Result<ServiceStats, Failure> {
    for _ in 0..MOST_PASSES {
        let stats = service.pass()?;
        if so(&stats) {
            return Ok(stats);
        }
    }
    Err(Failure::new(format!(
        "{failure} within {MOST_PASSES} passes: {:?}",
        service.stats()
    )))
}
