//! Settings of VMs and stores as the state keeps them, to tell later what has changed in the file.

use crate::plan::{StorePlan, VmPlan};
use serde::Deserialize;
use serde_json::{Value, json};
use vmm_dedup::Config;
use vmm_dedup_protocol::control::Settings;
use vmm_dedup_protocol::stats::ServiceStats;

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
        "user": vm.user,
        "groups": (!vm.groups.is_empty()).then_some(&vm.groups),
        "domain": vm.domain,
        "dedup": dedup,
        "agent": vm.agent.as_ref().map(ToString::to_string),
    })
}

/// The settings of a store that its process is started with.
pub(crate) fn store_spec(store: &StorePlan) -> Value {
    json!({
        "max_mib": store.max_mib,
        "metrics": store.metrics,
        "ordered": store.ordered,
        "secure": store.secure.then_some(true),
        "users": (!store.users.is_empty()).then_some(&store.users),
    })
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
        let config = dedup_of(new);
        for key in keys {
            match live(&key, config.as_ref(), &mut difference.live) {
                true => difference.live_keys.push(key),
                false => difference.restart_keys.push(key),
            }
        }
        difference
    }

    /// Adds what a running service has been told since (`vmm-dedup set`), which is neither as it was started nor as the file says.
    /// Whether it merges is left out. `old`, `new`: as for [`Self::between`].
    pub(crate) fn add_drift(&mut self, old: &Value, new: &Value, now: &ServiceStats) {
        let dedup = &new["dedup"];
        let is_managed = |spec: &Value| spec["dedup"]["breaks"]["mode"] == "managed";
        let reserve = match is_managed(old) && is_managed(new) {
            true => now.reserve_target,
            false => 0,
        };
        let settings = [
            ("dedup.cpu_percent", &dedup["cpu_percent"], now.cpu_percent),
            (
                "dedup.pass_period_ms",
                &dedup["pass_period_ms"],
                now.pass_period_ms,
            ),
            (
                "dedup.stop_target_us",
                &dedup["stop_target_us"],
                now.stop_target_us,
            ),
            (
                "dedup.breaks.reserve_pages",
                &dedup["breaks"]["reserve_pages"],
                reserve,
            ),
        ];
        let config = dedup_of(new);
        for (key, file, now) in settings {
            // A service that has told nothing yet has zeros.
            let differs = now != 0 && file.as_u64().is_some_and(|file| file != now);
            let is_told = self.live_keys.iter().any(|told| told == key);
            if differs && !is_told && live(key, config.as_ref(), &mut self.live) {
                self.live_keys
                    .push(format!("{key} ({now} by `set`, {file} in the file)"));
            }
        }
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
fn live(key: &str, new: Option<&Config>, settings: &mut Settings) -> bool {
    let key = key.strip_prefix("dedup.");
    key.zip(new).is_some_and(|(key, new)| new.live(key, settings))
}

/// The engine's settings in a VM's.
fn dedup_of(spec: &Value) -> Option<Config> {
    Config::deserialize(&spec["dedup"]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_dedup_protocol::control::Switch;

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
        assert_eq!(Difference::between(&old, &old), Difference::default());
    }

    #[test]
    fn what_somebody_has_set_is_told_unless_the_file_has_it_or_nobody_knows() {
        let breaks = json!({ "mode": "managed", "reserve_pages": 64 });
        let spec = of(
            json!({ "cpu_percent": 20, "pass_period_ms": 1000, "stop_target_us": 120, "breaks": breaks }),
            64,
        );
        let drift = |now: ServiceStats| {
            let mut difference = Difference::between(&spec, &spec);
            difference.add_drift(&spec, &spec, &now);
            (difference.live_keys, difference.live)
        };
        let as_it_is = ServiceStats {
            cpu_percent: 20,
            pass_period_ms: 1000,
            stop_target_us: 120,
            reserve_target: 64,
            ..ServiceStats::default()
        };

        assert_eq!(drift(as_it_is), (Vec::new(), Settings::default()));
        assert_eq!(drift(ServiceStats::default()), (Vec::new(), Settings::default()));
        let (keys, settings) = drift(ServiceStats {
            cpu_percent: 40,
            reserve_target: 8192,
            ..as_it_is
        });
        let cpu = "dedup.cpu_percent (40 by `set`, 20 in the file)";
        let reserve = "dedup.breaks.reserve_pages (8192 by `set`, 64 in the file)";
        assert_eq!(keys, [cpu, reserve]);
        let expected = Settings {
            cpu_percent: Some(20),
            reserve_pages: Some(64),
            ..Settings::default()
        };
        assert_eq!(settings, expected);
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
