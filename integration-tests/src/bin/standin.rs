//! A VMM as small as can be, for what real ones do rarely: it has guest memory and no guest. A test starts it with the
//! preload library and the name of a scenario; it ends with 0 if memory and errno were right all the time.
#![allow(unsafe_code)] // raw memory and system calls

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const PAGES: usize = 2048;
const LEN: usize = PAGES * PAGE;
const KVM_GET_API_VERSION: u64 = 0xae00;
const KVM_CREATE_VM: u64 = 0xae01;
const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
const KVM_SET_MEMORY_ATTRIBUTES: u64 = 0x4020_aed2;
const VFIO_IOMMU_MAP_DMA: u64 = 0x3b71;
const VHOST_VDPA_GET_DEVICE_ID: u64 = 0x8004_af70;
const VHOST_SCSI_SET_ENDPOINT: u64 = 0x40e8_af40;
const USERFAULTFD_IOC_NEW: u64 = 0xaa00;
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_COPY: u64 = 0xc028_aa03;
const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let scenario = std::env::args().nth(1).unwrap_or_default();
    if scenario == "sandboxed" {
        return sandboxed();
    }
    if let Some(open) = scenario.strip_prefix("direct_io/") {
        return direct_io(open);
    }
    let vm = Vm::start();
    match scenario.as_str() {
        "passthrough" => vm.retires(VFIO_IOMMU_MAP_DMA),
        "passthrough_and_back" => vm.comes_back_from(VFIO_IOMMU_MAP_DMA),
        "vdpa_and_back" => vm.comes_back_from(VHOST_VDPA_GET_DEVICE_ID),
        "hidden_pin" => vm.comes_back_while_a_page_is_pinned(),
        "vdpa" => vm.retires(VHOST_VDPA_GET_DEVICE_ID),
        "vhost_scsi" => vm.retires(VHOST_SCSI_SET_ENDPOINT),
        "protect" => vm.protects_a_part(),
        "confidential" => vm.retires(KVM_SET_MEMORY_ATTRIBUTES),
        "reuse" => vm.reuses_addresses_after_it_retired(),
        "unmap" => vm.unmaps_a_part(),
        "replace" => vm.replaces_a_part(),
        "move" => vm.moves(),
        "userfaultfd" => vm.registers_a_userfaultfd(),
        "postcopy" => vm.frees_memory_on_which_it_has_a_userfaultfd(),
        "fork" => vm.forks(),
        "reads" => vm.reads_what_others_hold(),
        "filtered" => vm.frees_memory_in_a_filtered_thread(),
        "shared" => vm.plugs_in_memory_that_others_map(),
        "store" => vm.outlives_its_store(),
        other => panic!("unknown scenario {other:?}"),
    }
}

/// A VMM that restricts itself before it talks to KVM.
fn sandboxed() {
    restrict(&[]);
    let vm = Vm::new();
    std::thread::sleep(Duration::from_secs(1));
    vm.check(0..PAGES);
}

