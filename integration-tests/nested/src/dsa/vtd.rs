//! Addresses of processes in QEMU's IOMMU: what the protocol does not tell the device (Intel, "Virtualization Technology for
//! Directed I/O", 9: scalable mode; the page tables are the CPU's).

use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use vmm_dedup_dsa_abi::Pasid;
use vmm_dedup_dsa_server::Translate;

/// Where QEMU's IOMMU has the register with the root table's address.
const ROOT_REGISTER: &str = "xp /1gx 0xfed90020";
/// How often it is looked at. Linux sets it once, long before the device is used.
const POLL: Duration = Duration::from_millis(100);

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const PRESENT: u64 = 1;
const WRITABLE: u64 = 2;
const LARGE: u64 = 1 << 7;
/// Of a PASID's entry: the CPU's page tables.
const FIRST_STAGE: u64 = 1;

/// The IOMMU's tables, for one device on bus 0.
#[derive(Debug)]
pub(super) struct Vtd {
    device: u8,
    root: AtomicU64,
}

impl Vtd {
    /// Learns from QEMU's monitor where the tables are, in a thread of its own: QEMU may be waiting for the device while the
    /// device works.
    pub(super) fn follow(monitor: &Path, device: u8) -> io::Result<Arc<Self>> {
        let own = Arc::new(Self {
            device,
            root: AtomicU64::new(0),
        });
        let (shared, monitor) = (Arc::clone(&own), monitor.to_owned());
        std::thread::Builder::new()
            .name("monitor".into())
            .spawn(move || shared.ask(&monitor))?;
        Ok(own)
    }

    /// Asks until QEMU has gone.
    fn ask(&self, monitor: &PathBuf) {
        let mut stream = loop {
            match UnixStream::connect(monitor) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(POLL),
            }
        };
        let Ok(reader) = stream.try_clone() else { return };
        let mut lines = BufReader::new(reader).lines().map_while(Result::ok);
        let mut call = |command: Value| -> Option<Value> {
            writeln!(stream, "{command}").ok()?;
            lines.find_map(|line| {
                let answer: Value = serde_json::from_str(&line).ok()?;
                answer.get("return").cloned()
            })
        };
        if call(json!({ "execute": "qmp_capabilities" })).is_none() {
            return;
        }
        let look =
            json!({ "execute": "human-monitor-command", "arguments": { "command-line": ROOT_REGISTER } });
        while let Some(answer) = call(look.clone()) {
            let text = answer.as_str().unwrap_or_default();
            let number = text.split("0x").last().unwrap_or_default().trim();
            if let Ok(root) = u64::from_str_radix(number, 16) {
                self.root.store(root & ADDRESS, Ordering::Release);
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Translate for Vtd {
    fn translate(
        &self,
        space: Pasid,
        address: u64,
        write: bool,
        word: &dyn Fn(u64) -> Option<u64>,
    ) -> Option<u64> {
        let present = |entry: u64| (entry & PRESENT != 0).then_some(entry & ADDRESS);
        let root = self.root.load(Ordering::Acquire);
        let (device, pasid) = (u64::from(self.device), u64::from(space.number()));
        // Root entries have two words, for the lower and the upper half of a bus's devices.
        let contexts = present(word(root + device / 128 * 8)?)?;
        let directory = present(word(contexts + device % 128 * 32)?)?;
        let table = present(word(directory + (pasid >> 6) * 8)?)?;
        let entry = table + (pasid & 63) * 64;
        let kind = word(entry)?;
        if kind & PRESENT == 0 || kind >> 6 & 7 != FIRST_STAGE {
            return None;
        }
        let pointer = word(entry + 16)?;
        let levels = 4 + (pointer >> 2 & 1);
        let mut table = pointer & ADDRESS;
        for level in (0..levels).rev() {
            let shift = 12 + 9 * level;
            let entry = word(table + (address >> shift & 511) * 8)?;
            if entry & PRESENT == 0 || write && entry & WRITABLE == 0 {
                return None;
            }
            if level == 0 || entry & LARGE != 0 {
                let within = (1 << shift) - 1;
                return Some(entry & ADDRESS & !within | address & within);
            }
            table = entry & ADDRESS;
        }
        None
    }
}
