//! The runtime directory of a fleet: what was started, and the files of those processes.
//!
//! ```text
//! DIRECTORY/state.json       what was started (replaced as a whole)
//! DIRECTORY/store-DOMAIN.log  (and .log.1, see `log_keeper`)
//! DIRECTORY/vm/NAME/         see `VmFiles`
//! ```
//!
//! A command that changes something holds a lock on the directory itself, which vanishes with the directory.

use crate::file::Vmm;
use crate::plan::{StorePlan, VmPlan};
use crate::process::Process;
use rustix::fs::{FlockOperation, Mode, OFlags};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmm_dedup_host::Failure;
use vmm_dedup_host::units::{natural_order, quoted};
use vmm_dedup_host::users::Identity;

/// What the name of a fleet's directory begins with.
pub(crate) const PREFIX: &str = "fleet-";

/// Bytes by which the state may grow without new VMs.
const STATE_ROOM: u64 = 4 << 10;
/// Bytes that a VM needs at first: its part of the state, settings and the beginnings of its logs, in whole pages.
const VM_ROOM: u64 = 24 << 10;
/// Bytes that a store needs at first: its part of the state and the beginning of its log.
const STORE_ROOM: u64 = 8 << 10;

/// How long to wait for the lock: a process that was about to be started by a command that was killed ends by itself, but
/// not at once.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// What is started; the truth for `status` and `down`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) fleet: String,
    /// Where it was started from.
    pub(crate) file: Option<PathBuf>,
    /// False while a command starts VMs, and if it was killed meanwhile.
    pub(crate) complete: bool,
    /// How many VMs of an entry there are instead of its `count`.
    #[serde(default)]
    pub(crate) scale: BTreeMap<String, u32>,
    /// The process that keeps logs short.
    #[serde(default)]
    pub(crate) log_keeper: Option<Process>,
    pub(crate) stores: Vec<StoreState>,
    pub(crate) vms: Vec<VmState>,
    /// VMs by name that were to be started and have no process: the start failed, or its command was killed.
    #[serde(default)]
    pub(crate) missing: BTreeMap<String, Missing>,
}

/// A VM that ought to run and has no process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Missing {
    pub(crate) vmm: Vmm,
    pub(crate) why: String,
}

impl State {
    /// Notes down that a VM ought to run and has no process.
    pub(crate) fn miss(&mut self, vm: &VmPlan, why: &str) {
        let (vmm, why) = (vm.vmm, why.to_owned());
        self.missing.insert(vm.name.clone(), Missing { vmm, why });
    }

    /// What [`crate::stores::Accounts`] are to be of planned stores: their processes are known if the fleet started them.
    pub(crate) fn asked<'a>(&'a self, stores: impl IntoIterator<Item = &'a StorePlan>) -> Vec<Asked<'a>> {
        let process = |domain: &str| {
            let store = self.stores.iter().find(|store| store.domain == domain)?;
            store.process.as_ref()
        };
        let stores = stores.into_iter();
        stores
            .map(|store| {
                let domain = store.domain.as_str();
                (domain, store.socket.as_path(), process(domain))
            })
            .collect()
    }

    /// The names of all VMs that ought to run, in the order that people expect.
    pub(crate) fn names(&self) -> Vec<&str> {
        let with_process = self.vms.iter().map(|vm| vm.name.as_str());
        let missing = self.missing.keys().map(String::as_str);
        let mut names: Vec<&str> = with_process.chain(missing).collect();
        names.sort_by(|a, b| natural_order(a, b));
        names
    }
}

/// A store to be asked: its domain, its socket, and its process as far as it is known.
pub(crate) type Asked<'a> = (&'a str, &'a Path, Option<&'a Process>);

/// A trust domain's store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StoreState {
    pub(crate) domain: String,
    pub(crate) socket: PathBuf,
    /// `None`: it ran before the fleet.
    pub(crate) process: Option<Process>,
    /// The settings that it was started with, see [`crate::spec`]; null if it ran before the fleet.
    #[serde(default)]
    pub(crate) spec: Value,
}

impl StoreState {
    /// What [`crate::stores::Accounts`] are to be of.
    pub(crate) fn asked(&self) -> Asked<'_> {
        (&self.domain, &self.socket, self.process.as_ref())
    }
}