/// A VMM that opens a disk for direct I/O which nobody can tell to be safe.
fn direct_io(open: &str) {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    if let Err(reason) = hide_a_disk(folder.path()) {
        return println!("SKIPPED: {reason}");
    }
    let disk = folder.path().join("all/disk");
    let vm = Vm::start();
    let file = File::options().read(true).write(true).clone();
    let file = match open {
        "open" => file.clone().custom_flags(libc::O_DIRECT).open(&disk),
        "fcntl" => file.open(&disk).inspect(|file| {
            // SAFETY: our own descriptor.
            let set = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_DIRECT) };
            assert_eq!(set, 0);
        }),
        other => panic!("unknown way to open: {other}"),
    };
    let file = match file {
        Ok(file) => file,
        Err(error) => return println!("SKIPPED: no direct I/O: {error}"),
    };
    // The engine knows before the descriptor can be used.
    let log = std::env::var_os("VMM_DEDUP_LOG").expect("a log");
    let log = std::fs::read_to_string(log).expect("the log is there");
    assert!(log.contains("merging is suspended"), "{log}");
    // From here on nothing may be merged: what is equal now stays where it is.
    (0..PAGES).for_each(|page| vm.fill_with(page, 7));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(600) {
        assert_eq!(
            vm.shared_pages(),
            0,
            "merged {:?} after the file was opened",
            start.elapsed()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(file);
    vm.wait("sharing", |vm| vm.shared_pages() > PAGES / 2);
    assert!((0..PAGES).all(|page| vm.holds(page, |word| content(page, word) ^ 7)));
    unmount(folder.path());
}

/// Makes an overlayfs with a file, and hides what it is made of.
fn hide_a_disk(folder: &Path) -> Result<(), String> {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    let at = |name: &str| folder.join(name);
    // SAFETY: there is no other thread yet.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } < 0 {
        return Err("no right to mount".into());
    }
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(|e| e.to_string())?;
    for name in ["upper", "work", "all"] {
        std::fs::create_dir(at(name)).map_err(|e| e.to_string())?;
    }
    std::fs::write(at("upper/disk"), [0; 65536]).map_err(|e| e.to_string())?;
    let path = |name: &str| at(name).to_string_lossy().into_owned();
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        folder.join("all").display(),
        path("upper"),
        path("work")
    );
    let options = std::ffi::CString::new(options).map_err(|e| e.to_string())?;
    let none = MountFlags::empty();
    mount("overlay", at("all"), "overlay", none, &*options).map_err(|e| format!("no overlayfs: {e}"))?;
    mount("tmpfs", at("upper"), "tmpfs", none, None).map_err(|e| e.to_string())
}

fn unmount(folder: &Path) {
    for name in ["upper", "all"] {
        let _ = rustix::mount::unmount(folder.join(name), rustix::mount::UnmountFlags::DETACH);
    }
}

struct Vm {
    kvm: OwnedFd,
    memory: usize,
}

impl Vm {
    fn new() -> Self {
        let kvm = File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .expect("kvm");
        assert_eq!(ioctl(&kvm, KVM_GET_API_VERSION, 0), 12);
        // SAFETY: a fresh descriptor.
        let kvm = unsafe { OwnedFd::from_raw_fd(ioctl(&kvm, KVM_CREATE_VM, 0)) };
        let memory = map(0, 0);
        let this = Self { kvm, memory };
        (0..PAGES).for_each(|page| this.fill(page));
        let slot: [u64; 4] = [0, 0, LEN as u64, memory as u64];
        assert_eq!(
            ioctl(&this.kvm, KVM_SET_USER_MEMORY_REGION, slot.as_ptr() as usize),
            0
        );
        this
    }

    /// Guest memory of which every page has a twin, shared.
    fn start() -> Self {
        let this = Self::new();
        this.wait("sharing", |this| {
            this.shared_mappings() > 0 && this.shared_pages() > PAGES / 2
        });
        this
    }

    fn word(&self, page: usize, word: usize) -> *mut u64 {
        assert!(page < PAGES && word < PAGE / 8);
        (self.memory + page * PAGE + word * 8) as *mut u64
    }

    fn fill(&self, page: usize) {
        self.fill_with(page, 0);
    }

    /// Something else, of which every page has a twin as well.
    fn fill_with(&self, page: usize, other: u64) {
        for word in 0..PAGE / 8 {
            // SAFETY: within our memory.
            unsafe { self.word(page, word).write_volatile(content(page, word) ^ other) };
        }
    }

    fn holds(&self, page: usize, is: impl Fn(usize) -> u64) -> bool {
        // SAFETY: within our memory.
        (0..PAGE / 8).all(|word| unsafe { self.word(page, word).read_volatile() } == is(word))
    }

    fn check(&self, mut pages: std::ops::Range<usize>) {
        assert!(pages.all(|page| self.holds(page, |word| content(page, word))));
    }

    fn check_zero(&self, mut pages: std::ops::Range<usize>) {
        assert!(pages.all(|page| self.holds(page, |_| 0)), "stale content");
    }

