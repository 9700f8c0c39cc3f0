//! Keys that lead to a slot with another content, and pages that only look as if they had a twin.

use crate::account::Account;
use crate::lookup::keys::KeyReader;
use crate::lookup::request::MergeRequest;
use crate::memory::page_map::PageMap;
use crate::store::session::Session;
use crate::sys::guest;

/// Pages were not what their slots hold. If one has the slot's line key all the same, the key must not lead anybody to
/// that slot again: the store marks it, and this page will be hashed. (Else it was written after it was looked up.)
pub(crate) fn note(map: &mut PageMap, session: &Session, account: &mut Account, different: &[MergeRequest]) {
    for request in different {
        let mut reader = KeyReader {
            memory: map.memory(),
            salt: session.salt(),
            account,
        };
        let (key, _) = reader.read(request.page);
        let line = session.index().and_then(|index| index.line(key));
        if request.slot.is_some() && line.and_then(|line| line.slot_for(request.page)) == request.slot {
            map.note_ambiguous(key);
        }
    }
}

/// Whether a page that the guest may be writing seems to hold what its slot holds.
#[allow(unsafe_code)] // reads guest memory
pub(crate) fn looks_equal(map: &PageMap, session: &Session, request: &MergeRequest) -> bool {
    let page = map.memory().address(request.page);
    let Some(slot) = request.slot else {
        return true; // it was read whole when it was keyed
    };
    let slot = session.store().and_then(|store| store.slot(slot));
    // SAFETY: guest memory stays mapped while the service runs, and slots are mapped.
    slot.is_some_and(|slot| unsafe { guest::seems_same_page(page, slot) })
}
