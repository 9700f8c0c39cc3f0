//! Linux's device node of a work queue, `/dev/dsa/wqX.Y`: a portal to map, and addresses of this process.
//!
//! The kernel has bound the queue (of a shared queue: this file) to this process's address space when the file was opened.
//! So nothing is pinned, and the device reads what this process may read, while the file is open. Closing it waits for what
//! is in flight.
#![allow(unsafe_code)] // maps the portal and writes to it

use super::causes::with_causes;
use super::queue::{QueueLimits, Trouble, WorkQueue};
use crate::instructions::{Instructions, wait_for_line};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use vmm_dedup_dsa_abi::config::Mode;
use vmm_dedup_dsa_abi::portal::{PLACE, PORTAL_BYTES};
use vmm_dedup_dsa_abi::registers::ResetKind;
use vmm_dedup_dsa_abi::{Descriptor, DeviceAddress};

/// Where nodes are.
const NODES: &str = "/dev/dsa";
/// Where the kernel tells of queues.
const QUEUES: &str = "/sys/bus/dsa/devices";

/// Why a queue cannot be used through its node.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// It is not a node of a queue.
    #[error("{0} is not a work queue: name one such as {NODES}/wq0.1")]
    Name(PathBuf),
    /// The kernel does not tell of it.
    #[error("{path} cannot be read: is the idxd driver loaded, and the queue configured (accel-config)?")]
    Attribute {
        /// What was read.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Its attributes make no sense to this driver.
    #[error("{name} is {value:?}, {wanted} is needed: configure the queue so (accel-config)")]
    Unfit {
        /// Of what.
        name: &'static str,
        /// What the kernel says.
        value: String,
        /// What is needed.
        wanted: &'static str,
    },
    /// The CPU cannot submit.
    #[error("this CPU has no {0}, which this queue's mode needs")]
    Instruction(&'static str),
    /// Somebody has it.
    #[error(
        "{0} is in use: a dedicated queue has one user at a time; configure one for each, or a shared one"
    )]
    Busy(PathBuf),
    /// This user may not open it.
    #[error("{0} may not be opened by this user: give the node to its group (udev)")]
    Denied(PathBuf),
    /// Opening failed.
    #[error(
        "{path} cannot be opened: is the process's address space bound to the device (intel_iommu=on,sm_on)?"
    )]
    Open {
        /// The node.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// This process may not map its portal.
    #[error("the portal of {0} may not be mapped by this process: Linux wants CAP_SYS_RAWIO for that")]
    Unprivileged(PathBuf),
    /// Mapping failed.
    #[error("the portal of {path} cannot be mapped")]
    Map {
        /// The node.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl NodeError {
    fn of_open(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.raw_os_error() {
            Some(libc::EBUSY) => Self::Busy(path),
            Some(libc::EACCES | libc::EPERM) => Self::Denied(path),
            _ => Self::Open { path, source },
        }
    }

    fn of_map(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => Self::Unprivileged(path),
            _ => Self::Map { path, source },
        }
    }
}

/// A queue by its node.
#[derive(Debug)]
pub struct Node {
    name: String,
    path: PathBuf,
    limits: QueueLimits,
    mode: Mode,
    open: Option<Open>,
    /// Where the kernel tells of the queue.
    attributes: PathBuf,
}

/// An open node.
#[derive(Debug)]
struct Open {
    portal: NonNull<u8>,
    /// The next place in the portal.
    place: usize,
    /// Open for as long as the portal is mapped: the kernel takes the address space away when it is closed.
    _file: File,
}

// SAFETY: the portal is memory of a device, mapped for this value alone, and written through &mut only.
unsafe impl Send for Open {}

impl Node {
    /// The user queues that are enabled, in the order of their names.
    ///
    /// # Errors
    /// If there are no nodes, or they cannot be listed.
    pub fn list() -> io::Result<Vec<PathBuf>> {
        let mut nodes: Vec<PathBuf> = std::fs::read_dir(NODES)?
            .map(|entry| Ok(entry?.path()))
            .collect::<io::Result<_>>()?;
        nodes.retain(|path| queue_name(path).is_some());
        nodes.sort();
        Ok(nodes)
    }

