//! Whether a store's socket may be a stranger's.
//!
//! Guest pages are given to whoever listens at the store's path. Whoever may write to a folder of that path may put his own store there, or
//! move the whole folder away and another one to its place. Folders that only some may write to are theirs who want a store there;
//! in folders that anybody may write to, such as /tmp, nobody knows.

use std::ffi::OsString;
use std::fs::{metadata, read_link, symlink_metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use vmm_dedup_protocol::peer;

/// Symbolic links that are followed, as the kernel does.
const MOST_LINKS: usize = 40;

/// Anybody may write.
const OTHERS_WRITE: u32 = 0o002;
/// Nobody moves what is another one's.
const STICKY: u32 = 0o1000;

/// Refuses somebody else's store where anybody may have put it on the way to its path: the socket, or a folder or link that leads there.
///
/// # Errors
/// It runs as a user that is neither root, nor this process's, nor whose the folder is that anybody may write to. Or a folder cannot be
/// looked at.
pub(super) fn check(path: &Path, socket: &OwnedFd) -> io::Result<()> {
    // A socket has the user of who made it.
    let (user, own) = (peer::credentials(socket)?.uid, rustix::fs::fstat(socket)?.st_uid);
    // Whoever it is: a filter that lacks these calls is to show before a stranger comes.
    let found = anybodys(path, own);
    if [0, own].contains(&user) {
        return Ok(());
    }
    match found?.into_iter().find(|(_, owner)| *owner != user) {
        None => Ok(()),
        Some((folder, _)) => Err(io::Error::other(format!(
            "it runs as user {user}, and anybody may have put it there, since all may write to {}: have its socket in a folder that only its user may write to, as all folders above",
            folder.display()
        ))),
    }
}

/// Folders on the way to a path, down from the root, in which anybody may have put what leads there, each with its owner. Links are followed.
fn anybodys(path: &Path, own: u32) -> io::Result<Vec<(PathBuf, u32)>> {
    let mut at = PathBuf::from("/");
    let mut rest = names(path);
    if path.is_relative() {
        rest.extend(names(&read_link("/proc/self/cwd")?));
    }
    let (mut found, mut links) = (Vec::new(), 0);
    while let Some(name) = rest.pop() {
        if name == ".." {
            at.pop();
            continue;
        }
        let (folder, next) = (metadata(&at)?, at.join(name));
        let entry = symlink_metadata(&next)?;
        let is_kept =
            folder.mode() & STICKY != 0 && !rest.is_empty() && [0, own, folder.uid()].contains(&entry.uid());
        if folder.mode() & OTHERS_WRITE != 0 && !is_kept {
            found.push((at.clone(), folder.uid()));
        }
        if !entry.is_symlink() {
            at = next;
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return Err(io::Error::from_raw_os_error(libc::ELOOP));
        }
        let target = read_link(next)?;
        if target.is_absolute() {
            at = PathBuf::from("/");
        }
        rest.extend(names(&target));
    }
    Ok(found)
}

/// The names in a path, the last one first.
fn names(path: &Path) -> Vec<OsString> {
    let name = |component: Component<'_>| match component {
        Component::Normal(_) | Component::ParentDir => Some(component.as_os_str().to_owned()),
        _ => None,
    };
    path.components().rev().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::store::connection::Store;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use vmm_dedup_protocol::socket;

    const STRANGER: u32 = 65_533;

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    /// A store of the stranger's; `None` where this process cannot act for him.
    fn listen(path: &Path) -> Option<OwnedFd> {
        let listen = || {
            let stranger = rustix::process::Uid::from_raw(STRANGER);
            let done = rustix::thread::set_thread_res_uid(stranger, stranger, stranger);
            done.ok().map(|()| socket::listen(path).unwrap())
        };
        std::thread::scope(|scope| scope.spawn(listen).join().unwrap())
    }

    fn checked(path: &Path) -> io::Result<()> {
        check(path, &socket::connect(path).unwrap())
    }

    fn refuses(path: &Path, folder: &Path) {
        let refused = checked(path).unwrap_err().to_string();
        let says = format!("may write to {}:", folder.display());
        assert!(refused.contains(&says), "{refused}");
    }

    #[test]
    fn a_strangers_store_is_used_only_where_not_anybody_could_have_put_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.sock");
        set_mode(folder.path(), 0o1777);
        let own = socket::listen(&path).unwrap();
        checked(&path).unwrap();
        drop(own);
        std::fs::remove_file(&path).unwrap();
        let Some(_listener) = listen(&path) else {
            return eprintln!("SKIPPED: only root can act as another user");
        };
        let refused = Store::connect(&path, "vm", 1).map(drop);
        let Err(Error::Connect { source, .. }) = &refused else {
            panic!("{refused:?}")
        };
        assert!(source.to_string().contains("it runs as user 65533"), "{source}");
        set_mode(folder.path(), 0o755);
        checked(&path).unwrap();
    }

    #[test]
    fn a_folder_that_anybody_may_move_away_is_anybodys() {
        let above = tempfile::tempdir().unwrap();
        let (folder, upper) = (above.path().join("upper/store"), above.path().join("upper"));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("store.sock");
        set_mode(&folder, 0o777);
        let Some(_listener) = listen(&path) else {
            return eprintln!("SKIPPED: only root can act as another user");
        };
        set_mode(&folder, 0o755);
        checked(&path).unwrap();
        set_mode(&upper, 0o777);
        refuses(&path, &upper);
        // What is another one's stays where it is.
        set_mode(&upper, 0o1777);
        checked(&path).unwrap();
        // What is a stranger's may have come there as the first.
        chown(&folder, Some(STRANGER), None).unwrap();
        refuses(&path, &upper);
        set_mode(&upper, 0o755);
        checked(&path).unwrap();
    }

    #[test]
    fn a_link_that_anybody_may_have_made_is_anybodys() {
        let above = tempfile::tempdir().unwrap();
        let (folder, open) = (above.path().join("store"), above.path().join("open"));
        [&folder, &open]
            .iter()
            .for_each(|folder| std::fs::create_dir(folder).unwrap());
        let (path, by_link) = (folder.join("store.sock"), open.join("link/store.sock"));
        set_mode(&folder, 0o777);
        let Some(_listener) = listen(&path) else {
            return eprintln!("SKIPPED: only root can act as another user");
        };
        set_mode(&folder, 0o755);
        symlink("../store", open.join("link")).unwrap();
        checked(&by_link).unwrap();
        set_mode(&open, 0o777);
        checked(&path).unwrap();
        refuses(&by_link, &open);
    }

    #[test]
    fn links_in_a_circle_lead_nowhere() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink("link", &link).unwrap();
        let error = anybodys(&link.join("store.sock"), 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
        assert!(anybodys(Path::new("../no/such"), 0).is_err());
    }
}