/// A VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct VmState {
    pub(crate) name: String,
    pub(crate) vmm: Vmm,
    pub(crate) process: Process,
    /// Domain of its store in [`State::stores`]; `None`: no dedup.
    pub(crate) store: Option<String>,
    /// Files outside of the runtime directory that the VMM makes.
    pub(crate) files: Vec<PathBuf>,
    /// The entry of the file that it is of.
    #[serde(default)]
    pub(crate) entry: String,
    /// The settings that it was started with, see [`crate::spec`].
    #[serde(default)]
    pub(crate) spec: Value,
    /// It has not run yet since its VMM was started: a command waits for it, or was killed meanwhile.
    #[serde(default)]
    pub(crate) starting: bool,
}

/// The files of one VM in the runtime directory.
#[derive(Clone, Debug)]
pub(crate) struct VmFiles(PathBuf);

impl VmFiles {
    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }

    /// Output and errors of the VMM.
    pub(crate) fn log(&self) -> PathBuf {
        self.0.join("vmm.log")
    }

    /// What the guest wrote to its serial port.
    pub(crate) fn serial(&self) -> PathBuf {
        self.0.join("serial.log")
    }

    /// The settings of dedup.
    pub(crate) fn dedup(&self) -> PathBuf {
        self.0.join("dedup.toml")
    }

    /// Cloud Hypervisor's API, or QEMU's monitor.
    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("api.sock")
    }

    /// The VMM's socket, as long as it is held: a path that leads to it whatever is made of its name meanwhile. Who owns the VM's
    /// folder may put there what he likes; only a socket of his own is one.
    pub(crate) fn hold_socket(&self) -> io::Result<HeldSocket> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = File::from(rustix::fs::open(self.socket(), flags, Mode::empty())?);
        let (is, owner) = (socket.metadata()?, fs::metadata(&self.0)?.uid());
        if !is.file_type().is_socket() || is.uid() != owner {
            return Err(io::Error::other(
                "what is in its place is no socket of the VM's user",
            ));
        }
        Ok(HeldSocket(socket.into()))
    }

    /// The number of a VMM's process, for those without a socket that goes when they end in order.
    pub(crate) fn pid(&self) -> PathBuf {
        self.0.join("vmm.pid")
    }
}

/// See [`VmFiles::hold_socket`].
#[derive(Debug)]
pub(crate) struct HeldSocket(OwnedFd);

impl HeldSocket {
    /// What to connect to.
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

/// A fleet's directory.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
}

/// A directory that no other command changes meanwhile.
#[derive(Debug)]
pub(crate) struct Locked {
    directory: Directory,
    _lock: File,
}

/// Makes a directory, and what leads to it, if it is not there; new ones have this mode.
pub(crate) fn make(path: &Path, mode: u32) -> Result<(), Failure> {
    let made = DirBuilder::new().recursive(true).mode(mode).create(path);
    made.map_err(|e| Failure::new(format!("cannot create {}: {e}", path.display())))
}

/// Why a fleet's file cannot be used, with what to do where that is known.
fn why(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => format!("{error}: run this as the user whose fleet it is"),
        _ => error.to_string(),
    }
}

impl Directory {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn state_path(&self) -> PathBuf {
        self.path.join("state.json")
    }

    /// The next state, until it takes the place of the last one.
    fn fresh_path(&self) -> PathBuf {
        self.path.join("state.json.new")
    }

