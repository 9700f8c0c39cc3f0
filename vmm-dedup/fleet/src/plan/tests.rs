//! From a file's text to a plan, or to a clear error.

use super::*;

fn plan(text: &str) -> Result<Plan, String> {
    let file = FleetFile::parse(Path::new("fleet.toml"), text).map_err(|e| e.to_string())?;
    let plan = Plan::expand(&file, "f".into(), "/fleet".into(), Path::new("/run/vmm-dedup"));
    plan.map_err(|mistake| mistake.text)
}

/// With one VM named `a` that has these lines more.
fn plan_with(lines: &str) -> Result<Plan, String> {
    plan(&format!("[[vm]]\nname = \"a\"\nkernel = \"k\"\n{lines}\n"))
}

fn error_with(lines: &str) -> String {
    plan_with(lines).unwrap_err()
}

#[test]
fn the_smallest_vm_gets_the_defaults() {
    let plan = plan_with("").unwrap();
    let [vm] = plan.vms.as_slice() else {
        panic!("one VM")
    };
    assert_eq!(
        (vm.name.as_str(), vm.vmm, vm.cpus, vm.memory_mib),
        ("a", Vmm::CloudHypervisor, 1, 256)
    );
    assert_eq!(vm.kernel, Path::new("/fleet/k"));
    let dedup = vm.dedup.as_ref().unwrap();
    assert!(dedup.enabled && dedup.name == "a");
    let [store] = plan.stores.as_slice() else {
        panic!("one store")
    };
    assert_eq!(store.socket, Path::new("/run/vmm-dedup/store.sock"));
    assert_eq!(store.metrics, Some("127.0.0.1:9753".parse().unwrap()));
}

#[test]
fn agents_are_heard_where_the_vsock_ends() {
    let agent = |lines: &str| {
        let plan = plan_with(&format!("agent = true\n{lines}")).unwrap();
        plan.vms[0].agent.as_ref().map(ToString::to_string)
    };
    let vsock = agent(r#"vsock = { cid = 3, socket = "{name}.vsock" }"#);
    assert_eq!(vsock.as_deref(), Some("/fleet/a.vsock"));
    let qemu = agent("vmm = \"qemu\"\nextra_args = [\"-device\", \"vhost-vsock-pci,guest-cid=17\"]");
    assert_eq!(qemu.as_deref(), Some("cid:17"));
    assert_eq!(plan_with("").unwrap().vms[0].agent, None);
}

#[test]
fn an_entry_with_a_count_is_expanded_with_names_and_numbers() {
    let plan = plan_with(
        r#"
        count = 3
        cmdline = "host={name} {{x}}"
        disks = [{ path = "{name}.raw" }, { path = "/base.raw", readonly = true }]
        net = [{ tap = "tap{index}", mac = "52:54:00:00:00:{index+16:02x}" }]
        vsock = { cid = "{index+100}", socket = "{name}.vsock" }
        "#,
    )
    .unwrap();
    let names: Vec<_> = plan.vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names, ["a-0", "a-1", "a-2"]);
    let vm = &plan.vms[2];
    assert_eq!(vm.cmdline, "host=a-2 {x}");
    let api = vm.api.as_ref().unwrap();
    let disks: Vec<_> = vm.disks().collect();
    assert_eq!(
        disks,
        [
            (Path::new("/fleet/a-2.raw"), false),
            (Path::new("/base.raw"), true)
        ]
    );
    let net = &api.net.as_ref().unwrap()[0];
    assert_eq!(
        (net.tap.as_deref(), net.mac.as_deref()),
        (Some("tap2"), Some("52:54:00:00:00:12"))
    );
    assert_eq!(api.vsock.as_ref().unwrap().cid, 102);
    assert_eq!(vm.vsock(), Some(Path::new("/fleet/a-2.vsock")));
    assert_eq!(api.payload.cmdline.as_deref(), Some("host=a-2 {x}"));
    assert_eq!(api.memory.as_ref().unwrap().size, 256 << 20);
}