    /// Lines of our address space that map the store, privately.
    fn shared_mappings(&self) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let shared = |line: &&str| line.contains("memfd:vmm-dedup") && line.contains("rw-p");
        maps.lines().filter(shared).count()
    }

    /// Those that begin in a range.
    fn shared_mappings_in(&self, range: std::ops::Range<usize>) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let begins = |line: &str| {
            let (start, _) = line.split_once('-')?;
            usize::from_str_radix(start, 16).ok()
        };
        let shared = |line: &&str| line.contains("memfd:vmm-dedup") && line.contains("rw-p");
        let starts = maps.lines().filter(shared).filter_map(begins);
        starts.filter(|start| range.contains(start)).count()
    }

    fn shared_pages(&self) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let pages = |line: &str| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let number = |text| usize::from_str_radix(text, 16).ok();
            Some((number(end)? - number(start)?) / PAGE)
        };
        let shared = maps
            .lines()
            .filter(|l| l.contains("memfd:vmm-dedup") && l.contains("rw-p"));
        shared.filter_map(pages).sum()
    }

    /// Pages that were merged since they were written: the kernel's copy of a page is anonymous memory.
    fn merged(&self, pages: &std::ops::Range<usize>) -> usize {
        /// Documentation/admin-guide/mm/pagemap.rst: the page is present; it is a file's, or shared memory.
        const PRESENT: u64 = 1 << 63;
        const OF_FILE: u64 = 1 << 61;
        let pagemap = File::open("/proc/self/pagemap").expect("/proc is there");
        let mut words = vec![0; pages.len() * 8];
        let at = (self.memory / PAGE + pages.start) * 8;
        pagemap
            .read_exact_at(&mut words, at as u64)
            .expect("our own memory");
        let words = words
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight")));
        words.filter(|word| word & (PRESENT | OF_FILE) != PRESENT).count()
    }

    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < PATIENCE, "{what} does not happen");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// What happens to it.
impl Vm {
    /// A device gets memory by a file, twice, and goes with the file's last descriptor. (The ioctl itself fails.)
    fn comes_back_from(&self, request: u64) {
        for _ in 0..2 {
            let device = device();
            let other = device.try_clone().expect("a descriptor");
            for _ in 0..2 {
                assert_eq!(ioctl(&device, request, 0), -1);
                assert_eq!(self.shared_mappings(), 0);
            }
            drop(device);
            // Longer than it takes to look.
            std::thread::sleep(Duration::from_millis(2500));
            assert_eq!(self.shared_mappings(), 0, "a descriptor is still open");
            self.check(0..PAGES);
            drop(other);
            self.wait("sharing again", |this| this.shared_pages() > PAGES / 2);
            self.check(0..PAGES);
        }
    }

