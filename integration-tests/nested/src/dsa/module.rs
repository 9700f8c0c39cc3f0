//! Linux's `dmatest`, which Debian does not build: the kernel's own source, compiled against its headers.

use crate::Failure;
use crate::debian::{WholeKernel, file_name, files, output};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "drivers/dma/dmatest.c";

/// The module, compiled unless it was before.
pub(super) fn dmatest(kernel: &WholeKernel, cache: &Path) -> Result<PathBuf, Failure> {
    let root = kernel
        .root()
        .canonicalize()
        .map_err(|e| Failure::file(cache, e))?;
    let folder = root.with_file_name("dmatest");
    let module = folder.join("dmatest.ko");
    if module.is_file() {
        return Ok(module);
    }
    fs::create_dir_all(&folder).map_err(|e| Failure::file(&folder, e))?;
    extract(&root, &folder)?;
    fs::write(folder.join("Makefile"), "obj-m := dmatest.o\n").map_err(|e| Failure::file(&folder, e))?;
    let headers = headers(&root)?;
    output(
        Command::new("make")
            .arg("-C")
            .arg(&headers)
            .arg(format!("M={}", folder.display()))
            // The compiler that is here, whatever the kernel was built with; no debugging information.
            .args(["CC=cc", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]),
    )?;
    Ok(module)
}

/// Takes the source out of the archive of all.
fn extract(root: &Path, folder: &Path) -> Result<(), Failure> {
    let sources = root.join("usr/src");
    let is_archive = |path: &PathBuf| file_name(path).contains(".tar");
    let archive = files(&sources).into_iter().find(is_archive);
    let archive = archive.ok_or_else(|| Failure::new(format!("no sources in {}", sources.display())))?;
    let name = file_name(&archive);
    let top = name.split_once(".tar").map_or(name.as_str(), |(top, _)| top);
    let text = output(
        Command::new("tar")
            .args(["--occurrence=1", "-xOf"])
            .arg(&archive)
            .arg(format!("{top}/{SOURCE}")),
    )?;
    let path = folder.join("dmatest.c");
    fs::write(&path, text).map_err(|e| Failure::file(&path, e))
}

/// The headers, whose makefiles are made to look for each other where they were unpacked.
fn headers(root: &Path) -> Result<PathBuf, Failure> {
    let sources = root.join("usr/src");
    let all = files(&sources);
    let folder = |suffix: &str| {
        let fits = |path: &&PathBuf| {
            let name = file_name(path);
            name.starts_with("linux-headers-") && name.ends_with(suffix)
        };
        let found = all.iter().find(fits).cloned();
        found.ok_or_else(|| Failure::new(format!("no headers in {}", sources.display())))
    };
    let (own, common) = (folder("-amd64")?, folder("-common")?);
    let makefile = own.join("Makefile");
    let text = fs::read_to_string(&makefile).map_err(|e| Failure::file(&makefile, e))?;
    let common = common.display().to_string();
    let place = format!("/usr/src/{}", file_name(Path::new(&common)));
    if text.contains(&format!(" {place}")) {
        let text = text.replace(&place, &common);
        fs::write(&makefile, text).map_err(|e| Failure::file(&makefile, e))?;
    }
    Ok(own)
}