#[test]
fn more_of_the_api_is_added_to_what_the_other_keys_say() {
    let plan =
        plan_with("api = { memory = { thp = false }, cpus = { max_vcpus = 4 }, watchdog = true }").unwrap();
    let api = plan.vms[0].api.as_ref().unwrap();
    assert_eq!(
        api.memory.as_ref().map(|m| (m.size, m.thp)),
        Some((256 << 20, Some(false)))
    );
    assert_eq!(
        api.cpus.as_ref().map(|c| (c.boot_vcpus, c.max_vcpus)),
        Some((1, 4))
    );
    assert_eq!(api.watchdog, Some(true));
}

#[test]
fn each_domain_has_a_store_and_only_if_a_vm_merges_in_it() {
    let text = r#"
        [store]
        socket = "s.sock"
        [domain.blue]
        max_mib = 100
        ordered = true
        secure = true
        [domain.unused]
        [template.t]
        kernel = "k"
        [[vm]]
        name = "a"
        template = "t"
        dedup = { mode = "off" }
        [[vm]]
        name = "b"
        template = "t"
        domain = "blue"
        dedup = { mode = "standby", cpu_percent = 3 }
    "#;
    let plan = plan(text).unwrap();
    let blue = StorePlan {
        domain: "blue".into(),
        socket: "/run/vmm-dedup/store-blue.sock".into(),
        metrics: None,
        max_mib: 100,
        ordered: true,
        secure: true,
        users: BTreeSet::new(),
    };
    assert_eq!(plan.stores, std::slice::from_ref(&blue));
    assert!(plan.store_of(&plan.vms[0]).is_none());
    assert_eq!(plan.store_of(&plan.vms[1]), Some(&blue));
    let dedup = plan.vms[1].dedup.as_ref().unwrap();
    assert_eq!((dedup.enabled, dedup.cpu_percent), (false, 3));
}

#[test]
fn dedup_may_be_a_line_as_embedders_take_it() {
    let text = r#"
        [template.t]
        kernel = "k"
        dedup = "pass_period_ms=500,cpu_percent=5,verify.timeout_us=3000"
        [[vm]]
        name = "a"
        template = "t"
        dedup = "mode=standby,cpu_percent=7,breaks=managed"
    "#;
    let plan = plan(text).unwrap();
    let dedup = plan.vms[0].dedup.as_ref().unwrap();
    assert_eq!((dedup.name.as_str(), dedup.enabled), ("a", false));
    assert_eq!((dedup.cpu_percent, dedup.pass_period_ms), (7, 500));
    assert_eq!(dedup.verify.timeout_us, 3000);
    assert_eq!(dedup.breaks, vmm_dedup::Breaks::managed(1024, 256 << 20));
}

#[test]
fn two_vms_of_one_name_are_refused() {
    let twice = "[[vm]]\nname = \"a\"\nkernel = \"k\"\n";
    assert_eq!(plan(&twice.repeat(2)).unwrap_err(), "two VMs have the name \"a\"");
    let clash = format!("{twice}count = 2\n[[vm]]\nname = \"a-1\"\nkernel = \"k\"\n");
    assert_eq!(plan(&clash).unwrap_err(), "two VMs have the name \"a-1\"");
}

#[test]
fn what_two_vms_cannot_both_have_is_refused() {
    for (lines, thing) in [
        ("disks = [{ path = \"d\" }]", "the writable disk /fleet/d"),
        (
            "net = [{ mac = \"52:54:00:00:00:0A\" }]",
            "the MAC address 52:54:00:00:00:0a",
        ),
        ("vsock = { cid = 3, socket = \"v\" }", "the vsock socket /fleet/v"),
    ] {
        let error = error_with(&format!("count = 2\n{lines}"));
        assert_eq!(
            error,
            format!("VMs \"a-0\" and \"a-1\" have {thing}: use {{name}} or {{index}} in it")
        );
    }
    plan_with("count = 2\ndisks = [{ path = \"d\", readonly = true }]").unwrap();
}