    /// What is started; `None` if nothing is.
    ///
    /// The directory must be the user's own, since `down` believes what it says.
    pub(crate) fn state(&self) -> Result<Option<State>, Failure> {
        let path = self.state_path();
        let fail = |e: String| Failure::new(format!("cannot use {}: {e}", path.display()));
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return match self.path.join("vm").exists() && !self.processes().is_empty() {
                    true => Err(fail(format!("{e}; {}", self.without_state()))),
                    false => Ok(None),
                };
            }
            Err(e) => return Err(fail(why(&e))),
        };
        let folder = fs::metadata(&self.path).map_err(|e| fail(e.to_string()))?;
        if folder.uid() != rustix::process::geteuid().as_raw() || folder.mode() & 0o022 != 0 {
            return Err(fail("others can write its directory, or own it".into()));
        }
        serde_json::from_str(&text)
            .map(Some)
            .map_err(|e| fail(format!("it is spoilt ({e}); {}", self.without_state())))
    }

    /// What to do when nobody knows any more what was started.
    fn without_state(&self) -> String {
        let remove = format!("`rm -r {}`", quoted(&self.path.to_string_lossy()));
        let processes = self.processes();
        if processes.is_empty() {
            return format!("nothing of its fleet runs: {remove}, then start the fleet again");
        }
        let told: Vec<String> = (processes.iter())
            .map(|(pid, name)| format!("{name} is process {pid}"))
            .collect();
        let pids: Vec<String> = processes.keys().map(ToString::to_string).collect();
        format!(
            "its fleet runs on ({}): put a copy of the file back, or end the fleet with `kill {}`, then {remove}",
            told.join(", "),
            pids.join(" ")
        )
    }

    /// Processes that write to logs here: what they are by their numbers, found without the state.
    fn processes(&self) -> BTreeMap<u32, String> {
        let Ok(folder) = fs::canonicalize(&self.path) else {
            return BTreeMap::new();
        };
        let named = |log: PathBuf| {
            let log = log.strip_prefix(&folder).ok()?.to_str()?;
            if let Some(file) = log.strip_prefix("vm/") {
                return file.split('/').next().map(str::to_owned);
            }
            let domain = log.strip_prefix("store-")?.strip_suffix(".log")?;
            Some(format!("the store of domain {domain:?}"))
        };
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let found = entries.filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let outputs = ["fd/1", "fd/2"].map(|fd| fs::read_link(entry.path().join(fd)));
            let name = outputs.into_iter().flatten().find_map(named)?;
            Some((pid, name))
        });
        found.collect()
    }

    pub(crate) fn vm(&self, name: &str) -> VmFiles {
        VmFiles(self.path.join("vm").join(name))
    }

    pub(crate) fn store_log(&self, domain: &str) -> PathBuf {
        self.path.join(format!("store-{domain}.log"))
    }

    /// Fails unless what a command will write fits: the state once more, and the first files of so many VMs and stores. It writes
    /// as much into a file without a name, where the directory is or will be made.
    pub(crate) fn check_room(&self, vms: usize, stores: usize) -> Result<(), Failure> {
        let place = self.path.ancestors().find(|place| place.exists());
        let place = place.unwrap_or(Path::new("/"));
        let state = fs::metadata(self.state_path()).map_or(0, |file| file.len());
        let bytes = state + STATE_ROOM + (vms as u64) * VM_ROOM + (stores as u64) * STORE_ROOM;
        let written = tempfile::tempfile_in(place)
            .and_then(|mut file| io::copy(&mut io::repeat(0).take(bytes), &mut file));
        written.map(drop).map_err(|e| {
            let what_to_do = match e.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ": make room there",
                _ => "",
            };
            let (place, kib) = (place.display(), bytes.div_ceil(1 << 10));
            Failure::new(format!(
                "cannot write the {kib} KiB that are needed in {place}: {e}{what_to_do}"
            ))
        })
    }

    /// Whether a command that changes the fleet is at work.
    pub(crate) fn is_locked(&self) -> bool {
        let lock = |file: File| rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared);
        File::open(&self.path).is_ok_and(|file| lock(file) == Err(rustix::io::Errno::WOULDBLOCK))
    }

    /// Locks the directory if it exists.
    pub(crate) fn lock(self) -> Result<Option<Locked>, Failure> {
        let fail =
            |e: io::Error, path: &Path| Failure::new(format!("cannot use {}: {}", path.display(), why(&e)));
        let lock = match File::open(&self.path) {
            Ok(lock) => lock,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(fail(e, &self.path)),
        };
        let begun = Instant::now();
        let mut locked = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive);
        while locked == Err(rustix::io::Errno::WOULDBLOCK) && begun.elapsed() < LOCK_PATIENCE {
            std::thread::sleep(Duration::from_millis(10));
            locked = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive);
        }
        match locked {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Failure::new(format!(
                    "another fleet command is at work in {}: wait for it",
                    self.path.display()
                )));
            }
            Err(e) => return Err(fail(e.into(), &self.path)),
        }
        // Who held the lock before may have removed the directory.
        if lock.metadata().map_err(|e| fail(e, &self.path))?.nlink() == 0 {
            return Ok(None);
        }
        Ok(Some(Locked {
            directory: self,
            _lock: lock,
        }))
    }

    /// Makes the directory, for this user alone, and locks it.
    pub(crate) fn create(self) -> Result<Locked, Failure> {
        if let Some(parent) = self.path.parent() {
            make(parent, 0o755)?;
        }
        make(&self.path, 0o700)?;
        let path = self.path.clone();
        let gone = || Failure::new(format!("{} was removed meanwhile: try again", path.display()));
        self.lock()?.ok_or_else(gone)
    }
}

