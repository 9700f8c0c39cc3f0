//! Keys: CRC32C of whole pages. The CPU makes the same, so that a key stays what it is when a device fails.

use super::DsaEngine;
use super::page::PAGE;
use std::sync::atomic::Ordering;
use vmm_dedup::compare::{Answer, Error, Keys, PageId, PageView, Pages};
use vmm_dedup_dsa_abi::Descriptor;
use vmm_dedup_protocol::PAGE_SIZE;

/// The CPU's key of a page, which may be torn.
pub(super) fn key_by_cpu(view: &PageView) -> u64 {
    let mut bytes = [0; PAGE_SIZE];
    for (to, word) in bytes.chunks_exact_mut(8).zip(view) {
        to.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
    crc32c::crc32c(&bytes).into()
}

impl Keys for DsaEngine {
    fn keys(&mut self, pages: &dyn Pages, of: &[PageId]) -> Vec<Answer<u64>> {
        if let Err(error) = self.alive() {
            return of.iter().map(|_| Err(error.clone())).collect();
        }
        let watch = self.watch();
        let views: Vec<Option<&PageView>> = of.iter().map(|page| pages.view(*page)).collect();
        let make = |engine: &Self, queue: usize, job: usize| {
            let address = engine.address(queue, of[job], views[job]?)?;
            Descriptor::crc(address, PAGE, 0).ok()
        };
        let keys = self.run(of.len(), make, |_, record| record.crc());
        let mut by_cpu = 0;
        let answers = (of.iter().zip(views).zip(keys))
            .map(|((page, view), by_device)| {
                match (by_device, view) {
                    (Some(crc), _) => Ok(crc.into()),
                    // The device was not given it, or failed.
                    (None, Some(view)) if self.may_read(*page) => {
                        by_cpu += 1;
                        Ok(key_by_cpu(view))
                    }
                    (None, _) => Err(Error::Fault(*page)),
                }
            })
            .collect();
        self.past.cpu_instead += by_cpu;
        let lines = of.len() as u64 * (u64::from(PAGE) / 64);
        self.account.pages += of.len() as u64;
        self.account.lines += lines;
        self.account.bytes += lines * 64;
        self.stop(&watch);
        answers
    }
}