#[test]
fn each_bad_setting_is_named_with_its_vm_and_what_is_possible() {
    for (lines, expected) in [
        ("count = 0", "count is 0, but a fleet has 1 to 4096 VMs"),
        ("cpus = 0", "cpus is 0: give 1 to 255"),
        ("cpus = 65\nvmm = \"reference\"", "cpus is 65: give 1 to 64"),
        (
            "memory_mib = 3\nvmm = \"reference\"",
            "memory_mib is 3: give 4 to 1048576",
        ),
        (
            "memory_mib = 1048577\nvmm = \"reference\"",
            "memory_mib is 1048577: give 4 to 1048576",
        ),
        ("memory_mib = 0", "memory_mib is 0: give 1 to 16777216"),
        ("cmdline = \"{nme}\"", "{nme} is not known"),
        (
            "dedup = { cpu_percent = nan }",
            "dedup has NaN: no setting is that",
        ),
        ("dedup.pack.idle_ms = inf", "dedup has inf: no setting is that"),
        (
            "disks = [{ path = \"d\", x = [-inf] }]",
            "disks has -inf: no setting is that",
        ),
        (
            "vsock = { cid = 1.5, socket = \"v\" }",
            "not what Cloud Hypervisor takes: invalid type: floating point `1.5`, expected a whole number",
        ),
        (
            "api = { memory = [1] }",
            "not what Cloud Hypervisor takes: invalid length 1, expected a table",
        ),
        (
            "api = { memory = 1979-05-27 }",
            "memory.a date is not known to Cloud Hypervisor's API",
        ),
        ("template = \"t\"", "there is no [template.t]"),
        ("domain = \"blue\"", "there is no [domain.blue]"),
        (
            "dedup = { mode = \"maybe\" }",
            "it must be \"on\", \"standby\" or \"off\"",
        ),
        (
            "dedup = { cpu_percnt = 3 }",
            "unknown field `cpu_percnt`, expected one of",
        ),
        (
            "dedup = { cpu_percent = 0 }",
            "cpu_percent is 0, but it must be 1 to 100",
        ),
        (
            "dedup = { breaks = { mode = \"mannaged\" } }",
            "breaks must be \"kernel\", \"managed\"",
        ),
        ("dedup = { name = \"b\" }", "dedup.name cannot be set here"),
        (
            "dedup = \"store=/s\"",
            "dedup.store cannot be set here: the VM's domain says it",
        ),
        ("dedup = \"agent=cid:7\"", "dedup.agent cannot be set here"),
        (
            "disks = [{ path = \"d\", readonli = true }]",
            "disks[0].readonli is not known to Cloud Hypervisor's API",
        ),
        (
            "disks = [{ readonly = true }]",
            "a disk has neither path nor vhost_socket",
        ),
        (
            "disks = [{ path = 3 }]",
            "invalid type: integer `3`, expected text",
        ),
        (
            "net = [{ mac = \"52:54\" }]",
            "net.mac is \"52:54\": give six bytes",
        ),
        (
            "net = [{ ip = \"10.0.0\" }]",
            "net.ip is \"10.0.0\": give an IP address",
        ),
        (
            "vsock = { cid = 2, socket = \"v\" }",
            "vsock.cid is 2: give 3 to 4294967294",
        ),
        (
            "vsock = { cid = \"x\", socket = \"v\" }",
            "vsock.cid is \"x\": it must be a number",
        ),
        ("vsock = { cid = 3 }", "missing field `socket`"),
        ("agent = true", "give the VM a vsock"),
        ("agent = true\ndedup = { mode = \"off\" }", "nobody would listen"),
        ("agent = true\nvmm = \"qemu\"", "a guest-cid in extra_args"),
        (
            "api = { serial = { mode = \"Tty\" } }",
            "api.serial cannot be set",
        ),
        (
            "api = { memory = { sharde = true } }",
            "memory.sharde is not known",
        ),
        ("vmm = \"reference\"\ndisks = []", "disks is for cloud-hypervisor"),
        ("vmm = \"qemu\"\nnet = []", "give QEMU its devices in extra_args"),
    ] {
        let error = error_with(lines);
        assert!(error.contains(expected), "{lines}: {error}");
        assert!(error.contains("\"a"), "{lines}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn each_bad_file_is_refused_with_what_to_do() {
    let vm = "[[vm]]\nname = \"a\"\nkernel = \"k\"\n";
    for (text, expected) in [
        ("".to_owned(), "the fleet has no VM"),
        ("[[vm]]\nname = \"a\"".into(), "it has no kernel"),
        ("[[vm]]\nkernel = \"k\"".into(), "a [[vm]] has no name"),
        (
            "[[vm]]\nname = \"a/b\"\nkernel = \"k\"".into(),
            "a VM's name is \"a/b\"",
        ),
        (
            format!("parallel = 0\n{vm}"),
            "parallel is 0: it must be at least 1",
        ),
        (
            format!("{vm}[template.t]\nname = \"x\""),
            "template \"t\" has a name",
        ),
        (
            format!("{vm}[domain.default]"),
            "[domain.default] is what [store] is for",
        ),
        (
            format!("{vm}[store]\nmax_mib = 0"),
            "max_mib of domain \"default\" is 0: give 1 to 262144",
        ),
        (
            format!(
                "{vm}[[vm]]\nname = \"b\"\nkernel = \"k\"\ndomain = \"x\"\n[domain.x]\nsocket = \"/run/vmm-dedup/store.sock\""
            ),
            "domains \"default\" and \"x\" have the same socket",
        ),
    ] {
        let error = plan(&text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn mistakes_are_told_with_their_line_and_column() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fleet.toml");
    let vm = "[[vm]]\nname = \"a\"\nkernel = \"k\"\n";
    for (text, place) in [
        (format!("parallel = 0\n{vm}"), "1:12"),
        (format!("# x\nstart_timeout_s = 0\n{vm}"), "2:19"),
        (format!("{vm}cmdline = \"{{nme}}\"\n"), "4:11"),
        (format!("{vm}extra_args = [\"{{nme}}\"]\n"), "4:14"),
        (format!("{vm}net = [{{ tap = \"{{nme}}\" }}]\n"), "4:7"),
        (format!("{vm}domain = \"blue\"\n"), "4:10"),
        (format!("{vm}{vm}"), "5:8"),
        (format!("{vm}disks = [{{ path = \"d\" }}]\ncount = 2\n"), "4:9"),
        (format!("{vm}[store]\nmax_mib = 0\n"), "5:11"),
        (format!("{vm}domain = \"x\"\n[domain.x]\nmax_mib = 0\n"), "6:11"),
        (format!("{vm}[domain.default]\nmax_mib = 1\n"), "4:1"),
        (format!("{vm}domain = \"-x\"\n[domain.-x]\n"), "5:1"),
        (format!("{vm}[template.t]\ncpus = 1\ncount = 3\n"), "6:9"),
        (
            format!(
                "{vm}{}domain = \"x\"\n[domain.x]\nsocket = \"/run/vmm-dedup/store.sock\"\n",
                vm.replace("\"a\"", "\"b\"")
            ),
            "9:10",
        ),
    ] {
        std::fs::write(&path, &text).unwrap();
        let read = Plan::read(&path, Path::new("/run/vmm-dedup"), &BTreeMap::new());
        let error = read.unwrap_err().to_string();
        let begin = format!("{}:{place}: ", path.display());
        assert!(error.starts_with(&begin), "{text}: {error}");
    }
}

#[test]
fn the_example_is_right() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/fleet.toml");
    let plan = Plan::read(&path, Path::new("/run/vmm-dedup"), &BTreeMap::new()).unwrap();
    assert_eq!(plan.name, "shop");
    let names: Vec<_> = plan.vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names.len(), 30, "{names:?}");
    let domains: Vec<_> = plan.stores.iter().map(|store| store.domain.as_str()).collect();
    assert_eq!(domains, ["default", "payments"]);
}

#[test]
fn a_user_is_the_vms_or_its_templates_or_the_fleets() {
    let text = r#"
user = "vm-{name}"
groups = ["kvm"]
[template.t]
kernel = "k"
user = "{index+61000}"
[[vm]]
name = "a"
kernel = "k"
[[vm]]
name = "b"
count = 2
template = "t"
[[vm]]
name = "c"
template = "t"
user = "c"
groups = []
domain = "blue"
[[vm]]
name = "d"
kernel = "k"
dedup = { mode = "off" }
[domain.blue]
"#;
    let plan = plan(text).unwrap();
    let users: Vec<_> = plan.vms.iter().map(|vm| vm.user.as_deref().unwrap()).collect();
    assert_eq!(users, ["vm-a", "61000", "61001", "c", "vm-d"]);
    assert_eq!((plan.vms[1].groups.len(), plan.vms[3].groups.len()), (1, 0));
    // Who merges in a domain is to be let into its store.
    let of_store = |at: usize| {
        plan.stores[at]
            .users
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (of_store(0), of_store(1)),
        (vec!["61000", "61001", "vm-a"], vec!["c"])
    );
}