    /// The device's file is gone from this process, and yet the kernel has memory pinned for it.
    fn comes_back_while_a_page_is_pinned(&self) {
        let device = device();
        assert_eq!(ioctl(&device, VFIO_IOMMU_MAP_DMA, 0), -1);
        let (pinned, rest) = (PAGES / 4, self.memory + LEN / 4);
        let mut ring = io_uring::IoUring::new(2).expect("a ring");
        let buffer = libc::iovec {
            iov_base: self.memory as *mut c_void,
            iov_len: LEN / 4,
        };
        // SAFETY: our own memory, which outlives the ring.
        unsafe { ring.submitter().register_buffers(&[buffer]) }.expect("they are pinned");
        drop(device);
        let of_rest = |this: &Self| this.shared_mappings_in(rest..this.memory + LEN);
        self.wait("sharing again", |this| of_rest(this) > 0);
        let zeros = File::open("/dev/zero").expect("zeros");
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            for page in 0..pinned {
                self.fill(page);
                let fd = io_uring::types::Fd(zeros.as_raw_fd());
                let to = (self.memory + page * PAGE) as *mut u8;
                let read = io_uring::opcode::ReadFixed::new(fd, to, 4096, 0).build();
                // SAFETY: the buffer is registered, and the completion is waited for.
                unsafe { ring.submission().push(&read) }.expect("there is room");
                ring.submit_and_wait(1).expect("it is read");
                assert_eq!(ring.completion().next().map(|done| done.result()), Some(4096));
                assert!(
                    self.holds(page, |_| 0),
                    "what a device wrote into page {page} is lost"
                );
            }
        }
        self.check(pinned..PAGES);
        assert_eq!(self.shared_mappings_in(self.memory..rest), 0);
    }

    /// The ioctl itself fails, on a file that does not know it; by then nothing is shared any more, for as long as the file is open.
    fn retires(&self, request: u64) {
        let null = File::open("/dev/null").expect("null");
        assert_eq!(ioctl(&null, request, 0), -1);
        let error = std::io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(self.shared_mappings(), 0);
        self.check(0..PAGES);
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(self.shared_mappings(), 0);
        // Freeing still does what it should.
        assert_eq!(free(self.memory, LEN / 2), 0);
        self.check_zero(0..PAGES / 2);
    }

    /// After a device was plugged in, memory goes, and other memory of the guest, which another process maps as well, comes
    /// to the same addresses. What is freed of it is nobody's but the VMM's business.
    fn reuses_addresses_after_it_retired(&self) {
        // The kernel copies these, and they stay in mappings of the store.
        (0..PAGES).step_by(2).for_each(|page| self.fill(page));
        let null = File::open("/dev/null").expect("null");
        assert_eq!(ioctl(&null, VFIO_IOMMU_MAP_DMA, 0), -1);
        assert!(self.shared_mappings() > 0, "no page was copied by the kernel");
        // SAFETY: our own memory, not used any more.
        assert_eq!(unsafe { libc::munmap(self.memory as *mut c_void, LEN) }, 0);
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        rustix::fs::ftruncate(&file, LEN as u64).expect("it grows");
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
        );
        let at = self.memory as *mut c_void;
        // SAFETY: where our memory was.
        let mapped = unsafe { libc::mmap(at, LEN, prot, flags, file.as_raw_fd(), 0) };
        assert_eq!(mapped, at);
        for bytes in [0, LEN as u64] {
            let slot: [u64; 4] = [0, 0, bytes, self.memory as u64];
            assert_eq!(
                ioctl(&self.kvm, KVM_SET_USER_MEMORY_REGION, slot.as_ptr() as usize),
                0
            );
        }
        for page in 0..PAGES {
            assert_eq!(free(self.memory + page * PAGE, PAGE), 0);
            self.fill(page);
            let mut seen = [0; 8];
            let read = rustix::io::pread(&file, &mut seen, (page * PAGE) as u64);
            assert_eq!(read, Ok(8));
            let seen = u64::from_ne_bytes(seen);
            assert_eq!(
                seen,
                content(page, 0),
                "who shares page {page} misses what the guest writes"
            );
        }
    }

    /// Memory that the VMM protects is its own again, and keeps the protection.
    fn protects_a_part(&self) {
        let protect = |prot| {
            // SAFETY: our own memory.
            let done = unsafe { libc::mprotect(self.memory as *mut c_void, LEN / 2, prot) };
            assert_eq!(done, 0);
        };
        protect(libc::PROT_READ);
        std::thread::sleep(Duration::from_millis(500));
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let address = |text: &str| usize::from_str_radix(text, 16).ok();
        let begins = |line: &str| line.split_once('-').and_then(|(start, _)| address(start));
        let protected = self.memory..self.memory + LEN / 2;
        for line in maps
            .lines()
            .filter(|l| begins(l).is_some_and(|start| protected.contains(&start)))
        {
            assert!(line.contains(" r--p ") && !line.contains("memfd"), "{line}");
        }
        self.check(0..PAGES);
        protect(libc::PROT_READ | libc::PROT_WRITE);
        (0..PAGES).for_each(|page| self.fill(page));
        self.check(0..PAGES);
    }

    /// That memory is refused, and the rest stays shared.
    fn plugs_in_memory_that_others_map(&self) {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        rustix::fs::ftruncate(&file, LEN as u64).expect("it grows");
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                LEN,
                prot,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(memory, libc::MAP_FAILED);
        let slot: [u64; 4] = [1, LEN as u64, LEN as u64, memory as u64];
        assert_eq!(
            ioctl(&self.kvm, KVM_SET_USER_MEMORY_REGION, slot.as_ptr() as usize),
            0
        );
        std::thread::sleep(Duration::from_millis(500));
        // New content of the private part is shared as before.
        (0..PAGES).for_each(|page| self.fill_with(page, 1));
        self.wait("sharing again", |this| this.shared_pages() > PAGES / 2);
        assert!((0..PAGES).all(|page| self.holds(page, |word| content(page, word) ^ 1)));
    }

    /// Another store is started when there is a file of that name beside the log.
    fn outlives_its_store(&self) {
        let log = std::env::var_os("VMM_DEDUP_LOG").expect("a log");
        let beside = |name: &str| Path::new(&log).with_file_name(name);
        let before = self.shared_mappings();
        assert!(before > 0);
        std::fs::write(beside("shared"), "").expect("a file");
        self.wait("another store", |_| beside("restarted").exists());
        self.check(0..PAGES);
        // Of the mappings that there are no new one is of the old store.
        self.renew();
        self.wait("sharing again", |this| this.shared_pages() > PAGES / 2);
        self.check(0..PAGES);
    }

    /// Gives all memory up, and fills it again.
    fn renew(&self) {
        assert_eq!(free(self.memory, LEN), 0);
        self.check_zero(0..PAGES);
        (0..PAGES).for_each(|page| self.fill(page));
    }

    fn unmaps_a_part(&self) {
        // SAFETY: our own memory, not used any more.
        let unmapped = unsafe { libc::munmap((self.memory + LEN / 4) as *mut c_void, LEN / 2) };
        assert_eq!(unmapped, 0);
        std::thread::sleep(Duration::from_millis(300));
        self.check(0..PAGES / 4);
        self.check(PAGES * 3 / 4..PAGES);
        assert!(self.shared_mappings() > 0);
        let (end, rest) = (self.memory + LEN * 3 / 4, LEN / 4);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::munmap(end as *mut c_void, rest) }, 0);
        self.check(0..PAGES / 4);
    }

    fn replaces_a_part(&self) {
        let at = self.memory + LEN / 4;
        // SAFETY: over our own memory, not used any more.
        let mapped = unsafe {
            let (prot, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            );
            libc::mmap(at as *mut c_void, LEN / 4, prot, flags, -1, 0)
        };
        assert_eq!(mapped as usize, at);
        self.check_zero(PAGES / 4..PAGES / 2);
        (PAGES / 4..PAGES / 2).for_each(|page| self.fill(page));
        std::thread::sleep(Duration::from_millis(500));
        self.check(0..PAGES);
    }

    fn moves(mut self) {
        // SAFETY: our own memory; only its new address is used from here on.
        let moved = unsafe {
            let target = map(0, libc::MAP_NORESERVE) as *mut c_void;
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            libc::mremap(self.memory as *mut c_void, LEN, LEN, flags, target)
        };
        assert_ne!(moved, libc::MAP_FAILED);
        self.memory = moved as usize;
        self.check(0..PAGES);
        assert_eq!(self.shared_mappings(), 0);
    }

    fn registers_a_userfaultfd(&self) {
        let uffd = userfaultfd();
        let register: [u64; 4] = [self.memory as u64, LEN as u64, 1, 0];
        let registered = ioctl(&uffd, UFFDIO_REGISTER, register.as_ptr() as usize);
        assert_eq!(registered, 0, "{}", std::io::Error::last_os_error());
        assert_eq!(self.shared_mappings(), 0);
        self.check(0..PAGES);
        drop(uffd);
        self.wait("sharing again", |this| this.shared_pages() > PAGES / 2);
        self.check(0..PAGES);
    }

    /// As the destination of a postcopy migration does: what it frees must be missed at the next touch, or the guest would
    /// read zeros instead of what is still to come.
    fn frees_memory_on_which_it_has_a_userfaultfd(&self) {
        // The kernel copies these, and they stay in mappings of the store.
        (0..PAGES).step_by(2).for_each(|page| self.fill(page));
        let uffd = userfaultfd();
        let register: [u64; 4] = [self.memory as u64, LEN as u64, 1, 0];
        let registered = ioctl(&uffd, UFFDIO_REGISTER, register.as_ptr() as usize);
        assert_eq!(registered, 0, "{}", std::io::Error::last_os_error());
        assert!(self.shared_mappings() > 0, "no page was copied by the kernel");
        for page in 0..64 {
            let at = self.memory + page * PAGE;
            assert_eq!(free(at, PAGE), 0);
            let seen = std::thread::scope(|scope| {
                let touched = scope.spawn(|| {
                    // SAFETY: within our memory.
                    unsafe { self.word(page, 0).read_volatile() }
                });
                use rustix::event::{PollFd, PollFlags, Timespec, poll};
                let patience = Timespec::try_from(Duration::from_secs(10)).expect("a time");
                let told = poll(&mut [PollFd::new(&uffd, PollFlags::IN)], Some(&patience));
                assert_eq!(told, Ok(1), "nobody was told that page {page} is missing");
                assert_eq!(rustix::io::read(&uffd, &mut [0u8; 32]), Ok(32));
                let source = vec![0xab_u8; PAGE + PAGE];
                let source = (source.as_ptr() as usize).next_multiple_of(16);
                let copy: [u64; 5] = [at as u64, source as u64, PAGE as u64, 0, 0];
                assert_eq!(ioctl(&uffd, UFFDIO_COPY, copy.as_ptr() as usize), 0);
                touched.join().expect("it reads")
            });
            assert_eq!(seen, 0xabab_abab_abab_abab);
        }
        self.check(64..PAGES);
    }

    fn forks(&self) {
        let zeros = File::open("/dev/zero").expect("zeros");
        // SAFETY: the child only makes system calls.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above; a hook that waits for the manager, which is not here, would be ended by the alarm.
            unsafe {
                libc::alarm(20);
                if libc::pread(zeros.as_raw_fd(), self.memory as *mut c_void, PAGE, 0) != PAGE.cast_signed() {
                    libc::_exit(1);
                }
                libc::madvise(self.memory as *mut c_void, PAGE, libc::MADV_DONTNEED);
                libc::munmap(self.memory as *mut c_void, LEN);
                ioctl(&self.kvm, VFIO_IOMMU_MAP_DMA, 0);
                libc::_exit(0);
            }
        }
        let mut status = 0;
        // SAFETY: a valid place for the status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(self.shared_mappings() > 0);
        self.check(0..PAGES);
    }

    /// Memory is read from a file again and again, before it could stand still between two passes. What is read by calls that are
    /// interposed is shared all the same, for as long as it lasts; what is read behind the library's back is not.
    fn reads_what_others_hold(&self) {
        let file = tempfile::tempfile().expect("a file");
        // SAFETY: our own memory, which nobody writes meanwhile.
        let content = unsafe { std::slice::from_raw_parts(self.memory as *const u8, LEN) };
        file.write_all_at(content, 0).expect("it is written");
        let parts: [std::ops::Range<usize>; 5] = [0..256, 256..512, 512..768, 768..1024, 1024..PAGES];
        let read = |how: usize, part: &std::ops::Range<usize>| {
            let (at, len) = (self.memory + part.start * PAGE, part.len() * PAGE);
            read_into(how, &file, at, len, part.start * PAGE);
        };
        let mut seen = [0; 5];
        let start = Instant::now();
        while seen[..4].contains(&0) {
            assert!(start.elapsed() < PATIENCE, "noted reads are not shared: {seen:?}");
            let round = Instant::now();
            parts.iter().enumerate().for_each(|(how, part)| read(how, part));
            // Longer than it takes to merge all.
            std::thread::sleep(Duration::from_millis(150));
            let merged = parts.clone().map(|part| self.merged(&part) > part.len() / 2);
            // Two passes may have seen a round that took longer than a pass's period.
            if round.elapsed() < Duration::from_millis(350) {
                (0..5).for_each(|how| seen[how] += usize::from(merged[how]));
            }
        }
        println!("merged after reads: {seen:?}");
        assert_eq!(seen[4], 0, "{seen:?}");
        self.check(0..PAGES);
        // A thread that may do little else reads as well, and a read that fails says why.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                restrict(&[
                    libc::SYS_pread64,
                    libc::SYS_preadv,
                    libc::SYS_futex,
                    libc::SYS_munmap,
                    libc::SYS_madvise,
                    libc::SYS_exit,
                    libc::SYS_sigaltstack,
                    libc::SYS_rt_sigprocmask,
                ]);
                parts.iter().enumerate().for_each(|(how, part)| read(how, part));
            });
        });
        // SAFETY: no descriptor.
        assert_eq!(unsafe { libc::pread(-1, self.memory as *mut c_void, LEN, 0) }, -1);
        let error = std::io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        self.check(0..PAGES);
    }

    /// As a virtio thread does for a balloon.
    fn frees_memory_in_a_filtered_thread(&self) {
        let memory = self.memory;
        let freed = std::thread::spawn(move || {
            let allowed = [
                libc::SYS_futex,
                libc::SYS_mmap,
                libc::SYS_munmap,
                libc::SYS_madvise,
                libc::SYS_mprotect,
                libc::SYS_exit,
                libc::SYS_brk,
                libc::SYS_sigaltstack,
                libc::SYS_rt_sigprocmask,
            ];
            restrict(&allowed);
            let one_by_one = (0..PAGES / 4).map(|page| free(memory + page * PAGE, PAGE));
            let failed = one_by_one.filter(|result| *result != 0).count();
            failed == 0 && free(memory + LEN / 4, LEN / 4) == 0 && free(memory + 1, PAGE) == -1
        });
        assert!(freed.join().expect("no system call was refused"));
        self.check_zero(0..PAGES / 2);
        self.check(PAGES / 2..PAGES);
        (0..PAGES / 2).for_each(|page| self.fill(page));
        self.wait("sharing again", |this| this.shared_pages() > PAGES * 9 / 10);
        self.check(0..PAGES);
    }
}

