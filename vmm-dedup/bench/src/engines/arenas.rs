//! Content in shared memory, where devices can read it.

use crate::content::Area;
use vmm_dedup::compare::Arena;
use vmm_dedup_host::Failure;
use vmm_dedup_protocol::key::PAGE_WORDS;

pub(crate) fn arena(pages: usize) -> Result<Arena, Failure> {
    Arena::new(pages).map_err(|e| Failure::new(format!("cannot make {pages} pages of shared memory: {e}")))
}

pub(crate) fn arena_of(area: &Area) -> Result<Arena, Failure> {
    let pages: Vec<usize> = (0..area.pages()).collect();
    arena_of_pages(area, &pages)
}

/// The pages with content: most zero pages of an image were never used, and would not be there.
pub(crate) fn arena_without_zeros(area: &Area) -> Result<Arena, Failure> {
    let used = |page: &usize| area.read(*page) != [0; PAGE_WORDS];
    let pages: Vec<usize> = (0..area.pages()).filter(used).collect();
    if pages.is_empty() {
        return Err(Failure::new("the images hold nothing but zeros"));
    }
    arena_of_pages(area, &pages)
}

pub(crate) fn arena_of_pages(area: &Area, pages: &[usize]) -> Result<Arena, Failure> {
    let arena = arena(pages.len())?;
    for (at, page) in pages.iter().enumerate() {
        arena.write(at, &area.read(*page));
    }
    Ok(arena)
}