impl std::ops::Deref for Locked {
    type Target = Directory;

    fn deref(&self) -> &Directory {
        &self.directory
    }
}

impl Locked {
    /// Removes what an `up` leaves that was killed before it had noted down anything: the directory, if it is empty.
    pub(crate) fn remove_remains(&self) {
        // Whatever else is there is somebody else's.
        let _ = remove_file(&self.fresh_path()).and_then(|()| fs::remove_dir(self.path()));
    }

    /// Fails unless the directory is empty, but for what [`Self::remove_remains`] removes.
    pub(crate) fn check_empty(&self) -> Result<(), Failure> {
        let _ = remove_file(&self.fresh_path());
        match fs::read_dir(self.path()).map(|mut entries| entries.next().is_none()) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Failure::new(format!(
                "{} is not empty and no fleet's: choose another --runtime-dir",
                self.path().display()
            ))),
            Err(e) => Err(Failure::new(format!("cannot use {}: {e}", self.path().display()))),
        }
    }

    /// Replaces the state as a whole.
    pub(crate) fn write(&self, state: &State) -> Result<(), Failure> {
        let (path, fresh) = (self.state_path(), self.fresh_path());
        let text = serde_json::to_string_pretty(state).map_err(Failure::from_error)?;
        let written = create_private(&fresh).and_then(|mut file| file.write_all(text.as_bytes()));
        written
            .and_then(|()| fs::rename(&fresh, &path))
            .map_err(|e| Failure::new(format!("cannot write {}: {e}", path.display())))
    }

    /// Makes the directory of a VM, empty, for this user alone.
    pub(crate) fn make_vm(&self, name: &str) -> Result<VmFiles, Failure> {
        let files = self.vm(name);
        let folder = files.folder();
        if let Some(parent) = folder.parent() {
            make(parent, 0o700)?;
        }
        let create = || DirBuilder::new().mode(0o700).create(folder);
        // What a VM has left, it may have made whatever it liked of.
        let made = create().or_else(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => fs::remove_dir_all(folder).and_then(|()| create()),
            _ => Err(e),
        });
        made.map_err(|e| Failure::new(format!("cannot create {}: {e}", folder.display())))?;
        Ok(files)
    }

    /// Gives the directory of a VM to its user, with the settings of dedup that are in it, once all that is made there with more
    /// rights is there. Others can pass through the fleet's directory then, and see nothing in it.
    pub(crate) fn give_vm(&self, files: &VmFiles, owner: &Identity) -> io::Result<()> {
        for folder in [self.path.as_path(), &self.path.join("vm")] {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o711))?;
        }
        let (uid, gid) = (Some(owner.uid), Some(owner.gid));
        if files.dedup().exists() {
            std::os::unix::fs::chown(files.dedup(), uid, gid)?;
        }
        std::os::unix::fs::chown(files.folder(), uid, gid)
    }

    /// Removes what a VM leaves that has ended.
    pub(crate) fn remove_vm(&self, vm: &VmState) -> Result<(), Failure> {
        let files = self.vm(&vm.name);
        let removed = match fs::remove_dir_all(files.folder()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => vm.files.iter().try_for_each(|file| remove_file(file)),
        };
        removed.map_err(|e| Failure::new(format!("cannot remove what VM {:?} leaves: {e}", vm.name)))
    }

    /// Removes all that belongs to a fleet; fails if something else is there too.
    pub(crate) fn remove(&self, state: &State) -> Result<(), Failure> {
        let path = self.path();
        let fail = |e: io::Error| Failure::new(format!("cannot remove {}: {e}", path.display()));
        // Also that of a store which was not noted down any more.
        for entry in fs::read_dir(path).map_err(fail)? {
            let entry = entry.map_err(fail)?.path();
            let name = entry.file_name().unwrap_or_default().as_encoded_bytes();
            let is_log = |name: &[u8]| {
                [&b".log"[..], b".log.1", b".log.new"]
                    .iter()
                    .any(|end| name.ends_with(end))
            };
            if name.starts_with(b"store-") && is_log(name) {
                remove_file(&entry).map_err(fail)?;
            }
        }
        for file in state.vms.iter().flat_map(|vm| &vm.files) {
            remove_file(file).map_err(fail)?;
        }
        match fs::remove_dir_all(path.join("vm")) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(fail(e)),
            _ => {}
        }
        remove_file(&self.fresh_path()).map_err(fail)?;
        // Last: as long as it is there, `down` can be repeated.
        remove_file(&self.state_path()).map_err(fail)?;
        fs::remove_dir(path).map_err(fail)
    }
}

