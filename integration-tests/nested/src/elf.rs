//! Which shared libraries a program needs.

use crate::Failure;
use object::Endianness;
use object::elf::{DT_NEEDED, FileHeader64, PT_INTERP};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};
use std::path::Path;

/// Names of the libraries that a program or library is linked with, and its loader's path if it has one. Empty for
/// what is no ELF file.
pub(crate) fn needs(path: &Path) -> Result<Vec<String>, Failure> {
    let data = std::fs::read(path).map_err(|e| Failure::file(path, e))?;
    if !data.starts_with(b"\x7fELF") {
        return Ok(Vec::new());
    }
    parse(&data).map_err(|e| Failure::file(path, e))
}

fn parse(data: &[u8]) -> object::Result<Vec<String>> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let mut needed = Vec::new();
    for segment in header.program_headers(endian, data)? {
        if segment.p_type(endian) == PT_INTERP
            && let Ok(path) = segment.data(endian, data)
        {
            needed.push(String::from_utf8_lossy(path).trim_end_matches('\0').to_owned());
        }
    }
    let sections = header.sections(endian, data)?;
    if let Some((entries, strings)) = sections.dynamic(endian, data)? {
        let strings = sections.strings(endian, data, strings)?;
        for entry in entries
            .iter()
            .filter(|entry| entry.tag32(endian) == Some(DT_NEEDED))
        {
            let name = entry.string(endian, strings)?;
            needed.push(String::from_utf8_lossy(name).into_owned());
        }
    }
    Ok(needed)
}
