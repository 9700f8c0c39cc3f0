//! An explanation for machines.

use serde_json::{Value, json};
use vmm_dedup_host::account;
use vmm_dedup_host::view::StoreView;
use vmm_dedup_protocol::control::Explained;
use vmm_dedup_protocol::observer::{Account, Vm};
use vmm_dedup_protocol::refusal::Refused;
use vmm_dedup_protocol::stats::ServiceStats;

/// Of one VM.
pub(super) fn of_vm(store: &StoreView, vm: &Vm, told: &Account) -> Value {
    let mut value = match told {
        Account::Explained(explained) => explained_json(&vm.name, explained, Some(vm)),
        Account::Refused(refused) => refused_json(refused),
    };
    value["pid"] = account::pid(vm).into();
    value["domain"] = store.domain().into();
    value["store"] = store.socket.to_string_lossy().into();
    if let Ok((stats, _)) = &store.account {
        value["store_full"] = account::is_full(stats).into();
        value["store_refused_full_total"] = stats.refused_full_total.into();
        value["store_secure"] = account::is_secure(stats).into();
    }
    value
}

fn huge_json(stats: &ServiceStats) -> Value {
    json!({
        "kept": stats.huge_ranges,
        "kept_in_use": stats.huge_kept_hot,
        "pages_given_up": stats.pages_given_up,
        "split": stats.huge_split,
        "splits_total": {
            "unused": stats.huge_splits_total.saturating_sub(stats.huge_splits_rare_total),
            "rarely_used": stats.huge_splits_rare_total,
            "zero": stats.huge_zero_total,
        },
        "rebuilt_total": stats.huge_rebuilt_total,
        "rebuild_us": { "p50": stats.rebuild.quantile_us(0.5), "p99": stats.rebuild.quantile_us(0.99) },
        "rebuild_refusals_total": {
            "pinned": stats.rebuild_pinned_total,
            "memory": stats.rebuild_memory_total,
            "other": stats.rebuild_other_total,
        },
        "use_source": stats.use_source_name(),
    })
}

pub(super) fn explained_json(name: &str, explained: &Explained, vm: Option<&Vm>) -> Value {
    let all = &explained.explanation;
    let classes: serde_json::Map<String, Value> = all
        .classes()
        .into_iter()
        .map(|(class, pages)| (class.to_owned(), pages.into()))
        .collect();
    let refusals = vm.map(|vm| {
        json!({
            "pinned": vm.stats.refused_pinned_total,
            "vmas": vm.stats.refused_vmas_total,
            "swapped": vm.stats.refused_swapped_total,
            "mismatches": vm.stats.mismatches_total,
            "other": vm.stats.refused_other_total,
        })
    });
    json!({
        "vm": name,
        "state": account::state_name(all.state),
        "pages": all.pages,
        "classes": classes,
        "heals": all.heals == 1,
        "note": explained.note,
        "refusals_total": refusals,
        "huge_pages": vm.map(|vm| huge_json(&vm.stats)),
    })
}

fn refused_json(refused: &Refused) -> Value {
    json!({
        "vm": refused.name.text(),
        "state": "refused",
        "pages": refused.pages,
        "reason": refused.refusal.reason.label(),
        "detail": refused.refusal.detail(),
        "lift": refused.refusal.lift(),
    })
}
