//! Keying pages that the kernel copied: anonymous memory in mappings of the store.
//!
//! Nobody tracks writes there: a mapping of a file would have to be registered, and walked in every pass. So such a page is
//! looked at twice. If its key is the same the second time it stood still, and a twin is looked for. A page that was reported to
//! the store is looked at now and then, ever less often while nothing changes. What was written unseen is found out when it is
//! compared.
//!
//! A page that cannot be merged gains nothing from a slot. So what may be pinned is neither reported nor published: while nothing
//! is known to tell of pins no copy is, and a page that was found pinned is not until it was left alone for long, unless the
//! index has a twin.

use crate::account::Account;
use crate::error::Error;
use crate::lookup::find::twin;
use crate::lookup::keys::{KeyReader, PREFETCH};
use crate::lookup::request::Keyed;
use crate::memory::layout::Page;
use crate::memory::page_map::PageMap;
use crate::memory::page_state::Known;
use crate::store::session::Session;
use crate::sys::guest;
use crate::sys::page_size::PAGE_SIZE;
use crate::sys::pagemap::Pagemap;
use std::ops::Range;

/// As many mappings, at least, as asking the kernel one more time costs.
const MAPPINGS_PER_CALL: usize = 8;

/// Which copies can be merged now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prospect {
    /// None: nothing tells of pins.
    None,
    /// Those that are not pinned, which is told page by page.
    UnlessPinned,
    /// All: nobody has pages pinned.
    All,
}

/// Looks at the copies in a chunk; returns those that stood still and are to find a twin.
///
/// # Errors
/// [`Error::Pagemap`].
pub(crate) fn look(
    map: &mut PageMap,
    pagemap: &mut Pagemap,
    session: &Session,
    account: &mut Account,
    pass: u64,
    at: usize,
    prospect: Prospect,
) -> Result<Keyed, Error> {
    let places = places(map, at);
    map.looked_at_copies(at, !places.is_empty());
    if places.is_empty() {
        return Ok(Keyed::default());
    }
    let wanted = |page: Page| {
        let state = map.state(page);
        let not_yet = match state.known {
            Known::Pinned(retry) => !retry.is_due(pass),
            // Line keys are read here.
            Known::Candidate(key) => prospect != Prospect::None && key.is_full(),
            _ => false,
        };
        state.backing.is_copied() && !not_yet && !map.is_withheld(page) && !map.is_paused(page)
    };
    let mut pages = Vec::new();
    for place in places {
        // What is swapped out stays there.
        for present in pagemap.private(place).map_err(Error::Pagemap)? {
            let addresses = present.step_by(PAGE_SIZE);
            let numbers = addresses.filter_map(|address| map.memory().page_at(address));
            pages.extend(numbers.filter(|page| wanted(*page)));
        }
    }
    if prospect == Prospect::None {
        account.stats.heal_pinned_total += pages.len() as u64;
        pages.iter().for_each(|page| map.forget_copy(*page));
        return Ok(Keyed::default());
    }
    Ok(read(map, session, account, (pass, prospect), &pages))
}

/// Where the kernel is asked about the copies in a chunk: stretch by stretch, or in all of the chunk if these are many. Asking costs
/// by the calls, and by the mappings on the way.
fn places(map: &PageMap, at: usize) -> Vec<Range<usize>> {
    let chunk = map.chunk_at(at);
    let mut copies: Vec<Range<usize>> = Vec::new();
    for page in chunk.pages.clone().filter(|page| map.backing(*page).is_copied()) {
        let start = map.memory().address(page);
        match copies.last_mut() {
            Some(last) if last.end == start => last.end += PAGE_SIZE,
            _ => copies.push(start..start + PAGE_SIZE),
        }
    }
    if copies.len() * MAPPINGS_PER_CALL > usize::from(map.chunk(at).fragments) + MAPPINGS_PER_CALL {
        return vec![chunk.addresses()];
    }
    copies
}

fn read(
    map: &mut PageMap,
    session: &Session,
    account: &mut Account,
    (pass, prospect): (u64, Prospect),
    pages: &[Page],
) -> Keyed {
    let memory = map.memory().clone();
    let mut reader = KeyReader {
        memory: &memory,
        salt: session.salt(),
        account,
    };
    let mut keyed = Keyed::default();
    for (n, page) in pages.iter().copied().enumerate() {
        if let Some(ahead) = pages.get(n + PREFETCH) {
            guest::prefetch_key_lines(memory.address(*ahead));
        }
        let (key, zero) = reader.read(page);
        match map.known(page) {
            Known::Candidate(known) if known == key => {}
            Known::Keyed(known) if known != key => {
                map.key_copy(page, Some(key));
            }
            // It rested long enough.
            Known::Keyed(_) | Known::Pinned(_) if zero => keyed.zeros.push(page),
            Known::Pinned(retry)
                if prospect == Prospect::UnlessPinned
                    && !retry.is_longest()
                    && twin(session, page, key).is_none() =>
            {
                map.copy_may_be_pinned(page, pass);
            }
            Known::Keyed(_) | Known::Pinned(_) => keyed.keys.push((page, key)),
            _ => map.key_copy(page, Some(key)),
        }
    }
    keyed
}