/// Stands for a device: a file of a kind of which nothing else is open.
fn device() -> File {
    File::open("/dev/full").expect("it is there")
}

/// Reads from a file by the call of that number, of which the last is no function of libc's; errno stays as it was.
fn read_into(how: usize, file: &File, at: usize, len: usize, offset: usize) {
    let (file, to) = (file.as_raw_fd(), at as *mut c_void);
    let from = i64::try_from(offset).expect("within the file");
    let half = |at: usize| libc::iovec {
        iov_base: at as *mut c_void,
        iov_len: len / 2,
    };
    let halves = [half(at), half(at + len / 2)];
    // SAFETY: our own memory, and errno's address is valid for the calling thread.
    let read = unsafe {
        *libc::__errno_location() = libc::EXFULL;
        let read = match how {
            0 => libc::pread(file, to, len, from),
            1 => libc::pread64(file, to, len, from),
            2 => libc::preadv(file, halves.as_ptr(), 2, from),
            3 => libc::preadv64(file, halves.as_ptr(), 2, from),
            _ => isize::try_from(libc::syscall(libc::SYS_pread64, file, to, len, from)).expect("a size"),
        };
        assert_eq!(*libc::__errno_location(), libc::EXFULL);
        read
    };
    assert_eq!(read, len.cast_signed());
}

