//! Content that fills long stretches of a guest, such as memory that its kernel has poisoned.
//!
//! One slot can be mapped to one page at a time: a stretch would cost a mapping for every page. The store makes a *series*
//! of such content when it is asked to, [`SERIES`](vmm_dedup_protocol::SERIES) consecutive slots that hold the same, and a
//! guest's page maps the one that its number says ([`Line::slot_for`]). Each slot is a slot like others: compared before it
//! is mapped, and counted.

use crate::account::Account;
use crate::error::Error;
use crate::lookup::keys::KeyReader;
use crate::lookup::request::{MergeRequest, Role};
use crate::memory::page_map::PageMap;
use crate::store::session::Session;
use crate::sys::page_size::PAGE_SIZE;
use vmm_dedup_protocol::index::Line;
use vmm_dedup_protocol::message::{Staged, Wish};

/// So many neighbours with one slot are worth a series. They spare half of what it costs; content that fills half of a
/// huge page is hardly ever alone.
const WORTH_IT: usize = 256;

/// Lets long stretches of one slot use the slots of a series.
///
/// # Errors
/// Those of the connection.
pub(crate) fn use_series(
    map: &PageMap,
    session: &mut Session,
    account: &mut Account,
    requests: &mut [MergeRequest],
) -> Result<(), Error> {
    let one_slot = |a: &MergeRequest, b: &MergeRequest| {
        let twins = a.role == Role::Twin && b.role == Role::Twin;
        twins && a.slot.is_some() && a.slot == b.slot && b.page == a.page + 1
    };
    let stretches = requests.chunk_by_mut(one_slot);
    for stretch in stretches.filter(|stretch| stretch.len() >= WORTH_IT) {
        use_series_for(map, session, account, stretch)?;
    }
    Ok(())
}

#[allow(unsafe_code)] // reads guest memory
fn use_series_for(
    map: &PageMap,
    session: &mut Session,
    account: &mut Account,
    stretch: &mut [MergeRequest],
) -> Result<(), Error> {
    let MergeRequest { page, slot, .. } = stretch[0];
    let mut reader = KeyReader {
        memory: map.memory(),
        salt: session.salt(),
        account,
    };
    let (key, _) = reader.read(page);
    let Some(store) = session.store_mut() else {
        return Ok(());
    };
    if slot.is_some() && store.index().line(key) == slot.map(Line::Sole) {
        // SAFETY: guest memory stays mapped while the service runs.
        unsafe { store.stage(0, map.memory().address(page)) };
        let (gap, wish) = (0, Wish::Series);
        let published = store.publish(&[Staged { key, gap, wish }])?;
        account.stats.bytes_read.publish += PAGE_SIZE as u64;
        if let Some(slot) = published.into_iter().flatten().next() {
            stretch[0] = MergeRequest::published(page, slot);
        }
    }
    if let Some(line @ Line::Series(_)) = store.index().line(key) {
        let twins = stretch.iter_mut().filter(|request| request.role == Role::Twin);
        twins.for_each(|twin| twin.slot = line.slot_for(twin.page));
    }
    Ok(())
}