    /// Opens a queue by its node.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn open(path: &Path) -> Result<Self, NodeError> {
        Self::with_attributes(path, Path::new(QUEUES))
    }

    /// The same, with what the kernel tells in another folder.
    fn with_attributes(path: &Path, queues: &Path) -> Result<Self, NodeError> {
        let name = queue_name(path).ok_or_else(|| NodeError::Name(path.to_owned()))?;
        let attributes = queues.join(&name);
        let (mode, limits) = describe(&attributes)?;
        let instructions = Instructions::of_this_cpu();
        match mode {
            Mode::Dedicated if !instructions.movdir64b => return Err(NodeError::Instruction("MOVDIR64B")),
            Mode::Shared if !instructions.enqcmd => return Err(NodeError::Instruction("ENQCMD")),
            _ => {}
        }
        let open = Some(Open::new(path)?);
        Ok(Self {
            name,
            path: path.to_owned(),
            limits,
            mode,
            open,
            attributes,
        })
    }
}

impl Open {
    fn new(path: &Path) -> Result<Self, NodeError> {
        let opened = File::options().read(true).write(true).open(path);
        let file = opened.map_err(|source| NodeError::of_open(path, source))?;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let portal = unsafe {
            mmap(
                std::ptr::null_mut(),
                PORTAL_BYTES,
                ProtFlags::WRITE,
                flags,
                &file,
                0,
            )
        };
        let portal = portal.map_err(|errno| NodeError::of_map(path, errno.into()))?;
        let portal = NonNull::new(portal.cast()).ok_or_else(|| NodeError::Map {
            path: path.to_owned(),
            source: io::ErrorKind::OutOfMemory.into(),
        })?;
        Ok(Self {
            portal,
            place: 0,
            _file: file,
        })
    }

    #[cfg(target_arch = "x86_64")]
    fn submit(&mut self, mode: Mode, descriptor: &Descriptor) -> bool {
        // SAFETY: the place is within the mapping, which lives as long as this value.
        let place = unsafe { self.portal.as_ptr().add(self.place) };
        self.place = (self.place + PLACE) % PORTAL_BYTES;
        match mode {
            Mode::Dedicated => {
                // SAFETY: the CPU was seen to have the instruction when the node was opened; portals are page-aligned, so
                // places are aligned to 64 bytes; a descriptor is aligned to 64 bytes.
                unsafe { crate::instructions::movdir64b(place, descriptor) };
                true
            }
            // SAFETY: as above; the kernel gave this process a PASID when it opened the node.
            Mode::Shared => unsafe { crate::instructions::enqcmd(place, descriptor) },
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn submit(&mut self, _mode: Mode, _descriptor: &Descriptor) -> bool {
        false
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: exactly what new() has mapped; nobody else knows the address. The file is closed after it, which waits
        // for what is in flight.
        let _ = unsafe { munmap(self.portal.as_ptr().cast(), PORTAL_BYTES) };
    }
}

impl WorkQueue for Node {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> QueueLimits {
        self.limits
    }

    fn uses_process_addresses(&self) -> bool {
        true
    }

    fn submit(&mut self, descriptor: &Descriptor) -> Result<bool, Trouble> {
        let open = self.open.as_mut();
        let open = open.ok_or_else(|| Trouble::Gone(format!("{} is closed", self.path.display())))?;
        Ok(open.submit(self.mode, descriptor))
    }

    fn relax(&mut self, status: &AtomicU64) {
        wait_for_line(status, || status.load(Ordering::Acquire) & 0xff != 0);
    }

    fn trouble(&mut self) -> Option<Trouble> {
        match read(&self.attributes, "state") {
            Ok(state) if state == "enabled" => None,
            Ok(_) => Some(Trouble::Halted(ResetKind::Command)),
            Err(error) => Some(Trouble::Gone(with_causes(&error))),
        }
    }

    /// Closes the node, which waits for what is in flight, and opens it again. Linux resets a halted device itself.
    fn reset(&mut self) -> Result<(), Trouble> {
        self.open = None;
        let gone = |error: NodeError| Trouble::Gone(with_causes(&error));
        self.open = Some(Open::new(&self.path).map_err(gone)?);
        self.trouble().map_or(Ok(()), Err)
    }

    /// The device uses this process's addresses.
    fn map(&mut self, _: DeviceAddress, _: usize, _: BorrowedFd<'_>, _: bool) -> Result<(), Trouble> {
        Ok(())
    }

    fn unmap(&mut self, _: DeviceAddress, _: usize) -> Result<(), Trouble> {
        Ok(())
    }
}

/// `wq0.1` of `/dev/dsa/wq0.1`.
fn queue_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let (device, queue) = name.strip_prefix("wq")?.split_once('.')?;
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (number(device) && number(queue)).then(|| name.to_owned())
}

fn read(folder: &Path, name: &str) -> Result<String, NodeError> {
    let path = folder.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(source) => Err(NodeError::Attribute { path, source }),
    }
}

