//! What follows from refusals: they are counted, and it is seen to that a page is found again when that may help.

use crate::account::Account;
use crate::lookup::request::MergeRequest;
use crate::memory::page_map::PageMap;
use crate::merge::admission::Obstacle;
use crate::merge::bridged_runs::Deferred;
use crate::store::session::{ResyncCause, Session};

/// Notes what was refused in this pass.
pub(crate) fn note(
    map: &mut PageMap,
    session: &mut Session,
    account: &mut Account,
    deferred: &mut Deferred,
    pass: u64,
    refused: &[(MergeRequest, Obstacle)],
) {
    let stats = &mut account.stats;
    for (request, obstacle) in refused {
        match obstacle {
            Obstacle::Deferred => {
                map.defer_chunk(map.chunk_of(request.page), pass);
                deferred.push(map, request);
                continue; // it waits in the list
            }
            // What is no news any more must be found again.
            Obstacle::Suspended => session.overrun_news(),
            Obstacle::SwappedOut => {
                stats.refused_swapped_total += 1;
                session.schedule_resync(pass, ResyncCause::Missed);
            }
            Obstacle::NoMappings => {
                stats.refused_vmas_total += 1;
                session.schedule_resync(pass, ResyncCause::NoMappings);
            }
            Obstacle::MayBePinned => stats.heal_pinned_total += 1,
            // Whoever ends these has the page looked at again.
            Obstacle::Changed | Obstacle::Probe | Obstacle::Huge | Obstacle::Guest | Obstacle::Restless => {}
        }
        map.defer(request.page, request.publisher_ref());
        if *obstacle == Obstacle::MayBePinned {
            map.copy_may_be_pinned(request.page, pass);
        }
    }
}