/// Makes a file anew, for this user alone.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)
}

/// Removes a file, if it is there.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// What may be directories of fleets, in the runtime folder.
pub(crate) fn directories(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    fn directory(folder: &tempfile::TempDir) -> Directory {
        Directory::new(folder.path().join("a/fleet"))
    }

    #[test]
    fn state_is_kept_and_everything_goes_with_the_directory() {
        let folder = tempfile::tempdir().unwrap();
        assert!(directory(&folder).state().unwrap().is_none());
        assert!(directory(&folder).lock().unwrap().is_none());
        let locked = directory(&folder).create().unwrap();
        locked.check_empty().unwrap();
        let files = locked.make_vm("web-0").unwrap();
        fs::write(files.log(), "log").unwrap();
        let state = State {
            fleet: "f".into(),
            ..State::default()
        };
        locked.write(&state).unwrap();
        assert_eq!(locked.state().unwrap().unwrap().fleet, "f");
        locked.remove(&state).unwrap();
        assert!(!folder.path().join("a/fleet").exists());
    }

    #[test]
    fn a_command_that_was_killed_while_it_wrote_the_state_is_no_trouble() {
        let folder = tempfile::tempdir().unwrap();
        let half_written = |locked: &Locked| fs::write(locked.path().join("state.json.new"), "{").unwrap();
        let locked = directory(&folder).create().unwrap();
        half_written(&locked);
        locked.check_empty().unwrap();
        half_written(&locked);
        locked.write(&State::default()).unwrap();
        half_written(&locked);
        fs::write(locked.store_log("default"), "").unwrap();
        locked.remove(&State::default()).unwrap();
        drop(locked);
        let locked = directory(&folder).create().unwrap();
        half_written(&locked);
        locked.remove_remains();
        assert!(!folder.path().join("a/fleet").exists());
    }

    #[test]
    fn vms_are_in_the_order_of_their_numbers_with_those_that_are_missed() {
        let missing = |name: &str| {
            let (vmm, why) = (Vmm::Qemu, "it did not start".to_owned());
            (name.to_owned(), Missing { vmm, why })
        };
        let state = State {
            missing: ["web-10", "db", "web-2"].map(missing).into(),
            ..State::default()
        };
        assert_eq!(state.names(), ["db", "web-2", "web-10"]);
    }

    #[test]
    fn room_is_tried_where_the_directory_is_or_will_be() {
        let folder = tempfile::tempdir().unwrap();
        directory(&folder).check_room(3, 1).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let file = folder.path().join("a");
        fs::write(&file, "").unwrap();
        let error = directory(&folder).check_room(1, 0).unwrap_err().to_string();
        let expected = format!("cannot write the 28 KiB that are needed in {}: ", file.display());
        assert!(error.starts_with(&expected), "{error}");
    }

    #[test]
    fn only_one_command_works_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let locked = directory(&folder).create().unwrap();
        let error = directory(&folder).lock().unwrap_err().to_string();
        assert!(error.contains("another fleet command"), "{error}");
        drop(locked);
        directory(&folder).lock().unwrap().unwrap();
    }

    #[test]
    fn what_is_not_the_fleets_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let locked = directory(&folder).create().unwrap();
        fs::write(locked.path().join("mine"), "").unwrap();
        assert!(
            locked
                .check_empty()
                .unwrap_err()
                .to_string()
                .contains("not empty")
        );
        locked.remove(&State::default()).unwrap_err();
        assert!(folder.path().join("a/fleet/mine").exists());
    }

    #[test]
    fn only_a_socket_of_the_vms_user_is_its_socket() {
        use std::os::unix::net::UnixListener;
        let folder = tempfile::tempdir().unwrap();
        let locked = directory(&folder).create().unwrap();
        let (a, b) = (locked.make_vm("a").unwrap(), locked.make_vm("b").unwrap());
        let _b = UnixListener::bind(b.socket()).unwrap();
        let held = b.hold_socket().unwrap();
        std::os::unix::net::UnixStream::connect(held.path()).unwrap();
        // What VM a is told would be told to b.
        std::os::unix::fs::symlink(b.socket(), a.socket()).unwrap();
        a.hold_socket().unwrap_err();
        fs::remove_file(a.socket()).unwrap();
        fs::write(a.socket(), "").unwrap();
        a.hold_socket().unwrap_err();
        // That of another user, whoever has put it there.
        let owner = Identity::of("61234", &[]).unwrap();
        match locked.give_vm(&b, &owner) {
            Ok(()) => _ = b.hold_socket().unwrap_err(),
            Err(e) => vmm_dedup_host::note!("SKIPPED: only root can give files away: {e}"),
        }
    }

    #[test]
    fn a_vms_folder_is_its_users_and_what_was_in_it_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let locked = directory(&folder).create().unwrap();
        locked.write(&State::default()).unwrap();
        let files = locked.make_vm("a").unwrap();
        std::os::unix::fs::symlink("/nonexistent", files.log()).unwrap();
        let files = locked.make_vm("a").unwrap();
        assert_eq!(fs::read_dir(files.folder()).unwrap().count(), 0);
        fs::write(files.dedup(), "").unwrap();
        let owner = Identity::of("61234", &[]).unwrap();
        if let Err(e) = locked.give_vm(&files, &owner) {
            vmm_dedup_host::note!("SKIPPED: only root can give files away: {e}");
            return;
        }
        let rights = |path: &Path| {
            let file = fs::metadata(path).unwrap();
            (file.uid(), file.mode() & 0o777)
        };
        assert_eq!(rights(files.folder()), (61_234, 0o700));
        assert_eq!(rights(&files.dedup()).0, 61_234);
        assert_eq!(rights(locked.path()), (0, 0o711));
        assert_eq!(rights(&locked.state_path()), (0, 0o600));
        // Still believed.
        locked.state().unwrap().unwrap();
    }

    #[test]
    fn a_directory_that_others_write_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let locked = directory(&folder).create().unwrap();
        locked.write(&State::default()).unwrap();
        fs::set_permissions(locked.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(
            locked
                .state()
                .unwrap_err()
                .to_string()
                .contains("others can write")
        );
    }

    #[test]
    fn a_broken_state_is_an_error_that_says_what_runs_and_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let locked = directory(&folder).create().unwrap();
        let path = locked.path().join("state.json");
        let error = || locked.state().unwrap_err().to_string();
        fs::write(&path, "{").unwrap();
        let remove = format!("`rm -r {}`", locked.path().display());
        assert!(
            error().starts_with(&format!("cannot use {}: it is spoilt (EOF", path.display()))
                && error().contains(&format!("nothing of its fleet runs: {remove}")),
            "{}",
            error()
        );
        let log = fs::File::create(locked.make_vm("web-0").unwrap().log()).unwrap();
        let mut vm = Command::new("sleep").arg("1000").stdout(log).spawn().unwrap();
        let log = fs::File::create(locked.store_log("blue")).unwrap();
        let mut store = Command::new("sleep").arg("1000").stderr(log).spawn().unwrap();
        let told = [
            format!("web-0 is process {}", vm.id()),
            format!("the store of domain \"blue\" is process {}", store.id()),
            format!("then {remove}"),
        ];
        let mut pids = [vm.id(), store.id()];
        pids.sort_unstable();
        let kill = format!("`kill {} {}`", pids[0], pids[1]);
        let spoilt = error();
        fs::remove_file(&path).unwrap();
        let gone = error();
        vm.kill().and_then(|()| store.kill()).unwrap();
        vm.wait().and_then(|_| store.wait()).unwrap();
        for text in [spoilt, gone] {
            let all = told.iter().chain([&kill]).all(|part| text.contains(part));
            assert!(all, "{text}");
        }
        assert!(locked.state().unwrap().is_none());
    }
}