fn number(folder: &Path, name: &'static str) -> Result<u64, NodeError> {
    let text = read(folder, name)?;
    text.parse().map_err(|_| NodeError::Unfit {
        name,
        value: text,
        wanted: "a number",
    })
}

/// What the kernel tells of a queue.
fn describe(folder: &Path) -> Result<(Mode, QueueLimits), NodeError> {
    let is = |name: &'static str, wanted: &'static str| {
        let value = read(folder, name)?;
        if value == wanted {
            Ok(())
        } else {
            Err(NodeError::Unfit { name, value, wanted })
        }
    };
    is("type", "user")?;
    is("state", "enabled")?;
    let mode = match read(folder, "mode")?.as_str() {
        "dedicated" => Mode::Dedicated,
        "shared" => Mode::Shared,
        other => {
            let (name, wanted) = ("mode", "dedicated or shared");
            let value = other.to_owned();
            return Err(NodeError::Unfit { name, value, wanted });
        }
    };
    let entries = match mode {
        Mode::Dedicated => number(folder, "size")?,
        // Linux gives users of shared queues the limited portal.
        Mode::Shared => number(folder, "threshold")?,
    };
    // Its device is the folder that it stands in.
    let device = std::fs::canonicalize(folder).ok();
    let device = device.as_deref().and_then(Path::parent);
    let operations = read(folder, "op_config").or_else(|error| {
        let device = device.ok_or(error)?;
        read(device, "op_cap")
    })?;
    let node = device.and_then(|device| read(device, "numa_node").ok());
    Ok((
        mode,
        QueueLimits {
            entries: usize::try_from(entries).unwrap_or(usize::MAX),
            members: usize::try_from(number(folder, "max_batch_size")?).unwrap_or(usize::MAX),
            bytes: number(folder, "max_transfer_size")?,
            operations: bits(&operations).ok_or(NodeError::Unfit {
                name: "op_config",
                value: operations,
                wanted: "a list of words",
            })?,
            node: node.and_then(|node| node.parse().ok()),
        },
    ))
}

