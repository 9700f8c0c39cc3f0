//! Settings of VMs and stores as the state keeps them, to tell later what has changed in the file.

use crate::plan::{StorePlan, VmPlan};
use serde_json::{Value, json};
use vmm_dedup_protocol::control::{Settings, Switch};

/// What has changed, in keys of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    /// What the running service can take over.
    pub(crate) live: Settings,
    pub(crate) live_keys: Vec<String>,
    /// What needs a new start of the VM.
    pub(crate) restart_keys: Vec<String>,
}

/// All settings of a VM.
pub(crate) fn spec(vm: &VmPlan) -> Value {
    let api = vm.api.as_ref().and_then(|api| serde_json::to_value(api).ok());
    let dedup = vm
        .dedup
        .as_ref()
        .and_then(|dedup| serde_json::to_value(dedup).ok());
    json!({
        "vmm": vm.vmm,
        "cpus": vm.cpus,
        "memory_mib": vm.memory_mib,
        "kernel": vm.kernel,
        "initramfs": vm.initramfs,
        "cmdline": vm.cmdline,
        "extra_args": vm.extra_args,
        "api": api,
        "domain": vm.domain,
        "dedup": dedup,
        "agent": vm.agent.as_ref().map(ToString::to_string),
    })
}

/// The settings of a store that its process is started with.
pub(crate) fn store_spec(store: &StorePlan) -> Value {
    json!({ "max_mib": store.max_mib, "metrics": store.metrics, "ordered": store.ordered })
}

/// The keys in which the settings of a store differ from those that it was started with.
pub(crate) fn store_keys(old: &Value, new: &StorePlan) -> Vec<String> {
    let mut keys = Vec::new();
    differing(old, &store_spec(new), "", &mut keys);
    keys
}

impl Difference {
    /// Between what a VM was started with and what the file says now.
    pub(crate) fn between(old: &Value, new: &Value) -> Self {
        let mut keys = Vec::new();
        differing(old, new, "", &mut keys);
        // What Cloud Hypervisor is told repeats most other keys.
        let of_api = |key: &String| key.starts_with("api");
        if keys.iter().any(|key| !of_api(key) && !key.starts_with("dedup")) {
            keys.retain(|key| !of_api(key));
        }
        // Another way to break has other settings: none of them is a change of what runs.
        let mode = |value: &Value| value["dedup"]["breaks"]["mode"].clone();
        if mode(old) != mode(new) {
            keys.retain(|key| !key.starts_with("dedup.breaks.") || key == "dedup.breaks.mode");
        }
        let mut difference = Self::default();
        for key in keys {
            match live(&key, new, &mut difference.live) {
                true => difference.live_keys.push(key),
                false => difference.restart_keys.push(key),
            }
        }
        difference
    }

    pub(crate) fn is_none(&self) -> bool {
        self.live_keys.is_empty() && self.restart_keys.is_empty()
    }
}

/// The keys in which two values differ, those of objects in them as `outer.inner`.
fn differing(old: &Value, new: &Value, at: &str, keys: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(a), Value::Object(b)) if !at.starts_with("api") => {
            let mut names: Vec<&String> = a.keys().chain(b.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let inner = match at {
                    "" => name.clone(),
                    outer => format!("{outer}.{name}"),
                };
                let of =
                    |value: &serde_json::Map<String, Value>| value.get(name).cloned().unwrap_or_default();
                differing(&of(a), &of(b), &inner, keys);
            }
        }
        (a, b) if a != b => keys.push(at.to_owned()),
        _ => {}
    }
}

/// Whether a running service can take over what this key says now; then it is in the settings.
fn live(key: &str, new: &Value, settings: &mut Settings) -> bool {
    let dedup = &new["dedup"];
    let number = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
    match key {
        "dedup.cpu_percent" => settings.cpu_percent = number(&dedup["cpu_percent"]),
        "dedup.pass_period_ms" => settings.pass_period_ms = number(&dedup["pass_period_ms"]),
        "dedup.stop_target_us" => settings.stop_target_us = number(&dedup["stop_target_us"]),
        "dedup.breaks.reserve_pages" if dedup["breaks"]["mode"] == "managed" => {
            settings.reserve_pages = number(&dedup["breaks"]["reserve_pages"]);
        }
        "dedup.enabled" => {
            let on = dedup["enabled"].as_bool();
            settings.switch = on.map(|on| if on { Switch::On } else { Switch::Off });
        }
        _ => return false,
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(dedup: Value, memory: u64) -> Value {
        json!({ "memory_mib": memory, "dedup": dedup, "api": { "memory": { "size": memory << 20 } } })
    }

    #[test]
    fn settings_of_dedup_that_can_change_live_are_told_from_others() {
        let old = of(
            json!({ "cpu_percent": 20, "enabled": true, "max_vmas": 1000, "pass_period_ms": 1000 }),
            64,
        );
        let new = of(
            json!({ "cpu_percent": 5, "enabled": false, "max_vmas": 10, "pass_period_ms": 10 }),
            64,
        );

        let difference = Difference::between(&old, &new);

        assert_eq!(
            difference.live_keys,
            ["dedup.cpu_percent", "dedup.enabled", "dedup.pass_period_ms"]
        );
        assert_eq!(difference.restart_keys, ["dedup.max_vmas"]);
        let expected = Settings {
            switch: Some(Switch::Off),
            cpu_percent: Some(5),
            pass_period_ms: Some(10),
            ..Settings::default()
        };
        assert_eq!(difference.live, expected);
        assert!(Difference::between(&old, &old).is_none());
    }

    #[test]
    fn a_reserve_can_change_but_who_breaks_cannot() {
        let breaks =
            |mode: &str, pages: u64| of(json!({ "breaks": { "mode": mode, "reserve_pages": pages } }), 1);
        let keys = |a: &Value, b: &Value| {
            let difference = Difference::between(a, b);
            (difference.live_keys, difference.restart_keys)
        };
        let (live, restart) = keys(&breaks("managed", 1), &breaks("managed", 2));
        assert_eq!(
            (live, restart.is_empty()),
            (vec!["dedup.breaks.reserve_pages".to_owned()], true)
        );
        let kernel = of(
            json!({ "breaks": { "mode": "kernel", "heal_stall_us": 5000 } }),
            1,
        );
        let (live, restart) = keys(&kernel, &breaks("managed", 1));
        assert_eq!(
            (live, restart),
            (Vec::new(), vec!["dedup.breaks.mode".to_owned()])
        );
        let (_, restart) = keys(&of(Value::Null, 1), &breaks("managed", 1));
        assert_eq!(restart, ["dedup"]);
    }

    #[test]
    fn what_the_api_repeats_is_said_once() {
        let difference = Difference::between(&of(Value::Null, 64), &of(Value::Null, 128));
        assert_eq!(difference.restart_keys, ["memory_mib"]);
        let mut new = of(Value::Null, 64);
        new["api"]["watchdog"] = true.into();
        assert_eq!(
            Difference::between(&of(Value::Null, 64), &new).restart_keys,
            ["api"]
        );
    }
}
