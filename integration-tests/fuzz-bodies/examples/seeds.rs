//! Writes the seeds of all targets to where libFuzzer finds them.

use std::fs;
use std::path::Path;
use vmm_dedup_fuzz_bodies::TARGETS;

fn main() -> std::io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
    for target in TARGETS {
        let folder = folder.join(target.name);
        match fs::remove_dir_all(&folder) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => fs::create_dir_all(&folder)?,
        }
        for (name, seed) in (target.seeds)() {
            fs::write(folder.join(name), seed)?;
        }
    }
    Ok(())
}