/// A bitmap as the kernel prints it: words of 32 bits in hexadecimal, the highest first, with commas (or, of older kernels,
/// words of 64 bits with spaces).
fn bits(text: &str) -> Option<[u64; 4]> {
    let mut all = [0; 4];
    let (words, width): (Vec<&str>, usize) = if text.contains(',') {
        (text.split(',').collect(), 32)
    } else {
        (text.split_whitespace().collect(), 64)
    };
    for (at, word) in words.iter().rev().enumerate() {
        let value = u64::from_str_radix(word, 16).ok()?;
        let bit = at * width;
        *all.get_mut(bit / 64)? |= value << (bit % 64);
    }
    (!words.is_empty()).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue as Linux 6.12 shows it.
    fn queue(changes: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("devices/dsa0");
        let queue = device.join("wq0.1");
        std::fs::create_dir_all(&queue).unwrap();
        let usual = [
            ("type", "user\n"),
            ("state", "enabled\n"),
            ("mode", "dedicated\n"),
            ("size", "16\n"),
            ("threshold", "0\n"),
            ("max_batch_size", "1024\n"),
            ("max_transfer_size", "2147483648\n"),
            (
                "op_config",
                "00000000,00000000,00000000,00000000,00000000,00000000,0000007b,00bf07ff\n",
            ),
        ];
        for (name, value) in usual.iter().chain(changes) {
            std::fs::write(queue.join(name), value).unwrap();
        }
        std::fs::write(device.join("numa_node"), "1\n").unwrap();
        let bus = folder.path().join("bus");
        std::fs::create_dir(&bus).unwrap();
        std::os::unix::fs::symlink(&queue, bus.join("wq0.1")).unwrap();
        folder
    }

    fn described(folder: &tempfile::TempDir) -> Result<(Mode, QueueLimits), NodeError> {
        describe(&folder.path().join("bus/wq0.1"))
    }

    #[test]
    fn the_kernel_tells_what_a_queue_takes() {
        let (mode, limits) = described(&queue(&[])).unwrap();
        let expected = QueueLimits {
            entries: 16,
            members: 1024,
            bytes: 1 << 31,
            operations: [0x7b_00bf_07ff, 0, 0, 0],
            node: Some(1),
        };
        assert_eq!((mode, limits), (Mode::Dedicated, expected));
        let shared = queue(&[("mode", "shared\n"), ("threshold", "12\n")]);
        let (mode, limits) = described(&shared).unwrap();
        assert_eq!((mode, limits.entries), (Mode::Shared, 12));
    }

    #[test]
    fn older_kernels_bitmaps_are_read() {
        assert_eq!(bits("0 0 0 7b00bf07ff"), Some([0x7b_00bf_07ff, 0, 0, 0]));
        assert_eq!(bits("1,00000002"), Some([0x1_0000_0002, 0, 0, 0]));
        assert_eq!([bits(""), bits("x"), bits("1 1 1 1 1")], [None; 3]);
    }

    #[test]
    fn a_queue_that_does_not_fit_is_refused_with_what_is_needed() {
        for (change, text) in [
            (("type", "kernel\n"), "type is \"kernel\", user is needed"),
            (
                ("state", "disabled\n"),
                "state is \"disabled\", enabled is needed",
            ),
            (
                ("mode", "odd\n"),
                "mode is \"odd\", dedicated or shared is needed",
            ),
            (("size", "many\n"), "size is \"many\", a number is needed"),
        ] {
            let error = described(&queue(&[change])).unwrap_err().to_string();
            assert!(error.starts_with(text), "{error}");
        }
    }

    #[test]
    fn only_nodes_of_queues_are_opened() {
        for path in ["/dev/null", "/dev/dsa/wq0", "/dev/dsa/wq.1", "/dev/dsa/wq0.x"] {
            let error = Node::open(Path::new(path)).unwrap_err().to_string();
            assert!(error.contains("is not a work queue"), "{error}");
        }
        let missing = Node::open(Path::new("/dev/dsa/wq77.0")).unwrap_err().to_string();
        assert!(missing.contains("wq77.0/type cannot be read"), "{missing}");
    }

    #[test]
    fn a_node_of_others_is_not_opened_and_the_message_says_whose_leave_is_needed() {
        /// Linux's overflow user: nobody's.
        const NOBODY: libc::c_long = 65534;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wq0.1");
        std::fs::write(&path, []).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o0)).unwrap();
        let node = path.clone();
        let opened = std::thread::spawn(move || {
            // SAFETY: it takes a number. It is of this thread only, and takes root's rights to files away as well.
            unsafe { libc::syscall(libc::SYS_setfsuid, NOBODY) };
            Open::new(&node).map(drop)
        });
        let error = opened.join().unwrap().unwrap_err().to_string();
        assert!(
            error.ends_with("may not be opened by this user: give the node to its group (udev)"),
            "{error}"
        );
    }

    #[test]
    fn what_the_kernel_says_is_told_with_what_to_do() {
        let path = Path::new("/dev/dsa/wq0.1");
        let of = |errno| io::Error::from_raw_os_error(errno);
        for (error, text) in [
            (NodeError::of_open(path, of(libc::EBUSY)), "one user at a time"),
            (NodeError::of_open(path, of(libc::ENODEV)), "cannot be opened"),
            (NodeError::of_map(path, of(libc::EPERM)), "wants CAP_SYS_RAWIO"),
            (NodeError::of_map(path, of(libc::ENOMEM)), "cannot be mapped"),
        ] {
            let error = error.to_string();
            assert!(
                error.contains("/dev/dsa/wq0.1") && error.contains(text),
                "{error}"
            );
        }
        // A file that is none of a device's has no portal.
        let error = Open::new(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(error, NodeError::Map { .. }), "{error}");
    }

    #[test]
    fn a_queue_without_a_node_or_an_instruction_is_named() {
        let folder = queue(&[]);
        let node = folder.path().join("wq0.1");
        let error = Node::with_attributes(&node, &folder.path().join("bus")).unwrap_err();
        let expected = if Instructions::of_this_cpu().movdir64b {
            "cannot be opened"
        } else {
            "no MOVDIR64B"
        };
        assert!(error.to_string().contains(expected), "{error}");
    }
}
