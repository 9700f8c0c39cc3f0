//! The stores of this host: each lists itself in the runtime folder for as long as it runs.
//!
//! A record is a file `*.store.json` in the runtime folder or in a folder of it. Its store keeps a lock on the file, which ends
//! with the process, however that ends. So a record without a lock is that of a store that has ended. It stays while the
//! store's socket is there, for then the store was killed and somebody should know; it goes with the socket, or when another
//! store takes its place.
//!
//! Records are written by whoever may write there and are believed in nothing: they tell where to ask. A record of another user
//! who is not root may tell of no socket but one beside itself, so that nobody sends root to a socket of his choice or stands in
//! for another's store. What has control characters in it is no record: it would act on the terminal.

use crate::runtime;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// What a record's name ends with.
const SUFFIX: &str = ".store.json";
/// The folder of records in the runtime folder.
const FOLDER: &str = "stores";
/// A record is short; what is longer is none.
const MOST_BYTES: u64 = 1 << 16;

/// What a store says of itself when it starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Where it listens.
    pub socket: PathBuf,
    /// Its trust domain.
    pub domain: String,
    /// Its process.
    pub pid: u32,
    /// Where it serves metrics.
    pub metrics: Option<SocketAddr>,
    /// Most memory for shared pages, MiB; `None` of a release that did not say.
    #[serde(default)]
    pub max_mib: Option<u64>,
    /// Whether it publishes the pages in the order of their content.
    #[serde(default)]
    pub ordered: bool,
    /// Whether it shares securely.
    #[serde(default)]
    pub secure: bool,
    /// Who may connect; of a release that did not say, root and its user.
    #[serde(default)]
    pub access: Access,
    /// When it started, seconds since the host booted.
    pub started: u64,
    /// Its release.
    pub version: String,
}

/// Who may connect to a store, as its options say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// Permissions of the socket.
    pub mode: u32,
    /// Its group, if it was named.
    pub group: Option<u32>,
    /// Who may connect besides root and the store's user; empty: whoever may write to the socket.
    pub users: Vec<u32>,
}

impl Access {
    /// Permissions of a socket of which nothing else is said.
    pub const MODE: u32 = 0o600;

    /// The options that say so, each with a space before it.
    #[must_use]
    pub fn words(&self) -> String {
        let mut words = String::new();
        if self.mode != Self::MODE {
            words += &format!(" --socket-mode {:04o}", self.mode);
        }
        if let Some(group) = self.group {
            words += &format!(" --socket-group {group}");
        }
        if !self.users.is_empty() {
            let users: Vec<String> = self.users.iter().map(u32::to_string).collect();
            words += &format!(" --join-user {}", users.join(","));
        }
        words
    }
}

impl Default for Access {
    fn default() -> Self {
        Self {
            mode: Self::MODE,
            group: None,
            users: Vec::new(),
        }
    }
}

/// A store that may be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Where it listens, or did.
    pub socket: PathBuf,
    /// What it said of itself; `None`: nothing but a socket was found.
    pub record: Option<Record>,
}

/// A record that is there for as long as this.
#[derive(Debug)]
pub struct Registration {
    path: PathBuf,
    /// Locked.
    file: File,
}

impl Registration {
    /// Lists a store: among the others, or beside its socket if that is in the runtime folder and this user may write nowhere
    /// else there.
    ///
    /// # Errors
    /// Why it could not be listed. It works all the same, for who names its socket.
    pub fn new(record: &Record) -> io::Result<Self> {
        let mut failed = None;
        for folder in places(&record.socket) {
            match Self::within(&folder, record) {
                Ok(registration) => return Ok(registration),
                Err(error) => _ = failed.get_or_insert(error),
            }
        }
        Err(failed.unwrap_or_else(|| io::Error::other("this user has no runtime folder")))
    }

