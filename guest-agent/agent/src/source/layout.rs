//! Where memory is: /proc/iomem.

use super::{Lack, Roots};
use std::ops::Range;
use vmm_dedup_agent_wire::frame::BLOCK;

const WHAT: &str = "the addresses of memory";

/// The blocks in which there is memory, ascending.
///
/// # Errors
/// [`Lack`]: without the right, the kernel says that all is at address 0.
pub fn blocks(roots: &Roots) -> Result<Vec<Range<u32>>, Lack> {
    let path = roots.proc.join("iomem");
    let text = std::fs::read_to_string(&path).map_err(|e| Lack::of(&path, &e, "CAP_SYS_ADMIN", WHAT))?;
    let ranges = parse(&text);
    if ranges.is_empty() {
        return Err(Lack::Right {
            file: path.display().to_string(),
            right: "CAP_SYS_ADMIN",
            what: WHAT,
        });
    }
    Ok(ranges)
}

fn parse(text: &str) -> Vec<Range<u32>> {
    let mut blocks: Vec<Range<u32>> = Vec::new();
    // What is within something else is indented.
    for line in text
        .lines()
        .filter(|line| line.trim_end().ends_with(": System RAM"))
    {
        let Some(range) = line.split_once(" : ").and_then(|(range, _)| block_range(range)) else {
            continue;
        };
        match blocks.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => blocks.push(range),
        }
    }
    blocks
}

/// "first-last", hexadecimal bytes; `None` also for nothing.
fn block_range(text: &str) -> Option<Range<u32>> {
    if text.starts_with(' ') {
        return None;
    }
    let (first, last) = text.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (first, last) = (number(first)?, number(last)?);
    let bytes = 4096 * BLOCK as u64;
    let block = |at: u64| u32::try_from(at).ok();
    (last > first).then_some(block(first / bytes)?..block(last / bytes + 1)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_where_the_kernel_says() {
        let text = "\
00000000-00000fff : Reserved
00001000-0009fbff : System RAM
00100000-bfffffff : System RAM
  01000000-01ffffff : Kernel code
  02000000-02ffffff : System RAM
e0000000-efffffff : PCI MMCONFIG
100000000-63fffffff : System RAM
";
        assert_eq!(parse(text), [0..0x600, 0x800..0x3200]);
    }

    #[test]
    fn without_rights_all_is_at_zero_and_that_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let roots = Roots {
            proc: folder.path().to_owned(),
            ..Roots::default()
        };
        assert!(matches!(blocks(&roots), Err(Lack::Missing { .. })));
        std::fs::write(folder.path().join("iomem"), "00000000-00000000 : System RAM\n").unwrap();
        let lack = blocks(&roots).unwrap_err().to_string();
        assert!(lack.contains("CAP_SYS_ADMIN"), "{lack}");
    }
}
