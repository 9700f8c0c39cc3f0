//! The programs of VMMs and the preload library: where they are, and whether the one can go into the other.

use crate::file::Vmm;
use elf::ElfBytes;
use elf::abi::PT_INTERP;
use elf::endian::AnyEndian;
use std::env;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What the library is called.
pub(crate) const LIBRARY: &str = "libvmm_dedup_preload.so";
/// Where the library is, if the file does not say.
const LIBRARY_VARIABLE: &str = "VMM_DEDUP_PRELOAD";

/// The program of a VMM: from its environment variable, else from PATH; the reference VMM is this program.
pub(crate) fn of(vmm: Vmm) -> Result<PathBuf, String> {
    let (variable, program) = match vmm {
        Vmm::Reference => return env::current_exe().map_err(|e| format!("cannot find this program: {e}")),
        Vmm::CloudHypervisor => ("CLOUD_HYPERVISOR", "cloud-hypervisor"),
        Vmm::Qemu => ("QEMU", "qemu-system-x86_64"),
    };
    if let Some(path) = env::var_os(variable).filter(|value| !value.is_empty()) {
        let path = PathBuf::from(path);
        return match is_program(&path) {
            true => Ok(path),
            false => Err(format!("{variable} is {}, which is no program", path.display())),
        };
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|path| is_program(path))
        .ok_or_else(|| format!("there is no {program} on PATH: install it, or set {variable} to its path"))
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// The preload library: as the file says, else by environment variable, else beside this program or in its `lib`.
pub(crate) fn library(given: Option<&Path>) -> Result<PathBuf, String> {
    let found = find_library(given)?;
    // The loader takes both as separators.
    if found
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .any(|byte| b": ".contains(byte))
    {
        return Err(format!(
            "there is a space or colon in {}: move the library",
            found.display()
        ));
    }
    Ok(found)
}

fn find_library(given: Option<&Path>) -> Result<PathBuf, String> {
    let named = given.map(|path| ("preload", path.to_owned())).or_else(|| {
        let path = env::var_os(LIBRARY_VARIABLE).filter(|value| !value.is_empty());
        path.map(|path| (LIBRARY_VARIABLE, PathBuf::from(path)))
    });
    if let Some((what, path)) = named {
        let found = std::path::absolute(&path).ok().filter(|path| path.is_file());
        return found.ok_or_else(|| format!("{what} is {}, which does not exist", path.display()));
    }
    let own = env::current_exe().unwrap_or_default();
    let folder = own.parent().unwrap_or(Path::new("/"));
    let places = [
        folder.join(LIBRARY),
        folder.join("../lib/vmm-dedup").join(LIBRARY),
    ];
    places.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        format!(
            "{LIBRARY} is neither in {0} nor in {0}/../lib/vmm-dedup: set preload in the fleet file or {LIBRARY_VARIABLE}, or set dedup.mode = \"off\"",
            folder.display()
        )
    })
}

/// Fails if the dynamic loader would not put a library into this program.
pub(crate) fn check_preloadable(program: &Path) -> Result<(), String> {
    let refuse = |why: &str, lift: &str| {
        Err(format!(
            "{} {why}: {lift}, or set dedup.mode = \"off\"",
            program.display()
        ))
    };
    let content = std::fs::read(program).map_err(|e| format!("cannot read {}: {e}", program.display()))?;
    if content.starts_with(b"#!") {
        return refuse(
            "is a script, so the preload library would go into its interpreter",
            "name the program itself",
        );
    }
    let file = ElfBytes::<AnyEndian>::minimal_parse(&content);
    let Some(segments) = file.ok().and_then(|file| file.segments()) else {
        return refuse("is no ELF program", "name the VMM's program");
    };
    if !segments.iter().any(|segment| segment.p_type == PT_INTERP) {
        return refuse(
            "is statically linked, so that nothing can be preloaded",
            "use a dynamically linked build",
        );
    }
    let metadata = program
        .metadata()
        .map_err(|e| format!("cannot read {}: {e}", program.display()))?;
    if metadata.mode() & 0o6000 != 0 {
        return refuse(
            "is set-user-ID or set-group-ID, for which the loader ignores LD_PRELOAD",
            "remove that bit and start the fleet as that user",
        );
    }
    if rustix::fs::getxattr(program, "security.capability", &mut [0u8; 64]).is_ok_and(|len| len > 0) {
        return refuse(
            "has file capabilities, for which the loader ignores LD_PRELOAD",
            "remove them (setcap -r) and give the capabilities to the user or service that starts the fleet",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn error_of(name: &str, content: &[u8], mode: u32) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        check_preloadable(&path).unwrap_err()
    }

    #[test]
    fn this_dynamically_linked_program_can_be_preloaded() {
        check_preloadable(&env::current_exe().unwrap()).unwrap();
    }

    #[test]
    fn a_static_program_is_refused_with_the_reason() {
        // The payload guest is a freestanding ELF image: no interpreter.
        let error = error_of("vmm", vmm_dedup_payload::ELF, 0o755);
        assert!(error.contains("vmm is statically linked"), "{error}");
        assert!(
            error.contains("dynamically linked build, or set dedup.mode"),
            "{error}"
        );
    }

    #[test]
    fn scripts_and_other_files_are_refused() {
        assert!(error_of("vmm", b"#!/bin/sh\n", 0o755).contains("is a script"));
        assert!(error_of("vmm", b"MZ", 0o755).contains("is no ELF program"));
    }

    #[test]
    fn a_set_user_id_program_is_refused() {
        let own = fs::read(env::current_exe().unwrap()).unwrap();
        assert!(error_of("vmm", &own, 0o4755).contains("set-user-ID"));
    }

    #[test]
    fn a_library_whose_path_the_loader_would_split_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a b.so", "a:b.so"] {
            let path = folder.path().join(name);
            fs::write(&path, "").unwrap();
            let error = library(Some(&path)).unwrap_err();
            assert!(error.starts_with("there is a space or colon in"), "{error}");
        }
    }

    #[test]
    fn a_library_that_is_named_must_exist() {
        let error = library(Some(Path::new("/nonexistent/lib.so"))).unwrap_err();
        assert_eq!(error, "preload is /nonexistent/lib.so, which does not exist");
    }
}