    fn within(folder: &Path, record: &Record) -> io::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Process numbers are those of a namespace: two containers that share the folder both have a process 1.
        let random = RandomState::new().build_hasher().finish();
        let name = format!("{}-{number}-{random:016x}", record.pid);
        let fresh = folder.join(format!(".{name}.new"));
        let path = folder.join(format!("{name}{SUFFIX}"));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(&fresh, flags, Mode::from_raw_mode(0o644))?);
        // Locked before it has its name: whoever sees a record without a lock sees that of a store that has ended.
        let written = flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(io::Error::from)
            .and_then(|()| (&file).write_all(&serde_json::to_vec(record)?))
            .and_then(|()| fs::rename(&fresh, &path));
        match written {
            Ok(()) => Ok(Self { path, file }),
            Err(error) => {
                let _ = fs::remove_file(&fresh);
                Err(error)
            }
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let inode = |metadata: io::Result<fs::Metadata>| metadata.map(|file| (file.dev(), file.ino())).ok();
        // Not that of another who took the name.
        if inode(self.file.metadata()) == inode(fs::symlink_metadata(&self.path)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Where a store may be listed, the best place first.
fn places(socket: &Path) -> Vec<PathBuf> {
    let mut places = Vec::new();
    if let Ok(folder) = runtime::folder() {
        let stores = folder.join(FOLDER);
        // What fails is told by whoever writes there.
        let _ = fs::create_dir_all(&stores);
        places.push(stores);
    }
    let beside = socket.parent().filter(|parent| {
        runtime::folders()
            .iter()
            .any(|folder| parent == folder || parent.parent() == Some(folder))
    });
    places.extend(beside.map(Path::to_owned));
    places
}

/// All stores that this user can find, by socket. Removes records of stores that have ended for good.
#[must_use]
pub fn stores() -> Vec<Known> {
    let mut known: BTreeMap<PathBuf, Option<Record>> = BTreeMap::new();
    let mut ended = Vec::new();
    for folder in runtime::folders() {
        for path in files(&folder) {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            if name.ends_with(SUFFIX) {
                match read(&path, rustix::process::geteuid().as_raw()) {
                    Some((record, true)) => _ = known.insert(record.socket.clone(), Some(record)),
                    Some((record, false)) => ended.push((path, record)),
                    None => {}
                }
            } else if is_store_socket(&folder, &path, name) {
                known.entry(path).or_insert(None);
            }
        }
    }
    for (path, record) in ended {
        let replaced = matches!(known.get(&record.socket), Some(Some(_)));
        if replaced || !is_socket(&record.socket) {
            let _ = fs::remove_file(&path);
        } else {
            known.insert(record.socket.clone(), Some(record));
        }
    }
    let known = known.into_iter();
    known.map(|(socket, record)| Known { socket, record }).collect()
}

/// What the store at this socket says of itself, or said, if it is listed.
#[must_use]
pub fn record(socket: &Path) -> Option<Record> {
    let absolute = std::path::absolute(socket).ok()?;
    let known = stores().into_iter().find(|known| known.socket == absolute);
    known.and_then(|known| known.record)
}

/// The files in a folder and in its folders.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let mut files = entries(folder);
    // Not what a link leads to: it may be anywhere.
    let is_folder = |path: &&PathBuf| fs::symlink_metadata(path).is_ok_and(|file| file.is_dir());
    let folders: Vec<PathBuf> = files.iter().filter(is_folder).cloned().collect();
    files.extend(folders.iter().flat_map(|folder| entries(folder)));
    files
}

/// Stores that list themselves nowhere are found by where fleets and units let them listen.
fn is_store_socket(folder: &Path, path: &Path, name: &str) -> bool {
    let at_the_top = path.parent() == Some(folder);
    let named = match at_the_top {
        true => name.starts_with("store") && name.ends_with(".sock"),
        false => name == "store.sock",
    };
    named && !acts_on_terminal(path) && is_socket(path)
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

fn acts_on_terminal(path: &Path) -> bool {
    path.to_string_lossy().contains(char::is_control)
}

/// A record as `user` may believe it, and whether its store lives. `None` for what is no record, or tells of what is not its
/// owner's.
fn read(path: &Path, user: u32) -> Option<(Record, bool)> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > MOST_BYTES {
        return None;
    }
    let mut text = String::new();
    (&file).take(MOST_BYTES).read_to_string(&mut text).ok()?;
    let record: Record = serde_json::from_str(&text).ok()?;
    let is_beside = record.socket.parent() == path.parent();
    let is_trusted = [0, user].contains(&metadata.uid());
    let harmless = |text: &str| !text.contains(char::is_control);
    let believed = (is_trusted || is_beside)
        && !acts_on_terminal(&record.socket)
        && harmless(&record.domain)
        && harmless(&record.version);
    if !believed {
        return None;
    }
    let alive = flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK);
    Some((record, alive))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn record(socket: PathBuf) -> Record {
        Record {
            socket,
            domain: "default".into(),
            pid: std::process::id(),
            metrics: None,
            max_mib: Some(8),
            ordered: false,
            secure: false,
            access: Access::default(),
            started: 1,
            version: "0".into(),
        }
    }

    fn own() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    #[test]
    fn a_record_of_another_user_tells_of_what_is_beside_it_and_of_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (beside, elsewhere) = (folder.path().join("s.sock"), "/elsewhere/s.sock".into());
        let [beside, elsewhere] = [beside, elsewhere].map(|socket| {
            let registration = Registration::within(folder.path(), &record(socket)).unwrap();
            // Whoever runs the test, the file belongs to a user who is neither root nor the one that reads it.
            std::os::unix::fs::chown(&registration.path, Some(FOREIGN), None).map(|()| registration)
        });
        let (Ok(beside), Ok(elsewhere)) = (beside, elsewhere) else {
            crate::note!("SKIPPED: only root can give files away");
            return;
        };
        assert!(read(&beside.path, own()).is_some());
        assert_eq!(read(&elsewhere.path, own()), None);
        assert!(read(&elsewhere.path, FOREIGN).is_some());
    }

    /// A user number that is nobody's.
    const FOREIGN: u32 = 54_321;

    #[test]
    fn what_would_act_on_a_terminal_is_no_record() {
        let folder = tempfile::tempdir().unwrap();
        let plain = record(folder.path().join("s.sock"));
        for bad in [
            Record {
                socket: folder.path().join("\x1b[2J.sock"),
                ..plain.clone()
            },
            Record {
                domain: "red\x1b[31m".into(),
                ..plain.clone()
            },
            Record {
                version: "1\n2".into(),
                ..plain.clone()
            },
        ] {
            let registration = Registration::within(folder.path(), &bad).unwrap();
            assert_eq!(read(&registration.path, own()), None, "{bad:?}");
        }
        let socket = folder.path().join("store-\x1b[2J.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        assert!(!is_store_socket(folder.path(), &socket, "store-\x1b[2J.sock"));
    }

    /// Stores in containers of their own that share the folder have the same process number.
    #[test]
    fn stores_with_the_same_process_number_are_listed_side_by_side() {
        let folder = tempfile::tempdir().unwrap();
        let record = record(folder.path().join("s.sock"));
        let name = |registration: &Registration| {
            let name = registration
                .path
                .file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned();
            name.split('-').nth(2).unwrap().to_owned()
        };
        let [a, b] = [(), ()].map(|()| Registration::within(folder.path(), &record).unwrap());
        // What another process adds to its number and to the count, which begins anew in each, is not the same again.
        assert_ne!(name(&a), name(&b));
        assert!(read(&a.path, own()).is_some() && read(&b.path, own()).is_some());
    }

    #[test]
    fn a_record_is_alive_while_it_is_held_and_gone_with_its_holder() {
        let folder = tempfile::tempdir().unwrap();
        let record = record(folder.path().join("s.sock"));
        let registration = Registration::within(folder.path(), &record).unwrap();
        let path = registration.path.clone();
        assert_eq!(read(&path, own()), Some((record.clone(), true)));
        let copy = folder.path().join(format!("copy{SUFFIX}"));
        fs::copy(&path, &copy).unwrap();
        assert_eq!(read(&copy, own()), Some((record, false)));
        drop(registration);
        assert!(!path.exists());
    }

    #[test]
    fn a_record_of_a_release_that_said_less_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("x{SUFFIX}"));
        let old = r#"{"socket":"/s","domain":"d","pid":1,"metrics":null,"started":1,"version":"0"}"#;
        fs::write(&path, old).unwrap();
        let (record, _) = read(&path, own()).unwrap();
        assert_eq!((record.max_mib, record.ordered), (None, false));
    }

    #[test]
    fn what_is_no_record_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("x{SUFFIX}"));
        for content in ["", "{", "{\"socket\": 1}", &"x".repeat(1 << 17)] {
            fs::write(&path, content).unwrap();
            assert_eq!(read(&path, own()), None);
        }
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert_eq!(read(&path, own()), None);
    }

    #[test]
    fn sockets_of_stores_are_told_from_others() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path();
        fs::create_dir(top.join("blue")).unwrap();
        let is_one = |name: &str| {
            let path = top.join(name);
            let _listener = UnixListener::bind(&path).unwrap();
            is_store_socket(top, &path, path.file_name().unwrap().to_str().unwrap())
        };
        assert!(is_one("store.sock") && is_one("store-blue.sock") && is_one("blue/store.sock"));
        assert!(!is_one("api.sock") && !is_one("blue/api.sock"));
        fs::write(top.join("store-file.sock"), "").unwrap();
        assert!(!is_store_socket(
            top,
            &top.join("store-file.sock"),
            "store-file.sock"
        ));
    }
}
