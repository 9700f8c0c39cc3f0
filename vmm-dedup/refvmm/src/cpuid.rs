//! What CPUID tells the guest: what KVM supports here, with this VM's topology (one package of single-threaded
//! cores whose APIC ids are their numbers), but for what guests need to run guests: they cannot. So KVM never has their memory
//! pinned, which the dedup service is told.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use crate::error::Error;

/// In leaf 1, and in leaf 0x80000001: the guest could run guests (VMX, SVM). KVM refuses what it was not offered.
const VMX: u32 = 1 << 5;
const SVM: u32 = 1 << 2;
const SVM_LEAF: u32 = 0x8000_000a;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
const MULTI_THREADING: u32 = 1 << 28;
const SIGNIFICANT_INDEX: u32 = 1;
const LEVEL_SMT: u32 = 1 << 8;
const LEVEL_CORE: u32 = 2 << 8;
const HYPERVISOR_LEAVES: u32 = 0x4000_0000;
const TIMING_LEAF: u32 = 0x4000_0010;
/// The local APIC timer's frequency in KVM.
const APIC_KHZ: u32 = 1_000_000;

/// CPUID for all vCPUs of a VM.
pub(crate) struct Template {
    entries: Vec<kvm_cpuid_entry2>,
    vcpus: u32,
    deadline_timer: bool,
    tsc_khz: Option<u32>,
}

impl Template {
    pub(crate) fn new(kvm: &Kvm, vcpus: u8, tsc_khz: Option<u32>) -> Result<Self, Error> {
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(Error::kvm("tell the CPUID it supports"))?;
        Ok(Template {
            entries: supported.as_slice().to_vec(),
            vcpus: u32::from(vcpus),
            deadline_timer: kvm.check_extension(Cap::TscDeadlineTimer),
            tsc_khz,
        })
    }

    /// CPUID of vCPU number `id`.
    pub(crate) fn for_vcpu(&self, id: u8) -> Result<CpuId, Error> {
        let entries = self.entries_for(u32::from(id));
        CpuId::from_entries(&entries).map_err(|_| Error::Kvm {
            operation: "take that many CPUID leaves",
            source: kvm_ioctls::Error::new(libc::E2BIG),
        })
    }

    fn entries_for(&self, id: u32) -> Vec<kvm_cpuid_entry2> {
        let id_bits = self.vcpus.next_power_of_two().ilog2();
        let mut entries = self.entries.clone();
        // The topology leaves are written anew.
        let topology_leaf = entries.iter().any(|entry| entry.function == 0xb);
        entries.retain(|entry| ![0xb, 0x1f, SVM_LEAF].contains(&entry.function));
        for entry in &mut entries {
            match entry.function {
                1 => {
                    entry.ebx = (entry.ebx & 0xffff) | (self.vcpus.next_power_of_two() << 16) | (id << 24);
                    entry.ecx = (entry.ecx & !VMX) | HYPERVISOR;
                    if self.deadline_timer {
                        entry.ecx |= TSC_DEADLINE;
                    }
                    if self.vcpus > 1 {
                        entry.edx |= MULTI_THREADING;
                    }
                }
                4 if entry.eax & 0x1f != 0 => {
                    let last_level = (entry.eax >> 5) & 7 >= 3;
                    let sharing = if last_level { self.vcpus - 1 } else { 0 };
                    entry.eax = (entry.eax & 0x3fff) | (sharing << 14) | ((self.vcpus - 1) << 26);
                }
                0x8000_0001 => entry.ecx &= !SVM,
                0x8000_0008 => entry.ecx = (entry.ecx & !0xf0ff) | (self.vcpus - 1) | (id_bits << 12),
                0x8000_001e => {
                    entry.eax = id;
                    entry.ebx = id;
                    entry.ecx = 0;
                }
                HYPERVISOR_LEAVES if self.tsc_khz.is_some() => entry.eax = entry.eax.max(TIMING_LEAF),
                _ => {}
            }
        }
        if topology_leaf {
            let level = |index, shift, count, kind| kvm_cpuid_entry2 {
                function: 0xb,
                index,
                flags: SIGNIFICANT_INDEX,
                eax: shift,
                ebx: count,
                ecx: index | kind,
                edx: id,
                ..Default::default()
            };
            entries.push(level(0, 0, 1, LEVEL_SMT));
            entries.push(level(1, id_bits, self.vcpus, LEVEL_CORE));
        }
        if let Some(khz) = self.tsc_khz {
            entries.retain(|entry| entry.function != TIMING_LEAF);
            entries.push(kvm_cpuid_entry2 {
                function: TIMING_LEAF,
                eax: khz,
                ebx: APIC_KHZ,
                ..Default::default()
            });
        }
        entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template() -> Template {
        let leaf = |function| kvm_cpuid_entry2 {
            function,
            ..Default::default()
        };
        let mut caches = leaf(4);
        caches.eax = 0x163; // a third-level cache
        let all = |function| kvm_cpuid_entry2 {
            ecx: u32::MAX,
            ..leaf(function)
        };
        Template {
            entries: vec![
                all(1),
                caches,
                leaf(0xb),
                leaf(0x1f),
                leaf(0x4000_0000),
                all(0x8000_0001),
                leaf(0x8000_000a),
            ],
            vcpus: 3,
            deadline_timer: true,
            tsc_khz: Some(2_100_000),
        }
    }

    fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        let mut found = entries
            .iter()
            .filter(|entry| entry.function == function && entry.index == index);
        *found.next().expect("the leaf is there")
    }

    #[test]
    fn every_vcpu_has_its_own_apic_id() {
        let entries = template().entries_for(2);

        assert_eq!(find(&entries, 1, 0).ebx >> 24, 2);
        assert_eq!(find(&entries, 0xb, 0).edx, 2);
        assert_eq!(find(&entries, 0xb, 1).edx, 2);
    }

    #[test]
    fn topology_is_one_package_of_single_threaded_cores() {
        let entries = template().entries_for(0);

        let (threads, cores) = (find(&entries, 0xb, 0), find(&entries, 0xb, 1));
        assert_eq!((threads.eax, threads.ebx, cores.eax, cores.ebx), (0, 1, 2, 3));
        assert_eq!(find(&entries, 4, 0).eax >> 26, 2);
        assert!(entries.iter().all(|entry| entry.function != 0x1f));
    }

    #[test]
    fn guests_cannot_run_guests() {
        let entries = template().entries_for(0);

        assert_eq!(find(&entries, 1, 0).ecx, !(1 << 5));
        assert_eq!(find(&entries, 0x8000_0001, 0).ecx, !(1 << 2));
        assert!(entries.iter().all(|entry| entry.function != 0x8000_000a));
    }

    #[test]
    fn tsc_frequency_is_in_the_timing_leaf() {
        let entries = template().entries_for(0);

        assert_eq!(find(&entries, 0x4000_0000, 0).eax, 0x4000_0010);
        assert_eq!(find(&entries, 0x4000_0010, 0).eax, 2_100_000);
    }
}
