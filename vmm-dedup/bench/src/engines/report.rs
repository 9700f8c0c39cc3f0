//! What `bench engines` prints.

use super::keys::Keys;
use super::merging::Merging;
use super::searching::Searching;
use super::service::Service;
use crate::plots::Plot;
use serde::Serialize;
use vmm_dedup_host::say;

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    mib: u32,
    slots: u32,
    kernel: String,
    pub(super) merging: Vec<Merging>,
    pub(super) keys: Vec<Keys>,
    pub(super) searching: Vec<Searching>,
    pub(super) service: Vec<Service>,
}

impl Report {
    pub(super) fn new(mib: u32, slots: u32) -> Self {
        Self {
            mib,
            slots,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            merging: Vec::new(),
            keys: Vec::new(),
            searching: Vec::new(),
            service: Vec::new(),
        }
    }

    pub(super) fn plots(&self) -> Vec<Plot> {
        let merging = self
            .merging
            .iter()
            .map(|m| (m.content.clone(), m.engine.to_owned(), m.cpu_ns_per_page));
        let searching = self
            .searching
            .iter()
            .map(|s| (s.engine.to_owned(), "search".to_owned(), s.cpu_ns_per_search));
        let service = self.service.iter().flat_map(|s| {
            [
                (s.engine.to_owned(), "search".to_owned(), s.search_ns_per_page),
                (s.engine.to_owned(), "all".to_owned(), s.all_ns_per_page),
            ]
        });
        vec![
            Plot::bars(
                "engines-merging",
                "KSM's algorithm: CPU time for a page",
                "ns",
                merging,
            ),
            Plot::bars(
                "engines-searching",
                "CPU time for a search in a large tree",
                "ns",
                searching,
            ),
            Plot::bars(
                "engines-service",
                "The service: CPU time for a page",
                "ns",
                service,
            ),
        ]
    }

    pub(super) fn print(&self) {
        say!("KSM's algorithm, {} MiB, Linux {}", self.mib, self.kernel);
        say!(
            "content         engine               pages/s  cpu ns/page  device ns  bytes/page  cmp/search   saved  same"
        );
        for m in &self.merging {
            say!(
                "{:<15} {:<19} {:>8.0} {:>12.0} {:>10.0} {:>11.0} {:>11.1} {:>7}  {}",
                m.content,
                m.engine,
                m.pages_per_s,
                m.cpu_ns_per_page,
                m.device_cpu_ns_per_page,
                m.bytes_per_page,
                m.comparisons_per_search,
                m.saved_pages,
                yes(m.same_merges)
            );
        }
        for m in &self.merging {
            if let Some(lines) = &m.lines {
                say!(
                    "{:<15} memcmp reads {:.1} lines; {:.1} % end in the first, {:.1} % read all 64",
                    m.content,
                    lines.mean,
                    lines.first_line * 100.0,
                    lines.all_lines * 100.0
                );
            }
            if let Some(cycles) = &m.cycles {
                say!("{:<15} {}: {cycles}", m.content, m.engine);
            }
            if let Some(costs) = &m.pagecmp {
                say!(
                    "{:<15} {} cuts the bandwidth of comparing by {:.1}, with keys by {:.2}",
                    m.content,
                    m.engine,
                    costs.bandwidth_cut,
                    costs.bandwidth_cut_with_keys
                );
            }
        }
        say!("\nkeys before and after writes: to every second page, or by guests");
        say!("content         key               write     bytes  matches  mismatches  false positives");
        for k in &self.keys {
            say!("{k}");
        }
        say!("\nsearching a tree of {} pages", self.slots);
        say!("engine               searches/s  cpu ns/search  of the CPU's  device ns  cmp/search  same");
        for s in &self.searching {
            say!(
                "{:<19} {:>11.0} {:>14.0} {:>13.2} {:>10.0} {:>11.1}  {}",
                s.engine,
                s.searches_per_s,
                s.cpu_ns_per_search,
                s.cpu_of_cpus,
                s.device_cpu_ns_per_search,
                s.comparisons_per_search,
                yes(s.same_answers)
            );
        }
        for s in &self.searching {
            if let Some(c) = &s.cycles {
                say!("{}: {c}", s.engine);
            }
        }
        say!("\nthe service on a store of {} pages", self.slots);
        say!("engine               search ns/page  of the CPU's  all ns/page  of the CPU's");
        for s in &self.service {
            say!(
                "{:<19} {:>15.0} {:>13.2} {:>12.0} {:>13.2}",
                s.engine,
                s.search_ns_per_page,
                s.search_of_cpus,
                s.all_ns_per_page,
                s.all_of_cpus
            );
        }
    }
}

fn yes(answer: bool) -> &'static str {
    if answer { "yes" } else { "NO" }
}