fn userfaultfd() -> OwnedFd {
    let device = File::open("/dev/userfaultfd").expect("userfaultfd");
    // SAFETY: a fresh descriptor.
    let uffd = unsafe { OwnedFd::from_raw_fd(ioctl(&device, USERFAULTFD_IOC_NEW, 0)) };
    let api: [u64; 3] = [0xaa, 0, 0];
    assert_eq!(ioctl(&uffd, UFFDIO_API, api.as_ptr() as usize), 0);
    uffd
}

fn content(page: usize, word: usize) -> u64 {
    (page as u64 / 2 + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_mul(word as u64 * 2 + 1)
}

fn map(at: usize, flags: i32) -> usize {
    let (prot, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
    );
    // SAFETY: a new mapping.
    let memory = unsafe { libc::mmap(at as *mut c_void, LEN, prot, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    memory as usize
}

fn free(at: usize, len: usize) -> i32 {
    // SAFETY: memory of ours whose content is not needed any more.
    unsafe { libc::madvise(at as *mut c_void, len, libc::MADV_DONTNEED) }
}

fn ioctl(fd: &impl AsRawFd, request: u64, argument: usize) -> i32 {
    // SAFETY: each request above gets the argument that it takes, or fails.
    unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) }
}

/// Ends the process if the calling thread makes another system call than these; with none, all are allowed, but the
/// thread counts as filtered.
fn restrict(allowed: &[i64]) {
    const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const RETURN: u16 = 0x06; // BPF_RET | BPF_K
    let step = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let count = u8::try_from(allowed.len()).expect("few");
    let mut program = vec![step(LOAD, 0, 0)];
    for (call, left) in allowed.iter().zip((0..count).rev()) {
        program.push(step(EQUAL, left + 1, u32::try_from(*call).expect("a number")));
    }
    if !allowed.is_empty() {
        program.push(step(RETURN, 0, libc::SECCOMP_RET_KILL_PROCESS));
    }
    program.push(step(RETURN, 0, libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).expect("short"),
        filter: program.as_mut_ptr(),
    };
    // SAFETY: a valid program, which the kernel copies.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter),
            0
        );
    }
}
